"""The list of jobs: filter, search, sort, compare, cancel."""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fastapi import Response
from nicegui import app, ui

from cloudjob.console.pages.compare import MAX_JOBS
from cloudjob.console.pages.frame import frame
from cloudjob.console.pages.http import json_response
from cloudjob.console.pages.widgets import column, confirm, grid, toggle
from cloudjob.console.results import Results
from cloudjob.console.state import Console
from cloudjob.console.text import displayable
from cloudjob.console.threads import in_thread
from cloudjob.emulator import daemon
from cloudjob.errors import CloudJobError
from cloudjob.model.status import JobState

_ALL = "all"
_STATES = [state.value for state in JobState]


def _column(field: str, header: str, **more: Any) -> dict[str, Any]:
    return column(field, header, tooltipField=field, **more)


# Columns that are shown on request; ``metrics`` stands for one for each metric.
_OPTIONAL = {"values": "Sweep values", "user": "User", "labels": "Labels", "metrics": "Metrics"}
_GROUPS = {"": "no groups", "sweep": "sweep", "state": "state", "name": "name", "user": "user"}
# The most jobs whose results one request returns.
_MAX_RESULTS = 20
# Seconds after which a request returns what it has; the page asks for the others again.
_RESULTS_S = 5.0
_COLUMNS = [
    _column("job", "Job", flex=3, minWidth=190, cellClass="mono", filter="agTextColumnFilter"),
    _column("state", "State", width=130, **{":cellRenderer": "console_ui.state"}),
    _column(
        "sweep",
        "Sweep",
        width=140,
        cellClass="mono",
        filter="agTextColumnFilter",
        **{":cellRenderer": "console_ui.sweep"},
    ),
    *(
        column(name, header, width=150, hide=True, **{":valueGetter": "console_ui.result"})
        for name, header in (("values", "Values"), ("labels", "Labels"))
    ),
    _column("user", "User", width=150, hide=True),
    _column("backend", "Backend", width=115),
    _column("nodes", "Nodes", width=90, type="numericColumn"),
    _column("ranks", "Ranks", width=90, type="numericColumn"),
    _column(
        "created",
        "Age",
        width=95,
        sort="desc",
        **{":valueFormatter": "console_ui.age", ":tooltipValueGetter": "console_ui.date"},
    ),
    _column(
        "started",
        "Duration",
        width=110,
        **{
            ":valueGetter": "console_ui.duration",
            ":valueFormatter": "console_ui.seconds",
            ":tooltipValueGetter": "console_ui.times",
        },
    ),
    _column("exit_code", "Exit", width=75, type="numericColumn"),
    _column("reason", "Reason", flex=4, minWidth=160),
]


def register(console: Console) -> None:
    """Add the page and the endpoint that fills it."""

    @app.get("/api/jobs")
    def jobs(since: int = 0, limit: int | None = None) -> Response:
        changes = console.jobs.changes(since)
        return json_response(changes._replace(rows=changes.rows[:limit]))

    @app.get("/api/results")
    async def results(jobs: str = "", metrics: bool = False) -> Response:
        return json_response(await in_thread(_results, console, jobs, metrics))

    @ui.page("/")
    def page(
        state: str = _ALL, q: str = "", group: str = "", columns: str = "", sort: str = ""
    ) -> None:
        # A field and its direction.
        order = sort if re.fullmatch(r"[a-z_]{1,20}-(asc|desc)", sort) else ""
        visible = [name for name in columns.split(",") if name in _OPTIONAL]
        chosen = state if state in _STATES else _ALL
        choice = _Choice(chosen, group if group in _GROUPS else "", visible, order)
        _JobsPage(console).build(choice, q)


class _Choice(NamedTuple):
    """How the jobs are shown; the address has all of it."""

    state: str
    group: str
    columns: Sequence[str]
    sort: str


class _Results(NamedTuple):
    """The results of some jobs by id."""

    jobs: Mapping[str, Mapping[str, Any]]


def _results(console: Console, jobs: str, metrics: bool) -> _Results:
    results_of = {}
    end_s = time.monotonic() + _RESULTS_S
    for job in jobs.split(",")[:_MAX_RESULTS]:
        if time.monotonic() > end_s:
            break
        results = Results()
        with contextlib.suppress(CloudJobError):
            results = console.results.of(console.job(job), with_metrics=metrics)
        # JSON has no number that is infinite or none.
        values = {
            name: value if math.isfinite(value) else str(value)
            for name, value in results.metrics.items()
        }
        results_of[job] = {**results._asdict(), "metrics": values}
    return _Results(results_of)


class _JobsPage:
    def __init__(self, console: Console) -> None:
        self._console = console

    def build(self, choice: _Choice, text: str) -> None:
        choice_json = json.dumps(choice._asdict())
        with frame("Jobs"):
            with ui.row().classes("toolbar items-center"):
                ui.input(placeholder="Search", value=text).props(
                    'dense outlined clearable debounce=150 aria-label="Search jobs"'
                ).classes("search").on_value_change(lambda e: self._search(e.value or ""))
                toggle([_ALL, *_STATES], choice.state, lambda e: self._filter(e.value))
                self._select(list(_OPTIONAL.items()), choice)
                ui.space()
                if daemon.is_running(self._console.home):
                    ui.link("Emulator", "/emulator")
                self._compare = ui.button("Compare", icon="compare_arrows").props(
                    "flat dense no-caps"
                )
                self._cancel = ui.button("Cancel", icon="cancel").props(
                    "flat dense no-caps color=negative"
                )
                self._compare.on_click(self._open_comparison)
                self._cancel.on_click(self._confirm_cancel)
            ui.html('<div id="list-error" role="alert"></div>', sanitize=False)
            self._grid = grid(
                _COLUMNS,
                **{
                    ":getRowId": "params => params.data.job",
                    "rowSelection": {
                        "mode": "multiRow",
                        "headerCheckbox": False,
                        "enableClickSelection": False,
                    },
                    "selectionColumnDef": {
                        "width": 44,
                        "pinned": "left",
                        "headerName": "Selected",
                        "headerClass": "unseen-header",
                    },
                    "rowHeight": 34,
                    "headerHeight": 36,
                    "tooltipShowDelay": 400,
                    "quickFilterText": text,
                    "cacheQuickFilter": True,
                    "suppressCellFocus": False,
                    "overlayNoRowsTemplate": "No jobs yet: <code>cloudjob submit train.py</code>",
                    ":onGridReady": f"params => console_ui.jobs(params.api, {choice_json})",
                    ":onCellClicked": "console_ui.openJob",
                    ":onCellKeyDown": "console_ui.openJob",
                    ":postSortRows": "console_ui.grouped",
                    ":rowClassRules": "({'group-start': console_ui.startsGroup})",
                    ":isExternalFilterPresent": "console_ui.hasStateFilter",
                    ":doesExternalFilterPass": "console_ui.hasState",
                },
            ).classes("jobs-grid")

    def _select(self, options: Sequence[tuple[str, str]], choice: _Choice) -> None:
        """Show the choices of columns and groups."""
        columns = ui.select(
            dict(options), value=list(choice.columns), multiple=True, label="Columns"
        )
        columns.props("dense outlined options-dense").classes("columns-choice")
        columns.on_value_change(lambda e: self._run("showColumns", e.value))
        groups = ui.select(_GROUPS, value=choice.group, label="Group by")
        groups.props("dense outlined options-dense").classes("columns-choice")
        groups.on_value_change(lambda e: self._run("groupBy", e.value))

    def _run(self, function: str, value: object) -> None:
        ui.run_javascript(f"console_ui.{function}({json.dumps(value)})")

    def _search(self, text: str) -> None:
        self._grid.run_grid_method("setGridOption", "quickFilterText", text)
        ui.run_javascript(f"console_ui.remember('q', {json.dumps(text)})")

    def _filter(self, state: str) -> None:
        self._run("filterState", state)

    async def _selected(self) -> list[str]:
        return [row["job"] for row in await self._grid.get_selected_rows()]

    async def _open_comparison(self) -> None:
        jobs = await self._selected()
        if not 2 <= len(jobs) <= MAX_JOBS:
            ui.notify(f"Select two to {MAX_JOBS} jobs to compare.")
            return
        ui.navigate.to(f"/compare?jobs={','.join(jobs)}")

    async def _confirm_cancel(self) -> None:
        jobs = await self._selected()
        if not jobs:
            ui.notify("Select the jobs to cancel.")
            return
        what = jobs[0] if len(jobs) == 1 else f"{len(jobs)} jobs"
        if not await confirm(f"Cancel {what}?", "Cancel", "Keep running"):
            return
        for job in jobs:
            try:
                await in_thread((await in_thread(self._console.job, job)).cancel)
                ui.notify(f"Asked {job} to end.", type="positive")
            except CloudJobError as error:
                ui.notify(displayable(error.message), type="negative", multi_line=True)
