"""What Horovod says about a stall: which ranks have not submitted a tensor that others wait for.

Only the rank that coordinates prints it, to its log, once a minute.
"""

from __future__ import annotations

import contextlib
import os
import re

from jobentry.contract.hangs import MOST_LATE, Late
from jobentry.contract.stacks import ThreadStack
from jobentry.secrets import masking

_LIMIT_BYTES = 64 * 1024
_LIBRARY = re.compile(r"(^|/)horovod/")
# A name may have brackets, as ``grads[0]``.
_STALL = re.compile(r"Missing ranks:\s*\n((?:\d+!?: \[.*\]\s*\n?)+)")
_RANK = re.compile(r"^(\d{1,9})!?: \[(.*)\]", re.MULTILINE)


def size_of(log: str) -> int:
    """Return how long a log is now; 0 if there is none."""
    with contextlib.suppress(OSError):
        return os.path.getsize(log)
    return 0


def late(thread: ThreadStack, log: str, start: int) -> tuple[Late, ...]:
    """Return what the last report in the log of a rank says about all ranks.

    Args:
        thread: The rank's main thread; only one in Horovod is believed.
        start: The size of the log when the rank came to its place: what is older may be over.
    """
    if not any(_LIBRARY.search(frame.file) for frame in thread.frames):
        return ()
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(max(start, size_of(log) - _LIMIT_BYTES))
        return read(file.read(_LIMIT_BYTES).decode("utf-8", "replace"))
    return ()


def read(text: str) -> tuple[Late, ...]:
    """Return what the last report in a text says."""
    reports = _STALL.findall(text)
    ranks = _RANK.findall(reports[-1]) if reports else []
    return tuple(
        Late(int(rank), tuple(masking.hide(name) for name in names.split(", ")))
        for rank, names in ranks[:MOST_LATE]
    )
