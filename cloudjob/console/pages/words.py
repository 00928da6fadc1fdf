"""How spans of time, numbers of things and texts of jobs read."""

from __future__ import annotations

import re
import time

from cloudjob import times
from cloudjob.model.status import JobStatus
from cloudjob.model.summary import span

# Terminal sequences and control characters, which have no meaning on a page, and marks that change
# the direction of the text behind them.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]?|\x1b[]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b."
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)


def since(status: JobStatus) -> str:
    """Return how long ago a job was submitted."""
    return f"submitted {span(time.time() - times.seconds_of(status.created_at))} ago"


def text(found: str) -> str:
    """Return a text of a job for a page: without what controls a terminal or turns the text.

    NiceGUI refuses what is not UTF-8, which arguments, names of files and messages may hold; its
    bytes are escaped.
    """
    return _CONTROL.sub("", found.encode("utf-8", "backslashreplace").decode("utf-8"))
