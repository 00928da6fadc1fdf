"""The door of the emulated OBS: what the server does to a connection, its client sees, too."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from cloudjob.emulator.gate import Gate

REQUEST = b"GET /bucket/key HTTP/1.1\r\nHost: here\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.fixture
def behind() -> Iterator[socket.socket]:
    """A port on which a server may listen."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        yield listener


@pytest.fixture
def client(behind: socket.socket) -> Iterator[socket.socket]:
    """A connection to the door of that port."""
    gate = Gate(lambda: behind.getsockname()[1], lambda method, target: None, lambda head: head)
    port = gate.listen("127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", port), 20) as made:
        yield made
    gate.close()


def test_a_connection_that_the_server_has_closed_is_closed_for_its_client(
    behind: socket.socket, client: socket.socket
):
    """It was quiet for long; else the next request on it would wait for an answer for ever."""
    client.sendall(REQUEST)
    server, _ = behind.accept()
    with server:
        assert server.recv(1000) == REQUEST
        server.sendall(ANSWER)
        assert client.recv(len(ANSWER), socket.MSG_WAITALL) == ANSWER

    assert client.recv(1000) == b""


def test_the_last_of_an_answer_comes_before_the_end(behind: socket.socket, client: socket.socket):
    """As of a server that closes as soon as it has answered."""
    client.sendall(REQUEST)
    server, _ = behind.accept()
    with server:
        assert server.recv(1000) == REQUEST
        server.sendall(ANSWER[:30] + bytes(3_000_000))

    with client.makefile("rb") as answer:
        assert len(answer.read()) == 30 + 3_000_000
