"""What the ranks of a running job execute, read again on request."""

from __future__ import annotations

from html import escape

from nicegui import ui

from cloudjob.console.facts import clock
from cloudjob.console.pages.frame import heading
from cloudjob.console.text import displayable
from cloudjob.console.threads import in_thread
from cloudjob.errors import CloudJobError
from cloudjob.model.text import counted, short_path
from cloudjob.model.times import rfc3339
from cloudjob.tracking import Job
from cloudjob.tracking.stacks import JobStacks, StackGroup

# A page with more would take seconds to load.
_MAX_GROUPS, _MAX_CALLS = 40, 60


async def build(job: Job) -> None:
    """Show the stacks, and a button that reads them again."""
    await _Stacks(job).read()


class _Stacks:
    def __init__(self, job: Job) -> None:
        self._job = job
        with ui.row().classes("items-center gap-3"):
            self._again = ui.button("Read again", icon="refresh", on_click=self.read)
            self._again.props("outline dense no-caps").classes("px-2")
            self._threads = ui.checkbox("all threads", on_change=self.read).props("dense")
            self._native = ui.checkbox("native calls", on_change=self.read).props("dense")
            self._native.tooltip(
                "Calls of C and C++ code, approximately; stops running threads for a moment"
            )
            self._note = ui.label().classes("quiet")
        self._groups = ui.column().classes("w-full gap-3")

    async def read(self) -> None:
        """Read the stacks, and show them; the ranks do not notice it."""
        self._again.disable()
        if self._job.is_asked_through_store:
            self._note.text = "Asking through the store of the job, which takes 10 to 30 seconds …"
        try:
            answer = await in_thread(
                self._job.stacks,
                with_threads=self._threads.value,
                with_native=self._native.value,
            )
        except CloudJobError as error:
            self._groups.clear()
            self._note.text = displayable(error.message)
        else:
            self._show(answer)
        self._again.enable()

    def _show(self, answer: JobStacks) -> None:
        silent = "".join(f" · node {node} did not answer" for node in answer.silent)
        self._note.text = f"{clock(rfc3339(answer.at))}{silent}"
        self._groups.clear()
        with self._groups:
            if answer.conclusion:
                heading(answer.conclusion)
            for group in answer.groups[:_MAX_GROUPS]:
                _group(group)
            more = len(answer.groups) - _MAX_GROUPS
            if more > 0:
                ui.label(counted(more, "more stack")).classes("quiet")
            if not answer.groups:
                ui.label("No rank runs yet.").classes("quiet")


def _group(group: StackGroup) -> None:
    with ui.card().classes("panel"):
        with ui.row().classes("items-baseline gap-2"):
            heading(displayable(group.who))
            ui.label(group.does).classes("quiet")
        if group.problem and not group.native:
            ui.label(f"No Python stack: {displayable(group.problem)}").classes("quiet")
        if group.native:
            body = "".join(
                f"<tr>{_cell(call.function or '?')}{_cell(call.library)}</tr>"
                for call in group.native[:_MAX_CALLS]
            )
            table = ui.html(f'<table class="plain calls">{body}</table>', sanitize=False)
            table.classes("w-full overflow-auto")
        if group.frames:
            body = "".join(
                f"<tr>{_cell(f'{frame.function}()')}"
                f"{_cell(f'{short_path(frame.file)}:{frame.line}')}{_cell(frame.source)}</tr>"
                for frame in group.frames[:_MAX_CALLS]
            )
            table = ui.html(f'<table class="plain calls">{body}</table>', sanitize=False)
            table.classes("w-full overflow-auto")


def _cell(text: str) -> str:
    return f'<td class="mono">{escape(displayable(text))}</td>'
