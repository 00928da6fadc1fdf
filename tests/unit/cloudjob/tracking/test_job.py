"""Status, log and lists of jobs whose platform answers late, in part or not at all."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NoReturn

import pytest

from cloudjob.backends.base import Backend
from cloudjob.backends.native import Absent, Ended, NativeStatus, Running
from cloudjob.errors import (
    BackendError,
    JobNotFound,
    StoreError,
    Unreachable,
    UsageError,
    WaitTimeout,
)
from cloudjob.home import records_path
from cloudjob.home.records import JobRecord, Records
from cloudjob.model import times
from cloudjob.model.status import Absence, Cause, Failure, JobState, exit_code, to_json
from cloudjob.store.directory import DirectoryStore
from cloudjob.tracking import (
    Job,
    JobFilter,
    descriptions,
    find_all,
    log,
    platforms,
    queries,
    status_reader,
)
from jobentry.contract import exits, journal
from jobentry.contract.paths import JobPaths
from jobentry.contract.stored_log import Chunk
from tests.support.statuses import status_of


class Platform(Backend[Any]):
    """A platform that reports a failed job and implements nothing but the status."""

    poll_s = 0.01

    def _lacks(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError

    build = show = environments = handle = own_handle = send = logs = cancel = remove = _lacks

    def __init__(self, ended_at: str) -> None:
        self._ended_at = ended_at

    def status(self, _handle: str) -> NativeStatus:
        return Ended("Failed", failure=Failure(exit_code=3), ended_at=self._ended_at)


class CopyingPlatform(Platform):
    """A platform that copies the record to the store itself, after the job has ended."""

    copies_files = True


def timestamp(ago_s: float = 0.0) -> str:
    """Return the time ``ago_s`` seconds ago, in the format of statuses."""
    moment = datetime.now(timezone.utc) - timedelta(seconds=ago_s)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


MADE_AT = timestamp(300)


def record_of(home: Path, **values: Any) -> JobRecord:
    """Add a job to the records and return its record."""
    record = JobRecord(
        **{
            **dict.fromkeys(("code_uri", "code_digest", "final_json", "state"), ""),
            "job": "train-1",
            "name": "train",
            "backend": "modelarts",
            "handle": "modelarts://h/p/1/train-1",
            "nodes": 1,
            "procs_per_node": 1,
            "created_at": timestamp(300),
            "code_size_bytes": 0,
            "code_files": 0,
            "store": (home / "store").as_uri(),
            "spec_json": json.dumps({"outputs": {}}),
            **values,
        }
    )
    with Records(records_path(home)) as db:
        db.add(record)
    return record


def put_record(home: Path, exit_code: int = 3) -> None:
    """Put the record of the head into the store."""
    failure = Failure(0, "host", exit_code=exit_code, message="the reason")
    record = exits.ExitRecord(
        job="train-1",
        outcome=exits.Outcome(exit_code, Cause.USER, failure) if exit_code else exits.Outcome(0),
        started_at=timestamp(),
        ended_at=timestamp(),
        phases=((0, "run", timestamp(), timestamp()),),
    )
    DirectoryStore(home / "store").put_bytes(exits.dump(record), JobPaths("train-1").record)


class Storeless(Platform):
    """A platform whose entry could not reach the store, so that only the log has the failure."""

    def status(self, _handle: str) -> NativeStatus:
        message = "node 0 ended with exit code 125"
        return Ended("Failed", failure=Failure(0, exit_code=125, message=message))

    def logs(self, _handle: str, _node: int | None, *, follow: bool) -> Iterator[tuple[int, bytes]]:
        yield 0, b"jobentry: put out/x: refused; trying again\n[0] epoch 1\n"
        yield (
            0,
            b"jobentry: uploading the output M: put x: refused; gave up after 20 s (attempts: 6)\n",
        )
        yield 0, b"jobentry: writing the record: put exit.json: refused\n"


def test_how_a_job_ended_is_reported_even_if_the_records_cannot_be_written(tmp_path: Path):
    ended = Job(record_of(tmp_path), Platform(timestamp()), tmp_path)
    put_record(tmp_path)
    records_path(tmp_path).write_bytes(b"damaged " * 1000)

    assert ended.status().exit_code == 3


def test_an_entry_that_could_not_reach_the_store_is_reported_with_its_last_message(tmp_path: Path):
    failure = Job(record_of(tmp_path), Storeless(timestamp(0)), tmp_path).status().failure

    assert failure is not None
    assert failure.message == (
        "uploading the output M: put x: refused; gave up after 20 s (attempts: 6):"
        " node 0 ended with exit code 125"
    )


class OutOfReach(Platform):
    """A platform of a stranger that this user cannot ask."""

    def status(self, _handle: str) -> NativeStatus:
        return Absent(Absence.OUT_OF_REACH)


@pytest.mark.parametrize("written_job", ["other-1", ["train-1"], {}, None])
def test_the_record_of_another_job_ends_the_wait_for_a_job_out_of_reach(
    written_job: Any, tmp_path: Path
):
    """The head writes one record, last, so no other will come."""
    record = record_of(tmp_path)._replace(home="/home/stranger")
    put_record(tmp_path)
    path = tmp_path / "store" / JobPaths("train-1").record
    path.write_text(json.dumps({**json.loads(path.read_text()), "job": written_job}))
    job = Job(record, OutOfReach(timestamp()), tmp_path)

    with pytest.raises(StoreError, match="waiting for train-1: its record is invalid"):
        job.wait(timeout_s=5)
    assert job.status().state is JobState.UNKNOWN


def test_a_wait_for_a_job_out_of_reach_says_that_its_attempt_has_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """It may have been started again, so that the wait goes on."""
    spec = json.dumps({"outputs": {}, "spec": {"retries": 2}})
    record = record_of(tmp_path, spec_json=spec)._replace(home="/home/stranger")
    put_record(tmp_path, exit_code=77)
    job = Job(record, OutOfReach(timestamp()), tmp_path)

    with pytest.raises(WaitTimeout):
        job.wait(timeout_s=0)
    assert "train-1: its last attempt has ended with exit code 77; whether it" in caplog.text


@pytest.mark.parametrize(
    ("kind", "ago_s", "expected"),
    [
        (CopyingPlatform, 0, "user"),
        (CopyingPlatform, 3600, "platform"),
        (Platform, 0, "platform"),
    ],
)
def test_a_record_that_is_late_still_counts(
    kind: type[Platform], ago_s: float, expected: str, tmp_path: Path
):
    """It counts only if the platform copies it, and for two minutes after the end of the job."""
    platform: Any = kind(timestamp(ago_s))
    job = Job(record_of(tmp_path), platform, tmp_path)
    assert job.status().cause == "platform"
    put_record(tmp_path)

    assert job.status().cause == expected


def test_a_store_that_does_not_answer_delays_a_status_by_seconds_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The status reports that the record could not be read, and the next request reads it."""
    monkeypatch.setattr(status_reader, "_STORE_S", 0.3)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"s3://bucket?endpoint=http://127.0.0.1:{silent.getsockname()[1]}"
        record = record_of(tmp_path, store=uri, backend="process")
        platform: Any = Platform(timestamp(200))
        status = Job(record, platform, tmp_path).status()
        waited = Job(record, platform, tmp_path).wait(record_s=0.0)

    assert status.failure is not None
    assert "reading the record of the job: " in status.failure.message
    assert waited == status
    put_record(tmp_path)
    with Records(records_path(tmp_path)) as db:
        record = db.get("train-1")
    assert record.final_json == ""
    last_status = Job(record, platform, tmp_path, DirectoryStore(tmp_path / "store")).wait()
    assert last_status.failure is not None
    assert last_status.failure.message == "the reason"


@pytest.mark.parametrize(("code", "state"), [(0, "SUCCEEDED"), (3, "FAILED")])
def test_a_platform_that_does_not_answer_does_not_hide_the_record(
    tmp_path: Path, code: int, state: str
):
    """The status is not saved as final, because the platform may still hold nodes of the job."""
    platform: Any = Silent()
    record = record_of(tmp_path)
    with pytest.raises(Unreachable):
        Job(record, platform, tmp_path).status()
    put_record(tmp_path, code)

    assert Job(record, platform, tmp_path).status().state == state
    assert Job(record, platform, tmp_path).wait().exit_code == code
    with Records(records_path(tmp_path)) as db:
        assert db.get("train-1").final_json == ""


def test_a_platform_that_does_not_answer_is_reported_whatever_the_description_is(tmp_path: Path):
    """That of another's job is in the store; only a record of its end needs it."""
    platform: Any = Silent()
    record = record_of(tmp_path)._replace(spec_json="", home="/home/else/.cloudjob")
    path = tmp_path / "store" / descriptions.key("train-1")
    path.parent.mkdir(parents=True)
    path.write_text("damaged")

    with pytest.raises(Unreachable):
        Job(record, platform, tmp_path).status()


def test_a_status_is_final_only_when_the_secrets_of_the_job_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Nobody would delete them later: a final status is not read again."""
    delete, may_delete = DirectoryStore.delete, threading.Event()

    def delete_later(self: DirectoryStore, key: str) -> None:
        may_delete.wait(180)
        delete(self, key)

    monkeypatch.setattr(DirectoryStore, "delete", delete_later)
    monkeypatch.setattr(status_reader, "_STORE_S", 0.3)
    store = DirectoryStore(tmp_path / "store")
    secret = f"{JobPaths('train-1').node}/env"
    store.put_bytes(b"s3cret", secret)
    put_record(tmp_path)
    platform: Any = CopyingPlatform(timestamp())
    job = Job(record_of(tmp_path), platform, tmp_path)

    assert (job.status().state, job.has_final_status) == (JobState.FAILED, False)
    may_delete.set()
    monkeypatch.setattr(status_reader, "_STORE_S", 180.0)
    assert (job.status().state, job.has_final_status) == (JobState.FAILED, True)
    assert not store.exists(secret)


def test_damage_that_a_record_reports_is_marked_in_the_store(tmp_path: Path):
    """The platform copies packages to the nodes, which do not read them from the store."""
    store = DirectoryStore(tmp_path / "store")
    key = "layers/" + "0" * 64
    record = exits.ExitRecord(
        "train-1",
        exits.Outcome(125, Cause.ENTRY),
        ended_at=timestamp(),
        damaged_layers=(key, "../no-key"),
    )
    store.put_bytes(exits.dump(record), JobPaths("train-1").record)

    Job(record_of(tmp_path), CopyingPlatform(timestamp()), tmp_path, store).status()  # type: ignore[arg-type]

    assert list(store.list("damaged/")) == ["damaged/" + "0" * 64]


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (JobFilter(), True),
        (JobFilter(names=("train",)), True),
        (JobFilter(names=("train-*",)), True),
        (JobFilter(names=("x", "tr*")), True),
        (JobFilter(names=("rain",)), False),
        (JobFilter(backends=("docker", "modelarts")), True),
        (JobFilter(backends=("docker",)), False),
        (JobFilter(since=timestamp(600)), True),
        (JobFilter(since=timestamp(0)), False),
    ],
)
def test_a_filter_selects_the_matching_jobs(selection: JobFilter, expected: bool, tmp_path: Path):
    assert selection.matches(record_of(tmp_path, created_at=MADE_AT)) is expected


class InconsistentPlatform(Platform):
    """A platform that reports a failed job with exit code 0, optionally with a killed watcher."""

    is_unwatched = False

    def status(self, _handle: str) -> NativeStatus:
        failure = Failure(exit_code=0, message="lost")
        return Ended("lost", failure=failure, is_unwatched=self.is_unwatched)


@pytest.mark.parametrize("has_record", [False, True])
def test_a_job_that_failed_never_has_exit_code_0(has_record: bool, tmp_path: Path):
    if has_record:
        put_record(tmp_path, exit_code=0)
    platform: Any = InconsistentPlatform(timestamp())

    status = Job(record_of(tmp_path), platform, tmp_path).status()

    assert (status.state, status.exit_code, status.cause) == (JobState.FAILED, 1, "platform")
    assert status.failure is not None
    assert exit_code(status) == 1


def test_a_job_that_ended_before_its_watcher_was_killed_has_succeeded(tmp_path: Path):
    """The head writes its record as its last step."""
    put_record(tmp_path, exit_code=0)
    platform: Any = InconsistentPlatform(timestamp())
    platform.is_unwatched = True

    status = Job(record_of(tmp_path), platform, tmp_path).status()

    assert (status.state, status.exit_code, status.cause) == (JobState.SUCCEEDED, 0, None)


@pytest.mark.parametrize(
    "state", [JobState.FAILED, JobState.CANCELLED, JobState.UNKNOWN, JobState.PENDING]
)
@pytest.mark.parametrize("code", [None, 0])
def test_only_a_job_that_succeeded_ends_a_command_with_0(
    state: JobState, code: int | None, tmp_path: Path
):
    platform: Any = Platform(timestamp())
    status = Job(record_of(tmp_path), platform, tmp_path).unknown("")

    assert exit_code(status._replace(state=state, exit_code=code)) == 1


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"failure": 3, "code": 1}', '"x"', "null"])
def test_a_damaged_final_status_is_requested_again(text: str, tmp_path: Path):
    platform: Any = Platform(timestamp(3600))
    record = record_of(tmp_path, final_json=text)

    job = Job(record, platform, tmp_path)

    assert job.status().exit_code == 3
    assert find_all(tmp_path)[0].status().exit_code == 3


def test_a_job_of_an_unknown_backend_is_listed_and_removed(tmp_path: Path):
    record_of(tmp_path, backend="punchcards", spec_json="{")

    [job] = find_all(tmp_path)
    status = job.status()

    assert (status.state, status.absence) == (JobState.UNKNOWN, Absence.NO_BACKEND)
    with pytest.raises(JobNotFound):
        job.wait()
    with pytest.raises(BackendError, match="punchcards"):
        job.cancel()
    assert list(job.outputs(is_own=True)) == []
    job.remove()
    assert find_all(tmp_path) == []


def test_removing_a_job_removes_its_unfinished_writes(tmp_path: Path):
    record = record_of(tmp_path, backend="punchcards", spec_json="{")
    unfinished = tmp_path / "store" / record.job / "record" / ".cloudjob-tmp-1"
    unfinished.parent.mkdir(parents=True)
    unfinished.touch()

    [job] = find_all(tmp_path)
    job.remove()

    assert not (tmp_path / "store" / record.job).exists()


# ---- many jobs


class Counting(Platform):
    """A platform that records each request for a status."""

    def __init__(self) -> None:
        super().__init__("")
        self.requests: list[str] = []

    def status(self, handle: str) -> NativeStatus:
        self.requests.append(handle)
        return Running("Running")


class Listing(Counting):
    """A platform that lists 10 of 100 jobs as running, omits 10, and does not know the others."""

    def statuses(self, handles: Sequence[str]) -> dict[str, NativeStatus | None]:
        self.requests.append("list")
        running = Running("Listed")
        return {
            handle: running if handle.endswith("7") else None
            for handle in handles
            if not handle.endswith("8")
        }


class Silent(Counting):
    """A platform that cannot be reached."""

    def status(self, handle: str) -> NativeStatus:
        self.requests.append(handle)
        raise Unreachable("asking: it does not answer")


class Unresponsive(Counting):
    """A platform that answers only after an event is set."""

    def __init__(self, ready: threading.Event) -> None:
        super().__init__()
        self._ready = ready

    def status(self, handle: str) -> NativeStatus:
        self._ready.wait()
        return super().status(handle)


@pytest.fixture
def hundred_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Return a function that adds a hundred jobs of a platform to the records."""

    def add(platform: Any) -> Any:
        for number in range(100):
            record_of(tmp_path, job=f"train-{number}", handle=f"modelarts://h/train-{number}")
        monkeypatch.setattr(
            queries, "opener", lambda *_: lambda record: platforms.Opened(record, platform)
        )
        return platform

    return add


def native_state(job: Job) -> str:
    assert job.last_status
    return job.last_status.native_state


def test_a_platform_that_can_list_its_jobs_gets_one_request_for_all_of_them(
    hundred_jobs: Callable[[Any], Any], tmp_path: Path
):
    platform = hundred_jobs(Listing())

    jobs = find_all(tmp_path)

    assert platform.requests.count("list") == 1
    assert len(platform.requests) == 11
    assert Counter(native_state(job) for job in jobs) == {
        "Listed": 10,
        "Running": 10,
        Absence.NO_JOB.value: 80,
    }


def test_a_platform_that_does_not_answer_gets_no_request_for_each_job(
    hundred_jobs: Callable[[Any], Any], tmp_path: Path
):
    platform = hundred_jobs(Silent())

    jobs = find_all(tmp_path)

    assert len(platform.requests) <= 8
    assert {native_state(job) for job in jobs} == {"asking: it does not answer"}


def test_a_list_has_a_time_limit(
    hundred_jobs: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(queries, "_LIST_S", 0.2)
    ready = threading.Event()
    hundred_jobs(Unresponsive(ready))
    try:
        jobs = find_all(tmp_path)
    finally:
        ready.set()

    assert {native_state(job) for job in jobs} == {"no answer within 0.2 s"}


class WithoutLog(Storeless):
    """A platform that no longer has the log."""

    def logs(self, _handle: str, _node: int | None, *, follow: bool) -> Iterator[tuple[int, bytes]]:
        raise BackendError("the log is gone")


def test_stored_journals_are_read_although_the_log_is_gone(tmp_path: Path):
    """Node 1 was killed before it could store its journal."""
    put_record(tmp_path)
    job = Job(record_of(tmp_path, nodes=2), WithoutLog(timestamp()), tmp_path)
    with pytest.raises(BackendError, match="the log is gone"):
        job.journals()
    lines = [journal.dump(journal.Phase("run", 1.0, 2.0))]
    DirectoryStore(tmp_path / "store").put_bytes(journal.pack(lines), JobPaths(job.id).journal(0))

    assert [(phase.node, phase.name) for phase in job.journals().phases] == [(0, "run")]


class PartialLog(Storeless):
    """A platform that becomes unreachable within the log of node 0, before that of node 1."""

    def logs(self, _handle: str, _node: int | None, *, follow: bool) -> Iterator[tuple[int, bytes]]:
        yield 0, b"jobentry: boot\njobentry: ready\n[0] a\n[1] a\n"
        raise Unreachable("following node 0: the machine does not answer")


class WithoutJob(Storeless):
    """A platform that no longer has the job."""

    def logs(self, _handle: str, _node: int | None, *, follow: bool) -> Iterator[tuple[int, bytes]]:
        raise JobNotFound("looking for train-1: there is no such job")
        yield 0, b""


def test_the_log_of_a_lost_job_is_read_from_a_slow_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store, folder = DirectoryStore(tmp_path / "store"), JobPaths("train-1").records
    store.put_bytes(gzip.compress(b"[0] a\n"), folder + Chunk(0, 1, 0).name)
    listed = DirectoryStore.list

    def slow(self: DirectoryStore, prefix: str = "") -> list[str]:
        time.sleep(0.2)
        return list(listed(self, prefix))

    monkeypatch.setattr(DirectoryStore, "list", slow)
    monkeypatch.setattr(log, "_STORE_S", 0.01)
    job = Job(record_of(tmp_path, nodes=1), WithoutJob(timestamp()), tmp_path)

    assert b"[0] a\n" in b"".join(piece.data for piece in job.pieces(follow=False))


def test_the_rest_of_a_log_that_the_platform_cannot_give_is_from_the_store(tmp_path: Path):
    stored = b"jobentry: ready\n[1] a\n[0] a\n[0] a\n[0]+ b\njobentry: ended\n"
    store, folder = DirectoryStore(tmp_path / "store"), JobPaths("train-1").records
    for node, data in ((0, stored), (1, b"[2] c\n")):
        store.put_bytes(gzip.compress(data), folder + Chunk(node, 1, 0).name)
    job = Job(record_of(tmp_path, nodes=2), PartialLog(timestamp()), tmp_path)
    log_of: dict[int, bytes] = {0: b"", 1: b""}

    def read() -> None:
        for piece in job.pieces(follow=False):
            log_of[piece.node] += piece.data

    with pytest.raises(Unreachable, match="following node 0"):
        read()

    first, notice, rest = log_of[0].partition(log.UNREAD)
    assert first == b"jobentry: boot\njobentry: ready\n[0] a\n[1] a\n"
    assert notice
    assert rest == b"[0] a\n[0]+ b\njobentry: ended\n"
    assert log_of[1] == log.UNREAD + b"[2] c\n"


class Refreshing(Storeless):
    """A backend that can give nodes fresh keys."""

    received: Mapping[str, str] = {}

    def status(self, _handle: str) -> NativeStatus:
        return Running("Running")

    def refresh(self, _handle: str, keys: Mapping[str, str]) -> None:
        self.received = keys


@pytest.mark.parametrize("token", ["", "fresh-token"])
def test_nodes_get_the_current_keys_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str
):
    """Permanent keys have no token; an empty one then replaces the old token."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "fresh-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "fresh-key")
    monkeypatch.setenv("AWS_SESSION_TOKEN", token)
    monkeypatch.setenv("AWS_CREDENTIAL_EXPIRATION", "2099-01-01T00:00:00Z")
    backend = Refreshing(timestamp())
    submission = {"outputs": {}, "access": {"CLOUDJOB_S3_SESSION_TOKEN": "***"}}
    record = record_of(tmp_path, store="s3://bucket/jobs", spec_json=json.dumps(submission))

    end_at = Job(record, backend, tmp_path).refresh_keys()

    assert end_at == (times.seconds_of("2099-01-01T00:00:00Z") if token else 0.0)
    assert backend.received == {
        "CLOUDJOB_S3_ACCESS_KEY": "fresh-id",
        "CLOUDJOB_S3_SECRET_KEY": "fresh-key",
        "CLOUDJOB_S3_SESSION_TOKEN": token,
    }


@pytest.mark.parametrize(
    ("kind", "access", "message"),
    [
        (Refreshing, {"CLOUDJOB_S3_ACCESS_KEY": "***"}, "no temporary keys"),
        (Refreshing, None, "no temporary keys"),
        (Storeless, {"CLOUDJOB_S3_SESSION_TOKEN": "***"}, "it has ended"),
    ],
)
def test_a_job_without_temporary_keys_is_not_refreshed(
    tmp_path: Path, kind: type[Platform], access: object, message: str
):
    record = record_of(tmp_path, spec_json=json.dumps({"outputs": {}, "access": access}))

    with pytest.raises(UsageError, match=message):
        Job(record, kind(timestamp()), tmp_path).refresh_keys()


def test_a_listed_job_has_its_description_and_its_outputs(tmp_path: Path):
    """Lists omit descriptions, which can be megabytes; a listed job reads its own when needed."""
    status = status_of(state=JobState.SUCCEEDED, nodes=1)
    spec = {"metrics": {"loss": "loss (.)"}}
    record_of(
        tmp_path,
        backend="process",
        handle="process://local/train-1",
        final_json=json.dumps(to_json(status)),
        spec_json=json.dumps({"outputs": {"MODEL": (tmp_path / "model").as_uri()}, "spec": spec}),
    )
    [listed] = find_all(tmp_path)

    assert listed.spec() == spec
    assert list(listed.outputs("MODEL")) == []


def test_a_list_of_the_newest_jobs_does_not_request_the_others(
    hundred_jobs: Callable[[Any], Any], tmp_path: Path
):
    platform = hundred_jobs(Counting())

    assert len(find_all(tmp_path, limit=3)) == 3
    assert len(platform.requests) == 3
    assert len(find_all(tmp_path, JobFilter(states=("RUNNING",)), limit=3)) == 3


@pytest.mark.parametrize(
    ("attempt", "expected"),
    [
        (1, [(0, 1000, 0), (0, 1000, 1), (1, 990, 0)]),
        (2, [(0, 5000, 0), (1, 5010, 0), (2, 5001, 0)]),
        # Node 1 was not started again, or its entry ended before it stored its log.
        (3, [(0, 9000, 0)]),
    ],
)
def test_the_stored_logs_of_an_attempt(attempt: int, expected: list[tuple[int, int, int]]):
    """Node 2 has stored nothing in the first attempt, so its first log is not of that one."""
    starts = [(0, 1000, 0), (0, 1000, 1), (0, 5000, 0), (0, 9000, 0)]
    others = [(1, 990, 0), (1, 5010, 0), (2, 5001, 0)]
    chunks = [Chunk(*values) for values in (*starts, *others)]

    assert sorted(log.of_attempt(chunks, attempt)) == expected
    with pytest.raises(UsageError, match="have stored logs of 3"):
        log.of_attempt(chunks, 4)
