"""The curves of a training's metrics, by step or by time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from cloudjob.console.charts.lines import Group, View, line_charts
from cloudjob.console.charts.style import ELAPSED, Chart, Lines, Points
from cloudjob.console.charts.usage import failed_at
from cloudjob.console.text import displayable
from cloudjob.model import times
from cloudjob.model.status import JobState, JobStatus
from cloudjob.tracking.metrics import MetricPoint

_INTEGERS = {"minInterval": 1}


def curves(
    points: Sequence[MetricPoint],
    status: JobStatus | None = None,
    view: View = View(),  # noqa: B008 (it is frozen)
) -> list[Chart]:
    """Return a chart for each metric, with a line for each rank or event file.

    Args:
        status: That of the job, to mark where it failed, and for the zero of the time.
    """
    zero_s = times.seconds_of(status.created_at) if status else 0.0
    lines_of = _lines_of(points, zero_s if view.by_time else None)
    return _charts(lines_of, view, _failed_at(points, status, view))


def compared_curves(
    jobs: Mapping[str, Sequence[MetricPoint]],
    view: View = View(),  # noqa: B008 (it is frozen)
) -> list[Chart]:
    """Return a chart for each metric, with a line for each job: its lowest rank or event file."""
    lines_of: dict[str, dict[str, Points]] = {}
    for job, points in jobs.items():
        for metric, lines in _lines_of(points, None).items():
            lines_of.setdefault(metric, {})[job] = next(iter(lines.values()))
    return _charts(lines_of, view, None)


def _failed_at(points: Sequence[MetricPoint], status: JobStatus | None, view: View) -> float | None:
    """Return where a job failed: the time, or the last step of the rank that made it fail."""
    if status is None or status.state is not JobState.FAILED:
        return None
    if view.by_time:
        return failed_at(status)
    rank = status.failure.rank if status.failure else None
    return max((p.step for p in points if rank is not None and p.rank == rank), default=None)


def _lines_of(
    points: Sequence[MetricPoint], zero_s: float | None
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return the lines of each metric: by step, or by seconds since ``zero_s``."""
    lines_of: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for point in sorted(points, key=lambda point: -1 if point.rank is None else point.rank):
        x = point.step if zero_s is None else point.at and point.at - zero_s
        if x is not None:
            line = displayable(point.source) if point.source else f"rank {point.rank}"
            lines_of.setdefault(point.title, {}).setdefault(line, []).append((x, point.value))
    ordered = sorted if zero_s is None else _spread
    return {
        name: {line: ordered(values) for line, values in lines.items()}
        for name, lines in lines_of.items()
    }


def _spread(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return points that were printed one after the other, as times are accurate to seconds only.

    Those with the same time are spread evenly until the next one.
    """
    groups = [(at, [value for _, value in each]) for at, each in groupby(points, itemgetter(0))]
    ends = [*(at for at, _ in groups[1:]), groups[-1][0]]
    return [
        (at + place * max(0.0, end - at) / len(values), value)
        for (at, values), end in zip(groups, ends, strict=True)
        for place, value in enumerate(values)
    ]


def _charts(lines_of: Mapping[str, Lines], view: View, failure: float | None) -> list[Chart]:
    y: dict[str, dict[str, Any]] = {}
    are_steps = True
    for title, lines in lines_of.items():
        points = [point for each in lines.values() for point in each]
        are_steps = are_steps and all(float(step).is_integer() for step, _ in points)
        y[title] = {"scale": True}
        if all(float(value).is_integer() for _, value in points):
            y[title].update(_INTEGERS)
    x: Mapping[str, Any] = ELAPSED if view.by_time else _INTEGERS if are_steps else {}
    name = "seconds" if view.by_time else "step"
    return line_charts(
        Group(lines_of, name, x, y, is_aligned=view.by_time, failed_at=failure), view
    )
