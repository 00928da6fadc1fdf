"""Submitted jobs: status, log, outputs, cancel and removal. Start at ``job.Job``."""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.tracking.cleanup import collect, remove_orphans
    from cloudjob.tracking.job import Job
    from cloudjob.tracking.lookup import find
    from cloudjob.tracking.queries import (
        JobFilter,
        filter_of,
        find_all,
        jobs_of,
        running_hangs,
        statuses_of,
        with_status,
    )

__all__ = [
    "Job",
    "JobFilter",
    "collect",
    "filter_of",
    "find",
    "find_all",
    "jobs_of",
    "remove_orphans",
    "running_hangs",
    "statuses_of",
    "with_status",
]

_MODULES = {
    "Job": "job",
    "collect": "cleanup",
    "find": "lookup",
    "remove_orphans": "cleanup",
    **dict.fromkeys(("JobFilter", "filter_of", "find_all", "jobs_of"), "queries"),
    **dict.fromkeys(("running_hangs", "statuses_of", "with_status"), "queries"),
}


def __getattr__(name: str) -> object:
    # A submit needs no lists, and a list no cleanup: each is imported on first use.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return globals()[name]
