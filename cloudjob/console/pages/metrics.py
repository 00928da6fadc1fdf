"""The curves of the training's metrics."""

from __future__ import annotations

import asyncio
import shlex
import time

from nicegui import ui

from cloudjob.console import charts
from cloudjob.console.log_table import LogTable, Selection
from cloudjob.console.pages.live import ChartView, ViewChoice
from cloudjob.console.pages.widgets import show_command, text_table
from cloudjob.console.state import Console
from cloudjob.console.text import displayable
from cloudjob.console.threads import in_thread
from cloudjob.errors import CloudJobError
from cloudjob.model.text import counted
from cloudjob.tracking import Job

_MAX_PATTERN = 1000
# The most seconds to wait for a log that is being read, and between two looks.
_READ_S, _POLL_S = 10.0, 0.1


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
            await _has_lines(log)
            found = await in_thread(log.try_pattern, pattern)
        except CloudJobError as error:
            self._result.clear()
            with self._result:
                ui.label(displayable(error.message)).classes("text-negative")
            return
        self._result.clear()
        with self._result:
            searched = counted(found.searched, "line")
            ui.label(f"{counted(found.values, 'value')} in the last {searched}").classes("quiet")
            if found.examples:
                rows = [(f"{value:g}", text) for text, value in found.examples]
                text_table("Last values", rows)
                metric = shlex.quote(f"NAME={pattern}")
                show_command("All values:", f"cloudjob metrics {self._job.id} --metric {metric}")


async def _has_lines(log: LogTable) -> None:
    """Wait until the log of a job was read, at most some seconds; that of a running one to now."""
    end_s = time.monotonic() + _READ_S
    while time.monotonic() < end_s:
        page = await in_thread(log.page, Selection(), 0, 0)
        if page.is_complete or page.error or (page.is_live and page.total):
            return
        await asyncio.sleep(_POLL_S)
