"""The log of a job, live, with search and a choice of node and rank."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple
from urllib.parse import quote

from fastapi import Depends, Response
from fastapi.responses import StreamingResponse
from nicegui import app, ui

from cloudjob.console.emulated import EmulatedJob
from cloudjob.console.log_table import LogTable, Match, Page, Selection
from cloudjob.console.pages.http import json_response, parameter, streamed
from cloudjob.console.pages.live import until_read
from cloudjob.console.pages.widgets import grid
from cloudjob.console.state import Console
from cloudjob.console.text import displayable
from cloudjob.console.threads import in_thread
from cloudjob.errors import CloudJobError
from cloudjob.tracking import Job

_ALL = "all"
# From this number of ranks on, users can type into the field for the rank.
_MANY_RANKS = 20
# The longest search, and the highest number of a line in an address.
_MAX_SEARCH, _MAX_LINE = 1000, 10**9
_COLUMNS: list[dict[str, Any]] = [
    {"field": "line", "width": 74, "cellClass": "line mono"},
    {
        "field": "at",
        "width": 78,
        "cellClass": "line mono",
        ":valueFormatter": "console_ui.clock",
        ":tooltipValueGetter": "console_ui.since",
    },
    {"field": "node", "width": 52, "cellClass": "line mono"},
    {"field": "rank", "width": 58, "cellClass": "rank mono"},
    {
        "field": "text",
        "flex": 1,
        "minWidth": 300,
        "cellClass": "mono",
        ":cellRenderer": "console_ui.lineCell",
        ":cellClassRules": "({'entry-line': p => p.data && p.data.rank === null})",
    },
]


def register(console: Console) -> None:
    """Add the endpoints that return the lines of the table, places in it, and the text."""
    _register_places(console)

    @app.get("/api/jobs/{job_id}/log")
    def log(
        job_id: str, which: Annotated[_Which, Depends(_which)], start: int = 0, end: int = 0
    ) -> Response:
        try:
            return json_response(which.log(console, job_id).page(which.selection, start, end))
        except CloudJobError as error:
            return json_response(Page(error=error.message))

    @app.get("/api/jobs/{job_id}/log.txt")
    async def download(job_id: str, which: Annotated[_Which, Depends(_which)]) -> Response:
        log = await in_thread(which.log, console, job_id)
        await until_read(log)
        pieces = log.texts(which.selection)
        first = await in_thread(next, pieces, b"")
        headers = {
            "Content-Disposition": f"attachment; filename*=UTF-8''{quote(job_id, '')}.log",
            "Cache-Control": "no-store",
        }
        body = streamed(first, pieces)
        return StreamingResponse(body, headers=headers, media_type="text/plain; charset=utf-8")


def _register_places(console: Console) -> None:
    @app.get("/api/jobs/{job_id}/log/failure")
    def failure(job_id: str, which: Annotated[_Which, Depends(_which)]) -> Response:
        with contextlib.suppress(CloudJobError):
            failed = console.job(job_id).status().failure
            place = which.log(console, job_id).find(failed, which.selection) if failed else None
            if place is not None:
                return json_response(_Place(*place))
        return json_response(_Place())

    @app.get("/api/jobs/{job_id}/log/match")
    def match(
        job_id: str,
        which: Annotated[_Which, Depends(_which)],
        line: int = 0,
        forward: bool = True,
    ) -> Response:
        with contextlib.suppress(CloudJobError):
            log = which.log(console, job_id)
            return json_response(log.match(which.selection, line, is_forward=forward))
        return json_response(Match())

    @app.get("/api/jobs/{job_id}/log/line")
    def line_place(job_id: str, which: Annotated[_Which, Depends(_which)], line: int) -> Response:
        with contextlib.suppress(CloudJobError):
            row = which.log(console, job_id).row_of(line, which.selection)
            return json_response(_Place(row, line))
        return json_response(_Place())


class _Which(NamedTuple):
    """Which lines a page shows: those of all attempts or of one, and of these a selection."""

    attempt: int | None
    selection: Selection

    def log(self, console: Console, job_id: str) -> LogTable:
        return console.log(job_id, self.attempt)


def _which(
    attempt: int | None = None,
    node: int | None = None,
    rank: int | None = None,
    text: str = "",
    expression: bool = False,
    others: bool = False,
) -> _Which:
    selection = Selection(node, rank, text, expression, others and bool(text))
    return _Which(attempt, selection)


class _Place(NamedTuple):
    """The row and the number of a line; 0 if there is no such line."""

    row: int = 0
    line: int = 0


def build(job: Job | EmulatedJob) -> None:
    """Show the log.

    The address chooses lines: a search ``q=``, ``expression=1``, ``others=1``, ``node=``,
    ``rank=`` and ``attempt=``; and a line to jump to, ``line=`` or ``failure=1``.
    """
    _LogView(job).build()


class _LogView:
    def __init__(self, job: Job | EmulatedJob) -> None:
        self._job = job
        self._name = json.dumps(job.id)
        request = ui.context.client.request
        self._jumps = parameter(request, "failure") == "1"
        self._line = _number(parameter(request, "line"), _MAX_LINE) or 0
        status = job.last_status
        attempt = status.attempt if status else None
        self._attempts = range(1, attempt.number + 1) if attempt else range(0)
        allowed = {"node": range(job.nodes), "rank": range(job.ranks), "attempt": self._attempts}
        numbers = {key: _number(parameter(request, key), _MAX_LINE) for key in allowed}
        self._selection: dict[str, Any] = {
            key: number for key, number in numbers.items() if number in allowed[key]
        }
        texts = {"text": displayable(parameter(request, "q"))[:_MAX_SEARCH]}
        flags = {key: "1" for key in ("expression", "others") if parameter(request, key) == "1"}
        self._selection.update({key: value for key, value in (texts | flags).items() if value})

    def build(self) -> None:
        with ui.row().classes("toolbar items-center"):
            search = ui.input(placeholder="Search the log", value=self._selection.get("text", ""))
            search.props('dense outlined clearable debounce=200 aria-label="Search the log"')
            search.props(f"maxlength={_MAX_SEARCH}").classes("search")
            search.on_value_change(lambda event: self._select("text", event.value))
            search.on("keydown.enter", js_handler=f"() => console_ui.toMatch({self._name}, true)")
            self._switch("Expression", "expression")
            self._others = self._switch("Other lines", "others")
            self._jump("keyboard_arrow_up", "toMatch", "Previous match", ", false")
            self._jump("keyboard_arrow_down", "toMatch", "Next match", ", true")
            self._choice("Node", "node", range(self._job.nodes))
            if self._job.ranks:
                self._choice("Rank", "rank", range(self._job.ranks))
            if len(self._attempts) > 1:
                self._choice("Attempt", "attempt", self._attempts)
            ui.html('<span id="log-state" class="quiet" role="status"></span>', sanitize=False)
            ui.space()
            status = self._job.last_status
            if status is not None and status.failure is not None:
                self._jump("error_outline", "toFailure", "Jump to the failure")
            self._jump("vertical_align_top", "toStart", "First line")
            self._jump("vertical_align_bottom", "toEnd", "Last line")
            self._jump("download", "saveLog", "Download these lines")
        begin = (
            f"{self._name}, {json.dumps(self._selection)}, {json.dumps(self._jumps)}, {self._line}"
        )
        grid(
            _COLUMNS,
            **{
                "rowModelType": "infinite",
                "cacheBlockSize": 200,
                "maxBlocksInCache": 20,
                "rowHeight": 20,
                "headerHeight": 0,
                "enableCellTextSelection": True,
                "suppressCellFocus": True,
                ":rowClassRules": (
                    "({'failure-line': console_ui.isFailure, 'chosen-line': console_ui.isChosen})"
                ),
                ":onCellClicked": f"event => console_ui.openLine({self._name}, event)",
                ":onGridReady": f"p => console_ui.log(p.api, {begin})",
            },
        ).classes("log-grid")
        ui.html('<pre id="log-line" class="lines" tabindex="0"></pre>', sanitize=False).classes(
            "w-full"
        )
        # A click on a line among matches shows it among its neighbours.
        ui.on("log-context", lambda: self._others.set_value(True))

    def _switch(self, label: str, key: str) -> ui.checkbox:
        box = ui.checkbox(label, value=key in self._selection).props("dense")
        box.on_value_change(lambda event: self._select(key, "1" if event.value else ""))
        return box

    def _choice(self, label: str, key: str, numbers: Sequence[int]) -> None:
        choice = ui.select(
            [_ALL, *numbers],
            value=self._selection.get(key, _ALL),
            label=label,
            with_input=len(numbers) > _MANY_RANKS,
            on_change=lambda event: self._select(key, event.value),
        )
        choice.props("dense outlined options-dense").classes("choice")

    def _jump(self, icon: str, function: str, text: str, more: str = "") -> None:
        button = ui.button(icon=icon)
        button.on_click(lambda: ui.run_javascript(f"console_ui.{function}({self._name}{more})"))
        button.props(f'flat dense round aria-label="{text}"').tooltip(text)

    def _select(self, key: str, value: object) -> None:
        self._selection.pop(key, None)
        if value not in (None, "", _ALL):
            self._selection[key] = value
        ui.run_javascript(f"console_ui.select({self._name}, {json.dumps(self._selection)})")


def _number(text: str, count: int) -> int | None:
    """Return a number below ``count``; None if the text is none."""
    is_number = text.isascii() and text.isdecimal() and len(text) < 10
    return int(text) if is_number and int(text) < count else None
