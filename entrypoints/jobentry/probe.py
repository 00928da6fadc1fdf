"""Finds out, for many workers at once, how far the way to each one goes: name, address, port.

ssh itself says little and late about a worker that is not there yet, so it is only started when
its port answers as an sshd does. A line without ssh is ready when its worker has been met.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from typing import Callable, NamedTuple

# So many workers are probed at the same moment; each probe mostly waits.
_THREADS = 64
_CONNECT_S = 3.0
_BANNER_S = 5.0
# The wait before a worker that was not there is tried again, growing up to the second figure. It
# grows by half: a worker is found after at most a third more than the time that it took to come up.
_PAUSE_S = (0.02, 1.0)
_GROWTH = 1.5


class Step(NamedTuple):
    """How far the way to a node goes; ``trouble`` says what is in the way, ``hint`` what to do."""

    address: str = ""
    is_listening: bool = False
    trouble: str = "not tried yet"
    hint: str = ""

    @property
    def is_there(self) -> bool:
        """Whether who should be there answers."""
        return not self.trouble


# Speaks with what answers, and returns what is wrong with it and what to do; nothing for nothing.
Greet = Callable[[socket.socket], "tuple[str, str]"]


def look(host: str, port: int, greet: Greet | None = None) -> Step:
    """Try the way to ``host`` once.

    Args:
        greet: None where an sshd should be.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return Step(trouble="its name does not resolve", hint=_NO_NAME)
    address = str(found[0][4][0])
    try:
        with socket.create_connection((address, port), _CONNECT_S) as connection:
            connection.settimeout(_BANNER_S)
            trouble, hint = (greet or _greeting)(connection)
            return Step(address, True, trouble, hint.format(port))
    except socket.timeout:
        return Step(address, False, "no answer on port %d" % port, _NO_ANSWER.format(port))
    except OSError as error:
        refused = _REFUSED.format("entry that listens" if greet else "sshd")
        hint = refused if isinstance(error, ConnectionRefusedError) else _NO_ANSWER.format(port)
        return Step(address, False, "port %d: %s" % (port, (error.strerror or "").lower()), hint)


_NO_NAME = "has it been started, and do the nodes share a network with names?"
_NO_ANSWER = "is it up, and may the nodes reach each other on port {}? (firewall, network policy)"
_REFUSED = "it is up without an {}: what does its own log say?"
_SILENT = "its sshd hangs: is its memory or its disk full? start that node again"
_STRANGER = "give SSHD_PORT another number than {} on all nodes"


def _greeting(connection: socket.socket) -> tuple[str, str]:
    """Return what is wrong with what greets us there, and what to do; empty for nothing."""
    try:
        banner = connection.recv(64)
    except socket.timeout:
        return "its sshd accepts and then says nothing", _SILENT
    except OSError:
        banner = b""
    if banner.startswith(b"SSH-"):
        return "", ""
    return "what listens there is not an sshd", _STRANGER


class Probe:
    """Probes workers in threads of its own; ``fileno`` is readable when one has been found."""

    def __init__(
        self,
        hosts: dict[int, str],
        port: int,
        greet: Callable[[int], Greet | None] = lambda index: None,
    ) -> None:
        self.steps: dict[int, Step] = {index: Step() for index in hosts}
        self._hosts = hosts
        self._port = port
        self._greet = greet
        self._found: list[int] = []
        self._wake, self._end = os.pipe()
        self._is_over = threading.Event()
        self._turns: queue.PriorityQueue[tuple[float, float, int]] = queue.PriorityQueue()
        for index in hosts:
            self._turns.put((0.0, _PAUSE_S[0], index))
        for _ in range(min(_THREADS, len(hosts))):
            threading.Thread(target=self._work, daemon=True).start()

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._wake

    def found(self) -> list[int]:
        """Return the workers that were found since the last call."""
        os.read(self._wake, 65536)
        found = []
        while self._found:
            found.append(self._found.pop(0))
        return found

    def again(self, index: int) -> None:
        """Try a worker that was found once more: ssh did not get in."""
        self._turns.put((time.monotonic() + _PAUSE_S[1], _PAUSE_S[1], index))

    def close(self) -> None:
        """Stop probing."""
        self._is_over.set()

    def _work(self) -> None:
        while not self._is_over.is_set():
            try:
                at, pause, index = self._turns.get(timeout=0.5)
            except queue.Empty:
                continue
            if self._is_over.wait(max(0.0, at - time.monotonic())):
                return
            step = self.steps[index] = look(self._hosts[index], self._port, self._greet(index))
            if step.is_there:
                self._found.append(index)
                os.write(self._end, b".")
            else:
                longer = min(_GROWTH * pause, _PAUSE_S[1])
                self._turns.put((time.monotonic() + pause, longer, index))
