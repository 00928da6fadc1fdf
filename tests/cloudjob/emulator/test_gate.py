"""The gate of the emulated OBS: what the server does to a connection reaches its client."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloudjob.emulator.gate import Gate

REQUEST = b"GET /bucket/key HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[socket.socket]:
    """A Unix socket on which a server may listen."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s3.sock"))
        listener.listen()
        listener.settimeout(20)
        yield listener


@pytest.fixture
def connect(behind: socket.socket) -> Iterator[Callable[[], socket.socket]]:
    """Connects to the gate of that socket."""
    gate = Gate(behind.getsockname(), lambda method, target: None, lambda head: head)
    port = gate.listen("127.0.0.1", 0)
    made: list[socket.socket] = []

    def connected() -> socket.socket:
        made.append(socket.create_connection(("127.0.0.1", port), 20))
        return made[-1]

    yield connected
    for item in made:
        item.close()
    gate.close()


@pytest.fixture
def client(connect: Callable[[], socket.socket]) -> socket.socket:
    """A connection to the gate."""
    return connect()


@pytest.mark.parametrize(
    "headers",
    [
        "Host: evil.example:80",
        "Host: 127.0.0.1.evil.example:80",
        "Host: 127.0.0.1:80\r\nOrigin: http://evil.example",
        "Host: 127.0.0.1:80\r\nOrigin: http://127.0.0.1:81",
        "Host: 127.0.0.1:80\r\nOrigin: null",
        "X-Host: 127.0.0.1:80",
    ],
)
def test_a_request_for_another_host_or_from_another_origin_is_refused(
    connect: Callable[[], socket.socket], headers: str
):
    """It never reaches the server."""
    client = connect()
    client.sendall(f"GET /bucket/key HTTP/1.1\r\n{headers}\r\n\r\n".encode())
    with client.makefile("rb") as answer:
        text = answer.read()

    assert text.startswith(b"HTTP/1.1 403 AccessDenied\r\n")
    assert b"access-control" not in text.lower()


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
