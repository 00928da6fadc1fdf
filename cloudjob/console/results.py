"""What the jobs table and the page of a sweep show of a job's description and its metrics."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from cloudjob.console.facts import labels_of
from cloudjob.console.text import displayable
from cloudjob.errors import CloudJobError
from cloudjob.model import grid
from cloudjob.tracking import Job
from cloudjob.tracking.metrics import last_values

# A table with more columns cannot be read.
MAX_METRICS = 12
_NAME_CHARS = 60
# Less is better for metrics with these parts in their names.
_COSTS = re.compile(r"loss|err|perplexity|ppl|mae|mse|time|second", re.IGNORECASE)


class Results(NamedTuple):
    """What a row shows besides the status.

    Args:
        values: Those of its sweep, as ``lr=0.1``.
        metrics: The last value of each metric of its training; of several ranks, of the lowest.
        is_final: Whether they will never change.
    """

    values: str = ""
    labels: str = ""
    metrics: Mapping[str, float] = {}
    is_final: bool = False


class ResultsCache:
    """Reads results, and keeps those of jobs that have ended."""

    def __init__(self) -> None:
        self._ended: dict[str, Results] = {}
        self._lock = threading.Lock()

    def of(self, job: Job, *, with_metrics: bool) -> Results:
        """Return the results of a job; metrics that cannot be read are left out."""
        with self._lock:
            cached = self._ended.get(job.id)
        if cached is not None:
            return cached
        is_over = job.has_final_status
        values, labels = _described(job)
        if not with_metrics:
            return Results(values, labels)
        try:
            last = last_values(job.metric_points())
        except CloudJobError:
            return Results(values, labels)
        metrics = {
            displayable(name)[:_NAME_CHARS]: value
            for name, value in islice(last.items(), MAX_METRICS)
        }
        results = Results(values, labels, metrics, is_over)
        if is_over:
            with self._lock:
                self._ended[job.id] = results
        return results


def _described(job: Job) -> tuple[str, str]:
    try:
        return displayable(grid.text_of(job.sweep_values())), displayable(labels_of(job.spec()))
    except CloudJobError:
        return "", ""


def is_cost(metric: str) -> bool:
    """Return whether less of a metric is better, as its name says."""
    return bool(_COSTS.search(metric))


def best_of(metric: str, values_of_jobs: Iterable[Mapping[str, float]]) -> float | None:
    """Return the best finite value of a metric; None if no value is better than another."""
    values = {each[metric] for each in values_of_jobs if math.isfinite(each.get(metric, math.nan))}
    return (min if is_cost(metric) else max)(values) if len(values) > 1 else None


def legends(jobs: Sequence[Job]) -> dict[str, str]:
    """Return a short name for each job: its values if these differ from all others', or its id."""
    texts = {}
    for job in jobs:
        try:
            texts[job.id] = displayable(grid.text_of(job.sweep_values())) or job.id
        except CloudJobError:
            texts[job.id] = job.id
    names = list(texts.values())
    return {job: text if names.count(text) == 1 else job for job, text in texts.items()}
