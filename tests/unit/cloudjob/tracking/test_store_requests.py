"""A request and its answer travel through the store of a job, whose readers take turns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudjob.errors import BackendError, UsageError
from cloudjob.home.records import JobRecord
from cloudjob.model.times import rfc3339
from cloudjob.store.directory import DirectoryStore
from cloudjob.tracking import store_requests
from cloudjob.tracking.access import JobAccess
from jobentry.contract.paths import JobPaths
from jobentry.system.requests import request, stored_answer

JOB = JobPaths("train-1")
QUESTION = request("stacks", with_threads=True)


class Cloud:
    """The store of a job, whose other users act whenever its reader pauses."""

    def __init__(self, folder: Path, act: Callable[[Cloud], None]) -> None:
        self.store = DirectoryStore(folder)
        self.now = 0.0
        self._act = act

    def ask(self) -> bytes:
        return store_requests.ask(
            self.store, JOB.job, QUESTION, clock=lambda: self.now, pause=self._pause
        )

    def _pause(self, seconds: float) -> None:
        self.now += seconds
        self._act(self)

    @property
    def request(self) -> bytes:
        return self.store.get_bytes(JOB.request)

    def answer(self, request: bytes, text: bytes) -> None:
        self.store.put_bytes(stored_answer(request, text), JOB.answer)


def test_a_question_is_answered_and_leaves_nothing(tmp_path: Path) -> None:
    asked = []

    def act(cloud: Cloud) -> None:
        if cloud.now > 5:
            asked.append(json.loads(cloud.request))
            cloud.answer(cloud.request, b"stacks")

    cloud = Cloud(tmp_path, act)

    assert cloud.ask() == b"stacks"
    assert asked[0].items() >= json.loads(QUESTION).items()
    assert list(cloud.store.list()) == []


def test_a_reader_waits_until_the_request_of_another_is_answered(tmp_path: Path) -> None:
    def act(cloud: Cloud) -> None:
        if cloud.now == 10:
            assert cloud.request == b"theirs"
            cloud.answer(b"theirs", b"not ours")
        elif cloud.now > 20:
            cloud.answer(cloud.request, b"ours")

    cloud = Cloud(tmp_path, act)
    cloud.store.put_bytes(b"theirs", JOB.request)

    assert cloud.ask() == b"ours"


def test_a_reader_whose_request_another_has_removed_asks_again(tmp_path: Path) -> None:
    requests = []

    def act(cloud: Cloud) -> None:
        if cloud.now == 5:
            requests.append(cloud.request)
            cloud.answer(b"theirs", b"not ours")
            cloud.store.delete(JOB.request)
        elif cloud.now > 10:
            requests.append(cloud.request)
            cloud.answer(cloud.request, b"ours")

    assert Cloud(tmp_path, act).ask() == b"ours"
    # A head answers each request once.
    assert requests[0] != requests[1]


@pytest.mark.parametrize("left", [b"of a reader that was killed", b"x" * 10_000])
def test_a_request_that_nobody_answers_is_replaced(tmp_path: Path, left: bytes) -> None:
    def act(cloud: Cloud) -> None:
        if cloud.request != left:
            cloud.answer(cloud.request, b"ours")

    cloud = Cloud(tmp_path, act)
    cloud.store.put_bytes(left, JOB.request)

    assert cloud.ask() == b"ours"


def test_a_head_that_does_not_answer_is_reported_and_nothing_is_left(tmp_path: Path) -> None:
    cloud = Cloud(tmp_path, lambda _: None)

    with pytest.raises(BackendError, match="no answer within 105 s"):
        cloud.ask()
    assert list(cloud.store.list()) == []


@pytest.mark.parametrize(
    ("access", "created_at", "problem"),
    [
        (None, 0.0, "an older version"),
        (5, 0.0, "an older version"),
        ({"CLOUDJOB_SIGNED_URIS": "***"}, 1e9, "first 7 days"),
    ],
)
def test_a_job_that_looks_for_no_requests_is_refused(
    tmp_path: Path, access: object, created_at: float, problem: str
) -> None:
    values: dict[str, Any] = dict.fromkeys(JobRecord._fields, "")
    values |= {"created_at": rfc3339(created_at), "spec_json": json.dumps({"access": access})}

    with pytest.raises(UsageError, match=problem):
        store_requests.need_access(JobAccess(JobRecord(**values), None, tmp_path, None))  # type: ignore[arg-type]
