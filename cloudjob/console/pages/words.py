"""How spans of time and numbers of files read."""

from __future__ import annotations

import time

from cloudjob import times
from cloudjob.model.status import JobStatus
from cloudjob.model.summary import span


def since(status: JobStatus) -> str:
    """Return how long ago a job was submitted."""
    return f"submitted {span(time.time() - times.seconds_of(status.created_at))} ago"


def files(count: int) -> str:
    """Return a number of files: ``1 file``, ``2 files``."""
    return f"{count} file" if count == 1 else f"{count} files"
