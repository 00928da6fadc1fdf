"""Why a job failed, when what happened on each node, and its facts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape

from nicegui import ui

from cloudjob.console import charts
from cloudjob.console.facts import facts
from cloudjob.console.pages import words
from cloudjob.model.status import Failure, JobStatus, Phase
from cloudjob.tracking import Job


def build(job: Job, status: JobStatus, phases: Sequence[Phase]) -> None:
    """Show the job as it is now."""
    if status.failure is not None:
        _verdict(job, status.failure)
    option = charts.timeline(status, phases, time.time())
    if option is not None:
        with ui.card().classes("panel"):
            ui.label("Timeline").classes("panel-title")
            chart = ui.echart(option, renderer="svg")
            chart.style(f"width: 100%; height: {charts.height_px(option)}px")
    with ui.card().classes("panel"):
        ui.label("Job").classes("panel-title")
        with ui.element("div").classes("facts"):
            for name, value in facts(status, job):
                with ui.column().classes("gap-0"):
                    ui.label(name).classes("fact-name")
                    ui.label(value).classes("fact-value")


def _verdict(job: Job, failure: Failure) -> None:
    with ui.card().classes("panel verdict"):
        place = (
            f"node {failure.node}" if failure.node is not None else "",
            failure.host or "",
            f"rank {failure.rank}" if failure.rank is not None else "",
            f"exit code {failure.exit_code}" if failure.exit_code is not None else "",
        )
        ui.label(words.text(" · ".join(filter(None, place)))).classes("verdict-place")
        ui.label(words.text(failure.message or "failed")).classes("verdict-message")
        if failure.last_lines:
            ui.label("Last lines").classes("fact-name")
            text = escape(words.text("\n".join(failure.last_lines)))
            lines = ui.html(f'<pre class="lines" tabindex="0">{text}</pre>', sanitize=False)
            lines.classes("w-full")
        if failure.rank is not None:
            ui.link(f"Log of rank {failure.rank}", f"/job/{job.id}/log?rank={failure.rank}")
