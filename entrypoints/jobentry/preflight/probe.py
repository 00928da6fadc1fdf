"""The probe: each node listens on a free port, as its ranks will, and the others connect to it.

What counts is what the kernels of both sides say: whether a connection exists, whether what was
sent is acknowledged, and how long that takes. A program that is slow, as on a busy machine, changes
none of it, so a busy node never looks like one behind a firewall.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import selectors
import socket
import struct
import threading
import time
from typing import NamedTuple, Sequence

from jobentry.contract.preflight import Endpoint, Link, Reach

_GREETING = b"cloudjob-preflight"
_MAX_GREETING_BYTES = 128
_MAX_ANSWER_BYTES = 64
_CHUNK_BYTES = 256 * 1024
# More than three packets of 9,000 bytes, and less than the smallest usual receive buffer, so that
# the other kernel acknowledges it even if no program reads it.
_LARGE_BYTES = 32 * 1024
# A connection may last so long and send so much: a transfer of some seconds on a fast network.
_MAX_S, _MAX_BYTES = 20.0, 1 << 40
_MAX_CONNECTIONS = 512
_BACKLOG = 128
_WAIT_S = 0.5
# So often must the kernel have repeated a packet before it counts as lost.
_MIN_REPEATED = 2
_UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL)
# Places in struct tcp_info (linux/tcp.h): packets that are not acknowledged, and the round trip in
# microseconds; before them, a byte: how often in a row the kernel had to repeat the oldest one.
# Only a network that carries no large packets does that again and again; one that loses packets at
# random lets some of them through.
_UNACKNOWLEDGED, _ROUND_TRIP, _REPEATED = 24, 68, 2
_TCP_INFO_BYTES = 104


class Target(NamedTuple):
    """One endpoint of another node."""

    node: int
    number: int
    endpoint: Endpoint


def greeting(key: bytes, sender: int, receiver: int) -> bytes:
    """Return the first line of a connection, which proves that it comes from a node of the job."""
    text = b"%s %d %d" % (_GREETING, sender, receiver)
    return b"%s %s\n" % (text, hmac.new(key, text, hashlib.sha256).hexdigest().encode("ascii"))


class Server:
    """Takes what other nodes send, and answers with its own number and how many bytes arrived.

    Args:
        key: Known to the nodes of the job only.
        listening: A socket that listens and does not block; this server closes it.
    """

    def __init__(self, key: bytes, node: int, listening: socket.socket) -> None:
        self._key = key
        self._node = node
        self._server = listening
        # For all other nodes at once: what does not fit here looks like a lost packet.
        self._server.listen(_BACKLOG)
        self.port = int(self._server.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._connections: dict[socket.socket, _Connection] = {}
        self._is_closed = threading.Event()
        self._selector.register(self._server, selectors.EVENT_READ)
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Stop listening, and have the thread end all connections."""
        self._is_closed.set()
        with contextlib.suppress(OSError):
            # No more connections from now on, and the thread wakes up.
            self._server.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        while not self._is_closed.is_set():
            for item, _ in self._selector.select(_WAIT_S):
                if item.fileobj is self._server:
                    self._accept()
                else:
                    self._read(item.fileobj)  # type: ignore[arg-type]
            now_s = time.monotonic()
            for each in [each for each in self._connections.values() if each.until_s < now_s]:
                self._end(each.socket)
        for connection in list(self._connections):
            self._end(connection)
        self._selector.close()
        self._server.close()

    def _accept(self) -> None:
        try:
            accepted, _ = self._server.accept()
        except OSError:
            return
        if len(self._connections) >= _MAX_CONNECTIONS:
            accepted.close()
            return
        accepted.setblocking(False)
        self._connections[accepted] = _Connection(accepted, time.monotonic() + _MAX_S)
        self._selector.register(accepted, selectors.EVENT_READ)

    def _read(self, source: socket.socket) -> None:
        connection = self._connections[source]
        try:
            data = source.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self._end(source)
            return
        if data and connection.take(data, self._key):
            return
        if connection.is_greeted:
            with contextlib.suppress(OSError):
                source.send(b"%d %d\n" % (self._node, connection.received_bytes))
        self._end(source)

    def _end(self, connection: socket.socket) -> None:
        self._connections.pop(connection, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        connection.close()


class _Connection:
    """A connection of another node, or of a stranger until it has proved that it is none."""

    def __init__(self, accepted: socket.socket, until_s: float) -> None:
        self.socket = accepted
        self.until_s = until_s
        self.received_bytes = 0
        self.is_greeted = False
        self._start = b""

    def take(self, data: bytes, key: bytes) -> bool:
        """Count ``data``; return whether the connection may continue."""
        self.received_bytes += len(data)
        if self.is_greeted:
            return self.received_bytes < _MAX_BYTES
        self._start += data[:_MAX_GREETING_BYTES]
        line, newline, _ = self._start.partition(b"\n")
        if not newline:
            return len(self._start) < _MAX_GREETING_BYTES
        fields = line.split(b" ")
        is_numbered = len(fields) == 4 and fields[1].isdigit() and fields[2].isdigit()
        expected = greeting(key, int(fields[1][:9]), int(fields[2][:9])) if is_numbered else b""
        self.is_greeted = hmac.compare_digest(line + b"\n", expected)
        return self.is_greeted


# -- attempts to reach other nodes ----------------------------------------------------------------


def reach(
    targets: Sequence[Target], key: bytes, node: int, addresses: Sequence[str], limit_s: float
) -> list[Link]:
    """Try all targets at once, with a large message to each; return what came of it.

    Args:
        addresses: The addresses of this node.
        limit_s: Seconds after which what has not answered counts as silent.
    """
    with selectors.DefaultSelector() as selector:
        attempts = [_Attempt(target, key, node, addresses, selector) for target in targets]
        deadline_s = time.monotonic() + limit_s
        has_time = True
        while has_time and any(attempt.result is None for attempt in attempts):
            left_s = deadline_s - time.monotonic()
            # A last look without waiting: this thread may not have run for a while.
            has_time = left_s > 0
            for item, _ in selector.select(max(0.0, left_s)):
                item.data.go_on()
        return [attempt.end() for attempt in attempts]


class _Attempt:
    """One attempt to reach a target."""

    def __init__(
        self,
        target: Target,
        key: bytes,
        node: int,
        addresses: Sequence[str],
        selector: selectors.BaseSelector,
    ) -> None:
        self.result: Link | None = None
        self._target = target
        self._is_own_address = target.endpoint.address in addresses
        self._selector = selector
        self._is_connected = False
        self._round_trip_us = 0
        self._answer = b""
        line = greeting(key, node, target.node)
        self._left = line + bytes(_LARGE_BYTES - len(line))
        address = target.endpoint.address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket: socket.socket | None = None
        try:
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            number = self._socket.connect_ex((address, target.endpoint.port))
        except (OSError, OverflowError) as error:
            number = getattr(error, "errno", None) or errno.EADDRNOTAVAIL
        if number in (0, errno.EINPROGRESS) and self._socket is not None:
            events = selectors.EVENT_READ | selectors.EVENT_WRITE
            selector.register(self._socket, events, self)
        else:
            self._failed(number)

    def go_on(self) -> None:
        """Continue after an event of the socket."""
        if self._socket is None or self.result is not None:
            return
        number = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self._failed(number)
            return
        if not self._is_connected:
            self._is_connected = True
            self._round_trip_us = _tcp_info(self._socket, _ROUND_TRIP, "=I")
        try:
            self._send()
            self._receive()
        except BlockingIOError:
            pass
        except OSError as error:
            self._failed(error.errno or errno.EIO)

    def end(self) -> Link:
        """Return what came of the attempt, which is over now."""
        if self.result is None:
            self._settle(self._unanswered())
        assert self.result is not None
        return self.result

    def _send(self) -> None:
        assert self._socket is not None
        if not self._left:
            return
        self._left = self._left[self._socket.send(self._left) :]
        if not self._left:
            self._socket.shutdown(socket.SHUT_WR)
            self._selector.modify(self._socket, selectors.EVENT_READ, self)

    def _receive(self) -> None:
        assert self._socket is not None
        data = self._socket.recv(_MAX_ANSWER_BYTES)
        self._answer += data
        if b"\n" in self._answer or len(self._answer) >= _MAX_ANSWER_BYTES or not data:
            number = self._answer.split(b" ")[0]
            if not number:
                # Its entry may be ending, or have too many connections.
                self._settle(Reach.SLOW)
                return
            is_right = number == b"%d" % self._target.node
            self._settle(Reach.WORKS if is_right else Reach.ITSELF)

    def _unanswered(self) -> Reach:
        if not self._is_connected or self._socket is None:
            return Reach.ITSELF if self._is_own_address else Reach.SILENT
        is_waiting = bool(_tcp_info(self._socket, _UNACKNOWLEDGED, "=I"))
        was_repeated = _tcp_info(self._socket, _REPEATED, "=B") >= _MIN_REPEATED
        return Reach.LARGE_LOST if is_waiting and was_repeated else Reach.SLOW

    def _failed(self, number: int) -> None:
        if self._is_connected:
            # It was there, and has ended the connection: its entry may be ending.
            self._settle(Reach.SLOW)
        elif self._is_own_address:
            self._settle(Reach.ITSELF)
        elif number == errno.ECONNREFUSED:
            self._settle(Reach.REFUSED)
        else:
            self._settle(Reach.NO_ROUTE if number in _UNREACHABLE else Reach.SILENT)

    def _settle(self, result: Reach) -> None:
        target = self._target
        self.result = Link(target.node, target.number, result, self._round_trip_us)
        if self._socket is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._socket)
            self._socket.close()


def _tcp_info(connection: socket.socket, at: int, kind: str) -> int:
    """Return a number of the kernel's about a connection; 0 if it has none."""
    try:
        data = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return 0
    is_long = len(data) >= at + struct.calcsize(kind)
    return int(struct.unpack_from(kind, data, at)[0]) if is_long else 0


def transfer(target: Target, key: bytes, node: int, seconds: float) -> float:
    """Send to a target for some seconds, and return how fast it arrived, in MB/s; 0 if not."""
    chunk = os.urandom(_CHUNK_BYTES)
    endpoint = target.endpoint
    try:
        with socket.create_connection((endpoint.address, endpoint.port), seconds) as connection:
            connection.settimeout(2 * seconds)
            connection.sendall(greeting(key, node, target.node))
            started_s = time.monotonic()
            while time.monotonic() - started_s < seconds:
                connection.sendall(chunk)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(_MAX_ANSWER_BYTES).split()
            took_s = time.monotonic() - started_s
    except OSError:
        return 0.0
    is_complete = len(answer) == 2 and answer[0] == b"%d" % target.node and answer[1].isdigit()
    return int(answer[1]) / took_s / 1e6 if is_complete else 0.0
