"""Records of jobs that have ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cloudjob.home import records_path
from cloudjob.home.records import JobRecord, Records
from cloudjob.model.status import JobState, to_json
from tests.support.statuses import status_of


def _ended(job: str, code: int) -> JobRecord:
    """Return the record of a job that ended with this exit code."""
    status = status_of(
        job, nodes=1, exit_code=code, state=JobState.FAILED if code else JobState.SUCCEEDED
    )
    return JobRecord(
        job=job, name="train", backend="process", handle=f"process://local/{job}", nodes=1,
        state=status.state, procs_per_node=1, created_at=status.created_at, code_uri="",
        code_digest="", code_size_bytes=0, code_files=0, store="file:///nowhere", spec_json="{}",
        final_json=json.dumps(to_json(status)),
    )  # fmt: skip


@pytest.fixture
def add_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """A function that records an ended job with the given exit code."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("CLOUDJOB_HOME", str(home))

    def add(job: str, code: int) -> None:
        with Records(records_path(home)) as db:
            db.add(_ended(job, code))

    return add


@pytest.fixture
def home(tmp_path: Path, add_ended: Callable[[str, int], None]) -> Path:
    """A home with records of three ended jobs, with the exit codes 0, 3 and 4."""
    for job, code in (("good-2", 0), ("bad-3", 3), ("bad-4", 4)):
        add_ended(job, code)
    return tmp_path / "home"
