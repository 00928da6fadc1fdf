"""The worker's end of the control connection: it listens for the head of its job."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
from typing import Callable

from jobentry.control import connection
from jobentry.control.connection import Channel, Link, Stream
from jobentry.control.dial import GREET_S, GREETING, MAX_GREETING_BYTES, REFUSED, TAKEN
from jobentry.control.event_loop import NodeLoop

# How many connections may be in the handshake at once.
_MAX_HANDSHAKES = 32


def listen(port: int, address: str = "") -> socket.socket:
    """Return a socket that listens on a port, 0 for any, of one address or of all.

    Raises:
        OSError: The port is taken, or the address is not of this machine.
    """
    is_ipv6 = ":" in address or (not address and _has_ipv6())
    server = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_ipv6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind((address, port))
        server.listen(_MAX_HANDSHAKES)
        server.setblocking(False)
    except OSError:
        server.close()
        raise
    return server


def announce(server: socket.socket, folder: str, node: int) -> None:
    """Write the address of ``server`` to the folder that the nodes of one machine share."""
    path = address_file(folder, node)
    address, port = server.getsockname()[:2]
    with open(path + ".new", "w", encoding="ascii") as file:
        file.write("%s %d\n" % (address, port))
    os.replace(path + ".new", path)


def announced(folder: str, node: int) -> tuple[str, int] | None:
    """Return the address that a node of this machine has announced, if any."""
    try:
        with open(address_file(folder, node), encoding="ascii") as file:
            address, port = file.read().split()
            return address, int(port)
    except (OSError, ValueError):
        return None


def address_file(folder: str, node: int) -> str:
    """Return the file in which a node announces its address."""
    return os.path.join(folder, "address-%d" % node)


class Listener:
    """Accepts connections of the head on ``server`` and attaches them to ``link``.

    Args:
        key: The signing key of the job.
        node: The number of this node.
    """

    def __init__(
        self, loop: NodeLoop, server: socket.socket, key: bytes, node: int, link: Link
    ) -> None:
        self._loop = loop
        self._server = server
        self._key = key
        self._node = node
        self._link = link
        self._entry = connection.nonce()
        self._session = ""
        self._handshakes: set[_Handshake] = set()
        self.on_attach: Callable[[], None] = lambda: None
        loop.selector.register(server, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Stop listening, and close all connections but the head's."""
        with contextlib.suppress(KeyError, ValueError):
            self._loop.selector.unregister(self._server)
        self._server.close()
        for handshake in list(self._handshakes):
            handshake.close()

    def _accept(self) -> None:
        try:
            accepted, _ = self._server.accept()
        except OSError:
            return
        if len(self._handshakes) < _MAX_HANDSHAKES:
            self._handshakes.add(_Handshake(self, self._loop, accepted))
        else:
            accepted.close()

    def greeting(self, nonce: str) -> str:
        """Return the greeting of a connection."""
        return f"{nonce} {self._entry}"

    def check(self, greeting: str, line: str) -> tuple[str, Channel | None, int]:
        """Check the head's answer to ``greeting``.

        Returns:
            The answer to send, the channel if the head is ours, and the number of our messages that
            it has received.
        """
        fields = line.split(" ")
        if len(fields) != 4 or not fields[2].isdecimal():
            return REFUSED.decode(), None, 0
        _, session, received, shown = fields
        transcript = "%s %s" % (greeting, line[: line.rindex(" ")])
        expected = connection.proof(self._key, "head", self._node, transcript)
        if not connection.is_proof(shown, expected):
            return REFUSED.decode(), None, 0
        if self._session not in ("", session) and self._link.received:
            return TAKEN.decode(), None, 0
        self._session = session
        own_count = "%d" % self._link.received
        transcript = f"{transcript} {own_count}"
        proof = connection.proof(self._key, "worker", self._node, transcript)
        channel = Channel(self._key, "worker", "head", transcript)
        return f"{own_count} {proof}", channel, int(received)

    def attach(self, stream: Stream, channel: Channel, received: int) -> None:
        """Continue with a connection of our head."""
        self._link.attach(stream, channel, received)
        self.on_attach()

    def forget(self, handshake: _Handshake) -> None:
        """Drop a handshake that has succeeded or failed."""
        self._handshakes.discard(handshake)


class _Handshake:
    """A connection in its handshake."""

    def __init__(self, listener: Listener, loop: NodeLoop, accepted: socket.socket) -> None:
        self._listener = listener
        self._loop = loop
        self._timer = "handshake-%d" % id(self)
        self._greeting = listener.greeting(connection.nonce())
        self._stream = Stream(loop.selector, accepted)
        self._stream.max_line_bytes = MAX_GREETING_BYTES
        self._stream.on_line = self._check
        self._stream.on_end = lambda why: self.close()
        loop.schedule(self._timer, GREET_S, self.close)
        self._stream.send(GREETING + self._greeting.encode("ascii") + b"\n")

    def close(self) -> None:
        """Close the connection."""
        self._loop.cancel(self._timer)
        self._stream.close()
        self._listener.forget(self)

    def _check(self, line: bytes) -> None:
        text = line.decode("ascii", "replace")
        answer, channel, received = self._listener.check(self._greeting, text)
        self._stream.send(answer.encode("ascii") + b"\n")
        if channel is None:
            self.close()
            return
        self._loop.cancel(self._timer)
        self._listener.forget(self)
        self._stream.max_line_bytes = connection.MAX_LINE_BYTES
        self._listener.attach(self._stream, channel, received)


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            tried.bind(("", 0))
            return True
    except OSError:
        return False
