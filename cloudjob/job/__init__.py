"""Submitted jobs: status, log, outputs, cancel and removal. Start at ``one.Job``."""

from __future__ import annotations

from cloudjob.job.many import Filter, collect, differences, find_all, sweep
from cloudjob.job.one import GONE, Job, find

__all__ = ["GONE", "Filter", "Job", "collect", "differences", "find", "find_all", "sweep"]
