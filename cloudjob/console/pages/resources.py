"""What the nodes and ranks of a job used, over time."""

from __future__ import annotations

from nicegui import ui

from cloudjob import times
from cloudjob.console import charts
from cloudjob.console.pages.live import Live
from cloudjob.console.state import Console
from cloudjob.console.threads import in_thread
from cloudjob.tracking import Job


async def build(console: Console, job: Job) -> None:
    """Show the charts, and keep them up to date while the job runs."""
    await _Resources(console, job).start()


class _Resources(Live):
    def __init__(self, console: Console, job: Job) -> None:
        super().__init__(job)
        self._console = console

    async def draw(self) -> None:
        journals = await in_thread(self._console.journals, self.job)
        status = self.job.last_status
        zero_s = times.seconds_of(status.created_at) if status else 0.0
        found = await in_thread(charts.resources, journals, zero_s)
        if not found:
            ui.label("The nodes have not recorded what they use yet.").classes("quiet")
            return
        with ui.element("div").classes("charts"):
            for title, option in found:
                with ui.card().classes("panel"):
                    ui.label(title).classes("panel-title")
                    ui.echart(option).style("width: 100%; height: 220px")
