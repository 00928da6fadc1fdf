"""A submit to the process backend that is killed at any step leaves a complete job or nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudjob import tracking
from cloudjob.backends.process import running
from cloudjob.backends.process.backend import ProcessBackend
from cloudjob.cli import main
from cloudjob.errors import JobNotFound, PackageError, RecordsError
from cloudjob.home.records import Records
from cloudjob.model.job import JobSpec
from cloudjob.model.status import Failure, JobState
from cloudjob.submission import pipeline
from jobentry.system import linux
from tests.support.homes import make_used_home

LIMIT_S = 180.0
# Sends itself SIGKILL before or after a step of the submit.
SUBMIT = """
import os, sys
from pathlib import Path
from cloudjob.submission import pipeline
from cloudjob.backends.process import backend, running
from cloudjob.home.records import Records
from cloudjob.model.job import JobSpec

home, source, step, when = sys.argv[1:]
owner = {"backend": backend, "running": running, "records": Records}[step.partition(".")[0]]
name = step.partition(".")[2]
real = getattr(owner, name)

def die(*args, **kwargs):
    if when == "after":
        real(*args, **kwargs)
    os.kill(os.getpid(), 9)

setattr(owner, name, die)
pipeline.submit(JobSpec(script="train.py", source=source, launcher="python"), Path(home))
"""


class Laptop:
    """A user whose script runs until the file ``go`` exists."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.source = folder / "source"
        self.go = folder / "go"
        self.source.mkdir()
        make_used_home(self.home)
        text = f"import os, time\nwhile not os.path.exists({str(self.go)!r}): time.sleep(0.05)\n"
        (self.source / "train.py").write_text(text)

    def spec(self) -> JobSpec:
        """Return the specification of the job."""
        return JobSpec(script="train.py", source=str(self.source), launcher="python")

    def run_killed_submit(self, step: str, when: str) -> None:
        """Run a submit that is killed before or after a step."""
        argv = [sys.executable, "-c", SUBMIT, str(self.home), str(self.source), step, when]
        assert subprocess.run(argv, check=False).returncode == -signal.SIGKILL

    def job(self) -> tracking.Job:
        """Return the only job."""
        [job] = tracking.find_all(self.home)
        return job

    def leftover_paths(self) -> list[str]:
        """Return the paths that jobs have left, except for the store and the records."""
        folders = [self.home / name for name in ("process", "running", "packing")]
        paths = [str(path) for folder in folders if folder.is_dir() for path in folder.iterdir()]
        return paths + [str(path) for path in self.run_dirs]

    run_dirs: tuple[Path, ...] = ()


@pytest.fixture
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A user; after the test, all jobs are removed and must have left no files."""
    (tmp_path / "t").mkdir()
    user = Laptop(tmp_path)
    yield user
    user.go.touch()
    jobs = tracking.find_all(user.home)
    for job in jobs:
        job.cancel(is_urgent=True)
        job.remove()
    run_dirs = [Path("/tmp", f"cloudjob-{job.id.rpartition('-')[2]}") for job in jobs]
    assert (user.leftover_paths(), [path for path in run_dirs if path.exists()]) == ([], [])


def poll(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def read(path: Path) -> bytes:
    """Return a file of a process; empty if it has ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("step", "when"),
    [
        ("records.add", "after"),
        ("running.register", "after"),
        ("backend._write_key", "before"),
        ("backend._write_key", "after"),
        ("running.note_controller", "before"),
        ("backend._send_request", "before"),
    ],
)
def test_a_submit_that_is_killed_before_its_job_starts_leaves_a_record_to_remove(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch, step: str, when: str
):
    laptop.run_killed_submit(step, when)

    job = laptop.job()
    run_dir = Path("/tmp", f"cloudjob-{job.id.rpartition('-')[2]}")
    poll(
        lambda: (
            tracking.find_all(laptop.home)
            and laptop.leftover_paths() == []
            and not run_dir.exists()
        )
    )
    name = running.process_name(job.id).encode()
    poll(lambda: not [path for path in Path("/proc").glob("[0-9]*/cmdline") if name in read(path)])
    status = job.status()
    assert (status.state, status.native_state) == (JobState.UNKNOWN, "the submit was interrupted")
    with pytest.raises(JobNotFound, match="interrupted"):
        job.wait()
    with monkeypatch.context() as patched:
        patched.setenv("CLOUDJOB_HOME", str(laptop.home))
        assert main(["cancel", "--all"]) == 0
    job.remove()
    assert tracking.find_all(laptop.home) == []


@pytest.mark.parametrize(
    ("step", "when"), [("backend._send_request", "after"), ("records.update", "before")]
)
def test_a_submit_that_is_killed_after_its_job_started_leaves_a_job_to_cancel(
    laptop: Laptop, step: str, when: str
):
    laptop.run_killed_submit(step, when)

    job = laptop.job()
    assert job.status().state is JobState.RUNNING
    job.cancel()
    assert job.wait().state is JobState.CANCELLED


def test_a_submit_that_fails_leaves_no_process(laptop: Laptop):
    """The controller starts while the job is still prepared."""
    before = linux.children(os.getpid())

    with pytest.raises(PackageError, match="no such file"):
        pipeline.submit(laptop.spec().with_values(script="other.py"), laptop.home)

    # Controllers of earlier tests may end meanwhile.
    assert set(linux.children(os.getpid())) - set(before) == set()


def test_records_that_are_locked_after_the_start_lose_no_job(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object, **__: object) -> None:
        raise RecordsError("database is locked")

    with monkeypatch.context() as patched:
        patched.setattr(Records, "update", refuse)
        job = pipeline.submit(laptop.spec(), laptop.home)

    assert [listed.id for listed in tracking.find_all(laptop.home)] == [job.id]
    listed = tracking.find(laptop.home, job.id)
    assert listed.status().state is JobState.RUNNING
    listed.cancel()
    assert listed.wait().state is JobState.CANCELLED


def test_an_interrupt_while_the_job_is_sent_ends_it(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch
):
    """A second Ctrl-C ends the submit at once, together with the processes that it has started."""
    from cloudjob.backends.process import backend

    real = backend._send_request

    def interrupted(*args: Any) -> None:
        real(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(backend, "_send_request", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pipeline.submit(laptop.spec(), laptop.home)

    assert tracking.find_all(laptop.home) == []
    assert laptop.leftover_paths() == []


def test_the_next_command_removes_the_remains_of_a_killed_controller(laptop: Laptop):
    job = pipeline.submit(laptop.spec(), laptop.home)
    folder = laptop.home / "process" / job.id
    poll(lambda: (folder / "node-0").exists() and (folder / "node-0.log").exists())
    lock = laptop.home / "running" / job.id
    deep = folder / "node-0"
    for _ in range(20):
        deep = deep / "deep"
    deep.mkdir(parents=True)

    os.kill(int(lock.read_bytes().split()[-1]), signal.SIGKILL)
    poll(lambda: tracking.find_all(laptop.home) and not lock.exists())

    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == []
    status = job.wait()
    assert (status.state, status.exit_code, status.cause) == (JobState.FAILED, 137, "platform")
    assert status.failure is not None
    assert "controller" in status.failure.message
    assert status.ended_at is None or status.ended_at > (status.started_at or "")


def test_a_damaged_state_neither_breaks_the_list_nor_keeps_the_job(laptop: Laptop):
    job = pipeline.submit(laptop.spec(), laptop.home)
    path = laptop.home / "process" / job.id / "state.json"
    poll(lambda: b'"process": 0' not in path.read_bytes())
    path.write_bytes(b"[1, 2")

    [_] = tracking.find_all(laptop.home)
    status = _.status()
    assert status.state is JobState.RUNNING
    job.cancel(is_urgent=True)
    poll(lambda: tracking.find_all(laptop.home)[0].status().state.is_final)
    path.write_bytes(b"[1, 2")
    with Records(laptop.home / "records.db") as db:
        db.update(job.id, final_json="", state="PENDING")
    # The controller may still run for a moment after it has reported the job's end.
    poll(lambda: tracking.find_all(laptop.home)[0].status().state.is_final)
    [listed] = tracking.find_all(laptop.home)
    status = listed.status()
    assert (status.state, status.exit_code) == (JobState.FAILED, 137)
    listed.remove()
    assert tracking.find_all(laptop.home) == []


def test_an_ended_job_leaves_no_zombie_in_the_process_that_submitted_it(laptop: Laptop):
    job = pipeline.submit(laptop.spec(), laptop.home)
    lock = laptop.home / "running" / job.id
    poll(lambda: len(running.processes_of(laptop.home, job.id)) == 3)
    controller = int(lock.read_bytes().split()[-1])
    laptop.go.touch()

    # The zombie must be reaped although no command queries the job's status.
    poll(lambda: not Path(f"/proc/{controller}").exists())


def test_a_worker_that_was_lost_before_the_job_began_is_blamed_and_not_the_head(tmp_path: Path):
    folder = tmp_path / "process" / "train-1"
    folder.mkdir(parents=True)
    node = {"host": "w", "process": 7, "started_at": 1.0}
    state = {
        "started_at": 1.0,
        "ended_at": 62.0,
        "exit_code": 143,
        "is_cancelled": False,
        "has_asked_head": True,
        "nodes": [
            {**node, "ended_at": 62.0, "exit_code": 143},
            {**node, "ended_at": 1.5, "exit_code": 137},
        ],
    }
    (folder / "state.json").write_text(json.dumps(state))

    status = ProcessBackend(tmp_path, {}).status("process://local/train-1")

    assert status.state is JobState.FAILED
    assert status.failure == Failure(1, exit_code=137, message="ended by SIGKILL, without a record")


def test_a_job_runs_until_its_entries_have_ended_whatever_is_killed(laptop: Laptop):
    """The folder of a node is kept until its entry has exited."""
    job = pipeline.submit(laptop.spec(), laptop.home)
    lock = laptop.home / "running" / job.id
    poll(lambda: len(running.processes_of(laptop.home, job.id)) == 3)
    controller = int(lock.read_bytes().split()[-1])
    [keeper] = linux.children(controller)
    [entry] = linux.children(keeper)

    # A keeper that is not stopped may still terminate its entry when the controller dies.
    for process in (entry, keeper):
        os.kill(process, signal.SIGSTOP)
        # On a busy machine it stops late; until then it still handles signals.
        stat = Path(f"/proc/{process}/stat")
        poll(lambda stat=stat: stat.read_text().rpartition(")")[2].split()[0] == "T")
    for process in (controller, keeper):
        os.kill(process, signal.SIGKILL)
    poll(lambda: running.processes_of(laptop.home, job.id) == [entry])

    assert job.status().state is JobState.RUNNING
    assert (laptop.home / "process" / job.id / "node-0").exists()
    os.kill(entry, signal.SIGCONT)
    laptop.go.touch()
    assert job.wait().native_state == "lost"
    assert not (laptop.home / "process" / job.id / "node-0").exists()


def test_an_entry_has_the_signals_and_files_of_a_program_that_was_just_started(laptop: Laptop):
    """It is a fork of the controller."""
    job = pipeline.submit(laptop.spec(), laptop.home)
    lock = laptop.home / "running" / job.id
    poll(lambda: len(running.processes_of(laptop.home, job.id)) == 3)
    [keeper] = linux.children(int(lock.read_bytes().split()[-1]))
    [entry] = linux.children(keeper)
    poll(lambda: linux.children(entry))

    def signals(kind: str) -> set[int]:
        text = Path(f"/proc/{entry}/status").read_text()
        mask = int(re.findall(rf"{kind}:\s*(\w+)", text)[0], 16)
        return {number for number in range(1, 64) if mask >> (number - 1) & 1}

    # Python blocks all signals for a moment when it starts a program.
    poll(lambda: not signals("SigBlk"))
    assert signals("SigIgn") == {signal.SIGPIPE, signal.SIGXFSZ}
    assert os.getsid(entry) == entry
    links = dict(linux.open_files(entry))
    assert links["0"] == os.devnull
    assert links["1"] == links["2"] == str(laptop.home / "process" / job.id / "node-0.log")
    others = {link for _, link in linux.open_files(keeper) if "pipe:" in link}
    assert others
    assert not others & set(links.values())


def test_a_node_that_is_still_starting_can_be_ended(tmp_path: Path, monkeypatch):
    """A job counts as running a moment before its nodes have processes."""
    with subprocess.Popen(["sleep", "60"]) as program:
        states = iter([0, 0, program.pid])
        backend = ProcessBackend(tmp_path, {})
        monkeypatch.setattr(
            backend, "nodes", lambda _: (False, [{"process": next(states), "exit_code": None}])
        )

        backend.end_node("process://local/train-1", 0)

        assert program.wait(LIMIT_S) == -signal.SIGHUP
