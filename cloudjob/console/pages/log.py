"""The log of a job, live, with search and a choice of node and rank."""

from __future__ import annotations

import contextlib
import json
from typing import Any, NamedTuple

from fastapi import Response
from nicegui import app, ui

from cloudjob.console.emulated import EmulatedJob
from cloudjob.console.log_table import Page, Selection
from cloudjob.console.pages.http import json_response, parameter
from cloudjob.console.pages.widgets import grid
from cloudjob.console.state import Console
from cloudjob.errors import CloudJobError
from cloudjob.tracking import Job

_ALL = "all"
# From this number of ranks on, users can type into the field for the rank.
_MANY_RANKS = 20
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
        ":cellClassRules": "({'entry-line': p => p.data && p.data.rank === null})",
    },
]


def register(console: Console) -> None:
    """Add the endpoint that returns the lines of the table."""

    @app.get("/api/jobs/{job_id}/log")
    def log(
        job_id: str,
        start: int = 0,
        end: int = 0,
        node: int | None = None,
        rank: int | None = None,
        text: str = "",
    ) -> Response:
        try:
            which = Selection(node, rank, text)
            return json_response(console.log(job_id).page(which, start, end))
        except CloudJobError as error:
            return json_response(Page(error=error.message))

    @app.get("/api/jobs/{job_id}/log/failure")
    def failure(
        job_id: str, node: int | None = None, rank: int | None = None, text: str = ""
    ) -> Response:
        with contextlib.suppress(CloudJobError):
            failed = console.job(job_id).status().failure
            found = (
                console.log(job_id).find(failed, Selection(node, rank, text)) if failed else None
            )
            if found is not None:
                return json_response(_Place(*found))
        return json_response(_Place())


class _Place(NamedTuple):
    """The row and the number of a line; 0 if there is no such line."""

    row: int = 0
    line: int = 0


def build(job: Job | EmulatedJob) -> None:
    """Show the log; ``rank=`` in the address chooses a rank, ``failure=1`` jumps to the failure."""
    _LogView(job).build()


class _LogView:
    def __init__(self, job: Job | EmulatedJob) -> None:
        self._job = job
        self._name = json.dumps(job.id)
        request = ui.context.client.request
        rank = parameter(request, "rank")
        self._jumps = parameter(request, "failure") == "1"
        is_rank = rank.isdecimal() and len(rank) < 10 and int(rank) < job.ranks
        self._selection: dict[str, Any] = {"rank": int(rank)} if is_rank else {}

    def build(self) -> None:
        with ui.row().classes("toolbar items-center"):
            search = ui.input(placeholder="Search the log").classes("search")
            search.props('dense outlined clearable debounce=200 aria-label="Search the log"')
            search.on_value_change(lambda event: self._select("text", event.value))
            self._choice("Node", "node", self._job.nodes)
            if self._job.ranks:
                self._choice("Rank", "rank", self._job.ranks)
            ui.html('<span id="log-state" class="quiet" role="status"></span>', sanitize=False)
            ui.space()
            status = self._job.last_status
            if status is not None and status.failure is not None:
                self._jump("error_outline", "toFailure", "Jump to the failure")
            self._jump("vertical_align_top", "toStart", "First line")
            self._jump("vertical_align_bottom", "toEnd", "Last line")
        begin = f"{self._name}, {json.dumps(self._selection)}, {json.dumps(self._jumps)}"
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
                ":rowClassRules": "({'failure-line': console_ui.isFailure})",
                ":onGridReady": f"p => console_ui.log(p.api, {begin})",
            },
        ).classes("log-grid")

    def _choice(self, label: str, key: str, count: int) -> None:
        choice = ui.select(
            [_ALL, *range(count)],
            value=self._selection.get(key, _ALL),
            label=label,
            with_input=count > _MANY_RANKS,
            on_change=lambda event: self._select(key, event.value),
        )
        choice.props("dense outlined options-dense").classes("choice")

    def _jump(self, icon: str, function: str, text: str) -> None:
        button = ui.button(icon=icon)
        button.on_click(lambda: ui.run_javascript(f"console_ui.{function}({self._name})"))
        button.props(f'flat dense round aria-label="{text}"').tooltip(text)

    def _select(self, key: str, value: object) -> None:
        self._selection.pop(key, None)
        if value not in (None, "", _ALL):
            self._selection[key] = value
        ui.run_javascript(f"console_ui.select({self._name}, {json.dumps(self._selection)})")
