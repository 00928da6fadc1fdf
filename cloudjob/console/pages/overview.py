"""The overview of a job: why it failed, the timeline of each node, and its facts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape

from nicegui import ui

from cloudjob.console import charts
from cloudjob.console.markdown import failure_text
from cloudjob.console.pages.frame import heading
from cloudjob.console.pages.live import ChartPanel
from cloudjob.console.text import displayable
from cloudjob.model.status import Failure, JobStatus, Phase
from cloudjob.tracking import Job


class Overview:
    """The overview of a job; creating it builds it on the page."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._shown: JobStatus | None = None
        self._verdict_container = ui.column().classes("w-full")
        # For what a running job does.
        self.top = ui.column().classes("w-full")
        self._timeline_container = ui.column().classes("w-full")
        self._facts_container = ui.column().classes("w-full")
        self._timeline: ChartPanel | None = None

    def update(
        self,
        status: JobStatus,
        phases: Sequence[Phase],
        hint: str,
        facts: Sequence[tuple[str, str]],
    ) -> None:
        """Show the current state of the job.

        Args:
            facts: Names and texts.
            hint: What this machine knows about its failure; empty if nothing.
        """
        chart = charts.timeline(status, phases, time.time())
        if chart and self._timeline:
            self._timeline.update(chart)
        elif chart:
            with self._timeline_container:
                self._timeline = ChartPanel(chart, is_text=True)
        if status == self._shown:
            return
        self._shown = status
        self._verdict_container.clear()
        self._facts_container.clear()
        if status.failure is not None:
            with self._verdict_container:
                _verdict(self._job, status, status.failure, hint)
        with self._facts_container, ui.card().classes("panel"):
            heading("Job")
            with ui.element("div").classes("facts"):
                for name, value in facts:
                    with ui.column().classes("gap-0"):
                        ui.label(name).classes("fact-name")
                        ui.label(value).classes("fact-value")


def _verdict(job: Job, status: JobStatus, failure: Failure, hint: str) -> None:
    with ui.card().classes("panel verdict"):
        parts = (
            f"node {failure.node}" if failure.node is not None else "",
            failure.host,
            f"rank {failure.rank}" if failure.rank is not None else "",
            f"exit code {failure.exit_code}" if failure.exit_code is not None else "",
        )
        ui.label(displayable(" · ".join(filter(None, parts)))).classes("verdict-place")
        ui.label(displayable(failure.message or "failed")).classes("verdict-message")
        if hint:
            ui.label(displayable(f"Hint: {hint}"))
        _lines("Stacks", failure.stack_lines)
        _lines("Last lines", failure.last_lines)
        with ui.row().classes("items-center"):
            ui.link("Show it in the log", f"/job/{job.id}/log?failure=1")
            if failure.rank is not None:
                ui.link(f"Log of rank {failure.rank}", f"/job/{job.id}/log?rank={failure.rank}")
            copy = ui.button("Copy as Markdown", icon="content_copy")
            copy.on_click(lambda: ui.clipboard.write(failure_text(status, hint)))
            copy.props("flat dense no-caps size=md")


def _lines(title: str, lines: Sequence[str]) -> None:
    if not lines:
        return
    ui.label(title).classes("fact-name")
    text = escape(displayable("\n".join(lines)))
    ui.html(f'<pre class="lines" tabindex="0">{text}</pre>', sanitize=False).classes("w-full")
