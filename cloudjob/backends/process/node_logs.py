"""What a controller reads of an attempt that has ended: the head's record, and the nodes' logs.

Ranks can write to both, so every read has a limit. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence

from jobentry.contract import exits
from jobentry.contract.exits import ExitRecord, RecordError

# Bytes of a record, and of all logs of one attempt, of which the ends are read.
_RECORD_LIMIT_BYTES = 1 << 20
_LOGS_LIMIT_BYTES = 16 << 20


def record(path: str) -> ExitRecord | None:
    """Return the record that a head has left on this machine; None if it has left none."""
    try:
        return exits.load(_read(path, 0, _RECORD_LIMIT_BYTES))
    except (OSError, RecordError):
        return None


def sizes(logs: Sequence[str]) -> list[int]:
    """Return the size of each log in bytes; 0 for one that does not exist yet."""
    return [_size(log) for log in logs]


def new_lines(logs: Sequence[str], begins: Sequence[int]) -> Iterator[bytes]:
    """Yield the lines that were added to logs since they had these sizes; of long logs, the last.

    A log that cannot be read shows no progress.
    """
    limit = _LOGS_LIMIT_BYTES // max(1, len(logs))
    for log, begin in zip(logs, begins, strict=True):
        with contextlib.suppress(OSError):
            yield from _read(log, max(begin, _size(log) - limit), limit).splitlines()


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _read(path: str, offset: int, limit_bytes: int) -> bytes:
    # A link or a pipe is none of ours, and a pipe would block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return b""
        file.seek(offset)
        return file.read(limit_bytes)
