"""One job: its head, and the tabs below it, each a module of its own."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from enum import Enum
from typing import Any

from nicegui import ui

from cloudjob import api
from cloudjob.console.facts import facts
from cloudjob.console.pages import log, metrics, outputs, ranks, resources, stacks, submitted
from cloudjob.console.pages.frame import badge, frame, heading, page
from cloudjob.console.pages.now import NowPanel
from cloudjob.console.pages.overview import Overview
from cloudjob.console.pages.widgets import confirm
from cloudjob.console.state import Console
from cloudjob.console.text import displayable
from cloudjob.console.threads import in_thread
from cloudjob.errors import CloudJobError
from cloudjob.model.status import Hang, JobState, JobStatus, Phase, SlowRanks
from cloudjob.model.summary import age, cut_logs, duration, reason
from cloudjob.model.text import counted
from cloudjob.submission import failure_hint
from cloudjob.tracking import Job

_REFRESH_S = 2.0
_VIEWS = ("overview", "metrics", "ranks", "stacks", "resources", "log", "outputs", "submitted")
# The views of jobs that have not ended.
_LIVE_VIEWS = ("stacks",)
# The colours of buttons, by whether what they do cannot be undone.
_COLOUR = {False: "primary", True: "negative"}
# Seconds to wait for the user's answer to the browser's question.
_PERMISSION_S = 60.0


class _Notification(Enum):
    """Whether the browser will notify the user: the text and the icon of the button, and why."""

    OFF = ("Notify me", "notifications", "")
    ON = (
        "Will notify you",
        "notifications_active",
        "The browser will tell you when the job has ended, while this page is open.",
    )
    BLOCKED = (
        "Notifications are blocked",
        "notifications_off",
        "The browser does not allow this page to show notifications.",
    )


def register(console: Console) -> None:
    """Add the page, and the endpoints of the log and of outputs."""
    log.register(console)
    outputs.register(console)

    @page("/job/{job_id}")
    @page("/job/{job_id}/{view}")
    async def job_page(job_id: str, view: str = _VIEWS[0]) -> None:
        job = await in_thread(console.job, job_id)
        await _JobPage(console, job).build(view if view in _VIEWS else _VIEWS[0])


class _JobPage:
    def __init__(self, console: Console, job: Job) -> None:
        self._job = job
        self._console = console
        self._status: JobStatus = job.unknown("…")
        self._is_read = False
        self._error = ""
        self._hint = ""
        self._notification = _Notification.OFF
        self._phases: Sequence[Phase] = ()
        self._facts: Sequence[tuple[str, str]] = ()
        self._hang: Hang | None = None
        self._slow: SlowRanks | None = None
        self._tabs: dict[str, ui.tab] = {}
        self._panels: dict[str, ui.column] = {}
        self._overview: Overview | None = None
        self._fills: dict[str, Callable[[], Awaitable[None] | None]] = {
            "overview": self._build_overview,
            "metrics": lambda: metrics.build(console, job),
            "ranks": lambda: ranks.build(console, job),
            "stacks": lambda: stacks.build(job),
            "resources": lambda: resources.build(console, job),
            "log": lambda: log.build(job),
            "outputs": lambda: outputs.build(job),
            "submitted": lambda: submitted.build(job),
        }

    async def build(self, view: str) -> None:
        if self._job.has_final_status:
            await self._poll()
        views = [v for v in _VIEWS if not (self._job.has_final_status and v in _LIVE_VIEWS)]
        view = view if view in views else views[0]
        with frame(self._job.id, self._job.id):
            self._head()
            tabs = ui.tabs().props("dense no-caps align=left outside-arrows").classes("views")
            with tabs:
                for name in views:
                    self._tabs[name] = ui.tab(name, label=name.capitalize())
            tabs.set_value(view)
            for name in views:
                self._panels[name] = ui.column().classes("w-full gap-3")
            tabs.on_value_change(self._change)
            if self._job.has_final_status and view == views[0]:
                # All of it is known: the first response shows it.
                await self._show(view)
            # A platform may take longer to answer than NiceGUI waits for a page.
            await ui.context.client.connected()
            if not self._job.has_final_status:
                await self._poll()
                self._refresh_head()
            # The user may have chosen another view by now.
            await self._show(str(tabs.value))
        if not self._status.state.is_final:
            timer = ui.timer(_REFRESH_S, lambda: self._refresh(timer))

    async def _change(self, event: Any) -> None:
        ui.navigate.history.replace(f"/job/{self._job.id}/{event.value}")
        await self._show(event.value)

    async def _show(self, view: str) -> None:
        for name, panel in self._panels.items():
            panel.set_visibility(name == view)
        fill = self._fills.pop(view, None)
        if fill is not None:
            with self._panels[view]:
                filling = fill()
                if filling is not None:
                    await filling

    async def _poll(self) -> None:
        try:
            self._status = await in_thread(self._job.status)
            self._phases, self._hang, self._slow = self._status.phases, self._status.hang, None
            if not self._status.state.is_final:
                journals = await in_thread(self._console.journals, self._job)
                self._phases, self._hang = journals.phases, journals.hang_at(time.time())
                self._slow = journals.slow_at(time.time())
            # Searches the source if the failure names a missing file.
            self._hint = await in_thread(failure_hint.of_job, self._job, self._status)
            self._error = ""
        except CloudJobError as error:
            self._error = error.message
        self._facts = await in_thread(facts, self._status, self._job)
        self._is_read = True

    async def _refresh(self, timer: ui.timer) -> None:
        before = (self._status, self._error)
        await self._poll()
        if (self._status, self._error) != before or self._status.state is JobState.RUNNING:
            self._refresh_head()
            if self._overview:
                self._overview.update(self._status, self._phases, self._hint, self._facts)
        if self._status.state.is_final:
            timer.deactivate()
            if self._notification is _Notification.ON:
                self._notify()

    async def _build_overview(self) -> None:
        self._overview = Overview(self._job)
        self._overview.update(self._status, self._phases, self._hint, self._facts)
        # A job of an earlier version has no description.
        with contextlib.suppress(CloudJobError):
            submitted.description(await in_thread(self._job.spec))
        if not self._status.is_over:
            with self._overview.top:
                await NowPanel(self._console, self._job).start()

    def _head(self) -> None:
        with ui.row().classes("w-full items-center gap-3"):
            self._title()
            ui.space()
            self._buttons()
        self._notices()

    def _refresh_head(self) -> None:
        self._title.refresh()
        self._notices.refresh()
        if self._status.state.is_final:
            self._buttons.refresh()
            for name in set(_LIVE_VIEWS) & set(self._tabs):
                self._tabs[name].set_visibility(False)

    @ui.refreshable_method
    def _title(self) -> None:
        status = self._status
        heading(displayable(status.name)).classes("job-title", remove="panel-title")
        if self._is_read:
            badge(status.state.value)
            # The state of one of many open tabs is seen in its icon.
            show = f"console_ui.showState({json.dumps(status.state.value)})"
            ui.context.client.run_javascript(show)
        ui.label(" · ".join(filter(None, _when(status)))).classes("quiet")

    @ui.refreshable_method
    def _notices(self) -> None:
        if self._error:
            ui.label(displayable(self._error)).classes("text-negative")
        if self._hang is not None:
            _hang_band(self._hang, self._job, has_ended=self._status.state.is_final)
        elif self._slow is not None:
            with ui.card().classes("panel"):
                heading("Slow")
                ui.label(displayable(self._slow.message))
                ui.link("What each rank does over time", f"/job/{self._job.id}/ranks")
        if texts := cut_logs(self._status):
            with ui.card().classes("panel verdict"):
                heading("The log is incomplete")
                for text in texts:
                    ui.label(displayable(text))

    @ui.refreshable_method
    def _buttons(self) -> None:
        """Show the buttons; they stay while the job runs, and with them the focus."""
        copy = ui.button("Copy id", icon="content_copy", on_click=self._copy)
        copy.props("flat dense no-caps size=md")
        for text, icon, act, is_dangerous in self._actions():
            button = ui.button(text, icon=icon, on_click=act)
            button.props(f"flat dense no-caps size=md color={_COLOUR[is_dangerous]}")

    def _actions(self) -> list[tuple[str, str, Callable[[], Any], bool]]:
        """Return the buttons: text, icon, what it does, and whether that cannot be undone."""
        actions = _Actions(self._job)
        again = ("Submit again", "replay", actions.submit, False)
        if self._status.state.is_final:
            return [again, ("Remove", "delete", actions.remove, True)]
        text, icon, _ = self._notification.value
        notify = (text, icon, self._switch_notification, False)
        return [notify, again, ("Cancel", "cancel", actions.cancel, True)]

    async def _switch_notification(self) -> None:
        """Ask the browser for its permission to say when the job has ended, or stop doing so."""
        # The button is replaced below.
        with ui.context.client:
            if self._notification is _Notification.ON:
                self._notification = _Notification.OFF
            else:
                script = "return console_ui.mayNotify()"
                is_allowed = await ui.run_javascript(script, timeout=_PERMISSION_S)
                self._notification = _Notification.ON if is_allowed else _Notification.BLOCKED
                ui.notify(self._notification.value[2])
            self._buttons.refresh()

    def _notify(self) -> None:
        status = self._status
        texts = (f"{displayable(status.name)}: {status.state.value}", displayable(reason(status)))
        words = ", ".join(map(json.dumps, texts))
        ui.context.client.run_javascript(f"console_ui.notifyUser({words})")

    def _copy(self) -> None:
        ui.clipboard.write(self._job.id)
        ui.notify("Copied the job's id.")


class _Actions:
    """What the buttons of a job's page do.

    The head with the buttons is replaced every two seconds, so the dialogs belong to the page.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    async def cancel(self) -> None:
        job = self._job
        with ui.context.client, _errors_shown():
            if await confirm(f"Cancel {job.id}?", "Cancel the job", "Keep it running"):
                await in_thread(job.cancel)
                ui.notify(f"Asked {job.id} to end.", type="positive")

    async def submit(self) -> None:
        with ui.context.client, _errors_shown():
            question = f"Submit {self._job.id} again, from the source folder as it is now?"
            if await confirm(question, "Submit", "Not now", is_dangerous=False):
                ui.notify("Submitting …")
                new = await in_thread(self._submit)
                ui.navigate.to(f"/job/{new.id}")

    def _submit(self) -> Job:
        # A copy takes no configuration files, and of a job of others only what can do no harm.
        return api.submit(api.job_spec(copy_of=self._job))

    async def remove(self) -> None:
        job = self._job
        with ui.context.client, _errors_shown():
            await in_thread(job.need_ended, "removing")
            await in_thread(job.need_here, "removing")
            count = len(await in_thread(job.outputs, is_own=True))
            files = f" and its {counted(count, 'output file')}" if count else ""
            if await confirm(f"Remove {job.id}{files}?", "Remove", "Keep it"):
                await in_thread(job.remove)
                ui.navigate.to("/")


@contextlib.contextmanager
def _errors_shown() -> Iterator[None]:
    try:
        yield
    except CloudJobError as error:
        text = f"{error.message}\n{error.hint}" if error.hint else error.message
        ui.notify(displayable(text), type="negative", multi_line=True)


def _when(status: JobStatus) -> tuple[str, ...]:
    """Return how long the job has run, when it was submitted, and which attempt this is."""
    attempt = status.attempt
    number = f"attempt {attempt.number} of {attempt.most}" if attempt else ""
    return duration(status), f"submitted {age(status)} ago", number


def _hang_band(hang: Hang, job: Job, *, has_ended: bool) -> None:
    """Show which ranks of a job do not move, and a link to what all of them do."""
    with ui.card().classes("panel verdict"):
        ui.label("Hung when it ended" if has_ended else "Hangs").classes("verdict-place")
        ui.label(displayable(hang.message)).classes("verdict-message")
        for line in hang.details:
            ui.label(displayable(line)).classes("quiet")
        if not has_ended:
            ui.link("Stacks of all ranks", f"/job/{job.id}/stacks")
