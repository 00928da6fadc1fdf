"""Tests of what the jobs table and the page of a sweep show besides states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cloudjob.console.pages.sweep import Row, table
from cloudjob.console.results import ResultsCache, best_of, is_cost, legends
from cloudjob.errors import StoreError
from cloudjob.model.status import JobState
from cloudjob.tracking.metrics import MetricPoint
from tests.support.statuses import status_of


class Job:
    """A job with these points in its log, which counts how often it is read."""

    def __init__(
        self, job: str, *points: MetricPoint, values: dict[str, str] | None = None
    ) -> None:
        self.id = job
        self.has_final_status = True
        self.error: Exception | None = None
        self.reads = 0
        self._points, self._values = points, values or {}

    def spec(self) -> dict[str, Any]:
        return {"backend": "kubernetes", "kubernetes": {"labels": {"team": "\x1b[31mred"}}}

    def sweep_values(self) -> dict[str, str]:
        return self._values

    def metric_points(self) -> Iterator[MetricPoint]:
        self.reads += 1
        if self.error:
            raise self.error
        yield from self._points


def point(name: str, rank: int, step: int, value: float) -> MetricPoint:
    return MetricPoint(name, rank, step, value)


LOSSES = (point("loss", 1, 0, 9.0), point("loss", 0, 0, 3.0), point("loss", 0, 1, 2.0))


def test_results_are_the_last_values_of_the_lowest_rank_and_are_read_once():
    job = Job("a", *LOSSES, point("loss", 1, 1, 8.0), values={"lr": "0.1"})
    cache = ResultsCache()

    assert cache.of(job, with_metrics=False).metrics == {}  # type: ignore[arg-type]
    assert job.reads == 0
    results = cache.of(job, with_metrics=True)  # type: ignore[arg-type]
    assert results.metrics == {"loss": 2.0}
    assert (results.values, results.labels, results.is_final) == ("lr=0.1", "team=red", True)
    assert cache.of(job, with_metrics=True) == results  # type: ignore[arg-type]
    assert job.reads == 1


def test_results_of_a_running_job_and_of_a_store_that_did_not_answer_are_read_again():
    job, cache = Job("a", *LOSSES), ResultsCache()
    job.error = StoreError("reading: no answer")
    assert cache.of(job, with_metrics=True).metrics == {}  # type: ignore[arg-type]

    job.error, job.has_final_status = None, False
    assert cache.of(job, with_metrics=True).metrics == {"loss": 2.0}  # type: ignore[arg-type]
    cache.of(job, with_metrics=True)  # type: ignore[arg-type]
    assert job.reads == 3


def test_names_of_metrics_are_short_and_few():
    points = [point(f"{number} {'x' * 200}", 0, 0, 1.0) for number in range(100)]
    metrics = ResultsCache().of(Job("a", *points), with_metrics=True).metrics  # type: ignore[arg-type]

    assert len(metrics) == 12
    assert all(len(name) <= 60 for name in metrics)


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [
        ("val_loss", [2.0, 1.0, float("nan")], 1.0),
        ("accuracy", [0.5, 0.9, float("inf")], 0.9),
        ("accuracy", [0.9, 0.9], None),
        ("accuracy", [], None),
    ],
)
def test_the_best_value_is_the_lowest_of_a_cost_and_else_the_highest(
    metric: str, values: list[float], best: float | None
):
    assert best_of(metric, [{metric: value} for value in values]) == best


def test_errors_and_times_are_costs():
    assert [is_cost(name) for name in ("word_error_rate", "step time", "f1")] == [True, True, False]


def test_legends_are_the_values_of_a_sweep_where_they_tell_jobs_apart():
    jobs = [Job("a", values={"lr": "0.1"}), Job("b", values={"lr": "0.2"}), Job("c"), Job("d")]
    assert legends(jobs) == {"a": "lr=0.1", "b": "lr=0.2", "c": "c", "d": "d"}  # type: ignore[arg-type]
    same = [Job("a", values={"lr": "1"}), Job("b", values={"lr": "1"})]
    assert legends(same) == {"a": "a", "b": "b"}  # type: ignore[arg-type]


def test_the_table_of_a_sweep_marks_the_best_and_keeps_hostile_text_text():
    rows = [
        Row(status_of("s-0", state=JobState.SUCCEEDED), {"lr": "<b>"}, {"<i>loss": 2.0}),
        Row(status_of("s-1"), {"lr": "0.2"}, {"<i>loss": 1.0}),
        Row(status_of("s-2"), {"lr": "0.3"}, {}),
    ]
    html = table(rows)

    assert html.count("(best)") == 1
    assert "1 (best)" in html
    assert "<i>" not in html
    assert "&lt;b&gt;" in html
