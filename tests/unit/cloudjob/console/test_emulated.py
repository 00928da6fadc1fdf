"""Tests of how the console reads the log of an emulator's job."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from cloudjob.console import emulated
from cloudjob.console.emulated import PREFIX, EmulatedJob
from cloudjob.console.state import Console
from cloudjob.emulator.job_context import logs_of
from cloudjob.emulator.node_logs import NodeLog
from cloudjob.emulator.state import JOBS
from tests.support.polling import poll


def test_a_log_has_only_lines_that_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    job = {"id": "key", "name": "job", "nodes": 2, "phase": "Completed"}
    running = SimpleNamespace(jobs=lambda _home: {"jobs": [job]}, folder=lambda home: home)
    monkeypatch.setattr(emulated, "daemon", running)
    NodeLog(logs_of(tmp_path / JOBS, "key") / "0").run_path("0").write_bytes(b"first\nsecond")

    pieces = EmulatedJob(tmp_path, "key").pieces(follow=True, is_timed=True, on_journal=None)

    assert b"".join(piece.data for piece in pieces) == b"first\nsecond\n"


def test_an_address_that_names_an_attempt_shows_the_whole_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    job = {"id": "key", "name": "job", "nodes": 1, "phase": "Completed"}
    running = SimpleNamespace(jobs=lambda _home: {"jobs": [job]}, folder=lambda home: home)
    monkeypatch.setattr(emulated, "daemon", running)
    NodeLog(logs_of(tmp_path / JOBS, "key") / "0").run_path("0").write_bytes(b"first\n")

    log = Console(tmp_path).log(f"{PREFIX}key", 2)

    try:
        poll(lambda: [row["text"] for row in log.end(1)] == ["first"], "the line of the log")
    finally:
        log.close()
