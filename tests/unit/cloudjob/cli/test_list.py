"""Tests of the table that `list` prints."""

from __future__ import annotations

import argparse
import threading
from typing import Any

import pytest

from cloudjob.api import running_hangs
from cloudjob.cli.commands import list as listed
from cloudjob.errors import BackendError
from cloudjob.model.status import Hang, JobState, JobStatus
from tests.support.statuses import status_of

HANG = Hang(
    rule="stacks",
    confidence="high",
    ranks=(3,),
    since="",
    message="rank 3 is in load(), and the others wait for it",
)


class Job:
    """A job with this status, whose nodes report this hang."""

    def __init__(self, status: JobStatus, hang: Hang | None = None) -> None:
        self.id, self.last_status, self.submitted_by = status.job, status, ""
        self.error: Exception | None = None
        self._hang = hang

    def latest(self) -> Job:
        if self.error:
            raise self.error
        return self

    def hang_at(self, now_s: float) -> Hang | None:
        return self._hang


def hangs(*statuses: Any) -> dict[str, str]:
    return running_hangs([(each.last_status, each) for each in statuses])


def test_the_list_says_which_running_job_hangs_and_how(capsys: pytest.CaptureFixture[str]):
    stuck, ended = Job(status_of("a"), HANG), Job(status_of("b", state=JobState.SUCCEEDED), HANG)
    options = argparse.Namespace(json=False, store="", sweep="", all=False, limit=None)
    listed._show_list([stuck, ended], options, is_all=True)  # type: ignore[list-item]

    _, first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("hangs: rank 3 is in load(), and the others wait for it")
    assert "hangs" not in second


def test_only_running_jobs_are_asked_and_one_that_does_not_answer_is_left_out():
    silent = Job(status_of("silent"), HANG)
    silent.error = BackendError("reading the log: no answer")
    pending = Job(status_of("pending", state=JobState.PENDING))
    pending.error = AssertionError("it was asked")

    assert hangs(silent, pending, Job(status_of("fine"))) == {}
    assert running_hangs([(status_of("unsent"), None)]) == {}


def test_few_jobs_are_asked_and_all_at_the_same_time():
    together = threading.Barrier(16, timeout=60)

    class Slow(Job):
        def latest(self) -> Job:
            together.wait()
            return self

    many = [Slow(status_of(str(number)), HANG) for number in range(40)]
    assert list(hangs(*many)) == [str(number) for number in range(16)]
