"""The head's view of all workers: a real loop, and processes that answer as workers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest

from jobentry.contract import node_end
from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import node_paths
from jobentry.control import peers, transport
from jobentry.control.handshake import Access, Resolver
from jobentry.control.peers import RemoteWorker, WorkerPool
from jobentry.control.transport import Message
from tests.support.loops import Clock, make_loop, signals_restored

FACTS = {"code": "sha256:1", "mpi": "4.1", "python": "3.11.2"}
KEY = b"the key of the job"
# The behaviour is one of the kinds below; a worker records each message that it receives.
WORKER = """\
import os, signal, sys, time
from jobentry.control import handshake, transport
from jobentry.contract.env import NodeEnv
from tests.support.loops import make_loop, paths_in
from pathlib import Path
folder, node, behaviour, key = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4].encode()
own = os.path.join(folder, str(node))
os.makedirs(own, exist_ok=True)
loop = make_loop(NodeEnv(), paths_in(Path(own)))
facts = {"code": "sha256:1", "mpi": "5.0" if behaviour == "old" else "4.1", "python": "3.11.2"}
over = []
def obey(message):
    with open(own + "/got", "a") as file:
        file.write(message.kind + "\\n")
    if message.kind == "hello" and behaviour != "silent":
        link.send("ready", at_s=time.time() + 3600 * (behaviour == "ahead"), **facts)
    if message.kind == "hello" and behaviour == "leaves":
        link.send("left", trouble="")
    if message.kind == "job-ended" and behaviour == "lost":
        os.kill(os.getpid(), 9)
    if message.kind == "job-ended" and behaviour == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    if message.kind == "job-ended":
        link.send("left", trouble="no room" if behaviour == "full" else "")
    if message.kind == "count":
        for number in range(100):
            link.send("counted", number=number)
    if message.kind == "bye":
        over.append(True)
link = transport.Link(obey, lambda why: None)
server = handshake.listen(0, "127.0.0.1")
at = handshake.Listener(loop, server, transport.secret(key), node, link, lambda: None)
handshake.announce(server, folder, node)
ticked = time.monotonic()
while not over:
    loop.step()
    if time.monotonic() - ticked > 0.1:
        # Ten times as fast as a real one.
        link.tick(1.0)
        ticked = time.monotonic()
"""


class Head:
    """A head with only its connections to workers."""

    def __init__(self, folder: Path, kinds: tuple[str, ...], **settings: Any) -> None:
        self.folder = folder
        self.kinds = kinds
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        node = NodeEnv(
            job="j",
            hosts=("head", *(f"{kind}{i}" for i, kind in enumerate(kinds, 1))),
            control_dir=str(folder),
            **settings,
        )
        where = node_paths({"CLOUDJOB_NODE_DIR": str(folder), "MA_HOME": str(folder)}, node)
        where = where._replace(node_dir=str(folder), log_dir=str(folder))
        self.clock = Clock(time.monotonic)
        self.loop = make_loop(node, where, now_s=self.clock.now_s)
        # From this message on, the head's clock hurries.
        self.hurries_after: tuple[str, str] | None = None
        self.received: list[tuple[str, str]] = []
        self.numbers: list[int] = []
        self.lost: list[tuple[str, str]] = []
        access = Access(transport.secret(KEY), "session", 0, Resolver(self.loop))
        self.workers = WorkerPool(node, self.loop, FACTS, access, self._receive, self._lose)

    def open(self, *absent: int) -> None:
        """Start the workers except for the absent ones, and connect to all of them."""
        for index in range(1, len(self.kinds) + 1):
            if index not in absent:
                self.start(index)
        self.workers.open()

    def start(self, index: int, key: bytes = KEY) -> None:
        """Start a worker."""
        args = [str(self.folder), str(index), self.kinds[index - 1], key.decode()]
        self.processes[index] = subprocess.Popen(
            [sys.executable, "-c", WORKER, *args],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        # Otherwise the loop would treat it as an orphan.
        self.loop.own_children.add(self.processes[index].pid)

    def report_end(self, index: int, code: int) -> None:
        """Report the end of a worker as a backend does."""
        report = self.folder / node_end.file_name(index)
        report.with_suffix(".new").write_bytes(node_end.dump(code))
        report.with_suffix(".new").rename(report)

    def _receive(self, worker: RemoteWorker, message: Message) -> None:
        self.received.append((worker.host, message.kind))
        if (worker.host, message.kind) == self.hurries_after:
            self.hurry()
        if message.kind == "counted":
            self.numbers.append(message.values["number"])

    def _lose(self, worker: RemoteWorker) -> None:
        self.lost.append((worker.host, worker.reason))

    def hurry(self) -> None:
        """Let each step of the loop take a quarter of a second by the head's clock."""
        self.clock.ahead_s += 0.25
        self.loop.schedule("hurry", 0.0, self.hurry)

    def hurry_until(self, claim: Callable[[], object]) -> None:
        """Run the loop until a condition holds, while the clock hurries."""
        self.hurry()
        self.until(claim)
        self.loop.cancel("hurry")

    def until(self, claim: Callable[[], object]) -> None:
        """Run the loop until a condition holds."""
        deadline = time.monotonic() + 60
        while not claim():
            assert time.monotonic() < deadline, (self.received, self.lost)
            self.loop.step()

    def wait_for_all_workers(self) -> None:
        self.until(lambda: not self.workers.absent)

    def close(self) -> None:
        self.workers.end(0, is_over=True, patience_s=0.0)
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.loop.close(tuple(self.loop.own_children))


@pytest.fixture
def make_head(tmp_path: Path) -> Iterator[Callable[..., Head]]:
    """A function that creates a head with workers of the given kinds."""
    heads: list[Head] = []

    def make(*kinds: str, **settings: Any) -> Head:
        heads.append(Head(tmp_path, kinds, **settings))
        return heads[-1]

    with signals_restored():
        yield make
        for each in heads:
            each.close()


def test_a_head_in_a_test_ends_no_process_of_other_tests(tmp_path: Path):
    """Such as a server that a whole session uses."""
    server = subprocess.Popen(["sleep", "600"])
    with signals_restored():
        Head(tmp_path, ()).close()

    assert server.poll() is None
    server.kill()
    server.wait()


# -- bring-up -----------------------------------------------------------------------------------


def test_the_head_connects_to_all_workers(make_head: Callable[..., Head]):
    head = make_head("good", "good", "good")
    head.open()
    head.wait_for_all_workers()

    assert sorted(head.received) == [("good%d" % i, "ready") for i in (1, 2, 3)]
    assert head.workers.unfit() == []


def test_a_worker_that_comes_late_is_found(make_head: Callable[..., Head]):
    head = make_head("good", "good")
    head.open(2)
    head.until(lambda: len(head.workers.absent) == 1)
    (row,) = head.workers.unfit()
    assert (row.node, row.problem) == (2, "its entry does not listen yet")

    head.start(2)

    head.wait_for_all_workers()
    assert head.lost == []


def test_a_worker_that_ends_before_it_answers_is_lost_at_once(make_head: Callable[..., Head]):
    head = make_head("good", "good")
    head.open(2)
    head.until(lambda: len(head.workers.absent) == 1)
    assert head.lost == []

    head.report_end(2, 137)
    head.until(lambda: head.lost)

    reason = "node 2 (good2) ended with exit code 137 before it joined the job"
    assert head.lost == [("good2", reason)]


def test_a_worker_with_another_key_is_reported_with_a_hint(make_head: Callable[..., Head]):
    head = make_head("good", "good")
    head.open(2)
    head.start(2, b"another key")
    problem = "its key differs from the head's, or it is not node 2"

    head.until(lambda: [row for row in head.workers.unfit() if row.problem == problem])

    (row,) = [row for row in head.workers.unfit() if row.node == 2]
    assert row.has_control is False
    assert "CLOUDJOB_SSH_KEY" in row.hint


def test_a_worker_that_does_not_answer_is_reported(make_head: Callable[..., Head]):
    head = make_head("silent")
    head.open()
    problem = "its entry has not answered"

    head.until(lambda: [row for row in head.workers.unfit() if row.problem == problem])

    (row,) = head.workers.unfit()
    assert "what does its own log say" in row.hint


def test_a_worker_with_another_version_is_reported_with_both(make_head: Callable[..., Head]):
    head = make_head("good", "old")
    head.open()
    head.wait_for_all_workers()

    (row,) = head.workers.unfit()
    assert (row.node, row.problem) == (2, "another MPI: 5.0, and the head has 4.1")


def test_the_clock_of_a_worker_is_compared_with_the_heads(make_head: Callable[..., Head]):
    head = make_head("good", "ahead")
    head.open()
    head.wait_for_all_workers()

    assert head.workers.unfit() == []
    assert [round(worker.clock_ahead_s, -2) for worker in head.workers.workers] == [0, 3600]


def test_late_workers_are_shown_while_the_head_waits(
    make_head: Callable[..., Head],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(peers, "_LATE_S", 0.2)
    head = make_head("good", "silent")
    head.open()
    stderr_parts: list[str] = []

    def is_shown_twice() -> bool:
        stderr_parts.append(capsys.readouterr().err)
        return "".join(stderr_parts).count("its entry has not answered") >= 2

    head.until(is_shown_twice)
    head.workers.stop_waiting()
    text = "".join(stderr_parts)

    assert "hint: node" in text
    assert "all workers are ready" not in text


def test_a_normal_start_shows_no_table(
    make_head: Callable[..., Head], capsys: pytest.CaptureFixture[str]
):
    head = make_head("good")
    head.open()
    head.wait_for_all_workers()
    head.workers.stop_waiting()

    assert capsys.readouterr().err == ""


def test_other_connections_do_not_block_the_head(make_head: Callable[..., Head]):
    head = make_head("good")
    head.start(1)
    place = head.folder / "address-1"
    head.until(place.exists)
    address, port = place.read_text().split()
    other_connections = [socket.create_connection((address, int(port)), 60) for _ in range(5)]
    try:
        for other, data in zip(
            other_connections, [b"", b"GET / HTTP/1.1\r\n\r\n", b"0" * 5000, b"\xff \xff 0 \xff\n"]
        ):
            assert other.recv(19) == b"cloudjob-control 2 "
            other.sendall(data)
        head.workers.open()

        head.wait_for_all_workers()
    finally:
        for other in other_connections:
            other.close()


# -- silent, disconnected and killed workers ----------------------------------------------------


def test_a_killed_worker_is_lost_soon(make_head: Callable[..., Head]):
    head = make_head("good", "good")
    head.open()
    head.wait_for_all_workers()
    head.processes[2].kill()

    head.hurry_until(lambda: head.lost)

    assert head.lost == [("good2", "its connection ended")]
    assert [worker.host for worker in head.workers.workers if worker.is_gone] == ["good2"]


def test_a_restarted_worker_is_a_new_one(make_head: Callable[..., Head]):
    """The ranks of the first worker are gone, even if another entry answers there now."""
    head = make_head("good")
    head.open()
    head.wait_for_all_workers()
    head.processes[1].kill()
    head.processes[1].wait()
    (head.folder / "address-1").unlink()
    head.start(1)

    head.until(lambda: head.lost)

    assert head.lost == [("good1", "its entry was started again")]


def test_a_broken_connection_is_resumed_without_loss(make_head: Callable[..., Head]):
    head = make_head("good")
    head.open()
    head.wait_for_all_workers()
    link = head.workers.workers[0].link
    head.workers.send("count")
    for _ in range(20):
        # Like a reset by the network: both sides have to detect it themselves.
        assert link._stream is not None
        assert link._stream._socket is not None
        link._stream._socket.shutdown(socket.SHUT_RDWR)
        head.until(lambda: not link.is_attached)
        head.workers.send("count")
        head.until(lambda: link.is_attached)

    head.until(lambda: len(head.numbers) >= 2100)
    assert head.numbers == list(range(100)) * 21
    assert head.lost == []


def test_the_head_reports_a_silent_worker_and_waits_for_it(
    make_head: Callable[..., Head], capsys: pytest.CaptureFixture[str]
):
    head = make_head("good", stall_s=10_000.0)
    head.open()
    head.wait_for_all_workers()
    stderr_parts: list[str] = []

    def is_reported(text: str) -> bool:
        stderr_parts.append(capsys.readouterr().err)
        return text in "".join(stderr_parts)

    os.kill(head.processes[1].pid, signal.SIGSTOP)
    head.hurry_until(lambda: is_reported("silent for "))
    assert "node 1 (good1); a node may be silent for 10000 s" in "".join(stderr_parts)
    head.workers.send("count")
    os.kill(head.processes[1].pid, signal.SIGCONT)
    head.until(lambda: is_reported("no longer silent: node 1 (good1)"))

    head.until(lambda: len(head.numbers) == 100)
    assert head.lost == []


def test_a_worker_that_is_silent_for_too_long_is_lost(make_head: Callable[..., Head]):
    head = make_head("good", stall_s=25.0)
    head.open()
    head.wait_for_all_workers()
    os.kill(head.processes[1].pid, signal.SIGSTOP)

    head.hurry_until(lambda: head.lost)

    (lost,) = head.lost
    assert lost[1].startswith("it has been silent for ")


def test_a_silent_worker_that_dies_is_lost_at_once(make_head: Callable[..., Head]):
    """Its port refuses connections, so the head does not wait for it."""
    head = make_head("good", stall_s=100_000.0)
    head.open()
    head.wait_for_all_workers()
    os.kill(head.processes[1].pid, signal.SIGSTOP)
    head.hurry_until(lambda: head.workers.workers[0].silent_s > transport.SILENT_S)
    head.processes[1].kill()
    head.processes[1].wait()

    head.hurry_until(lambda: head.lost)

    assert head.lost == [("good1", "its connection ended")]


def test_a_worker_that_is_killed_before_it_has_read_everything_is_lost_soon(
    make_head: Callable[..., Head],
):
    """Its kernel then resets the connection, and a node that is gone refuses no other."""
    head = make_head("good", stall_s=100_000.0)
    head.open()
    head.wait_for_all_workers()
    os.kill(head.processes[1].pid, signal.SIGSTOP)
    head.workers.send("count")
    (head.folder / "address-1").unlink()
    head.processes[1].kill()

    head.hurry_until(lambda: head.lost)

    assert head.lost == [("good1", "its connection ended")]


def test_a_worker_whose_end_is_reported_is_lost_although_its_connection_stays(
    make_head: Callable[..., Head],
):
    """The network of a node may be gone before its kernel has closed the connection."""
    head = make_head("good", stall_s=100_000.0)
    head.open()
    head.wait_for_all_workers()
    os.kill(head.processes[1].pid, signal.SIGSTOP)
    head.report_end(1, 137)

    head.hurry_until(lambda: head.lost)

    assert head.lost == [("good1", "it ended with exit code 137")]


def test_suspension_of_the_head_does_not_count_as_silence(make_head: Callable[..., Head]):
    head = make_head("good", stall_s=60.0)
    head.open()
    head.wait_for_all_workers()

    head.clock.advance(head.loop, 1000.0)
    for _ in range(3):
        head.loop.step()

    assert head.lost == []
    assert head.workers.workers[0].silent_s < transport.SILENT_S


def test_the_head_looks_again_for_a_worker_that_ends_before_it_is_ready(
    make_head: Callable[..., Head], monkeypatch: pytest.MonkeyPatch
):
    """As a container does that is restarted in place while the head waits for it."""
    monkeypatch.setattr(peers, "_PAUSE_S", (0.02, 0.05))
    head = make_head("silent")
    head.open()
    head.until(lambda: head.workers.workers[0].link.is_attached)
    head.processes[1].kill()
    head.processes[1].wait()
    head.kinds = ("good",)
    head.start(1)

    head.wait_for_all_workers()
    assert (head.received, head.lost) == ([("silent1", "ready")], [])


# -- the end of the job -------------------------------------------------------------------------


def test_at_the_end_each_worker_has_left(make_head: Callable[..., Head]):
    head = make_head("good", "full", "silent")
    head.open()
    head.until(lambda: len(head.workers.absent) == 1)
    begun = time.monotonic()

    assert head.workers.end(3, is_over=True, patience_s=60.0) == []

    assert time.monotonic() - begun < 60
    assert head.lost == []
    assert [worker.problem for worker in head.workers.workers] == ["", "no room", ""]
    for index in (1, 2):
        assert head.processes[index].wait(60) == 0


def test_a_worker_that_ends_without_confirming_is_reported(make_head: Callable[..., Head]):
    head = make_head("good", "lost", "full", "silent")
    head.open()
    head.until(lambda: len(head.workers.absent) == 1)

    unconfirmed = head.workers.end(0, is_over=True, patience_s=60.0)

    assert [(worker.host, worker.is_gone) for worker in unconfirmed] == [("lost2", True)]


def test_a_worker_that_never_confirms_is_reported_after_the_limit(make_head: Callable[..., Head]):
    head = make_head("good", "frozen")
    head.open()
    head.wait_for_all_workers()
    head.hurries_after = ("good1", "left")

    unconfirmed = head.workers.end(0, is_over=True, patience_s=60.0)

    assert [(worker.host, worker.is_gone) for worker in unconfirmed] == [("frozen2", False)]


def test_workers_that_end_together_stay_until_the_exit_code_is_final(
    make_head: Callable[..., Head], tmp_path: Path
):
    head = make_head("good", "full", "lost", ends_together=True)
    head.open()
    head.wait_for_all_workers()

    unconfirmed = head.workers.end(0, is_over=True, patience_s=60.0)

    assert [worker.host for worker in unconfirmed] == ["lost3"]
    assert [worker.problem for worker in head.workers.workers[:2]] == ["", "no room"]
    for index in (1, 2):
        assert "bye" not in (tmp_path / str(index) / "got").read_text().split()
    head.workers.dismiss(125)
    for index in (1, 2):
        assert head.processes[index].wait(60) == 0
        assert (tmp_path / str(index) / "got").read_text().split()[-1] == "bye"


def test_a_worker_whose_connection_breaks_gets_the_final_exit_code_with_the_next_one(
    make_head: Callable[..., Head],
):
    head = make_head("good", ends_together=True)
    head.open()
    head.wait_for_all_workers()
    assert head.workers.end(0, is_over=True, patience_s=60.0) == []
    link = head.workers.workers[0].link
    link.detach()
    head.loop.schedule("break", 0.0, lambda: link._disconnected(transport.Break.OTHER))

    head.workers.dismiss(0)

    assert head.processes[1].wait(60) == 0


@pytest.mark.parametrize("ends_together", [False, True])
def test_a_worker_that_leaves_while_the_job_runs_is_lost(
    make_head: Callable[..., Head], ends_together: bool
):
    head = make_head("leaves", ends_together=ends_together)
    head.open()

    head.until(lambda: head.lost)

    assert head.lost == [("leaves1", "its entry ended")]


def test_a_worker_that_has_ended_when_it_is_dismissed_is_lost_once(
    make_head: Callable[..., Head], monkeypatch: pytest.MonkeyPatch
):
    """Its kernel resets the connection, which the head notices when it sends."""
    head = make_head("leaves")
    worker = head.workers.workers[0]
    send = worker.link.send

    def send_to_ended(kind: str, **values: Any) -> None:
        if kind == "bye":
            worker._disconnected(transport.Break.RESET)
        else:
            send(kind, **values)

    monkeypatch.setattr(worker.link, "send", send_to_ended)
    head.open()

    head.until(lambda: head.lost)

    assert head.lost == [("leaves1", "its entry ended")]


def test_a_silent_worker_of_a_job_that_was_stopped_is_not_waited_for(
    make_head: Callable[..., Head],
):
    head = make_head("good", "frozen")
    head.open()
    head.wait_for_all_workers()
    head.hurries_after = ("good1", "left")

    unconfirmed = head.workers.end(143, is_over=False, patience_s=3600.0, silent_limit_s=7.0)

    assert [worker.host for worker in unconfirmed] == ["frozen2"]
