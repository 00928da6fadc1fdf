"""What passes over a connection is read as it was meant, however it is cut into pieces."""

from __future__ import annotations

import select
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.client import BadStatusLine, HTTPConnection, HTTPException, RemoteDisconnected
from pathlib import Path

import pytest

from cloudjob.store.s3.connection import Connection
from cloudjob.store.s3.refusals import Damaged

DEADLINE_S = 60.0
Pair = Callable[[float], tuple[Connection, socket.socket]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Make a connection and its other end."""
    ends: list[socket.socket] = []

    def make(stall_s: float = 60.0) -> tuple[Connection, socket.socket]:
        made = HTTPConnection("nowhere")
        made.sock, other = socket.socketpair()
        ends.extend((made.sock, other))
        return Connection(made, stall_s), other

    yield make
    for end in ends:
        end.close()


def body_of(connection: Connection, room_bytes: int = 7) -> bytes:
    """Read a body to its end."""
    pieces, room = [], memoryview(bytearray(room_bytes))
    while count := connection.read(room):
        pieces.append(bytes(room[:count]))
    return b"".join(pieces)


ANSWERS = {
    "length": (b"HTTP/1.1 200 OK\r\nETag: \"a\"\r\nContent-Length: 11\r\n\r\nhello world", True),
    "continue": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\netag:\"a\"\r\ncontent-length: 11\r\n\r\n"
        b"hello world",
        True,
    ),
    "chunks": (
        b"HTTP/1.1 200 OK\r\nETag: \"a\"\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5;x=y\r\nhello\r\n6\r\n world\r\n0\r\nTrailer: t\r\n\r\n",
        True,
    ),
    "close": (
        b"HTTP/1.1 200 OK\r\nETag: \"a\"\r\nConnection: close\r\nContent-Length: 11\r\n\r\n"
        b"hello world",
        False,
    ),
    "old": (b"HTTP/1.0 200 OK\nETag: \"a\"\nContent-Length: 11\n\nhello world", False),
    "no length": (b"HTTP/1.1 200 OK\r\nETag: \"a\"\r\n\r\nhello world", False),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_an_answer_is_read_however_it_comes(pair: Pair, name: str, step: int):
    """Byte by byte too; and then it is known whether another may follow."""
    data, is_reusable = ANSWERS[name]
    connection, other = pair(60.0)

    def send() -> None:
        for begin in range(0, len(data), step):
            other.sendall(data[begin : begin + step])
        if not is_reusable:
            other.close()

    thread = threading.Thread(target=send)
    thread.start()
    head = connection.head("GET")

    assert (head.status, head.headers["etag"]) == (200, '"a"')
    assert body_of(connection) == b"hello world"
    assert connection.is_reusable is is_reusable
    thread.join()


@pytest.mark.parametrize(
    ("method", "status"), [("HEAD", b"200 OK"), ("GET", b"204 No Content"), ("GET", b"304 Same")]
)
def test_an_answer_without_a_body_has_none(pair: Pair, method: str, status: bytes):
    """Whatever its head says of a length."""
    connection, other = pair(60.0)
    other.sendall(b"HTTP/1.1 %b\r\nContent-Length: 5\r\n\r\n" % status)

    connection.head(method)

    assert body_of(connection) == b""
    assert connection.is_reusable


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", RemoteDisconnected),
        (b"HTTP/1.1 200 OK\r\nContent-Le", Damaged),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n1234", Damaged),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", Damaged),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", Damaged),
        (b"\x15\x03\x01\x00\x02\x02\x50", BadStatusLine),
        (b"HTTP/2 200\r\n\r\n", BadStatusLine),
        (b"HTTP/1.1 200 OK\r\nA: " + b"a" * 100_000, HTTPException),
    ],
    ids=str,
)
def test_half_an_answer_and_none_are_errors(pair: Pair, data: bytes, error: type[Exception]):
    """Each is one that a request is sent again for."""
    connection, other = pair(60.0)
    thread = threading.Thread(target=lambda: (other.sendall(data), other.close()))
    thread.start()

    def read() -> None:
        connection.head("GET")
        body_of(connection)

    with pytest.raises(error):
        read()
    thread.join()


def test_what_stalls_is_given_up(pair: Pair):
    """A side that neither sends nor takes anything is not waited for."""
    connection, other = pair(0.1)
    with pytest.raises(TimeoutError):
        connection.head("GET")
    with pytest.raises(TimeoutError):
        connection.send(bytes(50_000_000))
    other.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n1234")
    connection.head("GET")
    with pytest.raises(TimeoutError):
        body_of(connection)


def test_a_wait_can_be_interrupted(pair: Pair):
    """By another thread."""
    connection, _ = pair(60.0)
    thread = threading.Timer(0.05, connection.interrupt)
    thread.start()

    with pytest.raises(RemoteDisconnected):
        connection.head("GET")
    thread.join()


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_comes_in_pieces_is_worth_reading_when_all_of_it_is_there(
    pair: Pair, name: str
):
    """Or when that cannot be known; asking never waits, and nothing is lost by it."""
    data, is_reusable = ANSWERS[name]
    connection, other = pair(60.0)
    knows_length = name in ("length", "close", "old")

    for at in range(len(data)):
        is_whole_head = data.find(b"\n\n", 0, at) > 0 or data.find(b"\r\n\r\n", 0, at) > 0
        assert connection.has_answer() is (not knows_length and is_whole_head)
        other.sendall(data[at : at + 1])
    if not is_reusable:
        other.close()

    assert connection.has_answer()
    assert connection.head("GET").headers["etag"] == '"a"'
    assert body_of(connection) == b"hello world"
    assert connection.is_reusable is is_reusable


def test_an_answer_that_has_ended_or_is_too_long_is_worth_reading(pair: Pair):
    """There is nothing to wait for; reading says what it is."""
    ended, other = pair(60.0)
    other.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n1234")
    assert not ended.has_answer()
    other.close()
    assert ended.has_answer()
    ended.head("GET")
    with pytest.raises(Damaged):
        body_of(ended)

    long, other = pair(60.0)
    data = bytes(200_000)
    sent = threading.Thread(
        target=other.sendall, args=(b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n" + data,)
    )
    sent.start()
    end = time.monotonic() + DEADLINE_S
    while not long.has_answer():
        assert time.monotonic() < end
    assert long.head("GET").size_bytes == len(data)
    assert body_of(long, 70_000) == data
    sent.join()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Make a key and a certificate of this machine in one file."""
    path = tmp_path / "here.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    words += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    words += ["-keyout", str(path), "-out", str(tmp_path / "crt")]
    subprocess.run(words, check=True, capture_output=True)
    with path.open("a") as file:
        file.write((tmp_path / "crt").read_text())
    return path


@pytest.fixture
def tls(certificate: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Make what our side and the other need to trust each other."""
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(certificate)
    return ssl.create_default_context(cafile=str(certificate)), theirs


def test_tls_gives_an_answer_in_pieces_without_waiting(
    tls: tuple[ssl.SSLContext, ssl.SSLContext],
):
    """Whenever more can be had the system says so, so nobody asks in vain for ever."""
    ours, theirs = tls
    near, far = socket.socketpair()
    made = HTTPConnection("localhost")
    data = bytes(range(250)) * 200
    pieces = [b"HTTP/1.1 200 OK\r\nContent-Le", b"ngth: %d\r\n\r\n" % len(data), data]
    asked = threading.Semaphore(0)

    def serve() -> None:
        with theirs.wrap_socket(far, server_side=True) as other:
            for piece in pieces:
                asked.acquire(timeout=DEADLINE_S)
                other.sendall(piece)

    thread = threading.Thread(target=serve)
    thread.start()
    made.sock = ours.wrap_socket(near, server_hostname="localhost")
    connection = Connection(made, 0.1)
    assert not connection.has_answer()
    asked.release()
    select.select([connection], [], [], DEADLINE_S)
    assert not connection.has_answer()
    asked.release(2)
    while not connection.has_answer():
        assert select.select([connection], [], [], DEADLINE_S)[0]

    assert connection.head("GET").size_bytes == len(data)
    assert body_of(connection) == data
    assert connection.is_reusable
    thread.join()
    made.close()


def test_tls_carries_the_same(tls: tuple[ssl.SSLContext, ssl.SSLContext]):
    """A large body both ways, an answer in pieces, and a side that stalls."""
    ours, theirs = tls
    near, far = socket.socketpair()
    made = HTTPConnection("localhost")
    came = bytearray()
    data = bytes(range(256)) * 4000

    def serve() -> None:
        with theirs.wrap_socket(far, server_side=True) as other:
            while len(came) < len(data) and (piece := other.recv(65536)):
                came.extend(piece)
            other.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data))
            other.sendall(data)
            released.wait(60)

    released = threading.Event()
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        made.sock = ours.wrap_socket(near, server_hostname="localhost")
        connection = Connection(made, 60.0)
        connection.send(memoryview(data))
        assert connection.head("GET").size_bytes == len(data)
        assert body_of(connection, 70_000) == data == came
        assert connection.is_reusable
        connection.limit(0.1)
        with pytest.raises(TimeoutError):
            connection.head("GET")
    finally:
        released.set()
        thread.join()
        made.close()
