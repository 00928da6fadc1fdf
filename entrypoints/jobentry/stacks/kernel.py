"""What the kernel says about a thread: proc(5)."""

from __future__ import annotations

import re
from typing import NamedTuple

_SWITCHES = re.compile(rb"ctxt_switches:\s*(\d+)")


class Registers(NamedTuple):
    """Where a thread is: the address of its innermost stack entry, and of its next instruction."""

    stack: int
    instruction: int


def blocked_since(process: int, thread: int) -> int | None:
    """Return how often a thread has left its CPU if it is off it now, and not ready to run.

    A thread for which this returns the same number twice has not run in between. None if it runs,
    has ended, or cannot be examined.
    """
    folder = "/proc/%d/task/%d" % (process, thread)
    try:
        # The order matters: a thread may block after its switches were counted. The file of its
        # system call says "running" unless the thread has really left its CPU.
        with open(folder + "/syscall", "rb") as file:
            if file.read().startswith(b"running"):
                return None
        with open(folder + "/status", "rb") as file:
            counts = _SWITCHES.findall(file.read())
    except OSError:
        return None
    return sum(map(int, counts)) if len(counts) == 2 else None


def registers_of_blocked(process: int, thread: int) -> Registers | None:
    """Return where a blocked thread is; None if it runs, has ended, or may not be examined."""
    try:
        with open("/proc/%d/task/%d/syscall" % (process, thread), "rb") as file:
            fields = file.read().split()
    except OSError:
        return None
    # The number of the system call, its arguments, and then these two.
    if len(fields) < 3:
        return None
    return Registers(stack=int(fields[-2], 16), instruction=int(fields[-1], 16))
