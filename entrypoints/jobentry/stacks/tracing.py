"""Stops a running thread of another process for a moment, to read its registers: ptrace(2).

A process of its own does it: the kernel reports a stop to whichever thread of the tracing process
waits for its children, and the entry's loop would take it for the end of a rank.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
from typing import Callable

from jobentry.stacks.kernel import Registers
from jobentry.stacks.memory import UnreadableError

_SEIZE, _INTERRUPT, _DETACH, _REGISTERS = 0x4206, 0x4207, 17, 0x4204
_GENERAL = 1  # NT_PRSTATUS
_ALL_CHILDREN = 0x40000000  # __WALL
_SIGNAL_AT_PARENTS_END = 1  # PR_SET_PDEATHSIG
# How many registers there are, and which of them are the stack's and the instruction's.
_PLACES = {"x86_64": (27, 19, 16), "aarch64": (34, 31, 32)}
# Seconds for all of it, on a machine that is busy.
_PATIENCE_S = 5.0
_MOST_BYTES = 1 << 20


def registers_of_running(
    thread: int, read_stack: Callable[[Registers], bytes]
) -> tuple[Registers, bytes]:
    """Return where a thread is, and what ``read_stack`` returns while it is stopped there.

    Raises:
        UnreadableError: It has ended, is traced already, or the kernel does not permit it.
    """
    if os.uname().machine not in _PLACES:
        raise UnreadableError("its registers have no known order")
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    ptrace, prctl = library.ptrace, library.prctl
    ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    ptrace.restype = ctypes.c_long
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        # If the entry is killed meanwhile, nobody else would end a child that hangs.
        prctl(_SIGNAL_AT_PARENTS_END, signal.SIGKILL, 0, 0, 0)
        _trace(thread, ptrace, read_stack, writer)
    os.close(writer)
    try:
        answer = _answer(reader)
    finally:
        os.close(reader)
        # If it hangs, its end lets the thread go on.
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # the loop may have noticed its end
            os.waitpid(child, 0)
    if len(answer) <= 16:
        raise UnreadableError("the kernel does not let it be traced")
    return Registers(*struct.unpack("<QQ", answer[:16])), answer[16:]


def _answer(reader: int) -> bytes:
    answer = bytearray()
    while len(answer) < _MOST_BYTES and select.select([reader], [], [], _PATIENCE_S)[0]:
        piece = os.read(reader, _MOST_BYTES)
        if not piece:
            return bytes(answer)
        answer += piece
    return b""


def _trace(
    thread: int,
    ptrace: Callable[..., int],
    read_stack: Callable[[Registers], bytes],
    writer: int,
) -> None:
    """Stop the thread, read it, let it go on, and write the answer; never return."""
    import ctypes

    try:
        # A signal for the group of the entry is the entry's, whose loop would be woken by ours.
        signal.set_wakeup_fd(-1)
        count, stack_at, instruction_at = _PLACES[os.uname().machine]
        values = (ctypes.c_uint64 * count)()
        # A struct iovec: where the registers go, and how much room there is.
        target = (ctypes.c_uint64 * 2)(ctypes.addressof(values), ctypes.sizeof(values))
        if ptrace(_SEIZE, thread, None, None) == 0 and ptrace(_INTERRUPT, thread, None, None) == 0:
            _, status = os.waitpid(thread, _ALL_CHILDREN)
            # It stops for a signal that came first, too, which would then be lost; our own stop has
            # an event in the upper bits.
            number = 0 if status >> 16 else os.WSTOPSIG(status)
            ptrace(_REGISTERS, thread, _GENERAL, ctypes.addressof(target))
            registers = Registers(stack=values[stack_at], instruction=values[instruction_at])
            stack = read_stack(registers)
            ptrace(_DETACH, thread, None, number)
            _write(writer, struct.pack("<QQ", *registers) + stack)
    finally:
        os._exit(0)


def _write(writer: int, answer: bytes) -> None:
    while answer:
        answer = answer[os.write(writer, answer) :]
