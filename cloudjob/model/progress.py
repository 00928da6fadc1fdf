"""Progress reports of long calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from cloudjob import library_log


class Progress(NamedTuple):
    """One report.

    Args:
        kind: ``note`` or ``warning``, with a message; ``sending`` or ``fetching``, with bytes;
            ``sent``, with a message, just before the job is sent to the platform.
        message: One line; it may hold unprintable characters of file names.
        hint: What to do about a warning; may be empty.
        total_bytes: 0 if unknown.
    """

    kind: str
    message: str = ""
    hint: str = ""
    done_bytes: int = 0
    total_bytes: int = 0


OnProgress = Callable[[Progress], None]

# The number of texts that ``log_once`` remembers, as others may choose them.
_MOST_LOGGED = 1000


def log_warnings(progress: Progress) -> None:
    """Log warnings as ``cloudjob`` and ignore everything else."""
    if progress.kind == "warning":
        library_log.warn("; ".join(text for text in (progress.message, progress.hint) if text))


@lru_cache(_MOST_LOGGED)
def log_once(message: str) -> None:
    """Log a warning as ``cloudjob``, unless this process has just logged the same text."""
    log_warnings(Progress("warning", message))


def meter(kind: str, total_bytes: int, on_progress: OnProgress) -> Callable[[int], None]:
    """Return a function that takes the number of bytes of each step and reports the total.

    Any thread may call the function; ``on_progress`` is called by one thread at a time.
    """
    lock = threading.Lock()
    done_bytes = 0
    on_progress(Progress(kind, total_bytes=total_bytes))

    def step(count: int) -> None:
        nonlocal done_bytes
        with lock:
            done_bytes += count
            on_progress(Progress(kind, done_bytes=done_bytes, total_bytes=total_bytes))

    return step
