"""The line between the head and a worker without ssh, where the launcher starts nothing over one.

A TCP connection for each worker, on the port that an sshd would have. Both sides show that they
have the key of the job, and every message is signed with it, so that none can be made up, changed,
repeated or left out on the way; nothing is hidden, as nothing on this line is a secret. (ADR 31)

A thread stands where ssh and ``cat`` stand else: between the connection and the two pipes that the
entry speaks and listens to. So a node is heard of also while its entry does something that takes
long, and one that is frozen is not, as with ssh.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import selectors
import socket
import subprocess
import threading
import time
from typing import Callable

from jobentry.contract.paths import NodePaths

_GREETING = b"cloudjob-line 1 "
_REFUSED = b"refused"
_NONCE_BYTES = 16
_MAC_LETTERS = 32
# What is longer than this before anybody has shown his key is a stranger's.
_MOST_GREETING_BYTES = 256
_PATIENCE_S = 5.0
# So often each side is heard of, and after so many times of silence it is gone; as ssh has it.
_BEAT_S = 2.0
_MOST_SILENT = 4
# How long the last words may take to be taken.
_LAST_S = 3.0
_STRANGERS = 32
_MOST_BYTES = 1 << 24


class WireError(Exception):
    """The other side is not who it should be, or is gone."""


def secret(key: bytes) -> bytes:
    """Return what is signed with, made of the private key of the job."""
    return hashlib.sha256(b"cloudjob line\0" + key.strip()).digest()


class Channel:
    """Signs what one side says, and checks what the other does.

    Args:
        says: What the key of the one direction is made for, and ``hears`` that of the other.
    """

    def __init__(self, key: bytes, says: str, hears: str, nonces: str) -> None:
        self._says, self._hears = (_sign(key, f"to {side}", nonces) for side in (says, hears))
        self._said = self._heard = 0

    def seal(self, line: bytes) -> bytes:
        """Return ``line``, which has no newline in it, as it goes over the connection."""
        mac = _mac(self._says, self._said, line)
        self._said += 1
        return mac + line + b"\n"

    def open(self, line: bytes) -> bytes:
        """Return what the other side has said.

        Raises:
            WireError: It has not said that, or not now.
        """
        mac, said = line[:_MAC_LETTERS], line[_MAC_LETTERS:]
        if not hmac.compare_digest(mac, _mac(self._hears, self._heard, said)):
            raise WireError("a message is not of who it should be")
        self._heard += 1
        return said


def _mac(key: bytes, count: int, line: bytes) -> bytes:
    found = hmac.new(key, b"%d %s" % (count, line), hashlib.sha256).hexdigest()
    return found[:_MAC_LETTERS].encode("ascii")


def _sign(key: bytes, *words: str) -> bytes:
    return hmac.new(key, "\0".join(words).encode("utf-8"), hashlib.sha256).digest()


def greet(connection: socket.socket, key: bytes, node: int) -> Channel:
    """Be the head on a connection to the worker ``node``.

    Raises:
        WireError: What answers has another key, is another node, or no entry at all.
        OSError: It does not answer.
    """
    greeting = _line(connection)
    if not greeting.startswith(_GREETING):
        raise WireError("what listens there is not the entry of a node")
    nonces = greeting[len(_GREETING) :].decode("ascii", "replace")
    nonces += os.urandom(_NONCE_BYTES).hex()
    mine = nonces[-2 * _NONCE_BYTES :].encode("ascii")
    proof = _sign(key, "head", str(node), nonces).hex().encode("ascii")
    connection.sendall(mine + b" " + proof + b"\n")
    proof = _sign(key, "worker", str(node), nonces).hex().encode("ascii")
    if not hmac.compare_digest(_line(connection), proof):
        raise WireError(f"it has another key than the head, or is not node {node}")
    return Channel(key, "worker", "head", nonces)


def answer(connection: socket.socket, key: bytes, node: int) -> Channel:
    """Be the worker ``node`` on a connection that somebody has opened.

    Raises:
        WireError: It is not our head.
        OSError: It does not answer.
    """
    nonces = os.urandom(_NONCE_BYTES).hex()
    connection.sendall(_GREETING + nonces.encode("ascii") + b"\n")
    theirs, _, shown = _line(connection).partition(b" ")
    nonces += theirs.decode("ascii", "replace")
    proof = _sign(key, "head", str(node), nonces).hex().encode("ascii")
    if len(theirs) != 2 * _NONCE_BYTES or not hmac.compare_digest(shown, proof):
        connection.sendall(_REFUSED + b"\n")
        raise WireError("it is not our head")
    proof = _sign(key, "worker", str(node), nonces).hex().encode("ascii")
    connection.sendall(proof + b"\n")
    return Channel(key, "head", "worker", nonces)


def _line(connection: socket.socket) -> bytes:
    """Return the next line, byte by byte: what follows it is another's."""
    line = b""
    due_s = time.monotonic() + _PATIENCE_S
    while not line.endswith(b"\n"):
        # As a whole: a stranger may send a letter now and then.
        connection.settimeout(max(0.001, due_s - time.monotonic()))
        piece = connection.recv(1)
        if not piece or len(line) > _MOST_GREETING_BYTES:
            raise WireError("it hung up")
        line += piece
    return line[:-1]


class _Link:
    """One connection, and the pipes of the entry that it is joined to."""

    def __init__(
        self,
        connection: socket.socket,
        channel: Channel,
        pipes: tuple[int, int],
        ended: Callable[[], None],
    ) -> None:
        self.connection = connection
        self.channel = channel
        # What the entry says, and where it listens; -1 when that has been closed.
        self.says, self.listens = pipes
        self.ended = ended
        self.heard = b""
        self.said = b""
        # What there was no room for yet.
        self.outgoing = b""
        self.incoming = b""
        self.is_full = False
        self.has_hung_up = False
        self.silent = 0
        self.has_heard = False


class _Exchange:
    """Carries what is said between connections and pipes, in a thread of its own."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = os.pipe()
        self._selector.register(self._wake, selectors.EVENT_READ, self._woken)
        self._lock = threading.Lock()
        self._todo: list[Callable[[], None]] = []
        self._links: list[_Link] = []
        self._is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, link: _Link) -> None:
        """Begin to carry what is said on ``link``."""
        self._do(lambda: self._begin(link))

    def drop(self, link: _Link) -> None:
        """Let go of ``link`` at once."""
        self._do(lambda: self._end(link))

    def close(self) -> None:
        """Say what is still to be said, and let go of everything."""
        self._do(self._finish)
        self._thread.join(2 * _LAST_S)

    def _do(self, action: Callable[[], None]) -> None:
        with self._lock:
            self._todo.append(action)
        os.write(self._waker, b".")

    def _woken(self) -> None:
        os.read(self._wake, 4096)
        with self._lock:
            todo, self._todo = self._todo, []
        for action in todo:
            action()

    def _run(self) -> None:
        due_s = time.monotonic() + _BEAT_S
        try:
            while not self._is_over:
                for key, _ in self._selector.select(max(0.0, due_s - time.monotonic())):
                    key.data()
                if time.monotonic() >= due_s:
                    due_s = time.monotonic() + _BEAT_S
                    for link in list(self._links):
                        self._beat(link)
        finally:
            # Whatever has gone wrong here, nobody waits for a line that is not carried.
            for link in list(self._links):
                self._end(link)

    def _begin(self, link: _Link) -> None:
        link.connection.setblocking(False)
        link.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._links.append(link)
        self._selector.register(link.connection, selectors.EVENT_READ, lambda: self._hear(link))
        self._selector.register(link.says, selectors.EVENT_READ, lambda: self._say(link))

    def _beat(self, link: _Link) -> None:
        """Let the other side know that we are there; note that it says nothing."""
        link.silent += 1
        # An own turn of silence counts, and not time: of a machine that was asleep little is known.
        if link.silent > _MOST_SILENT:
            self._end(link)
        elif link.says >= 0:
            self._send(link, b"")

    def _say(self, link: _Link) -> None:
        """Pass on what our entry says."""
        if link not in self._links or link.says < 0:
            return
        try:
            data = os.read(link.says, 65536)
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(link.says)
            os.close(link.says)
            link.says = -1
            self._flush(link)
            return
        *lines, link.said = (link.said + data).split(b"\n")
        for line in lines:
            self._send(link, line)

    def _send(self, link: _Link, line: bytes) -> None:
        link.outgoing += link.channel.seal(line)
        self._flush(link)

    def _hear(self, link: _Link) -> None:
        """Pass on what the other side says."""
        self._flush(link)
        if link not in self._links:
            return
        try:
            data = link.connection.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            *lines, link.heard = (link.heard + data).split(b"\n")
            said = b"".join(line + b"\n" for line in map(link.channel.open, lines) if line)
        except WireError:
            said = data = b""
        link.silent = 0
        link.has_heard = link.has_heard or bool(said)
        link.incoming += said
        self._flush(link)
        if not data or len(link.heard) > _MOST_BYTES:
            self._end(link)

    def _flush(self, link: _Link) -> None:
        """Write what there is room for; the loop comes back when there is more."""
        if link not in self._links:
            return
        try:
            link.outgoing = _rest(link.connection.fileno(), link.outgoing)
            link.incoming = _rest(link.listens, link.incoming)
            if link.says < 0 and not link.outgoing and not link.has_hung_up:
                # Our entry says no more; the other side may still say something.
                link.has_hung_up = True
                link.connection.shutdown(socket.SHUT_WR)
        except OSError:
            self._end(link)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.outgoing else 0)
        key = self._selector.get_key(link.connection)
        if key.events != wanted:
            self._selector.modify(link.connection, wanted, key.data)
        if link.is_full != bool(link.incoming):
            link.is_full = bool(link.incoming)
            if link.is_full:
                write = selectors.EVENT_WRITE
                self._selector.register(link.listens, write, lambda: self._flush(link))
            else:
                self._selector.unregister(link.listens)

    def _finish(self) -> None:
        for link in list(self._links):
            self._say(link)
            # A connection that is closed with something unread takes back what was said last.
            with contextlib.suppress(OSError):
                link.connection.settimeout(_LAST_S)
                link.connection.sendall(link.outgoing)
                link.connection.shutdown(socket.SHUT_WR)
                while link.connection.recv(65536):
                    pass
            self._end(link)
        self._is_over = True

    def _end(self, link: _Link) -> None:
        if link not in self._links:
            return
        self._links.remove(link)
        self._selector.unregister(link.connection)
        link.connection.close()
        if link.says >= 0:
            self._selector.unregister(link.says)
            os.close(link.says)
        if link.is_full:
            self._selector.unregister(link.listens)
        if link.incoming:
            last = (link.listens, link.incoming)
            threading.Thread(target=_write, args=last, daemon=True).start()
        else:
            os.close(link.listens)
        link.says = link.listens = -1
        link.ended()


def _rest(descriptor: int, data: bytes) -> bytes:
    """Write what there is room for, and return what there is none for."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            break
    return data


def _write(descriptor: int, data: bytes) -> None:
    """Write the last of what was heard to an entry that has something else to do."""
    os.set_blocking(descriptor, True)
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]
    os.close(descriptor)


class Session:
    """The head's end of a line, in the place of a remote shell."""

    pid = 0

    def __init__(self, exchange: _Exchange, connection: socket.socket, channel: Channel) -> None:
        says, mine = os.pipe()
        listens, theirs = os.pipe()
        self.stdin = os.fdopen(mine, "wb", buffering=0)
        self.stdout = os.fdopen(listens, "rb", buffering=0)
        self._has_ended = threading.Event()
        self._exchange = exchange
        self._link = _Link(connection, channel, (says, theirs), self._has_ended.set)
        for descriptor in (says, theirs):
            os.set_blocking(descriptor, False)
        exchange.add(self._link)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the connection has ended.

        Raises:
            subprocess.TimeoutExpired: It has not, in this time.
        """
        if not self._has_ended.wait(timeout):
            raise subprocess.TimeoutExpired("line", timeout or 0.0)
        return 0

    def kill(self) -> None:
        """End the connection at once."""
        self._exchange.drop(self._link)


class Wires:
    """The head's end of all lines."""

    def __init__(self, key: bytes) -> None:
        self._key = secret(key)
        self._exchange = _Exchange()
        self._met: dict[int, tuple[socket.socket, Channel]] = {}

    def meet(self, connection: socket.socket, node: int) -> None:
        """Greet the worker ``node``, and keep the connection until it is wanted.

        Raises:
            WireError, OSError: As ``greet`` says.
        """
        channel = greet(connection, self._key, node)
        kept = connection.dup()
        kept.settimeout(None)
        self._met[node] = (kept, channel)

    def open(self, node: int) -> Session:
        """Return the line to a worker that was met."""
        connection, channel = self._met.pop(node)
        return Session(self._exchange, connection, channel)

    def close(self) -> None:
        """Let go of all lines."""
        self._exchange.close()
        for connection, _ in self._met.values():
            connection.close()


def meeting(wires: Wires, node: int) -> Callable[[socket.socket], tuple[str, str]]:
    """Return what meets the worker ``node``; it says what is in the way and what to do."""

    def meet(connection: socket.socket) -> tuple[str, str]:
        try:
            wires.meet(connection, node)
        except socket.timeout:
            return "its entry accepts and then says nothing", _SILENT
        except (WireError, OSError) as error:
            return str(error), _OTHER
        return "", ""

    return meet


_SILENT = "it hangs: is its memory or its disk full? start that node again"
_OTHER = (
    "every node of a job must be given the same key (CLOUDJOB_SSH_KEY), and its port be free"
    " (SSHD_PORT)"
)


class Listener:
    """The worker's end of the line, which waits for the head on a port.

    Raises:
        OSError: The port is taken.
    """

    def __init__(self, key: bytes, node: int, port: int, where: NodePaths) -> None:
        self._key = secret(key)
        self._node = node
        self._where = where
        self._exchange = _Exchange()
        self._link: _Link | None = None
        self._lock = threading.Lock()
        self._strangers = threading.BoundedSemaphore(_STRANGERS)
        self._server = _server(port)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Say what is still to be said to the head, and hang up."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._exchange.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            if self._strangers.acquire(blocking=False):
                threading.Thread(target=self._meet, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _meet(self, connection: socket.socket) -> None:
        try:
            self._take(connection, answer(connection, self._key, self._node))
        except (WireError, OSError):
            connection.close()
        finally:
            self._strangers.release()

    def _take(self, connection: socket.socket, channel: Channel) -> None:
        """Join the line to the pipes of this node's entry."""
        with self._lock:
            if self._link is not None:
                if self._link.has_heard:
                    raise WireError("the head is there already")
                self._exchange.drop(self._link)
            says = os.open(self._where.to_head, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            # Not for writing alone: that would fail while nobody listens.
            flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
            listens = os.open(self._where.from_head, flags)
            link = self._link = _Link(connection, channel, (says, listens), lambda: None)
            link.ended = lambda: self._forget(link)
            self._exchange.add(link)

    def _forget(self, link: _Link) -> None:
        with self._lock:
            if self._link is link:
                self._link = None


def _server(port: int) -> socket.socket:
    """Return a socket that listens on a port of every address of this node."""
    family = socket.AF_INET6 if _has_ipv6() else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind(("", port))
        server.listen(_STRANGERS)
    except OSError:
        server.close()
        raise
    return server


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            tried.bind(("", 0))
            return True
    except OSError:
        return False
