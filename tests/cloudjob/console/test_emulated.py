"""Tests of how the console reads the log of an emulator's job."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from cloudjob.console import emulated
from cloudjob.console.emulated import EmulatedJob
from cloudjob.emulator.job_context import logs_of
from cloudjob.emulator.node_logs import NodeLog
from cloudjob.emulator.state import JOBS


def test_a_log_has_only_lines_that_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    job = {"id": "key", "name": "job", "nodes": 2, "phase": "Completed"}
    running = SimpleNamespace(jobs=lambda _home: {"jobs": [job]}, folder=lambda home: home)
    monkeypatch.setattr(emulated, "daemon", running)
    NodeLog(logs_of(tmp_path / JOBS, "key") / "0").run_path("0").write_bytes(b"first\nsecond")

    found = EmulatedJob(tmp_path, "key").pieces(follow=True, is_timed=True, on_journal=None)

    assert b"".join(piece.data for piece in found) == b"first\nsecond\n"
