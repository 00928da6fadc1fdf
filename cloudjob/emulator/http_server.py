"""Serves the emulator's ASGI applications with uvicorn: one event loop, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
from collections.abc import Collection, Mapping
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

LOOPBACK = "127.0.0.1"
IDLE_S = 75
_END_S = 2


class Connection(H11Protocol):
    """A connection that times out after 75 s without data before or in the head of a request.

    Applications find the transport in ``scope["state"]``.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout of the first request."""
        super().connection_made(transport)
        # asyncio only does this for sockets that were made with an explicit protocol. Without it,
        # the second part of each answer waits for the client's delayed acknowledgement, 40 ms.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.app_state = {**self.app_state, "transport": transport}
        self._close_when_idle()

    def data_received(self, data: bytes) -> None:
        """Handle the data, then restart the timeout of the head."""
        super().data_received(data)
        self._close_when_idle()

    def _close_when_idle(self) -> None:
        is_between_requests = self.cycle is None or self.cycle.response_complete
        if is_between_requests and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                IDLE_S, self.timeout_keep_alive_handler
            )

    def send_400_response(self, msg: str) -> None:
        """Send the response of the application's ``refusal``; uvicorn would always send 400.

        The status of h11 is 431 for any head that is too large; for a single line it must be 414.
        """
        status = getattr(sys.exc_info()[1], "error_status_hint", 400)
        if status == 431 and b"\r\n" not in self.conn.trailing_data[0]:
            status = 414
        answer = self.app.refusal(status)
        head = h11.Response(
            status_code=status, headers=answer.raw_headers, reason=STATUS_PHRASES[status]
        )
        with contextlib.suppress(h11.LocalProtocolError):
            for event in (head, h11.Data(data=answer.body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class HttpServer:
    """Serves each application on its own sockets."""

    def __init__(self) -> None:
        self._servers: list[tuple[uvicorn.Server, list[socket.socket]]] = []
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def add(self, app: Any, sockets: list[socket.socket]) -> None:
        """Serve ``app`` on these sockets once the server has started.

        Args:
            app: An ASGI application; ``refusal(status)`` is its response to unreadable requests.
        """
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=_END_S,
        )
        self._servers.append((uvicorn.Server(config), sockets))

    def start(self) -> None:
        """Start to serve."""
        self._thread.start()

    def close(self) -> None:
        """Accept no more connections, and wait two seconds for running requests."""
        for server, _ in self._servers:
            server.should_exit = True
        self._thread.join(_END_S + 1)

    def _run(self) -> None:
        async def serve() -> None:
            await asyncio.gather(*(server.serve(sockets) for server, sockets in self._servers))

        asyncio.run(serve())


def bind(address: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        OSError: The port is in use.
    """
    return socket.create_server((address, port), backlog=2048)


def port_of(listener: socket.socket) -> int:
    """Return the port of a socket."""
    return int(listener.getsockname()[1])


def target_of(scope: Mapping[str, Any]) -> str:
    """Return path and query as in the request line."""
    path, query = scope["raw_path"], scope["query_string"]
    return bytes(path + b"?" + query if query else path).decode("ascii")


def is_from_here(headers: Mapping[str, str], addresses: Collection[str]) -> bool:
    """Whether a request is for one of these addresses and not from a web page of another origin.

    Any web page can make a browser send requests here, even under a host name that the page's owner
    lets resolve to this machine.

    Args:
        headers: The headers by name in lower case.
    """
    host = headers.get("host", "")
    origin = headers.get("origin")
    name, colon, port = host.partition(":")
    is_named = name in (*addresses, "localhost") and (not colon or port.isdecimal())
    return is_named and origin in (None, f"http://{host}")
