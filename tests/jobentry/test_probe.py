"""The way to a worker, tried on real sockets: servers that hang, reset, or say nonsense."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Callable

import pytest

from jobentry import probe
from jobentry.probe import Probe, Step, look

HERE = "127.0.0.1"


class Server:
    """Something that listens on a port of its own, and does the same with each that comes."""

    def __init__(self, treat: Callable[[socket.socket], None]) -> None:
        self.socket = socket.create_server((HERE, 0))
        self.port = int(self.socket.getsockname()[1])
        self.taken: list[socket.socket] = []
        self._treat = treat
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self.taken.append(connection)
            self._treat(connection)

    def close(self) -> None:
        """Stop listening, and hang up on everybody."""
        self.socket.shutdown(socket.SHUT_RDWR)
        for each in (self.socket, *self.taken):
            each.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """A function that starts a server; all are closed at the end."""
    servers: list[Server] = []

    def start(treat: Callable[[socket.socket], None]) -> Server:
        servers.append(Server(treat))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def reset(connection: socket.socket) -> None:
    """Hang up with a RST, as a machine that is going down does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.create_server((HERE, 0)) as server:
        return int(server.getsockname()[1])


def test_an_sshd_that_greets_is_there(serve: Callable[..., Server]):
    """It needs no more than its first words."""
    server = serve(lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n"))

    step = look(HERE, server.port)

    assert step == Step(HERE, True, "")
    assert step.is_there


def test_a_name_that_nobody_knows():
    """A container that has not been started has no name yet."""
    step = look("no-such-host.invalid", 22)

    assert (step.address, step.is_listening) == ("", False)
    assert step.trouble == "its name does not resolve"
    assert "has it been started" in step.hint


@pytest.mark.parametrize("name", ["a" * 70, "a..b", "\udcff"])
def test_a_name_that_cannot_be_one(name: str):
    """What is no name does not resolve, and is no traceback."""
    assert look(name, 22).trouble == "its name does not resolve"


def test_a_port_that_is_closed():
    """The machine is there, its sshd is not."""
    port = free_port()

    step = look(HERE, port)

    assert step.trouble == "port %d: connection refused" % port
    assert (step.address, step.is_listening) == (HERE, False)
    assert "what does its own log say?" in step.hint


def test_a_server_that_hangs(serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch):
    """It accepts, and then says nothing: an sshd on a machine without memory."""
    monkeypatch.setattr(probe, "_BANNER_S", 0.2)
    server = serve(lambda connection: None)

    step = look(HERE, server.port)

    assert step.trouble == "its sshd accepts and then says nothing"
    assert step.is_listening
    assert "its sshd hangs" in step.hint


def test_a_machine_that_does_not_answer(monkeypatch: pytest.MonkeyPatch):
    """Its queue is full, and packets are dropped, as by a firewall."""
    monkeypatch.setattr(probe, "_CONNECT_S", 0.2)
    with socket.socket() as server:
        server.bind((HERE, 0))
        server.listen(0)
        port = int(server.getsockname()[1])
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex((HERE, port))

        step = look(HERE, port)

        for each in waiting:
            each.close()
    assert step.trouble == "no answer on port %d" % port
    assert "firewall" in step.hint


@pytest.mark.parametrize(
    "treat",
    [
        lambda connection: connection.close(),
        lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        lambda connection: connection.sendall(b"\xff\x00" * 100),
    ],
    ids=["closed", "http", "bytes"],
)
def test_a_server_that_is_no_sshd(serve: Callable[..., Server], treat: Callable[..., None]):
    """Whatever it says or does, it is not what we look for."""
    server = serve(treat)

    step = look(HERE, server.port)

    assert not step.is_there
    assert step.trouble == "what listens there is not an sshd"
    assert "SSHD_PORT" in step.hint
    assert str(server.port) in step.hint


def test_a_server_that_resets(serve: Callable[..., Server]):
    """Its RST may come before we have read, or even before we are told that we are connected."""
    server = serve(reset)

    step = look(HERE, server.port)

    assert step.trouble in (
        "what listens there is not an sshd",
        "port %d: connection reset by peer" % server.port,
    )
    assert step.hint


def found(watch: Probe, count: int) -> list[int]:
    """Wait until a probe has found so many."""
    seen: list[int] = []
    while len(seen) < count:
        assert select.select([watch], [], [], 60)[0], "after 60 s: %s" % watch.steps
        seen += watch.found()
    return sorted(seen)


def test_all_workers_are_found_at_once(serve: Callable[..., Server]):
    """More than there are threads; the ones that are there are told, the others are tried on."""
    server = serve(lambda connection: connection.sendall(b"SSH-2.0-x\r\n"))
    hosts = dict.fromkeys(range(1, 100), HERE)
    hosts[100] = "no-such-host.invalid"
    watch = Probe(hosts, server.port)
    try:
        assert found(watch, 99) == list(range(1, 100))
        assert not watch.steps[100].is_there
    finally:
        watch.close()


def test_a_worker_that_comes_late_is_found(serve: Callable[..., Server]):
    """Its port is closed at first."""
    port = free_port()
    watch = Probe({1: HERE}, port)
    try:
        assert not select.select([watch], [], [], 0.2)[0]
        with socket.create_server((HERE, port)) as late:
            late.settimeout(60)
            connection, _ = late.accept()
            connection.sendall(b"SSH-2.0-x\r\n")
            assert found(watch, 1) == [1]
            connection.close()
    finally:
        watch.close()


def test_a_worker_where_ssh_did_not_get_in_is_tried_again(serve: Callable[..., Server]):
    """It is told once more."""
    server = serve(lambda connection: connection.sendall(b"SSH-2.0-x\r\n"))
    watch = Probe({1: HERE}, server.port)
    try:
        assert found(watch, 1) == [1]
        watch.again(1)
        assert found(watch, 1) == [1]
    finally:
        watch.close()
