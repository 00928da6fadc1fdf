"""How spans of time, numbers of things and texts of jobs read."""

from __future__ import annotations

import time

from cloudjob import times
from cloudjob.model.status import JobStatus
from cloudjob.model.summary import span


def since(status: JobStatus) -> str:
    """Return how long ago a job was submitted."""
    return f"submitted {span(time.time() - times.seconds_of(status.created_at))} ago"


def count(number: int, one: str, many: str = "") -> str:
    """Return a number of things: ``1 file``, ``2 files``."""
    return f"{number} {one}" if number == 1 else f"{number} {many or one + 's'}"


def text(found: str) -> str:
    """Return a text of a job for NiceGUI, which refuses what is not UTF-8: its bytes are escaped.

    Arguments, names of files and messages may hold such bytes.
    """
    return found.encode("utf-8", "backslashreplace").decode("utf-8")
