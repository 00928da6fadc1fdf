"""What a running job does: its progress, its loss, its resources and the last lines of its log."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from html import escape

from nicegui import ui

from cloudjob.console.now import Now, now, spark
from cloudjob.console.pages.frame import heading
from cloudjob.console.pages.live import Live, until_read
from cloudjob.console.state import Console
from cloudjob.console.threads import in_thread
from cloudjob.errors import BackendError
from cloudjob.model import summary
from cloudjob.model.status import JobState, JobStatus
from cloudjob.tracking import Job

_LINES = 8
# Seconds between two requests for what a job waits for.
_STATUS_S = 10.0


class NowPanel(Live):
    """The panel; it disappears when the job has ended."""

    def __init__(self, console: Console, job: Job) -> None:
        super().__init__(job)
        self._console = console
        self._wait, self._next_status_s = "", 0.0
        self._shown: Now | None = None
        # The names of the facts, and the labels with their texts.
        self._facts: Sequence[str] = ()
        self._values: list[ui.label] = []

    async def draw(self) -> str:
        """Show the current values; texts are replaced in place."""
        status = self.job.last_status
        if status is None or status.is_over:
            self.container.clear()
            return ""
        if self._shown is None and status.state is JobState.RUNNING:
            # The first steps of a long training are not what it does now.
            await until_read(await in_thread(self._console.log, self.job.id))
        current = await in_thread(self._read, status)
        if self._shown is None:
            self._build()
        if current != self._shown:
            self._update(current)
        self._shown = current
        return ""

    def _read(self, status: JobStatus) -> Now:
        log = self._console.log(self.job.id)
        # The table starts to read the log.
        rows = log.end(_LINES)
        if status.wait is None:
            self._wait = ""
        elif time.monotonic() >= self._next_status_s:
            self._next_status_s = time.monotonic() + _STATUS_S
            # More than a list tells; that reports a platform that does not answer.
            with suppress(BackendError):
                self._wait = summary.wait(self.job.status())
        return now(
            log.journals,
            log.progress(),
            log.main_curve(),
            rows,
            wait=self._wait,
            has_shared_memory=status.backend == "process",
        )

    def _build(self) -> None:
        with self.container, ui.card().classes("panel"):
            with ui.row().classes("w-full items-center gap-3"):
                heading("Now")
                self._share = ui.label().classes("quiet")
            self._bar = ui.linear_progress(0, show_value=False, size="6px")
            self._bar.props('rounded aria-label="Progress"')
            self._grid = ui.element("div").classes("facts")
            self._spark = ui.html("", sanitize=False).classes("w-full")
            self._lines = ui.html("", sanitize=False).classes("w-full")
            ui.link("All lines", f"/job/{self.job.id}/log")

    def _update(self, current: Now) -> None:
        self._bar.set_visibility(current.share is not None)
        self._bar.set_value(current.share or 0.0)
        self._share.set_text("" if current.share is None else f"{100 * current.share:.0f} %")
        names = [name for name, _ in current.facts]
        if names != self._facts:
            self._rebuild_facts(names)
        for value, (_, text) in zip(self._values, current.facts, strict=True):
            value.set_text(text)
        self._spark.set_content(spark(current.spark) if current.spark else "")
        self._spark.set_visibility(bool(current.spark))
        text = escape("\n".join(current.lines)) or "No line yet."
        self._lines.set_content(f'<pre class="lines last-lines" tabindex="0">{text}</pre>')

    def _rebuild_facts(self, names: Sequence[str]) -> None:
        self._facts = names
        self._grid.clear()
        self._values = []
        with self._grid:
            for name in names:
                with ui.column().classes("gap-0"):
                    ui.label(name).classes("fact-name")
                    self._values.append(ui.label().classes("fact-value"))
