"""How a job in containers ends, whatever happens between two requests to the engine."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudjob.backends import open_backend
from cloudjob.backends.docker import engine as engines
from cloudjob.backends.docker import state
from cloudjob.backends.native import Ended
from cloudjob.errors import JobNotFound
from cloudjob.home import locks
from cloudjob.model.status import JobState
from jobentry.contract.exits import Cause
from tests.support.fake_engine import FakeEngine

JOB = "train-2345678b"
HANDLE = f"docker://local/{JOB}"
REPORT = "/run/cloudjob/ended-1"
LIMIT_S = 180.0


class Case:
    """A job, its engine, and a backend as each command opens one."""

    def __init__(self, home: Path, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home = home
        self.folder = home / "docker" / JOB
        self.folder.mkdir(parents=True)
        self.engine = FakeEngine(JOB, nodes)
        monkeypatch.setattr(engines, "connect", lambda: self.engine)
        self.backend: Any = open_backend("docker", home)

    def note(self, name: str, seconds_ago: float) -> None:
        """Write a note of an earlier command into the folder of the job."""
        path = self.folder / name
        path.touch()
        at = time.time() - seconds_ago
        os.utime(path, (at, at))

    def save(self, code: int = 7) -> None:
        """Save the end of the job, and remove it from the engine, as another command does."""
        self.engine.end(0, code)
        containers = self.backend.nodes(HANDLE)
        status = state.ended_status(containers, is_cancelled=False)
        (self.folder / "state.json").write_bytes(state.dump(status))
        for item in containers:
            self.engine.remove(item.node)
        self.engine.has_network = False

    def status(self) -> Any:
        """Return the status that the next command sees."""
        return self.backend.status(HANDLE)


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Case]:
    """A function that starts a job with some nodes."""
    return lambda nodes: Case(tmp_path / "home", nodes, monkeypatch)


def ended(status: Any) -> tuple[JobState, Cause, int | None, int | None, str]:
    assert isinstance(status, Ended), status
    failure = status.failure
    assert failure is not None
    return (status.state, status.cause, status.exit_code, failure.node, failure.message)


@pytest.mark.parametrize("node", ["0", "1", "x", None])
def test_a_container_made_from_an_image_of_a_node_is_no_node(
    case: Callable[[int], Case], node: str | None
):
    """`docker commit` copies the labels; a request to this container would be refused here."""
    job = case(1)
    labels = {**job.engine.containers()[0]["Labels"], "cloudjob.node": node}
    if node is None:
        del labels["cloudjob.node"]
    other = {"Id": "id-99", "Names": ["/my-own"], "State": "running", "Labels": labels}
    job.engine.others = [other]

    assert [item.id for item in job.backend.nodes(HANDLE)] == ["id-0"]
    assert job.backend.statuses([HANDLE])[HANDLE].state is JobState.RUNNING
    job.backend.signal(HANDLE, "SIGTERM")
    job.engine.end(0, 7)
    assert ended(job.status())[2:4] == (7, 0)
    job.backend.remove(HANDLE)
    assert job.engine.containers() == [other]


@pytest.mark.parametrize("name", ["renamed", "worker-0-old"])
def test_a_node_that_somebody_has_renamed_is_still_a_node(case: Callable[[int], Case], name: str):
    """Another container in the network of the job that was made from an image of it is none."""
    job = case(2)
    job.engine.names[1] = name
    other = {**job.engine.containers()[0], "Id": "id-99", "Names": ["/my-own"]}
    job.engine.others = [other]

    assert [item.id for item in job.backend.nodes(HANDLE)] == ["id-0", "id-1"]
    assert job.status().state is JobState.RUNNING
    job.engine.end(0, 0)
    job.engine.end(1, 0)
    assert job.status().state is JobState.SUCCEEDED
    assert job.engine.containers() == [other]


@pytest.mark.parametrize("node", [0, 1])
def test_a_status_names_a_node_that_somebody_has_paused(case: Callable[[int], Case], node: int):
    job = case(2)
    job.engine.pause(node)
    status = job.status()

    assert status.state is JobState.RUNNING
    assert status.native == f"paused: node {node} (worker-{node})"
    assert job.backend.statuses([HANDLE]) == {}


# -- other commands ---------------------------------------------------------------------------


def test_a_job_that_another_command_saves_at_this_moment_is_not_unknown(
    case: Callable[[int], Case],
):
    """Its containers are gone, its end is not saved yet, and that command holds the lock."""
    job = case(1)
    job.engine.remove(0)
    is_locked, is_looking = threading.Event(), threading.Event()
    job.engine.before["networks"] = is_looking.set
    statuses = []

    def save() -> None:
        with locks.hold(job.folder / "lock"):
            is_locked.set()
            assert is_looking.wait(LIMIT_S)
            status = state.all_removed(is_cancelled=False)
            (job.folder / "state.json").write_bytes(state.dump(status))
            job.engine.has_network = False
            statuses.append(status)

    other = threading.Thread(target=save)
    other.start()
    assert is_locked.wait(LIMIT_S)
    status = job.status()
    other.join()

    assert status == statuses[0]


@pytest.mark.parametrize("request_name", ["inspect", "kill", "networks"])
def test_a_job_that_another_command_saves_between_two_requests_has_its_end(
    case: Callable[[int], Case], request_name: str
):
    job = case(2)
    if request_name == "networks":
        job.engine.before["containers"] = lambda: (job.engine.remove(0), job.engine.remove(1))
        job.engine.before["networks"] = lambda: (job.engine.run(0), job.save())
    else:
        job.engine.end(0, 7, seconds_ago=100)
        job.engine.before[request_name] = job.save

    assert ended(job.status())[1:4] == (Cause.PLATFORM, 7, 0)


def test_a_job_that_is_nowhere_is_not_found(case: Callable[[int], Case]):
    job = case(1)
    job.engine.remove(0)
    job.engine.has_network = False

    with pytest.raises(JobNotFound):
        job.status()


def test_a_list_does_not_give_up_a_job_whose_containers_were_removed(case: Callable[[int], Case]):
    job = case(1)
    job.engine.remove(0)

    assert job.backend.statuses([HANDLE, "docker://local/other"]) == {"docker://local/other": None}
    message = "the containers of all nodes were removed"
    assert ended(job.status()) == (JobState.FAILED, Cause.PLATFORM, 137, None, message)


# -- containers that somebody starts or removes ---------------------------------------------------


def test_a_container_that_is_started_again_has_not_succeeded(case: Callable[[int], Case]):
    """The engine reports exit code 0 for a container that runs."""
    job = case(1)
    job.engine.end(0, 7)
    looks = iter(["containers of the status", "containers to be killed"])

    def start_again() -> None:
        # Between the list of the containers and their inspection.
        if next(looks, None) == "containers to be killed":
            job.engine.before["inspect"] = lambda: job.engine.run(0)
        else:
            job.engine.before["containers"] = start_again

    job.engine.before["containers"] = start_again

    assert ended(job.status())[:4] == (JobState.FAILED, Cause.PLATFORM, 137, 0)


def test_the_head_learns_that_the_container_of_a_worker_was_removed(case: Callable[[int], Case]):
    job = case(2)
    job.engine.remove(1)

    assert job.status().state is JobState.RUNNING
    assert job.engine.files == {(0, REPORT): b"137\n"}
    assert job.engine.signals == []


def test_a_worker_whose_container_was_removed_is_to_blame(case: Callable[[int], Case]):
    """Its head has ended because it was asked to."""
    job = case(2)
    job.engine.remove(1)
    job.note("removed-1", seconds_ago=90)
    assert job.status().state is JobState.RUNNING
    assert job.engine.signals == [(0, "SIGTERM")]
    job.engine.end(0, 143)

    message = "the container of node 1 was removed"
    assert ended(job.status()) == (JobState.FAILED, Cause.PLATFORM, 137, 1, message)


def test_workers_whose_head_was_removed_have_time_to_end(case: Callable[[int], Case]):
    job = case(2)
    job.engine.remove(0)

    assert job.status().state is JobState.RUNNING
    assert job.engine.signals == [(1, "SIGTERM")]
    job.note("removed-0", seconds_ago=29)
    assert job.status().state is JobState.RUNNING
    job.note("removed-0", seconds_ago=31)
    message = "the container of node 0 was removed"
    assert ended(job.status()) == (JobState.FAILED, Cause.PLATFORM, 137, 0, message)
    assert job.engine.signals[-1] == (1, "SIGKILL")


def test_a_container_that_a_submit_has_not_created_yet_was_not_removed(
    case: Callable[[int], Case],
):
    job = case(2)
    job.engine.remove(1)

    with locks.hold(job.folder / "lock"):
        assert job.status().state is JobState.RUNNING

    assert job.engine.files == {}
    assert not list(job.folder.glob("removed-*"))


def test_a_submit_that_begins_after_a_look_at_its_lock_is_not_interrupted(
    case: Callable[[int], Case],
):
    """A status on a busy machine may stand still between its look and the list of containers."""
    job = case(2)

    def begin() -> None:
        descriptor = locks.acquire(job.folder / "lock")
        assert descriptor is not None
        job.engine.create(1)

        def complete() -> None:
            job.engine.run(1)
            os.close(descriptor)

        threading.Timer(0.2, complete).start()

    job.engine.before["containers"] = begin

    assert job.status().state is JobState.RUNNING
    assert job.engine.signals == []


def test_a_submit_that_was_killed_before_it_had_started_every_node_is_interrupted(
    case: Callable[[int], Case],
):
    job = case(2)
    job.engine.create(1)

    message = "the submit was interrupted before it had started every node"
    assert ended(job.status()) == (JobState.FAILED, Cause.PLATFORM, 1, None, message)
    assert job.engine.signals == [(0, "SIGKILL")]


# -- a head that does not end ---------------------------------------------------------------------


def test_the_head_learns_of_a_worker_that_has_failed(case: Callable[[int], Case]):
    job = case(2)
    job.engine.end(1, 137)

    assert job.status().state is JobState.RUNNING
    assert job.engine.files == {(0, REPORT): b"137\n"}
    job.engine.files.clear()
    assert job.status().state is JobState.RUNNING
    assert job.engine.files == {}


def test_a_head_that_hangs_is_asked_to_end_and_then_killed(case: Callable[[int], Case]):
    """It has 60 s to end by itself, and then its grace period and the time for its record."""
    job = case(2)
    job.engine.end(1, 137, seconds_ago=59)
    assert job.status().state is JobState.RUNNING
    assert job.engine.signals == []
    job.engine.end(1, 137, seconds_ago=61)
    assert job.status().state is JobState.RUNNING
    assert job.engine.signals == [(0, "SIGTERM")]
    job.note("asked", seconds_ago=29)
    assert job.status().state is JobState.RUNNING
    job.note("asked", seconds_ago=31)
    assert job.status().state is JobState.RUNNING
    assert job.engine.signals == [(0, "SIGTERM"), (0, "SIGKILL")]

    message = "node 1 (worker-1) ended with exit code 137"
    assert ended(job.status()) == (JobState.FAILED, Cause.PLATFORM, 137, 1, message)
    assert job.engine.containers() == []
