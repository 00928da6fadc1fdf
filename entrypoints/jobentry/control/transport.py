"""The control connection of head and worker: signed, numbered, resumed when it breaks.

A worker listens, the head connects. Both prove that they have the job's key, and every line is
signed with a key of its connection and direction, so nothing can be forged, changed, repeated or
dropped on the way. Nothing is encrypted: no secret crosses this connection. (ADR 34) A message is a
kind and values, as one line of JSON.

A TCP connection may break, or fall silent, while both nodes are alive. A ``Link`` survives that:
messages are numbered and kept until the other side has acknowledged them, and the next connection
resends those that were lost. All of it runs in the node's event loop.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import selectors
import socket
from collections import deque
from enum import Enum
from typing import Any, Callable, NamedTuple

# A node that sends nothing for this long is reported, and the head tries to reconnect to it.
SILENT_S = 15.0
# Each side sends something at least this often.
_BEAT_S = 5.0


class Break(Enum):
    """How a stream has ended."""

    # The other kernel closed it because the process there has ended.
    CLOSED = "closed"
    # The other kernel does not have it any more: it resets one whose process has ended without
    # having read everything. A firewall on the way may do the same.
    RESET = "reset"
    # The network broke, or what came is no message of the job.
    OTHER = "other"


_NONCE_BYTES = 16
_MAC_LETTERS = 32
# Bytes in a line, and in one that a peer may send before the handshake is done.
_MAX_LINE_BYTES = 1 << 24
_MAX_GREETING_BYTES = 256


class Message(NamedTuple):
    """A message: its kind and its values."""

    kind: str
    values: dict[str, Any]


def dump(kind: str, **values: Any) -> bytes:
    """Return the line of a message, with its newline."""
    return json.dumps({"word": kind, **values}).encode("ascii") + b"\n"


def load(line: bytes) -> Message:
    """Return the message of a line."""
    values = json.loads(line.decode("ascii"))
    return Message(values.pop("word"), values)


class ControlError(Exception):
    """Data on a connection is not from a node of this job, or is malformed."""


def secret(key: bytes) -> bytes:
    """Return the signing key, derived from the private key of the job."""
    return hashlib.sha256(b"cloudjob control\0" + key.strip()).digest()


def nonce() -> str:
    """Return a random number, in hex."""
    return os.urandom(_NONCE_BYTES).hex()


def proof(key: bytes, side: str, node: int, transcript: str) -> str:
    """Return the HMAC of a handshake in hex, which only a holder of ``key`` can compute."""
    return _derived(key, side, str(node), transcript).hex()


def is_proof(text: str, key: bytes, side: str, node: int, transcript: str) -> bool:
    """Whether the other side has sent the right proof, compared in constant time."""
    expected = proof(key, side, node, transcript)
    return hmac.compare_digest(text.encode("ascii", "replace"), expected.encode("ascii"))


class Channel:
    """Signs the lines of one side, and checks those of the other.

    Args:
        me: The side that sends, ``head`` or ``worker``; ``other`` is the one that answers.
        transcript: The handshake of this connection.
    """

    def __init__(self, key: bytes, me: str, other: str, transcript: str) -> None:
        self._sending = _derived(key, f"from {me}", transcript)
        self._receiving = _derived(key, f"from {other}", transcript)
        self._sent = self._received = 0

    def seal(self, line: bytes) -> bytes:
        """Return ``line``, which contains no newline, with its signature."""
        mac = _mac(self._sending, self._sent, line)
        self._sent += 1
        return mac + line + b"\n"

    def open(self, line: bytes) -> bytes:
        """Return the line without its signature, which is verified.

        Raises:
            ControlError: The other side has not sealed this line, or not as its next one.
        """
        mac, text = line[:_MAC_LETTERS], line[_MAC_LETTERS:]
        if not hmac.compare_digest(mac, _mac(self._receiving, self._received, text)):
            raise ControlError("a line with a wrong signature")
        self._received += 1
        return text


def _mac(key: bytes, count: int, line: bytes) -> bytes:
    digest = hmac.new(key, b"%d %s" % (count, line), hashlib.sha256).hexdigest()
    return digest[:_MAC_LETTERS].encode("ascii")


def _derived(key: bytes, *parts: str) -> bytes:
    return hmac.new(key, "\0".join(parts).encode("utf-8"), hashlib.sha256).digest()


class Stream:
    """A connected socket in an event loop: reads lines and writes bytes without blocking.

    Its lines are short until ``hand_over``, as the other side has not proved its identity yet.

    Args:
        on_line: Called with each line.
        on_end: Called once, with how the stream ended, unless ``close`` ended it.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        connection: socket.socket,
        on_line: Callable[[bytes], None],
        on_end: Callable[[Break], None],
    ) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector = selector
        self._socket: socket.socket | None = connection
        self._incoming = b""
        self._outgoing = b""
        self._max_line_bytes = _MAX_GREETING_BYTES
        self._on_line, self._on_end = on_line, on_end
        selector.register(connection, selectors.EVENT_READ, self._ready)

    def hand_over(self, on_line: Callable[[bytes], None], on_end: Callable[[Break], None]) -> None:
        """Pass what follows the handshake to these functions."""
        self._max_line_bytes = _MAX_LINE_BYTES
        self._on_line, self._on_end = on_line, on_end

    def send(self, data: bytes) -> None:
        """Send ``data``, or queue it if the socket's buffer is full."""
        self._outgoing += data
        self._flush()

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._selector.unregister(self._socket)
            self._socket.close()
            self._socket = None

    def _end(self, how: Break) -> None:
        if self._socket is not None:
            self.close()
            self._on_end(how)

    def _ready(self) -> None:
        self._flush()
        if self._socket is None:
            return
        try:
            data = self._socket.recv(65536)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(_break_of(error))
            return
        *lines, self._incoming = (self._incoming + data).split(b"\n")
        for line in lines:
            if self._socket is None:
                return
            self._on_line(line)
        if not data:
            self._end(Break.CLOSED)
        elif len(self._incoming) > self._max_line_bytes:
            # A line without an end.
            self._end(Break.OTHER)

    def _flush(self) -> None:
        if self._socket is None:
            return
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[self._socket.send(self._outgoing) :]
        except BlockingIOError:
            pass
        except OSError as error:
            self._end(_break_of(error))
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
        if self._selector.get_key(self._socket).events != events:
            self._selector.modify(self._socket, events, self._ready)


def _break_of(error: OSError) -> Break:
    is_reset = isinstance(error, (ConnectionResetError, BrokenPipeError))
    return Break.RESET if is_reset else Break.OTHER


class Link:
    """The messages to and from one node, across connections.

    Args:
        on_message: Called with each message, once and in order.
        on_break: Called with how the connection has ended; ``attach`` sets the next.
    """

    def __init__(
        self, on_message: Callable[[Message], None], on_break: Callable[[Break], None]
    ) -> None:
        self._on_message = on_message
        self._on_break = on_break
        self._stream: Stream | None = None
        self._channel: Channel | None = None
        # The numbers and lines of messages that are not acknowledged, whether sent or not.
        self._unacknowledged: deque[tuple[int, bytes]] = deque()
        self._last = 0
        self.received = 0
        self._quiet_s = 0.0
        self.silent_s = 0.0

    @property
    def is_attached(self) -> bool:
        """Whether there is a connection."""
        return self._stream is not None

    def send(self, kind: str, **values: object) -> None:
        """Send a message, now or with the next connection."""
        self._last += 1
        line = dump(kind, **values)[:-1]
        self._unacknowledged.append((self._last, line))
        self._send(self._last, line)

    def attach(self, stream: Stream, channel: Channel, acknowledged: int) -> None:
        """Continue with this connection, on which nothing was sent after its handshake.

        Args:
            acknowledged: How many of our messages the other side has received.
        """
        self.detach()
        self._stream, self._channel = stream, channel
        stream.hand_over(self._received, self._disconnected)
        self.silent_s = 0.0
        self._acknowledged(acknowledged)
        for number, line in list(self._unacknowledged):
            self._send(number, line)

    def detach(self) -> None:
        """Close the connection; messages wait for the next one."""
        if self._stream is not None:
            self._stream.close()
        self._stream = self._channel = None

    def tick(self, elapsed_s: float) -> None:
        """Check the time, and send a heartbeat if due. Called about once a second.

        The caller limits ``elapsed_s``: a suspended machine knows nothing about the other side.
        """
        self.silent_s += elapsed_s
        self._quiet_s += elapsed_s
        if self._quiet_s >= _BEAT_S:
            self.beat()

    def beat(self) -> None:
        """Send a line without a message, which acknowledges what was received."""
        self._send(0, b"")

    def _send(self, number: int, line: bytes) -> None:
        if self._stream is None or self._channel is None:
            return
        self._quiet_s = 0.0
        self._stream.send(self._channel.seal(b"%d %d %s" % (number, self.received, line)))

    def _received(self, line: bytes) -> None:
        assert self._channel is not None
        try:
            number, acknowledged, text = self._channel.open(line).split(b" ", 2)
            self._acknowledged(int(acknowledged))
            self.silent_s = 0.0
            if int(number) <= self.received:
                return
            if int(number) != self.received + 1:
                raise ControlError("a message is missing")
            message = load(text)
        except (ControlError, ValueError, KeyError):
            self.detach()
            self._on_break(Break.OTHER)
            return
        self.received += 1
        self._on_message(message)

    def _acknowledged(self, number: int) -> None:
        while self._unacknowledged and self._unacknowledged[0][0] <= number:
            self._unacknowledged.popleft()

    def _disconnected(self, how: Break) -> None:
        self._stream = self._channel = None
        self._on_break(how)
