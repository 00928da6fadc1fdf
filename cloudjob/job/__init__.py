"""The way back: a job that was submitted, from any shell, at any time."""

from __future__ import annotations

from cloudjob.job.many import Filter, collect, differences, find_all, sweep
from cloudjob.job.one import GONE, Job, find

__all__ = ["GONE", "Filter", "Job", "collect", "differences", "find", "find_all", "sweep"]
