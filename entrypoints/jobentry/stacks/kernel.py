"""What the kernel says about a thread: proc(5)."""

from __future__ import annotations

import re

_SWITCHES = re.compile(rb"ctxt_switches:\s*(\d+)")


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
