"""Tests of the rows that the jobs page receives: first all of them, then the changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cloudjob.console import job_list
from cloudjob.console.job_list import JobList, row_of
from cloudjob.home import records_path
from cloudjob.home.records import JobRecord, Records
from cloudjob.model.status import Failure, Hang, JobState, JobStatus, to_json
from tests.support.polling import poll
from tests.support.statuses import status_of


def ended(job: str, **more: Any) -> JobStatus:
    values: dict[str, Any] = {
        "state": JobState.SUCCEEDED,
        "procs_per_node": 4,
        "started_at": "2026-01-01T00:00:01.000Z",
        "ended_at": "2026-01-01T00:00:11.000Z",
        "exit_code": 0,
    }
    return status_of(job, **{**values, **more})


def record(home: Path, status: JobStatus) -> None:
    """Record an ended job."""
    with Records(records_path(home)) as db:
        db.add(
            JobRecord(
                status.job,
                status.name,
                status.backend,
                f"{status.backend}://local/{status.job}",
                status.state.value,
                status.nodes,
                status.procs_per_node,
                status.created_at,
                "",
                "",
                0,
                0,
                "",
                json.dumps(to_json(status)),
                "{}",
            )
        )


def test_a_page_gets_all_jobs_once_and_then_what_changed(tmp_path: Path):
    record(tmp_path, ended("train-1"))
    jobs = JobList(tmp_path)
    first = jobs.changes(0)
    assert [row["job"] for row in first.rows] == ["train-1"]
    assert jobs.changes(first.version).rows == []

    record(tmp_path, ended("train-2", created_at="2026-01-02T00:00:00.000Z"))
    poll(lambda: [row["job"] for row in jobs.changes(first.version).rows] == ["train-2"], "job 2")
    assert [row["job"] for row in jobs.changes(0).rows] == ["train-2", "train-1"]

    version = jobs.changes(0).version
    with Records(records_path(tmp_path)) as db:
        db.remove("train-1")
    poll(lambda: jobs.changes(version).removed == ["train-1"], "the removal")


def test_the_newest_jobs_come_first_and_all_others_after_them(tmp_path: Path):
    for number in range(300):
        record(
            tmp_path,
            ended(
                f"train-{number}",
                created_at=f"2026-01-01T00:{number // 60:02d}:{number % 60:02d}.000Z",
            ),
        )
    jobs = JobList(tmp_path)
    first = jobs.changes(0)
    assert [row["job"] for row in first.rows][:200] == [
        f"train-{number}" for number in range(299, 99, -1)
    ]

    def seen() -> list[str]:
        more = jobs.changes(first.version)
        return [row["job"] for row in (*first.rows, *more.rows)]

    poll(lambda: len(seen()) == 300, "all jobs")
    assert jobs.changes(first.version).removed == []


def test_a_page_of_an_earlier_console_gets_everything_again(tmp_path: Path):
    record(tmp_path, ended("train-1"))

    assert [row["job"] for row in JobList(tmp_path).changes(10_000).rows] == ["train-1"]


def test_records_that_cannot_be_read_are_reported(tmp_path: Path):
    records_path(tmp_path).write_bytes(b"this is no database" * 100)

    assert "records" in JobList(tmp_path).changes(0).error


def test_a_damaged_record_and_an_unknown_backend_leave_the_other_jobs_in_the_list(tmp_path: Path):
    for number, status in enumerate(("{", "[]", '{"failure": 5}')):
        record(tmp_path, ended(f"bad-{number}", backend="nowhere"))
        with Records(records_path(tmp_path)) as db:
            db.update(f"bad-{number}", final_json=status, name="")
    record(tmp_path, ended("good"))

    changes = JobList(tmp_path).changes(0)
    assert changes.error == ""
    assert {row["job"]: row["state"] for row in changes.rows} == {
        "good": "SUCCEEDED", "bad-0": "UNKNOWN", "bad-1": "UNKNOWN", "bad-2": "UNKNOWN",
    }  # fmt: skip


def test_details_that_arrive_after_the_end_of_a_job_are_shown(tmp_path: Path):
    failed = ended("train-1", state=JobState.FAILED, failure=Failure(message="ended"))
    record(tmp_path, failed)
    with Records(records_path(tmp_path)) as db:
        final = db.get("train-1").final_json
        db.update("train-1", final_json="")
    jobs = JobList(tmp_path)
    poll(lambda: jobs.changes(0).rows[0]["state"] == "UNKNOWN", "a job that the platform lost")
    with Records(records_path(tmp_path)) as db:
        db.update("train-1", final_json=final)

    poll(lambda: jobs.changes(0).rows[0]["reason"] == "ended", "the reason")


class Stuck:
    """A job whose nodes report a hang."""

    id = "train-1"

    def latest(self) -> Stuck:
        return self

    def hang_at(self, now_s: float) -> Hang:
        values = {"rule": "stacks", "confidence": "high", "ranks": (3,), "since": ""}
        return Hang(**values, message="rank 3 is in load()")  # type: ignore[arg-type]


def test_running_jobs_are_asked_now_and_then_how_they_hang(tmp_path: Path):
    jobs, status = JobList(tmp_path), status_of("train-1")

    def hangs_now() -> dict[str, str]:
        jobs._ask([(status, Stuck())])  # type: ignore[list-item]
        return dict(jobs._hangs)

    poll(lambda: hangs_now() == {"train-1": "hangs: rank 3 is in load()"}, "the hang")
    assert row_of(status, "", hangs_now()["train-1"])["reason"] == "hangs: rank 3 is in load()"


def test_a_job_whose_log_cannot_be_read_does_not_end_the_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Unreadable(Stuck):
        def latest(self) -> Stuck:
            asked.append(self)
            raise OSError(116, "Stale file handle")

    monkeypatch.setattr(job_list, "_ASK_S", 0.0)
    asked: list[Stuck] = []
    jobs, status = JobList(tmp_path), status_of("train-1")

    def ask() -> bool:
        jobs._ask([(status, Unreadable())])  # type: ignore[list-item]
        return len(asked) > 2

    poll(ask, "three questions")
    assert jobs._hangs == {}


def test_a_row_has_times_in_seconds_the_number_of_ranks_and_the_sweep():
    row = row_of(ended("train-5w94xpwk-3"))

    assert row["sweep"] == "train-5w94xpwk"
    assert row["ended"] - row["started"] == 10.0
    assert row["ranks"] == 8
    assert row_of(ended("train-1", started_at=None))["started"] == 0
