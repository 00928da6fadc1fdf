"""One connection to a service, and the HTTP/1.1 that passes over it.

``http.client`` makes it: TLS, and the tunnel through a proxy. What passes is written and read here:
the head of an answer alone costs a module made for mail a quarter of all that a small object does.
"""

from __future__ import annotations

import math
import re
import socket
import ssl
import struct
from collections.abc import Callable
from http.client import BadStatusLine, HTTPConnection, LineTooLong, RemoteDisconnected
from typing import NamedTuple

from cloudjob.store.s3.refusals import Damaged
from cloudjob.waits import FIRST_S

# So long may nothing come before a word about it.
QUIET_S = FIRST_S
_ROOM_BYTES = 64 * 1024
# With so much to come it is worth waiting for all that there is room for: fewer calls, each of
# which lets go of Python's lock and has to get it back.
_MANY_BYTES = 64 * 1024
_END_OF_HEAD = re.compile(rb"\r?\n\r?\n")
_STATUS = re.compile(r"HTTP/1\.([01]) +([1-5][0-9]{2})(?: |\r?$)")
_LENGTH = re.compile(rb"\ncontent-length:[ \t]*([0-9]+)[ \t]*\r?\n", re.IGNORECASE)
# What has no body, whatever its head says.
_BODILESS = (204, 304)


class Head(NamedTuple):
    """How an answer begins.

    Args:
        headers: By their names in small letters; of one that comes twice, the last.
        size_bytes: How long the body is; None when only its end will tell.
    """

    status: int
    headers: dict[str, str]
    size_bytes: int | None


class Connection:
    """A connection that was made; one thread at a time uses it.

    Args:
        made: What made it.
        stall_s: How long nothing may come or go.

    Attributes:
        on_quiet: Called every few seconds in which nothing comes that is waited for.
    """

    def __init__(self, made: HTTPConnection, stall_s: float) -> None:
        self._made = made
        self._socket: socket.socket = made.sock
        self._is_tls = isinstance(self._socket, ssl.SSLSocket)
        self._room = memoryview(bytearray(_ROOM_BYTES))
        self._begin = self._end = 0
        self._rest: int | None = 0
        self._is_chunked = False
        self._is_kept = True
        self.on_quiet: Callable[[], None] = _nothing
        self.limit(stall_s)

    @property
    def is_reusable(self) -> bool:
        """Whether another request may follow: all of the answer was read, and more is welcome."""
        return self._is_kept and self._rest == 0 and self._begin == self._end

    def limit(self, stall_s: float) -> None:
        """Say how long nothing may come or go.

        The system keeps the time where it can: Python would ask before each call whether it will
        wait, and let go of its lock twice. TLS needs Python for it.
        """
        self._stall_s = stall_s
        self._tries = max(1, math.ceil(stall_s / QUIET_S))
        self._wait_s = stall_s / self._tries
        if self._is_tls:
            self._socket.settimeout(self._wait_s)
            return
        self._socket.settimeout(None)
        options = {socket.SO_RCVTIMEO: self._wait_s, socket.SO_SNDTIMEO: stall_s}
        for option, limit_s in options.items():
            limit = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, option, limit)

    def send(self, data: bytes | memoryview) -> None:
        """Send all of ``data``."""
        if self._is_tls:
            self._socket.settimeout(self._stall_s)
        try:
            self._socket.sendall(data)
        except BlockingIOError as error:
            raise TimeoutError from error
        finally:
            if self._is_tls:
                self._socket.settimeout(self._wait_s)

    def fileno(self) -> int:
        """Return the descriptor that can be read from when something has come."""
        return self._socket.fileno()

    def has_answer(self) -> bool:
        """Take what has come, without waiting for more, and say whether it is worth reading.

        It is when all of an answer is there, or when that cannot be known: it has ended, it does
        not say how long it is, or there is no room for all of it.
        """
        if self._begin == self._end:
            self._begin = self._end = 0
        is_over = self._arrived()
        came = self._room[self._begin : self._end]
        head = _END_OF_HEAD.search(came)
        if is_over or self._end == _ROOM_BYTES or head is None:
            return is_over or self._end == _ROOM_BYTES
        length = _LENGTH.search(came[: head.end()])
        return length is None or head.end() + int(length[1]) <= len(came)

    def head(self, method: str) -> Head:
        """Return how the next answer begins; what comes before it is passed over."""
        while True:
            status, headers, is_old = self._next_head()
            if status >= 200:
                break
        encoding = headers.get("transfer-encoding", "").lower()
        said = headers.get("content-length", "")
        word = headers.get("connection", "").lower()
        self._is_kept = word == "keep-alive" if is_old else word != "close"
        self._is_chunked = encoding == "chunked"
        if method == "HEAD" or status in _BODILESS:
            self._rest, self._is_chunked = 0, False
        elif self._is_chunked:
            self._rest = self._chunk()
            return Head(status, headers, None)
        elif said.isascii() and said.isdecimal():
            self._rest = int(said)
        else:
            self._rest, self._is_kept = None, False
        return Head(status, headers, self._rest)

    def read(self, room: memoryview) -> int:
        """Read the next bytes of the body into ``room``; none at its end.

        Raises:
            Damaged: It ends before its time.
        """
        if self._rest == 0:
            return 0
        if self._rest is not None:
            room = room[: self._rest]
        count = self._taken(room)
        if not count and self._rest is not None:
            raise Damaged(f"the answer ends {self._rest} bytes before its time")
        if self._rest is not None:
            self._rest -= count
            if self._is_chunked and not self._rest:
                self._line()
                self._rest = self._chunk()
        return count

    def interrupt(self) -> None:
        """End whatever another thread waits for here."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of it."""
        self._made.close()

    # -- inside -------------------------------------------------------------------------------

    def _arrived(self) -> bool:
        """Take what is there, and say whether nothing will follow."""
        if self._is_tls:
            self._socket.settimeout(0)
        try:
            room = self._room[self._end :]
            count = self._socket.recv_into(room, 0, 0 if self._is_tls else socket.MSG_DONTWAIT)
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        finally:
            if self._is_tls:
                self._socket.settimeout(self._wait_s)
        self._end += count
        return not count

    def _next_head(self) -> tuple[int, dict[str, str], bool]:
        while not (found := _END_OF_HEAD.search(self._room[self._begin : self._end])):
            self._more("head")
        text = str(self._room[self._begin : self._begin + found.start()], "latin-1")
        self._begin += found.end()
        first, *lines = text.split("\n")
        status = _STATUS.match(first)
        if status is None:
            raise BadStatusLine(first)
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        return int(status[2]), headers, status[1] == "0"

    def _chunk(self) -> int:
        """Return how long the next chunk of a body is; after the last, pass over what follows."""
        line = self._line().partition(b";")[0].strip()
        try:
            size_bytes = int(line, 16)
        except ValueError as error:
            raise Damaged("the answer comes in chunks that nobody can read") from error
        while not size_bytes and self._line():
            pass
        return size_bytes

    def _line(self) -> bytes:
        while (end := self._room[self._begin : self._end].tobytes().find(b"\n")) < 0:
            self._more("line")
        line = bytes(self._room[self._begin : self._begin + end])
        self._begin += end + 1
        return line.rstrip(b"\r")

    def _more(self, what: str) -> None:
        """Have more bytes at hand."""
        if self._begin:
            count = self._end - self._begin
            self._room[:count] = bytes(self._room[self._begin : self._end])
            self._begin, self._end = 0, count
        if self._end == _ROOM_BYTES:
            raise LineTooLong(what)
        count = self._received(self._room[self._end :])
        if not count and not self._end and what == "head":
            raise RemoteDisconnected("no answer")
        if not count:
            raise Damaged(f"the answer ends within its {what}")
        self._end += count
        # Whoever does not speak HTTP may never end its first line.
        if what == "head" and not b"HTTP/".startswith(bytes(self._room[: min(5, self._end)])):
            raise BadStatusLine(bytes(self._room[: min(80, self._end)]).decode("latin-1"))

    def _taken(self, room: memoryview) -> int:
        """Put bytes into ``room``: first what came along with the head."""
        if self._begin < self._end:
            count = min(len(room), self._end - self._begin)
            room[:count] = self._room[self._begin : self._begin + count]
            self._begin += count
            return count
        is_many = not self._is_tls and self._rest is not None and len(room) >= _MANY_BYTES
        return self._received(room, socket.MSG_WAITALL if is_many else 0)

    def _received(self, room: memoryview, flags: int = 0) -> int:
        left = self._tries
        while True:
            try:
                return self._socket.recv_into(room, 0, flags)
            except (BlockingIOError, TimeoutError) as error:
                left -= 1
                if not left:
                    raise TimeoutError from error
            self.on_quiet()


def _nothing() -> None:
    """Tell nobody."""
