"""The HTTP server: threads of the standard library, one function a request."""

from __future__ import annotations

import json
import re
import socket
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote

from cloudjob.emulator.answers import ApiError

_LIMIT_BYTES = 12 << 20
_IDLE_S = 75


@dataclass(frozen=True, slots=True)
class Request:
    """A request.

    Args:
        target: Path and query as they stand in the request line.
        headers: By their names in lower case.
        words: The parts of the path that the route leaves open, by their names.
    """

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    id: str
    words: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The path, unquoted."""
        return unquote(self.target.partition("?")[0])

    @property
    def query(self) -> dict[str, str]:
        """The query; of a name that comes twice the last."""
        return dict(parse_qsl(self.target.partition("?")[2], keep_blank_values=True))

    def json(self) -> dict[str, Any]:
        """Return the body, whose texts are Unicode and whose numbers are finite.

        Raises:
            ApiError: It is no JSON object.
        """
        try:
            found = json.loads(self.body or b"{}")
            # What Python reads beyond JSON: NaN, Infinity, 1e999 and lone surrogates.
            json.dumps(found, allow_nan=False, ensure_ascii=False).encode("utf-8")
        except (ValueError, RecursionError) as error:
            raise ApiError("ModelArts.2787", type(error).__name__) from error
        if not isinstance(found, dict):
            raise ApiError("ModelArts.2787", "an object is needed")
        return found


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer.

    Args:
        body: What is sent as JSON; None for an empty body.
        is_lost: Whether the connection closes instead.
    """

    status: int = 200
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    is_lost: bool = False


Endpoint = Callable[[Request], Answer]


def is_from_here(headers: Mapping[str, str], addresses: Collection[str]) -> bool:
    """Whether a request names one of our own addresses, and no web page of others sent it.

    A browser sends what a page of any origin asks for, and finds us under any name that its owner
    lets point to us.

    Args:
        headers: By their names in lower case.
    """
    host = headers.get("host", "")
    origin = headers.get("origin")
    is_named = (host.rpartition(":")[0] or host) in (*addresses, "localhost")
    return is_named and origin in (None, f"http://{host}")


class Routes:
    """Which function answers which method and path."""

    def __init__(self) -> None:
        self._routes: list[tuple[str, re.Pattern[str], Endpoint]] = []

    def add(self, method: str, path: str, endpoint: Endpoint) -> None:
        """Let ``endpoint`` answer; ``{name}`` in the path stands for one part of it."""
        pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path)
        self._routes.append((method, re.compile(pattern + r"/?\Z"), endpoint))

    def find(self, method: str, path: str) -> tuple[Endpoint, dict[str, str]] | None:
        """Return the function and the open parts of the path; None when nobody answers."""
        for known, pattern, endpoint in self._routes:
            found = pattern.match(path) if known == method else None
            if found:
                return endpoint, found.groupdict()
        return None


class Server(ThreadingHTTPServer):
    """Listens on one address, and hands each request to one function."""

    daemon_threads = True
    request_queue_size = 256
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], answer: Endpoint) -> None:
        self.answer = answer
        # What the Date of an answer says: by it a client sees that its own clock is wrong.
        self.clock: Callable[[], float] = time.time
        super().__init__(address, _Connection)

    def server_bind(self) -> None:
        """Bind without asking for the name of the address, which may take seconds."""
        socket.socket.setsockopt(self.socket, socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no fault of ours."""


class _Connection(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "api-gateway"
    sys_version = ""
    timeout = _IDLE_S
    disable_nagle_algorithm = True
    # One write, one packet: else the body waits for the client's delayed ACK.
    wbufsize = 1 << 16
    server: Server

    def _serve(self) -> None:
        length = self.headers.get("Content-Length", "0")
        if not length.isdecimal() or int(length) > _LIMIT_BYTES:
            self.close_connection = True
            self.send_error(413)
            return
        request = Request(
            method=self.command,
            target=self.path,
            headers={name.lower(): value for name, value in self.headers.items()},
            body=self.rfile.read(int(length)),
            id=uuid.uuid4().hex,
        )
        answer = self.server.answer(request)
        if answer.is_lost:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self._send(request, answer)

    def _send(self, request: Request, answer: Answer) -> None:
        body = b"" if answer.body is None else json.dumps(answer.body).encode("ascii")
        self.send_response(answer.status)
        self.send_header("X-Request-Id", request.id)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.status != 204:
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if answer.status != 204:
            self.wfile.write(body)

    def date_time_string(self, timestamp: float | None = None) -> str:
        """Return the service's time, as the header has it."""
        return super().date_time_string(self.server.clock() if timestamp is None else timestamp)

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = _serve  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """The server of a test or a laptop keeps no access log."""
