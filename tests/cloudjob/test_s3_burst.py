"""Many small objects from a server that is not like others."""

from __future__ import annotations

import hashlib
import socketserver
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cloudjob.store.s3 import S3Store, burst, place
from cloudjob.store.s3.wire import Patience, Request

DATA = bytes(range(256))
ANSWER = b'HTTP/1.1 200 OK\r\nETag: "%s"\r\nContent-Length: 256\r\n\r\n' % (
    hashlib.md5(DATA, usedforsecurity=False).hexdigest().encode()
)


class Handler(socketserver.StreamRequestHandler):
    """Answers at once, or a byte at a time without end, or once and no more."""

    def handle(self) -> None:
        """Serve one connection."""
        while first := self.rfile.readline():
            while self.rfile.readline().strip():
                pass
            while b"slow" in first:
                self.wfile.write(b"H")
                time.sleep(0.01)
            self.wfile.write(ANSWER + DATA)
            if b"last" in first:
                return


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[Any]:
    """Return what reaches such a server."""
    for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CLOUDJOB_HOME", str(tmp_path))
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        uri = f"s3://bucket?endpoint=http://127.0.0.1:{server.server_address[1]}"
        found: Any = S3Store(place.read(uri), patience=Patience(total_s=0.3, stall_s=0.3))._wire
        yield found
        for _, connection in found._idle:
            connection.close()
        server.shutdown()


def got(wire: Any, keys: list[str]) -> dict[str, bytes | None]:
    """Ask once for each."""
    asked = [Request("GET", key, key) for key in keys]
    answers = burst.answers(wire, asked)
    return {request.key: answer.body if answer else None for request, answer in answers}


@pytest.mark.parametrize("count", [1, 16, 200])
def test_each_is_answered(wire: Any, count: int):
    """Fewer than there are connections, as many, and more."""
    keys = [f"key-{number}" for number in range(count)]

    assert got(wire, keys) == dict.fromkeys(keys, DATA)
    assert len(wire._idle) == min(count, 16)


def test_what_trickles_is_not_waited_for(wire: Any):
    """All others come; of that one something comes all the time, and never an answer."""
    keys = [f"key-{number}" for number in range(100)]

    assert got(wire, ["slow", *keys]) == {"slow": None, **dict.fromkeys(keys, DATA)}
    assert not wire._busy


def test_connections_that_end_leave_the_rest_to_others(wire: Any):
    """After one answer each: sixteen came, and nobody is asked again here."""
    found = got(wire, [f"last-{number}" for number in range(20)])

    assert [key for key, body in found.items() if body is None] == [
        f"last-{n}" for n in range(16, 20)
    ]
