"""The key-value store over HTTP through which Horovod's ranks find each other without MPI.

It has the protocol of Horovod's own server (0.28.1, ``horovod/runner/http/http_server.py``), which
only ``horovodrun`` starts: ``PUT``, ``GET`` and ``DELETE /SCOPE/KEY``.
"""

from __future__ import annotations

import socketserver
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from jobentry.contract import exits

# The size limit of a value; the address of a rank has some dozens of bytes.
_MAX_BYTES = 1_000_000


class Server(socketserver.ThreadingMixIn, HTTPServer):
    """The store of one job.

    Args:
        nodes: Number of nodes of the job.
        slots: Number of ranks of each node.
    """

    daemon_threads = True
    # A thousand ranks may connect at once.
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], nodes: int, slots: int) -> None:
        super().__init__(address, _Handler)
        self.lock = threading.Lock()
        self.values: dict[str, dict[str, bytes]] = {}
        self._sizes = {"global": nodes * slots, "local": slots, "cross": nodes}
        self._done: dict[str, set[str]] = {}

    def server_bind(self) -> None:
        """Bind without looking up the host name, as HTTPServer does; that may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def finish(self, scope: str, rank: str) -> None:
        """Record that a rank has finished with a scope; empty the scope once all ranks have."""
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
        if not size.isdecimal() or int(size[:9]) > _MAX_BYTES:
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
        """Do not log requests."""

    def _names(self) -> tuple[str, str]:
        scope, _, key = self.path.lstrip("/").partition("/")
        return scope, key

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main(port: str, nodes: str, slots: str) -> int:
    """Serve forever; ``slots`` is the number of ranks of each node."""
    number = int(port)
    try:
        server = Server(("", number), int(nodes), int(slots))
    except OSError as error:
        text = f"listening on port {number}: {error.strerror}; set MASTER_PORT to another port\n"
        sys.stderr.write(text)
        return exits.ENTRY_FAILED
    server.serve_forever()
    return 0
