"""One attempt of the head to reach a worker: address lookup, connection and handshake."""

from __future__ import annotations

import errno
import os
import queue
import selectors
import socket
import threading
from typing import Callable, NamedTuple

from jobentry.control import connection
from jobentry.control.connection import Channel, Stream
from jobentry.control.event_loop import NodeLoop
from jobentry.system.addresses import plain_name

GREETING = b"cloudjob-control 2 "
REFUSED = b"refused"
TAKEN = b"taken"
# Bytes that a peer may send before the handshake is done.
MAX_GREETING_BYTES = 256
# The timeout of the TCP connection, and of the handshake on it.
_CONNECT_S = 3.0
GREET_S = 5.0
# Threads look up names, as lookups block.
_THREADS = 64


class Attempt(NamedTuple):
    """The result of an attempt; ``problem`` is what prevents the connection, ``hint`` what to try.

    Args:
        is_dead: Whether it proves that the worker's entry no longer listens.
        has_control: Whether the handshake succeeded; None for not tried.
    """

    address: str = ""
    is_listening: bool = False
    problem: str = "not tried yet"
    hint: str = ""
    is_dead: bool = False
    has_control: bool | None = None


class Answer(NamedTuple):
    """The answer of a worker that has proved its identity.

    Args:
        entry: The random number of its process.
        received: The number of messages that it has received from this head.
    """

    address: str
    stream: Stream
    channel: Channel
    entry: str
    received: int


class HeadIdentity(NamedTuple):
    """The head, as its workers see it.

    Args:
        key: The signing key.
        session: The random number of its process.
    """

    key: bytes
    session: str


class Resolver:
    """Looks up names in threads, and passes the addresses to the node's loop."""

    def __init__(self, loop: NodeLoop) -> None:
        # Not a ThreadPoolExecutor: it takes milliseconds to import, and its threads outlive the job
        # when a name server is slow.
        self._threads = 0
        self._names: queue.SimpleQueue[tuple[str, int, Callable[[str], None]]] = queue.SimpleQueue()
        self._resolved: queue.SimpleQueue[tuple[str, Callable[[str], None]]] = queue.SimpleQueue()
        self._wake, self._waker = os.pipe()
        loop.selector.register(self._wake, selectors.EVENT_READ, self._pass_on)

    def resolve(self, host: str, port: int, on_address: Callable[[str], None]) -> None:
        """Call ``on_address`` from the loop with the address of a host; empty if it has none."""
        self._names.put((host, port, on_address))
        if self._threads < _THREADS:
            self._threads += 1
            threading.Thread(target=self._look_up, daemon=True).start()

    def _look_up(self) -> None:
        while True:
            host, port, on_address = self._names.get()
            self._resolved.put((_address(host, port), on_address))
            os.write(self._waker, b".")

    def _pass_on(self) -> None:
        for _ in os.read(self._wake, 4096):
            address, on_address = self._resolved.get()
            on_address(address)


def _address(host: str, port: int) -> str:
    try:
        addresses = socket.getaddrinfo(plain_name(host), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ""
    return str(addresses[0][4][0])


class Dial:
    """One attempt: connects to an address, and shakes hands.

    Args:
        received: The number of messages that the head has received from this worker.
        on_answer: Called when the worker has proved its identity.
        on_failure: Called when the attempt has failed.
    """

    def __init__(
        self,
        loop: NodeLoop,
        head: HeadIdentity,
        node: int,
        received: int,
        on_answer: Callable[[Answer], None],
        on_failure: Callable[[Attempt], None],
    ) -> None:
        self._loop = loop
        self._head = head
        self._node = node
        self._received = received
        self._on_answer = on_answer
        self._on_failure = on_failure
        self._address = ""
        self._port = 0
        self._socket: socket.socket | None = None
        self._stream: Stream | None = None
        self._transcript = ""
        self._entry = ""

    def start(self, address: str, port: int) -> None:
        """Connect."""
        self._address, self._port = address, port
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            number = self._socket.connect_ex((address, port))
        except OSError as error:
            self._unreachable(error.errno or 0)
            return
        if number not in (0, errno.EINPROGRESS):
            self._unreachable(number)
            return
        self._loop.selector.register(self._socket, selectors.EVENT_WRITE, self._connected)
        self._loop.schedule(self._timer, _CONNECT_S, lambda: self._unreachable(errno.ETIMEDOUT))

    def stop(self) -> None:
        """Abandon the attempt."""
        self._loop.cancel(self._timer)
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        elif self._socket is not None:
            if self._socket in self._loop.selector.get_map():
                self._loop.selector.unregister(self._socket)
            self._socket.close()
        self._socket = None

    @property
    def _timer(self) -> str:
        return "dial-%d" % self._node

    def _connected(self) -> None:
        if self._socket is None:
            return
        number = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self._unreachable(number)
            return
        self._loop.selector.unregister(self._socket)
        self._stream = Stream(self._loop.selector, self._socket)
        self._stream.max_line_bytes = MAX_GREETING_BYTES
        self._stream.on_line = self._greeting_received
        self._stream.on_end = lambda why: self._fail("it closed the connection", _OTHER, False)
        self._loop.schedule(self._timer, GREET_S, self._is_silent)

    def _greeting_received(self, line: bytes) -> None:
        """Answer the worker's greeting."""
        if not line.startswith(GREETING):
            self._fail("another program listens there, not the entry of a node", _FOREIGN, True)
            return
        fields = line[len(GREETING) :].decode("ascii", "replace").split()
        self._entry = fields[1] if len(fields) == 2 else ""
        own_part = "%s %s %d" % (connection.nonce(), self._head.session, self._received)
        self._transcript = " ".join((*fields, own_part))
        shown = connection.proof(self._head.key, "head", self._node, self._transcript)
        assert self._stream is not None
        self._stream.on_line = self._answer_received
        self._stream.send(("%s %s\n" % (own_part, shown)).encode("ascii"))

    def _answer_received(self, line: bytes) -> None:
        """Check the worker's answer."""
        assert self._stream is not None
        if line == TAKEN:
            self._fail("it serves another head already", _OTHER, True)
            return
        received, _, shown = line.decode("ascii", "replace").partition(" ")
        transcript = f"{self._transcript} {received}"
        expected = connection.proof(self._head.key, "worker", self._node, transcript)
        if not received.isdecimal() or not connection.is_proof(shown, expected):
            problem = "its key differs from the head's, or it is not node %d" % self._node
            self._fail(problem, _OTHER, True)
            return
        stream, self._stream, self._socket = self._stream, None, None
        self.stop()
        stream.max_line_bytes = connection.MAX_LINE_BYTES
        channel = Channel(self._head.key, "head", "worker", transcript)
        self._on_answer(Answer(self._address, stream, channel, self._entry, int(received)))

    def _is_silent(self) -> None:
        self._fail("its entry accepts the connection and then sends nothing", _SILENT, False)

    def _fail(self, problem: str, hint: str, is_dead: bool) -> None:
        self.stop()
        is_other = hint is _OTHER
        attempt = Attempt(self._address, True, problem, hint.format(self._port), is_dead)
        self._on_failure(attempt._replace(has_control=False if is_other else None))

    def _unreachable(self, number: int) -> None:
        self.stop()
        if number == errno.ETIMEDOUT:
            problem, hint = "no answer on port %d" % self._port, _NO_ANSWER
        else:
            problem = "port %d: %s" % (self._port, os.strerror(number).lower())
            hint = _NOT_LISTENING if number == errno.ECONNREFUSED else _NO_ANSWER
        is_dead = number == errno.ECONNREFUSED
        hint = hint.format(self._port)
        self._on_failure(Attempt(self._address, False, problem, hint, is_dead))


NO_NAME = Attempt(
    problem="its name does not resolve",
    hint="has it been started, and do the nodes share a network with names?",
)
NO_ADDRESS = Attempt(
    problem="its entry does not listen yet",
    hint="what does its own log say?",
)
_NO_ANSWER = "is it up, and can the nodes reach each other on port {}? (firewall, network policy)"
_NOT_LISTENING = "the node is up, but its entry does not listen: what does its own log say?"
_SILENT = "it hangs: is its memory or its disk full? restart that node"
_FOREIGN = "set SSHD_PORT to a port other than {} on all nodes"
_OTHER = "every node of a job needs the same key (CLOUDJOB_SSH_KEY) and a free port (SSHD_PORT)"
