"""The curves of the training's metrics."""

from __future__ import annotations

from nicegui import ui

from cloudjob.console import charts
from cloudjob.console.pages.live import ChartView
from cloudjob.console.pages.widgets import show_command
from cloudjob.console.state import Console
from cloudjob.console.threads import in_thread
from cloudjob.tracking import Job


async def build(console: Console, job: Job) -> None:
    """Show a chart for each metric, and keep them up to date while the job runs."""

    async def find() -> list[charts.Chart]:
        found = charts.curves(await in_thread(console.metrics, job))
        hint.set_visibility(not found)
        return found

    with ui.column() as hint:
        show_command(
            "Find metrics in what ranks print:",
            f"cloudjob metrics {job.id} --metric 'loss=loss ([0-9.]+)'",
        )
    hint.set_visibility(False)
    await ChartView(job, find, "No metrics were found in the log or the outputs").start()
