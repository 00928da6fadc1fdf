"""The curves of the training's metrics."""

from __future__ import annotations

import shlex

from nicegui import ui

from cloudjob.console import charts
from cloudjob.console.pages.live import ChartView, ViewChoice, until_read
from cloudjob.console.pages.widgets import show_command, text_table
from cloudjob.console.state import Console
from cloudjob.console.text import displayable
from cloudjob.console.threads import in_thread
from cloudjob.errors import CloudJobError
from cloudjob.model.text import counted
from cloudjob.tracking import Job

_MAX_PATTERN = 1000


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
    _Trial(console, job)
    choice = ViewChoice(has_steps=True)
    missing = "No metrics were found in the log or the outputs"
    await ChartView(job, find, missing, choice).start()


class _Trial:
    """A field to try the pattern of a metric on the log."""

    def __init__(self, console: Console, job: Job) -> None:
        self._console = console
        self._job = job
        with ui.expansion("Try a pattern").props("dense").classes("w-full"):
            with ui.row().classes("w-full items-center gap-2"):
                self._field = ui.input(placeholder="loss ([0-9.]+)").classes("pattern mono")
                self._field.props(
                    f'dense outlined maxlength={_MAX_PATTERN} aria-label="Pattern of a metric"'
                )
                self._field.on("keydown.enter", self._try)
                button = ui.button("Try", on_click=self._try)
                button.props("outline dense no-caps").classes("px-2")
            self._result = ui.column().classes("w-full gap-1").props("role=status")

    async def _try(self) -> None:
        pattern = str(self._field.value or "")
        if not pattern:
            return
        try:
            log = await in_thread(self._console.log, self._job.id)
            await until_read(log)
            trial = await in_thread(log.try_pattern, pattern)
        except CloudJobError as error:
            self._result.clear()
            with self._result:
                ui.label(displayable(error.message)).classes("text-negative")
            return
        self._result.clear()
        with self._result:
            searched = counted(trial.searched, "line")
            ui.label(f"{counted(trial.values, 'value')} in the last {searched}").classes("quiet")
            if trial.examples:
                rows = [(f"{value:g}", text) for text, value in trial.examples]
                text_table("Last values", rows)
                metric = shlex.quote(f"NAME={pattern}")
                show_command("All values:", f"cloudjob metrics {self._job.id} --metric {metric}")
