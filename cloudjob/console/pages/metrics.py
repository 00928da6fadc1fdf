"""The curves of the training's metrics."""

from __future__ import annotations

from nicegui import ui

from cloudjob.console import charts
from cloudjob.console.pages import words
from cloudjob.console.pages.command import show_command
from cloudjob.console.pages.live import Live
from cloudjob.console.threads import in_thread
from cloudjob.tracking import Job


async def build(job: Job) -> None:
    """Show a chart for each metric, and keep them up to date while the job runs."""
    await _Metrics(job).start()


class _Metrics(Live):
    async def draw(self) -> None:
        found = charts.curves(await in_thread(self.job.training_metrics))
        if not found:
            ui.label("No metrics were found in the log or the outputs.").classes("quiet")
            show_command(
                "Find some in what ranks print:",
                f"cloudjob metrics {self.job.id} --metric 'loss=loss ([0-9.]+)'",
            )
            return
        with ui.element("div").classes("charts"):
            for name, option in found:
                with ui.card().classes("panel"):
                    ui.label(words.text(name)).classes("panel-title")
                    ui.echart(option).style("width: 100%; height: 240px")
