"""The list of jobs: filter, search, sort, compare, cancel."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Response
from nicegui import app, ui

from cloudjob.console.pages.compare import MAX_JOBS
from cloudjob.console.pages.frame import frame
from cloudjob.console.pages.http import json_response
from cloudjob.console.pages.widgets import column, confirm, grid, toggle
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


_COLUMNS = [
    _column("job", "Job", flex=3, minWidth=150, cellClass="mono", filter="agTextColumnFilter"),
    _column("state", "State", width=130, **{":cellRenderer": "console_ui.state"}),
    _column("sweep", "Sweep", width=140, cellClass="mono", filter="agTextColumnFilter"),
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
        found = console.jobs.changes(since)
        return json_response(found._replace(rows=found.rows[:limit]))

    @ui.page("/")
    def page(state: str = _ALL, q: str = "") -> None:
        _JobsPage(console).build(state, q)


class _JobsPage:
    def __init__(self, console: Console) -> None:
        self._console = console

    def build(self, state: str, text: str) -> None:
        chosen = state if state in _STATES else _ALL
        with frame("Jobs"):
            with ui.row().classes("toolbar items-center"):
                ui.input(placeholder="Search", value=text).props(
                    'dense outlined clearable debounce=150 aria-label="Search jobs"'
                ).classes("search").on_value_change(lambda e: self._search(e.value or ""))
                toggle([_ALL, *_STATES], chosen, lambda e: self._filter(e.value))
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
                    "suppressCellFocus": False,
                    "overlayNoRowsTemplate": "No jobs yet: <code>cloudjob submit train.py</code>",
                    ":onGridReady": f"params => console_ui.jobs(params.api, {json.dumps(chosen)})",
                    ":onCellClicked": "console_ui.openJob",
                    ":onCellKeyDown": "console_ui.openJob",
                    ":isExternalFilterPresent": "console_ui.hasStateFilter",
                    ":doesExternalFilterPass": "console_ui.hasState",
                },
            ).classes("jobs-grid")

    def _search(self, text: str) -> None:
        self._grid.run_grid_method("setGridOption", "quickFilterText", text)
        ui.run_javascript(f"console_ui.remember('q', {json.dumps(text)})")

    def _filter(self, state: str) -> None:
        ui.run_javascript(f"console_ui.filterState({json.dumps(state)})")

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
