"""All workers, as the head sees them: a real loop, and programs in the place of ssh."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest

from jobentry import workers
from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import node_paths
from jobentry.peers import Message, Peer
from jobentry.supervise import PASSED_SIGNALS, STOP_SIGNALS, NodeLoop
from jobentry.workers import Workers

FACTS = {"code": "sha256:1", "mpi": "4.1", "python": "3.11.2"}
# Called as ssh is. The name of the host says how it behaves; `tries` counts its calls.
SHELL = """\
import json, os, signal, sys, time
host = sys.argv[1]
kind = host.rstrip("0123456789")
tries = os.path.join(os.path.dirname(sys.argv[0]), host)
with open(tries, "a") as file:
    file.write(".")
def say(word, **values):
    print(json.dumps({"word": word, **values}), flush=True)
if kind == "stranger":
    sys.exit("Host key verification failed.")
if kind == "late" and os.path.getsize(tries) < 3:
    sys.exit("connect to host: Connection refused")
for line in sys.stdin:
    word = json.loads(line)["word"]
    if word == "hello" and kind != "silent":
        facts = json.loads(os.environ["FACTS"])
        if kind == "old":
            facts["mpi"] = "5.0"
        say("ready", **facts, at_s=time.time() + (3600 if kind == "ahead" else 0))
        if kind == "dies":
            sys.exit(1)
    if word == "end" and kind == "lost":
        os.kill(os.getpid(), 9)
    if word == "end" and kind == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    if word == "end":
        say("left", trouble="no room" if kind == "full" else "")
        sys.exit(0)
"""


class Watch:
    """A head that has nothing but its workers."""

    def __init__(self, folder: Path, hosts: tuple[str, ...]) -> None:
        shell = folder / "ssh"
        shell.write_text("#!%s -IS\n%s" % (sys.executable, SHELL))
        shell.chmod(0o755)
        node = NodeEnv(job="j", hosts=("head", *hosts), remote_shell=str(shell))
        where = node_paths({"CLOUDJOB_NODE_DIR": str(folder), "MA_HOME": str(folder)}, node)
        where = where._replace(node_dir=str(folder), log_dir=str(folder))
        os.mkfifo(where.events)
        self.loop = NodeLoop(node, where)
        self.heard: list[tuple[str, str]] = []
        self.lost: list[str] = []
        self.workers = Workers(node, where, self.loop, FACTS, self._hear, self._lose)

    def _hear(self, peer: Peer, message: Message) -> None:
        self.heard.append((peer.host, message.word))

    def _lose(self, peer: Peer) -> None:
        self.lost.append(peer.host)

    def until(self, claim: Callable[[], object]) -> None:
        """Let the loop run until something is true."""
        deadline = time.monotonic() + 60
        while not claim():
            assert time.monotonic() < deadline, (self.heard, self.lost)
            self.loop.step()


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Watch]]:
    """A function that makes a head with workers of these kinds."""
    monkeypatch.setenv("FACTS", json.dumps(FACTS))
    kept = {
        number: signal.getsignal(number)
        for number in (*STOP_SIGNALS, *PASSED_SIGNALS, signal.SIGCHLD)
    }
    made: list[Watch] = []

    def make(*hosts: str) -> Watch:
        made.append(Watch(tmp_path, hosts))
        return made[-1]

    yield make
    for each in made:
        each.workers.end(0, is_over=True, patience_s=0.0)
        each.loop.close()
    signal.set_wakeup_fd(-1)
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_all_workers_are_greeted(watch: Callable[..., Watch]):
    """Each answers, and nobody is unfit."""
    head = watch("good1", "good2", "good3")
    head.workers.open()
    head.until(lambda: not head.workers.absent)

    assert sorted(head.heard) == [("good%d" % i, "ready") for i in (1, 2, 3)]
    assert head.workers.unfit() == []
    assert head.workers.warnings() == []
    assert sorted(head.workers.processes) == sorted(head.loop.own)


def test_a_shell_that_got_nowhere_is_tried_again(watch: Callable[..., Watch], tmp_path: Path):
    """A worker is up later than the head."""
    head = watch("late1")
    head.workers.open()
    head.until(lambda: not head.workers.absent)

    assert (tmp_path / "late1").read_text() == "..."
    assert head.lost == []
    # A shell that has ended and was waited for is nobody's any more.
    assert head.loop.own == set(head.workers.processes)


@pytest.mark.parametrize(
    ("host", "trouble", "hint"),
    [
        ("stranger1", "it has another key for ssh: Host key verification failed.", "the same key"),
        ("silent1", "its entry has not answered", "what does its own log say"),
    ],
)
def test_who_has_not_answered_says_why(
    watch: Callable[..., Watch], tmp_path: Path, host: str, trouble: str, hint: str
):
    """As far as the remote shell knows."""
    head = watch("good1", host)
    head.workers.open()
    head.until((tmp_path / host).exists)
    head.until(lambda: [row for row in head.workers.unfit() if row.trouble == trouble])
    head.until(lambda: len(head.workers.absent) == 1)

    (row,) = head.workers.unfit()
    assert (row.node, row.host, row.trouble) == (2, host, trouble)
    assert hint in row.hint


def test_a_worker_that_does_not_fit_is_named(watch: Callable[..., Watch]):
    """With both versions."""
    head = watch("good1", "old2")
    head.workers.open()
    head.until(lambda: not head.workers.absent)

    (row,) = head.workers.unfit()
    assert (row.node, row.trouble) == (2, "another MPI: 5.0, and the head has 4.1")


def test_a_clock_that_is_far_off_is_warned_of(watch: Callable[..., Watch]):
    """It works all the same."""
    head = watch("good1", "ahead2")
    head.workers.open()
    head.until(lambda: not head.workers.absent)

    assert head.workers.unfit() == []
    warning, hint = head.workers.warnings()
    assert warning == "the clock of node 2 (ahead2) is +3600 s from the head's"
    assert hint.startswith("hint: ")


def test_a_worker_that_is_lost_is_told_once(watch: Callable[..., Watch]):
    """Only one that had answered can be lost."""
    head = watch("good1", "dies2")
    head.workers.open()
    head.until(lambda: head.lost)

    assert head.lost == ["dies2"]
    assert [peer.host for peer in head.workers.peers if peer.is_gone] == ["dies2"]


def test_at_the_end_each_worker_has_left(watch: Callable[..., Watch]):
    """Nobody is lost by that, and who could not keep its outputs says so."""
    head = watch("good1", "full2", "silent3")
    head.workers.open()
    head.until(lambda: len(head.workers.absent) == 1)
    begun = time.monotonic()
    head.workers.end(3, is_over=True, patience_s=60.0)

    assert time.monotonic() - begun < 60
    assert head.lost == []
    assert [peer.trouble for peer in head.workers.peers] == ["", "no room", ""]


def test_a_worker_that_ends_without_confirming_is_reported(watch: Callable[..., Watch]):
    head = watch("good1", "lost2", "full3", "silent4")
    head.workers.open()
    head.until(lambda: len(head.workers.absent) == 1)

    unconfirmed = head.workers.end(0, is_over=True, patience_s=60.0)

    assert [(peer.host, peer.is_gone) for peer in unconfirmed] == [("lost2", True)]


def test_a_worker_that_never_confirms_is_reported_after_the_limit(watch: Callable[..., Watch]):
    head = watch("good1", "frozen2")
    head.workers.open()
    head.until(lambda: not head.workers.absent)

    unconfirmed = head.workers.end(0, is_over=True, patience_s=2.0)

    assert [(peer.host, peer.is_gone) for peer in unconfirmed] == [("frozen2", False)]


def test_who_is_late_is_shown_while_the_head_waits(
    watch: Callable[..., Watch],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """Not in a run where nobody is late; once more when the wait has doubled; and when all came."""
    monkeypatch.setattr(workers, "_LATE_S", 0.2)
    head = watch("good1", "silent2")
    head.workers.open()
    said: list[str] = []

    def shown(count: int) -> Callable[[], Any]:
        def claim() -> bool:
            said.append(capsys.readouterr().err)
            return "".join(said).count("the nodes after") >= count

        return claim

    head.until(shown(2))
    head.workers.stop_looking()
    text = "".join(said)

    assert "its entry has not answered" in text
    assert "hint: node" in text
    assert "all workers are there" not in text


def test_another_key_is_shown_sooner(
    watch: Callable[..., Watch],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """A node with another key seldom gets the right one by waiting; it is still waited for."""
    monkeypatch.setattr(workers, "_REFUSED_S", 0.2)
    head = watch("silent1", "stranger2")
    begun = time.monotonic()
    head.workers.open()
    said: list[str] = []

    def is_shown() -> bool:
        said.append(capsys.readouterr().err)
        return "the nodes after" in "".join(said)

    head.until(is_shown)
    text = "".join(said)

    assert time.monotonic() - begun < workers._LATE_S
    assert "it has another key for ssh" in text
    assert "hint: node 2: every node of a job must be given the same key" in text
    assert len(head.workers.absent) == 2


def test_nobody_is_shown_in_a_good_run(
    watch: Callable[..., Watch], capsys: pytest.CaptureFixture[str]
):
    """A table is for when something is wrong."""
    head = watch("good1")
    head.workers.open()
    head.until(lambda: not head.workers.absent)
    head.workers.stop_looking()

    assert capsys.readouterr().err == ""
