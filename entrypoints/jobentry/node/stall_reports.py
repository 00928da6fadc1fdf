"""What Horovod says about a stall: which ranks have not submitted a tensor that others wait for.

Only the rank that coordinates prints it, to its log, once a minute.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import BinaryIO

from jobentry.contract.hangs import MOST_LATE, Late
from jobentry.contract.stacks import ThreadStack
from jobentry.secrets import masking

_LIMIT_BYTES = 64 * 1024
_LIBRARY = re.compile(r"(^|/)horovod/")
# A name may have brackets, as ``grads[0]``.
_STALL = re.compile(rb"Missing ranks:\s*\n((?:\d+!?: \[.*\][^\S\n]*\n?)+)")
_RANK = re.compile(rb"^(\d{1,9})!?: \[(.*)\]", re.MULTILINE)


class StallReports:
    """The reports in the log of a rank since it came to its place: what is older may be over.

    Args:
        thread: The rank's main thread; only one in Horovod is believed.
    """

    def __init__(self, log: str, thread: ThreadStack) -> None:
        self._log = log
        self._is_believed = any(_LIBRARY.search(frame.file) for frame in thread.frames)
        self._start = self._end = self._read = _size_of(log)
        self._late: tuple[Late, ...] = ()
        self._seen_s = 0.0

    def late(self, now_s: float) -> tuple[tuple[Late, ...], float]:
        """Return what the last report says about all ranks, and how many seconds ago it did."""
        if self._is_believed and _size_of(self._log) != self._read:
            with contextlib.suppress(OSError), open(self._log, "rb") as file:
                self._read_on(file, now_s)
        return self._late, now_s - self._seen_s if self._late else 0.0

    def _read_on(self, file: BinaryIO, now_s: float) -> None:
        self._read = file.seek(0, os.SEEK_END)
        start = file.seek(max(self._start, self._read - _LIMIT_BYTES))
        late, size = read(file.read(_LIMIT_BYTES))
        if late and start + size > self._end:
            self._late, self._end, self._seen_s = late, start + size, now_s


def read(text: bytes) -> tuple[tuple[Late, ...], int]:
    """Return what the last report in a text says, and where it ends."""
    reports = list(_STALL.finditer(text))
    if not reports:
        return (), 0
    ranks = _RANK.findall(reports[-1][1])
    late = tuple(
        Late(int(rank), tuple(map(masking.hide, names.decode("utf-8", "replace").split(", "))))
        for rank, names in ranks[:MOST_LATE]
    )
    return late, reports[-1].end()


def _size_of(log: str) -> int:
    """Return how long a log is now; 0 if there is none."""
    with contextlib.suppress(OSError):
        return os.path.getsize(log)
    return 0
