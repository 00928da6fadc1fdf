"""A real worker in a process, with the test in place of the head."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.heads import Head

ENTRYPOINTS = Path(__file__).parents[3] / "entrypoints"
WORKER = """\
import json, sys
from jobentry.control import handshake
from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths
from jobentry.launchers.common import Launch, Process
from jobentry.control.loop import NodeSetup
from jobentry.control.worker import ControlSocket, Worker
from jobentry.node.journal import Journal
folder, processes, settings = sys.argv[1], *map(json.loads, sys.argv[2:])
plan = Launch(tuple(Process(name, tuple(argv), {}) for name, argv in processes), 2, cwd=folder)
node = NodeEnv(job="j", node=1, hosts=("head", "here"), **settings)
server = handshake.listen(0, "127.0.0.1")
paths = NodePaths(folder, folder, folder, folder, folder)
setup = NodeSetup(node, paths, Journal())
worker = Worker(setup, plan, dict, ControlSocket(server, b"the key of the job"))
handshake.announce(server, folder, 1)
worker.run()
sys.exit(worker.leave(""))
"""


class WorkerHead(Head):
    """The worker, and the head's end of its connection."""

    def __init__(
        self, folder: Path, processes: list[tuple[str, list[str]]], **settings: object
    ) -> None:
        os.mkfifo(folder / "events")
        self.folder = folder
        with (folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-c", WORKER, folder, json.dumps(processes), json.dumps(settings)],
                env={"PYTHONPATH": str(ENTRYPOINTS), "PATH": os.environ["PATH"]},
                stderr=err,
            )
        super().__init__(folder)
        self.send("hello")
        self.receive("ready")

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    def end(self, code: int) -> int:
        """Tell the worker how the job ended, let it leave, and return its exit code."""
        self.send("job-ended", code=code, is_over=True, reason="")
        self.receive("left")
        self.send("bye")
        return self.process.wait(60)


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[Any]:
    """A function that starts a worker with processes to launch; it is killed after the test."""
    started: list[WorkerHead] = []

    def start(*processes: tuple[str, list[str]], **settings: object) -> WorkerHead:
        started.append(WorkerHead(tmp_path, list(processes), **settings))
        return started[0]

    yield start
    for value in started:
        value.process.kill()
        value.process.wait()
        value.close()


@pytest.mark.parametrize("first", [[], [("stays", ["sleep", "600"])]], ids=["alone", "second"])
def test_a_launcher_that_cannot_be_started_is_reported_at_once(start_worker: Any, first: Any):
    head = start_worker(*first, ("torchrun", ["/no/such/torchrun", "-m", "x"]))
    head.send("launch")

    problem = "starting /no/such/torchrun: No such file or directory"
    assert head.receive("launcher-ended") == {"name": "torchrun", "code": 127, "lines": [problem]}
    path = Path(f"/proc/{head.process.pid}/task/{head.process.pid}/children")
    deadline = time.monotonic() + 180
    while any(is_running(int(child)) for child in path.read_text().split()):
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.01)
    assert head.end(7) == 7


def test_a_worker_stays_until_the_head_knows_that_its_outputs_are_stored(start_worker: Any):
    head = start_worker()
    head.send("job-ended", code=0, is_over=True, reason="")
    head.receive("left")

    with pytest.raises(subprocess.TimeoutExpired):
        head.process.wait(0.5)
    head.send("bye")

    assert head.process.wait(60) == 0


@pytest.mark.parametrize("final", [0, 125, None])
def test_a_worker_that_ends_with_its_head_has_the_same_exit_code(
    start_worker: Any, final: int | None
):
    """The ranks have succeeded, and then the outputs of another node may not be stored."""
    head = start_worker(ends_together=True)
    head.send("job-ended", code=0, is_over=True, reason="")
    head.receive("left")
    if final is None:
        # The head was killed.
        head.close()
    else:
        head.send("bye", code=final)

    assert head.process.wait(60) == (125 if final is None else final)


def test_a_worker_logs_why_its_head_ends_before_there_are_ranks(start_worker: Any):
    head = start_worker()
    head.send("job-ended", code=125, is_over=False, reason="looking for mpirun: not found on PATH")
    head.receive("left")
    head.send("bye")

    assert head.process.wait(60) == 125
    assert head.err == (
        "jobentry: the head (head) ends the job: looking for mpirun: not found on PATH\n"
    )


def test_a_worker_that_loses_its_head_ends_with_125(start_worker: Any):
    head = start_worker()
    head.close()

    assert head.process.wait(60) == 125
    assert "the head (head) is gone: ending the ranks of this node" in head.err


def test_a_worker_whose_head_is_silent_for_too_long_ends_with_125(start_worker: Any):
    head = start_worker(stall_s=2.0)

    assert head.process.wait(60) == 125
    assert "the head (head) has been silent for 2 s" in head.err


def test_a_head_that_connects_again_finds_the_worker_as_it_was(start_worker: Any):
    head = start_worker(("torchrun", ["sh", "-c", "exit 3"]))
    head.send("launch")
    head.close()
    head.open()

    # A head sends a message again if the worker has not received it.
    if head.reply == "1":
        head.sent = 1
        head.send("launch")
    head.receive("launcher-ended")
    head.received -= 1
    head.close()
    head.open()

    assert head.reply == "2"
    head.receive("launcher-ended")
    assert head.end(3) == 3


def test_a_second_head_is_refused(start_worker: Any):
    head = start_worker()

    second = Head(head.folder, session="another")
    second.close()

    assert second.reply == "taken"
    assert head.end(0) == 0


def is_running(process: int) -> bool:
    """Return whether a process runs and is not a zombie."""
    try:
        return b") Z " not in Path(f"/proc/{process}/stat").read_bytes()
    except OSError:
        return False


def test_a_launcher_that_ends_is_reported_with_its_last_lines(start_worker: Any):
    head = start_worker(("torchrun", ["sh", "-c", "echo one; echo two >&2; exit 3"]))
    head.send("launch")

    assert head.receive("launcher-ended") == {
        "name": "torchrun",
        "code": 3,
        "lines": ["one", "two"],
    }
    assert head.end(3) == 3


def test_a_worker_runs_mpiruns_command_in_the_users_shell(start_worker: Any):
    head = start_worker()
    head.send(
        "run-command", number=4, command='echo "$CLOUDJOB_NODE_DIR" "${PYTHONPATH-none}"; exit 3'
    )

    output = head.receive("command-output")
    while output["code"] is None:
        more = head.receive("command-output")
        output = {**more, "lines": output["lines"] + more["lines"]}
    assert output == {"number": 4, "lines": [f"{head.folder} none"], "code": 3}
    head.send("run-command", number=5, command="sleep 600")
    head.send("kill")
    assert head.receive("command-output") == {"number": 5, "lines": [], "code": 137}
    assert head.end(0) == 0


def test_a_worker_does_not_wait_for_a_daemon(start_worker: Any):
    """Processes that a command starts may outlive it, as mpirun's daemon does."""
    head = start_worker()
    head.send("run-command", number=1, command="setsid sleep 600 <&- >&- 2>&- & exit 0")

    assert head.receive("command-output") == {"number": 1, "lines": [], "code": 0}
    assert head.end(0) == 0
