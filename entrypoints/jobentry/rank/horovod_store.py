"""The store over which Horovod's ranks find each other without MPI: keys and values over HTTP.

It speaks what Horovod's own server does (0.28.1, ``horovod/runner/http/http_server.py``), which
would have to be started by ``horovodrun``: ``PUT``, ``GET`` and ``DELETE /SCOPE/KEY``.
"""

from __future__ import annotations

import socketserver
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from jobentry.contract import exits

# An address of a rank is some dozens of bytes.
_MOST_BYTES = 1_000_000


class Server(socketserver.ThreadingMixIn, HTTPServer):
    """The store of one job.

    Args:
        nodes: How many nodes the job has.
        slots: How many ranks a node has.
    """

    daemon_threads = True
    # A thousand ranks knock at once.
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], nodes: int, slots: int) -> None:
        super().__init__(address, _Handler)
        self.lock = threading.Lock()
        self.values: dict[str, dict[str, bytes]] = {}
        self._sizes = {"global": nodes * slots, "local": slots, "cross": nodes}
        self._done: dict[str, set[str]] = {}

    def server_bind(self) -> None:
        """Bind as a TCP server does: that of HTTP looks its own name up, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def finish(self, scope: str, rank: str) -> None:
        """Note that a rank has met the others; when all have, a second meeting begins anew."""
        kind = scope.partition("_")[0]
        with self.lock:
            done = self._done.setdefault(scope, set())
            done.add(rank)
            if len(done) >= self._sizes.get(kind, 0):
                self.values.pop(scope, None)
                del self._done[scope]


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 60

    def do_GET(self) -> None:
        scope, key = self._names()
        with self.server.lock:
            value = self.server.values.get(scope, {}).get(key)
        self._answer(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        scope, key = self._names()
        size = self.headers.get("Content-Length", "")
        if not size.isdecimal() or int(size[:9]) > _MOST_BYTES:
            self._answer(400)
            return
        value = self.rfile.read(int(size))
        with self.server.lock:
            self.server.values.setdefault(scope, {})[key] = value
        self._answer(200)

    def do_DELETE(self) -> None:
        self.server.finish(*self._names())
        self._answer(200)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of requests."""

    def _names(self) -> tuple[str, str]:
        scope, _, key = self.path.lstrip("/").partition("/")
        return scope, key

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main(words: list[str]) -> int:
    """Serve on the port ``words[0]`` for a job of so many nodes and ranks a node; never ends."""
    number, nodes, slots = (int(word) for word in words)
    try:
        server = Server(("", number), nodes, slots)
    except OSError as error:
        text = f"listening on port {number}: {error.strerror}; MASTER_PORT names another\n"
        sys.stderr.write(text)
        return exits.ENTRY_FAILED
    server.serve_forever()
    return 0
