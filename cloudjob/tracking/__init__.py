"""Submitted jobs: status, log, outputs, cancel and removal. Start at ``job.Job``."""

from __future__ import annotations

from cloudjob.tracking.cleanup import collect, remove_orphans
from cloudjob.tracking.job import Job
from cloudjob.tracking.lookup import find
from cloudjob.tracking.queries import (
    Filter,
    filter_of,
    find_all,
    jobs_of,
    statuses_of,
    with_status,
)

__all__ = [
    "Filter",
    "Job",
    "collect",
    "filter_of",
    "find",
    "find_all",
    "jobs_of",
    "remove_orphans",
    "statuses_of",
    "with_status",
]
