"""How spans of time and numbers of files read."""

from __future__ import annotations

import time

from cloudjob import times
from cloudjob.model.status import JobStatus

_MINUTE, _HOUR, _DAY = 60, 3600, 24 * 3600
# Below this many seconds tenths matter.
_SHORT_S = 10


def duration(status: JobStatus) -> str:
    """Return for how long a job has run or ran; empty if that is unknown."""
    if status.started_at is None or (status.ended_at is None and status.state.is_final):
        return ""
    end = times.seconds_of(status.ended_at) if status.ended_at else time.time()
    return span(end - times.seconds_of(status.started_at))


def since(status: JobStatus) -> str:
    """Return how long ago a job was submitted."""
    return f"submitted {span(time.time() - times.seconds_of(status.created_at))} ago"


def span(seconds: float) -> str:
    """Return a span of time in its two largest units."""
    whole = max(int(seconds), 0)
    if whole < _SHORT_S:
        return f"{max(seconds, 0):.1f} s"
    for limit, unit, part, small in (
        (_DAY, "d", _HOUR, "h"),
        (_HOUR, "h", _MINUTE, "min"),
        (_MINUTE, "min", 1, "s"),
    ):
        if whole >= limit:
            return f"{whole // limit} {unit} {whole % limit // part:02d} {small}"
    return f"{whole} s"


def files(count: int) -> str:
    """Return a number of files: ``1 file``, ``2 files``."""
    return f"{count} file" if count == 1 else f"{count} files"
