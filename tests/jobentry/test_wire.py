"""The line without ssh: real connections on loopback, real FIFOs, and strangers."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobentry import peers, wire
from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths, node_paths
from jobentry.peers import Message, Peer
from jobentry.probe import Step, look
from jobentry.wire import Channel, Listener, WireError, Wires

KEY = b"-----BEGIN-----\nsecret of the job\n"
BEAT_S = 0.5


@given(st.lists(st.binary(max_size=50).map(lambda line: line.replace(b"\n", b""))))
def test_what_is_sealed_can_be_opened(lines: list[bytes]):
    """By the other side, in the order in which it was said."""
    head = Channel(b"key", "worker", "head", "nonces")
    worker = Channel(b"key", "head", "worker", "nonces")

    assert [worker.open(head.seal(line)[:-1]) for line in lines] == lines


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda first, second: [second], id="left out"),
        pytest.param(lambda first, second: [first, first], id="repeated"),
        pytest.param(lambda first, second: [first[:-1] + b"x"], id="changed"),
        pytest.param(lambda first, second: [first[32:]], id="unsigned"),
        pytest.param(lambda first, second: [b""], id="nothing"),
    ],
)
def test_what_was_touched_on_its_way_is_refused(spoil: Callable[[bytes, bytes], list[bytes]]):
    """Each message holds what came before it."""
    head = Channel(b"key", "worker", "head", "nonces")
    worker = Channel(b"key", "head", "worker", "nonces")
    lines = spoil(head.seal(b"one")[:-1], head.seal(b"two")[:-1])

    for line in lines[:-1]:
        worker.open(line)
    with pytest.raises(WireError):
        worker.open(lines[-1])


def test_what_one_side_said_cannot_be_said_back_to_it():
    """Each direction has a key of its own."""
    head = Channel(b"key", "worker", "head", "nonces")

    with pytest.raises(WireError):
        head.open(head.seal(b"one")[:-1])


class Node:
    """A worker's side: the FIFOs of its entry, and a listener."""

    def __init__(self, folder: Path, key: bytes = KEY, index: int = 1) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = int(server.getsockname()[1])
        self.where = paths_of(folder)
        for name in (self.where.to_head, self.where.from_head):
            os.mkfifo(name)
        # As the entry opens them: what is said waits for the head.
        self.to_head = os.open(self.where.to_head, os.O_RDWR | os.O_NONBLOCK)
        self.from_head = os.open(self.where.from_head, os.O_RDONLY | os.O_NONBLOCK)
        self.listener = Listener(key, index, self.port, self.where)

    def say(self, word: str) -> None:
        os.write(self.to_head, peers.dump(word))

    def hear(self, within_s: float = 60.0) -> bytes:
        """Return what comes from the head next; nothing is the end."""
        assert select.select([self.from_head], [], [], within_s)[0]
        return os.read(self.from_head, 65536)

    def close(self) -> None:
        self.listener.close()
        os.close(self.to_head)
        os.close(self.from_head)


def paths_of(folder: Path) -> NodePaths:
    """Return the paths of a node that has this folder alone."""
    folder.mkdir()
    names = {"CLOUDJOB_NODE_DIR": str(folder), "MA_HOME": str(folder)}
    return node_paths(names, NodeEnv(job="j", node_dir=str(folder)))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A worker that listens."""
    node = Node(tmp_path / "worker")
    yield node
    node.close()


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Callable[..., Peer]]:
    """A function that meets a worker and opens the head's side."""
    wires: list[Wires] = []
    found: list[Peer] = []

    def make(port: int, key: bytes = KEY) -> Peer:
        wires.append(Wires(key))
        step = look("127.0.0.1", port, wire.meeting(wires[-1], 1))
        assert step.is_there, step
        env = NodeEnv(job="j", hosts=("near", "127.0.0.1"), sshd_port=port)
        peer = Peer(env, 1, str(tmp_path / "peer.log"), "")
        found.append(peer)
        peer.open(wires[-1])
        return peer

    yield make
    for peer in found:
        peer.close(patience_s=0.0)
    for one in wires:
        one.close()


def heard(peer: Peer, within_s: float = 60.0) -> list[Message] | None:
    """Return what the worker says next; None is the end."""
    assert select.select([peer], [], [], within_s)[0]
    return peer.hear()


def test_both_sides_hear_each_other(node: Node, join: Callable[..., Peer]):
    """What was said before the line was there, too."""
    node.say("early")
    peer = join(node.port)
    peer.tell("launch", number=3)

    assert heard(peer) == [Message("early", {})]
    said = b""
    while said.count(b"\n") < 2:
        said += node.hear()
    assert [peers.load(line) for line in said.splitlines()] == [
        Message("hello", {}),
        Message("launch", {"number": 3}),
    ]
    node.say("idle")
    assert heard(peer) == [Message("idle", {})]


def test_the_last_words_of_a_worker_arrive(node: Node, join: Callable[..., Peer]):
    """It says how it has left and is gone at once, while the head speaks to it."""
    peer = join(node.port)
    node.hear()
    for _ in range(50):
        peer.tell("signal", number=10)
    for _ in range(200):
        node.say("left-" + 100 * "x")
    node.listener.close()

    count = 0
    while True:
        said = heard(peer)
        if said is None:
            break
        count += len(said)
    assert count == 200


def test_more_than_a_pipe_holds_waits_for_an_entry_that_is_busy(
    node: Node, join: Callable[..., Peer]
):
    """Both entries do something else for a while: nothing is lost, and the worker may be gone."""
    peer = join(node.port)
    text = "x" * 1000
    for number in range(300):
        peer.tell("signal", number=number, text=text)
    heard_here = b""
    while heard_here.count(b"\n") < 301:
        heard_here += node.hear()
    os.set_blocking(node.to_head, True)
    for number in range(300):
        os.write(node.to_head, peers.dump("said", number=number, text=text))
    node.listener.close()

    said = []
    while True:
        messages = heard(peer)
        if messages is None:
            break
        said += [values["number"] for _, values in messages]
    assert said == list(range(300))


def look_at(text: str) -> Step:
    """Return how far the head gets with a program that serves what is no worker."""
    wires = Wires(KEY)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = subprocess.Popen(
            [sys.executable, "-c", text, str(server.fileno())], pass_fds=[server.fileno()]
        )
        step = look("127.0.0.1", port, wire.meeting(wires, 1))
        program.wait()
    wires.close()
    return step


def test_what_greets_without_letters_is_no_entry():
    """A stranger may send what is no text at all."""
    step = look_at(STRANGER)

    assert not step.is_there
    assert step.hint


STRANGER = """
import socket, sys
connection, _ = socket.socket(fileno=int(sys.argv[1])).accept()
connection.sendall(b"cloudjob-line 1 " + b"\\xff" * 32 + b"\\n")
connection.recv(4096)
"""


def test_the_worker_notices_that_the_head_went(node: Node, join: Callable[..., Peer]):
    """Its connection is closed by the kernel, whatever has ended it."""
    peer = join(node.port)
    node.hear()
    peer.close(patience_s=0.0)

    assert node.hear() == b""


def test_a_line_can_be_opened_again(node: Node, join: Callable[..., Peer]):
    """One that got nowhere: the head is welcome a second time."""
    first = join(node.port)
    node.hear()
    first.close(patience_s=0.0)
    assert node.hear() == b""
    os.close(node.from_head)
    node.from_head = os.open(node.where.from_head, os.O_RDONLY | os.O_NONBLOCK)
    second = join(node.port)
    node.say("idle")

    assert heard(second) == [Message("idle", {})]


@pytest.mark.parametrize(("key", "index"), [(b"another", 1), (KEY, 2)], ids=["key", "node"])
def test_who_has_another_key_or_number_is_refused(tmp_path: Path, key: bytes, index: int):
    """And is told so, with what to look at."""
    other = Node(tmp_path / "worker", key, index)
    wires = Wires(KEY)
    try:
        step = look("127.0.0.1", other.port, wire.meeting(wires, 1))
    finally:
        wires.close()
        other.close()

    assert step.trouble == "it has another key than the head, or is not node 1"
    assert "CLOUDJOB_SSH_KEY" in step.hint


def test_who_only_says_that_he_is_a_worker_is_refused():
    """What greets as a worker does has to show that it has the key."""
    step = look_at(IMPOSTOR)

    assert not step.is_there
    assert "another key" in step.trouble


IMPOSTOR = """
import socket, sys
connection, _ = socket.socket(fileno=int(sys.argv[1])).accept()
connection.sendall(b"cloudjob-line 1 " + b"0" * 32 + b"\\n")
said = connection.recv(4096).split()
connection.sendall(said[1] + b"\\n")
connection.recv(1)
"""


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"0" * 5000,
        b"0" * 32 + b" " + b"0" * 64 + b"\n",
        b"\xff" * 32 + b" " + b"\xff" * 64 + b"\n",
    ],
)
def test_strangers_are_sent_away(node: Node, join: Callable[..., Peer], words: bytes):
    """Whatever they say they are no head, and the head gets in beside them."""
    with socket.create_connection(("127.0.0.1", node.port), 60) as stranger:
        assert stranger.recv(16) == b"cloudjob-line 1 "
        stranger.sendall(words)
        peer = join(node.port)
        node.say("idle")

        assert heard(peer) == [Message("idle", {})]


def test_a_second_head_is_sent_away(node: Node, join: Callable[..., Peer]):
    """While the first is there; that one hears nothing of it."""
    first = join(node.port)
    node.hear()
    second = join(node.port)

    assert heard(second) is None
    node.say("idle")
    assert heard(first) == [Message("idle", {})]


def test_a_silent_line_lives(
    tmp_path: Path, join: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
):
    """Each side lets the other know that it is there, also while its entry says nothing."""
    monkeypatch.setattr(wire, "_BEAT_S", BEAT_S)
    node = Node(tmp_path / "worker")
    try:
        peer = join(node.port)
        node.hear()
        # Longer than silence may last.
        assert not select.select([peer, node.from_head], [], [], 8 * BEAT_S)[0]
        node.say("idle")

        assert heard(peer) == [Message("idle", {})]
    finally:
        node.close()


FROZEN = """
import os, sys, time
from pathlib import Path
from jobentry import wire
from tests.jobentry.test_wire import Node
wire._BEAT_S = float(sys.argv[2])
node = Node(Path(sys.argv[1]))
print(node.port, flush=True)
time.sleep(600)
"""


def test_a_node_that_is_frozen_is_gone(
    tmp_path: Path, join: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
):
    """Its kernel still answers for it; its entry does not."""
    monkeypatch.setattr(wire, "_BEAT_S", BEAT_S)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    far = subprocess.Popen(
        [sys.executable, "-c", FROZEN, str(tmp_path / "worker"), str(BEAT_S)],
        env=environ,
        stdout=subprocess.PIPE,
    )
    assert far.stdout is not None
    try:
        peer = join(int(far.stdout.readline()))
        os.kill(far.pid, signal.SIGSTOP)

        assert heard(peer) is None
    finally:
        far.kill()
        far.stdout.close()
        far.wait()


def test_a_port_that_is_taken_is_said(tmp_path: Path):
    """By the system's own word."""
    with socket.create_server(("", 0)) as server:
        port = int(server.getsockname()[1])
        with pytest.raises(OSError, match="in use"):
            Listener(KEY, 1, port, paths_of(tmp_path / "worker"))


def test_all_lines_of_many_workers_are_carried_by_one_thread(
    tmp_path: Path, join: Callable[..., Peer]
):
    """Also when there are more open files than select() can number."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this machine allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    node = Node(tmp_path / "worker")
    try:
        peer = join(node.port)
        poll = select.poll()
        poll.register(node.from_head, select.POLLIN)
        assert poll.poll(60_000)
        assert peers.load(os.read(node.from_head, 4096).strip()) == Message("hello", {})
        node.say("idle")
        poll = select.poll()
        poll.register(peer, select.POLLIN)
        assert poll.poll(60_000)
        assert peer.hear() == [Message("idle", {})]
    finally:
        for descriptor in spare:
            os.close(descriptor)
        node.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
