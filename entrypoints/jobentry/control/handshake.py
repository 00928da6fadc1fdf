"""How a control connection begins: the head dials, the worker listens, and both shake hands.

The worker greets with its random numbers, the head answers with its own and a proof that it has the
job's key, and the worker replies with its proof. Each side also says how many messages of the other
it has received.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import selectors
import socket
import threading
from functools import partial
from typing import Callable, NamedTuple

from jobentry.control import transport
from jobentry.control.loop import NodeLoop
from jobentry.control.transport import Break, Channel, Link, Stream
from jobentry.system.addresses import is_link_local, is_own, plain_name

GREETING = b"cloudjob-control 2 "
_REFUSED = "refused"
_TAKEN = "taken"
# The timeout of the TCP connection, and of the handshake on it.
_CONNECT_S = 3.0
_GREET_S = 5.0
# How many connections may be in the handshake at once.
_MAX_HANDSHAKES = 32
# Threads look up names, as lookups block.
_THREADS = 64


class Attempt(NamedTuple):
    """The result of an attempt; ``problem`` is what prevents the connection, ``hint`` what to try.

    Args:
        is_dead: Whether it proves that the worker's entry no longer listens.
        has_control: Whether the handshake succeeded; None for not tried.
        is_misnamed: Whether its name has an address that cannot be that of another node.
    """

    address: str = ""
    is_listening: bool = False
    problem: str = "not tried yet"
    hint: str = ""
    is_dead: bool = False
    has_control: bool | None = None
    is_misnamed: bool = False


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


class Access(NamedTuple):
    """What the head needs to reach its workers.

    Args:
        key: The signing key of the job.
        session: The random number of the head's process.
        port: Where workers listen.
    """

    key: bytes
    session: str
    port: int
    resolver: Resolver


class Resolver:
    """Looks up names in threads, and passes the addresses to the node's loop."""

    def __init__(self, loop: NodeLoop) -> None:
        # Not a ThreadPoolExecutor: it takes milliseconds to import, and its threads outlive the job
        # when a name server is slow.
        self._threads = 0
        self._names: queue.SimpleQueue[tuple[str, int, Callable[[str], None]]] = queue.SimpleQueue()
        self._loop = loop

    def resolve(self, host: str, port: int, on_address: Callable[[str], None]) -> None:
        """Call ``on_address`` from the loop with the address of a host; empty if it has none."""
        self._names.put((host, port, on_address))
        if self._threads < _THREADS:
            self._threads += 1
            threading.Thread(target=self._look_up, daemon=True).start()

    def _look_up(self) -> None:
        while True:
            host, port, on_address = self._names.get()
            self._loop.post(partial(on_address, _address(host, port)))


def _address(host: str, port: int) -> str:
    try:
        addresses = socket.getaddrinfo(plain_name(host), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ""
    return min((str(item[4][0]) for item in addresses), key=is_link_local)


def _misnamed(address: str) -> str:
    """Return why a name with this address cannot be that of another node; empty if it can."""
    if is_link_local(address):
        return "its name has only the link-local address %s, which no library can use" % address
    return "its name has an address of the head, %s" % address if is_own(address) else ""


class Dial:
    """One attempt to reach a worker: finds its address, connects, and shakes hands.

    Args:
        node: The number of the worker.
        received: The number of messages that the head has received from this worker.
        on_answer: Called when the worker has proved its identity.
        on_failure: Called when the attempt has failed.
    """

    def __init__(
        self,
        loop: NodeLoop,
        access: Access,
        node: int,
        received: int,
        on_answer: Callable[[Answer], None],
        on_failure: Callable[[Attempt], None],
    ) -> None:
        self._loop = loop
        self._access = access
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
        self._is_by_name = False
        self._is_stopped = False

    def start(self, host: str, control_dir: str) -> None:
        """Start to reach the worker.

        Args:
            control_dir: Where the nodes of one machine announce their addresses; empty for others.
        """
        if not control_dir:
            self._access.resolver.resolve(host, self._access.port, self._resolved)
            return
        endpoint = announced(control_dir, self._node)
        if endpoint is None:
            self._on_failure(NO_ADDRESS)
        else:
            self._connect(*endpoint)

    def _resolved(self, address: str) -> None:
        if self._is_stopped:
            return
        if address:
            self._is_by_name = True
            self._connect(address, self._access.port)
        else:
            self._on_failure(NO_NAME)

    def _connect(self, address: str, port: int) -> None:
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
        self._is_stopped = True
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
        self._stream = Stream(self._loop.selector, self._socket, self._received_line, self._ended)
        self._loop.schedule(self._timer, _GREET_S, self._is_silent)

    def _received_line(self, line: bytes) -> None:
        if self._transcript:
            self._check_answer(line)
        else:
            self._answer_greeting(line)

    def _answer_greeting(self, line: bytes) -> None:
        if not line.startswith(GREETING):
            self._fail("another program listens there, not the entry of a node", _FOREIGN, True)
            return
        fields = line[len(GREETING) :].decode("ascii", "replace").split()
        self._entry = fields[1] if len(fields) == 2 else ""
        own_part = "%s %s %d" % (transport.nonce(), self._access.session, self._received)
        self._transcript = " ".join((*fields, own_part))
        proof = transport.proof(self._access.key, "head", self._node, self._transcript)
        assert self._stream is not None
        self._stream.send(("%s %s\n" % (own_part, proof)).encode("ascii"))

    def _check_answer(self, line: bytes) -> None:
        assert self._stream is not None
        if line == _TAKEN.encode("ascii"):
            self._fail("it serves another head already", _OTHER, True)
            return
        received, _, proof = line.decode("ascii", "replace").partition(" ")
        transcript = f"{self._transcript} {received}"
        is_ours = transport.is_proof(proof, self._access.key, "worker", self._node, transcript)
        if not received.isdecimal() or not is_ours:
            problem = "its key differs from the head's, or it is not node %d" % self._node
            self._fail(problem, _OTHER, True)
            return
        stream, self._stream, self._socket = self._stream, None, None
        self.stop()
        channel = Channel(self._access.key, "head", "worker", transcript)
        self._on_answer(Answer(self._address, stream, channel, self._entry, int(received)))

    def _ended(self, how: Break) -> None:
        self._fail("it closed the connection", _OTHER, False)

    def _is_silent(self) -> None:
        self._fail("its entry accepts the connection and then sends nothing", _SILENT, False)

    def _fail(self, problem: str, hint: str, is_dead: bool) -> None:
        self.stop()
        is_other = hint is _OTHER
        attempt = Attempt(self._address, True, problem, hint.format(self._port), is_dead)
        self._on_failure(attempt._replace(has_control=False if is_other else None))

    def _unreachable(self, number: int) -> None:
        self.stop()
        is_dead = number == errno.ECONNREFUSED
        misnamed = _misnamed(self._address) if self._is_by_name else ""
        if misnamed:
            problem, hint = misnamed, _MISNAMED
        elif number == errno.ETIMEDOUT:
            problem, hint = "no answer on port %d" % self._port, _NO_ANSWER
        else:
            problem = "port %d: %s" % (self._port, os.strerror(number).lower())
            hint = _NOT_LISTENING if is_dead else _NO_ANSWER
        hint = hint.format(self._port)
        attempt = Attempt(self._address, False, problem, hint, is_dead)
        self._on_failure(attempt._replace(is_misnamed=bool(misnamed)))


NO_NAME = Attempt(
    problem="its name does not resolve",
    hint="has it been started, and do the nodes share a network with names?",
)
NO_ADDRESS = Attempt(
    problem="its entry does not listen yet",
    hint="what does its own log say?",
)
_NO_ANSWER = "is it up, and can the nodes reach each other on port {}? (firewall, network policy)"
_NOT_LISTENING = (
    "a machine is up there, but no entry listens: is the address right, and what does its log say?"
)
_SILENT = "it hangs: is its memory or its disk full? restart that node"
_MISNAMED = "correct its address in the name server, or in /etc/hosts of the head"
_FOREIGN = "set SSHD_PORT to a port other than {} on all nodes"
_OTHER = "every node of a job needs the same key (CLOUDJOB_SSH_KEY) and a free port (SSHD_PORT)"


# ---- the worker ----------------------------------------------------------------------------------


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
        on_attach: Called when the head has connected.
    """

    def __init__(
        self,
        loop: NodeLoop,
        server: socket.socket,
        key: bytes,
        node: int,
        link: Link,
        on_attach: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._server = server
        self._key = key
        self._node = node
        self._link = link
        self._on_attach = on_attach
        self._entry = transport.nonce()
        self._session = ""
        self._handshakes: set[Stream] = set()
        loop.selector.register(server, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Stop listening, and close all connections but the head's."""
        with contextlib.suppress(KeyError, ValueError):
            self._loop.selector.unregister(self._server)
        self._server.close()
        for stream in list(self._handshakes):
            self._drop(stream)

    def _accept(self) -> None:
        try:
            accepted, _ = self._server.accept()
        except OSError:
            return
        if len(self._handshakes) >= _MAX_HANDSHAKES:
            accepted.close()
            return
        greeting = f"{transport.nonce()} {self._entry}"

        def check(line: bytes) -> None:
            self._check(stream, greeting, line.decode("ascii", "replace"))

        stream = Stream(self._loop.selector, accepted, check, lambda how: self._drop(stream))
        # Before the greeting: a peer that has reset the connection ends it at once.
        self._handshakes.add(stream)
        self._loop.schedule(_timer(stream), _GREET_S, lambda: self._drop(stream))
        stream.send(GREETING + greeting.encode("ascii") + b"\n")

    def _check(self, stream: Stream, greeting: str, line: str) -> None:
        """Reply to the answer of a head, and continue with its connection if it is ours."""
        reply, channel, received = self._reply(greeting, line)
        stream.send(reply.encode("ascii") + b"\n")
        if channel is None:
            self._drop(stream)
            return
        self._forget(stream)
        self._link.attach(stream, channel, received)
        self._on_attach()

    def _reply(self, greeting: str, line: str) -> tuple[str, Channel | None, int]:
        """Return the reply, the channel of our head, and how many messages it has received."""
        fields = line.split(" ")
        if len(fields) != 4 or not fields[2].isdecimal():
            return _REFUSED, None, 0
        _, session, received, proof = fields
        transcript = "%s %s" % (greeting, line[: line.rindex(" ")])
        if not transport.is_proof(proof, self._key, "head", self._node, transcript):
            return _REFUSED, None, 0
        if self._session not in ("", session) and self._link.received:
            return _TAKEN, None, 0
        self._session = session
        transcript = f"{transcript} {self._link.received}"
        proof = transport.proof(self._key, "worker", self._node, transcript)
        channel = Channel(self._key, "worker", "head", transcript)
        return f"{self._link.received} {proof}", channel, int(received)

    def _drop(self, stream: Stream) -> None:
        stream.close()
        self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        self._loop.cancel(_timer(stream))
        self._handshakes.discard(stream)


def _timer(stream: Stream) -> str:
    return "handshake-%d" % id(stream)


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            tried.bind(("", 0))
            return True
    except OSError:
        return False
