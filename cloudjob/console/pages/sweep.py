"""A sweep: the values of each job beside its last metrics, and their curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from nicegui import ui

from cloudjob.console import charts
from cloudjob.console.pages.frame import frame, heading, page
from cloudjob.console.pages.live import ChartView, Live
from cloudjob.console.results import best_of, is_cost, legends
from cloudjob.console.state import Console
from cloudjob.console.text import displayable
from cloudjob.console.threads import in_thread
from cloudjob.model import summary
from cloudjob.model.status import JobStatus
from cloudjob.tracking import Job
from cloudjob.tracking.sweep import Sweep, attach

# A page with more would take seconds to load.
_MAX_JOBS, _MAX_CURVES = 200, 16


class Row(NamedTuple):
    """One job of a sweep: its status, its values, and the last value of each metric."""

    status: JobStatus
    values: Mapping[str, str]
    metrics: Mapping[str, float]


def register(console: Console) -> None:
    """Add the page."""

    @page("/sweep/{sweep_id}")
    async def sweep_page(sweep_id: str) -> None:
        sweep = await in_thread(attach, console.home, sweep_id)
        jobs = (await in_thread(sweep.jobs))[:_MAX_JOBS]
        name = displayable(sweep_id)
        with frame(name, "Sweep", name):
            # A platform may take longer to answer than NiceGUI waits for a page.
            await ui.context.client.connected()
            if jobs:
                await _Table(console, sweep, jobs).start()
                await _curves(console, jobs).start()


class _Table(Live):
    def __init__(self, console: Console, sweep: Sweep, jobs: Sequence[Job]) -> None:
        super().__init__(jobs[0], jobs)
        self._console = console
        self._sweep = sweep

    async def draw(self) -> str:
        rows = await in_thread(self._read)
        self.container.clear()
        with self.container, ui.card().classes("panel").style("overflow-x: auto"):
            heading(displayable(self._sweep.id))
            ui.label(summary.states([row.status for row in rows])).classes("quiet")
            ui.html(table(rows), sanitize=False).classes("w-full")
        return ""

    def _read(self) -> list[Row]:
        jobs = {job.id: job for job in self._sweep.jobs()}
        rows = []
        for status in self._sweep.statuses()[:_MAX_JOBS]:
            job = jobs.get(status.job)
            metrics = self._console.results.of(job, with_metrics=True).metrics if job else {}
            rows.append(Row(status, self._sweep.values(status.job), metrics))
        return rows


def _curves(console: Console, jobs: Sequence[Job]) -> ChartView:
    async def find() -> list[charts.Chart]:
        names = legends(jobs)
        points = {
            names[job.id]: await in_thread(console.metrics, job) for job in jobs[:_MAX_CURVES]
        }
        return await in_thread(charts.compared_curves, points)

    return ChartView(jobs[0], find, "", others=jobs)


def table(rows: Sequence[Row]) -> str:
    """Return the jobs as HTML, in their order; the best value of each metric is marked."""
    names = list(dict.fromkeys(name for row in rows for name in row.values))
    metrics = list(dict.fromkeys(name for row in rows for name in row.metrics))
    best = {name: best_of(name, [row.metrics for row in rows]) for name in metrics}
    heads = ["Job", "State", *names, *(_head(name) for name in metrics), "Duration"]
    head = "".join(f'<th scope="col">{escape(displayable(name))}</th>' for name in heads)
    body = "".join(_line(row, names, best) for row in rows)
    return f'<table class="plain sweep"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _head(metric: str) -> str:
    return f"{metric} {'↓' if is_cost(metric) else '↑'}"


def _line(row: Row, names: Sequence[str], best: Mapping[str, float | None]) -> str:
    job, state = escape(row.status.job), row.status.state.value
    cells = [
        f'<a href="/job/{job}">{job}</a>',
        f'<span class="state-mark state-{state}">{state}</span>',
        *(escape(displayable(row.values.get(name, ""))) for name in names),
        *(_metric(row.metrics.get(name), best[name]) for name in best),
        escape(summary.duration(row.status)),
    ]
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _metric(value: float | None, best: float | None) -> str:
    if value is None:
        return "&ndash;"
    is_best = value == best and math.isfinite(value)
    return f'<b class="best">{value:.6g} (best)</b>' if is_best else f"{value:.6g}"
