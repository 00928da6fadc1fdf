"""The curves of the training's metrics."""

from __future__ import annotations

from nicegui import ui

from cloudjob.console import charts
from cloudjob.console.pages.live import ChartView, ViewChoice
from cloudjob.console.pages.widgets import show_command
from cloudjob.console.state import Console
from cloudjob.console.threads import in_thread
from cloudjob.tracking import Job


async def build(console: Console, job: Job) -> None:
    """Show a chart for each metric, and keep them up to date while the job runs."""

    async def find() -> list[charts.Chart]:
        points = await in_thread(console.metrics, job)
        hint.set_visibility(not points)
        return await in_thread(charts.curves, points, job.last_status, choice.view)

    with ui.column() as hint:
        show_command(
            "Find metrics in what ranks print:",
            f"cloudjob metrics {job.id} --metric 'loss=loss ([0-9.]+)'",
        )
    hint.set_visibility(False)
    choice = ViewChoice(has_steps=True)
    missing = "No metrics were found in the log or the outputs"
    await ChartView(job, find, missing, choice).start()
