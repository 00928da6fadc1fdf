"""Submitted jobs: status, log, outputs, cancel and removal. Start at ``job.Job``."""

from __future__ import annotations

from cloudjob.jobs.job import GONE, Job, find
from cloudjob.jobs.queries import Filter, collect, differences, find_all, sweep

__all__ = ["GONE", "Filter", "Job", "collect", "differences", "find", "find_all", "sweep"]
