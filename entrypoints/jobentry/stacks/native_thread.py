"""The main thread of a program without Python: whether it stays where it is."""

from __future__ import annotations

import re

from jobentry.stacks.memory import Memory, UnreadableError
from jobentry.stacks.python_stacks import Look
from jobentry.system import linux

_STATE = re.compile(rb"^State:\s*(\w).*^voluntary_ctxt_switches:\s*(\d+)", re.MULTILINE | re.DOTALL)
_BLOCKED = (b"S", b"D")
# What a call keeps for its caller lies below the address to which it returns: the caller's
# registers, of which there are at most six on x86-64; above it are the caller's variables.
_BELOW_BYTES, _ABOVE_BYTES = 6 * 8, 16 * 8
_IN_CALL = Look((), -1)


class NativeThread:
    """Looks at the main thread of a program again and again, without stopping it.

    It stays where it is as long as it neither begins nor ends to wait in the kernel. A thread that
    waits in a library for other ranks may do that all the time: ``hold`` says in which call it is.

    Raises:
        UnreadableError: The process is gone, or may not be read.
    """

    def __init__(self, process: int) -> None:
        self.process = process
        self._memory = Memory(process)
        self._held, self._content = 0, b""

    def close(self) -> None:
        """Stop looking."""
        self._memory.close()

    def hold(self, address: int) -> None:
        """Compare only the stack around an address, at which a call returns; 0 ends that.

        Raises:
            UnreadableError: The process has ended.
        """
        self._held = address
        self._content = self._around() if address else b""

    def look(self) -> Look:
        """Return what changes when the thread moves.

        Raises:
            UnreadableError: The process has ended.
        """
        if self._held and self._around() == self._content:
            return _IN_CALL
        self._held = 0
        try:
            match = _STATE.search(linux.read(self.process, "status"))
        except OSError as error:
            raise UnreadableError("the process has ended") from error
        if match is None:
            raise UnreadableError("the kernel does not count its waits")
        return Look((), 2 * int(match[2]) + (match[1] in _BLOCKED))

    def _around(self) -> bytes:
        start = self._held - _BELOW_BYTES
        return self._memory.read(start, _BELOW_BYTES + 8 + _ABOVE_BYTES)
