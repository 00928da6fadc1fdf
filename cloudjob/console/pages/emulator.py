"""The jobs of the emulator on this machine, including those that other clients created."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nicegui import ui

from cloudjob.console.emulated import EmulatedJob
from cloudjob.console.pages import log
from cloudjob.console.pages.frame import frame, page
from cloudjob.console.pages.widgets import NAME, column, grid
from cloudjob.console.state import Console
from cloudjob.console.text import displayable
from cloudjob.console.threads import in_thread
from cloudjob.emulator import daemon
from cloudjob.errors import CloudJobError
from cloudjob.home import records_path
from cloudjob.home.records import Records
from cloudjob.model.summary import span
from cloudjob.model.text import counted

_REFRESH_S = 3.0
_COLUMNS = (
    {**NAME, "headerName": "Job", ":cellRenderer": "console_ui.file"},
    column(
        "phase",
        "Phase",
        width=130,
        cellClassRules={"state-FAILED": "['Failed', 'Abnormal'].includes(x)"},
    ),
    column("nodes", "Nodes", width=90, type="numericColumn"),
    column("user", "User", width=130),
    column("created", "Created", width=190, **{":valueFormatter": "console_ui.date"}),
    column("duration", "Duration", width=120),
)


def register(console: Console) -> None:
    """Add the page."""

    @page("/emulator")
    async def list_page() -> None:
        with frame("Emulator", "Emulator"):
            note = ui.label("…").classes("quiet")
            table = grid(
                _COLUMNS,
                **{
                    "rowData": [],
                    ":getRowId": "params => params.data.id",
                    "rowHeight": 34,
                    "overlayNoRowsTemplate": "There are no jobs to show.",
                    ":onGridReady": "params => console_ui.narrowEmulator(params.api)",
                },
            ).classes("jobs-grid outputs-grid")

        async def refresh() -> None:
            try:
                total, rows = await in_thread(_rows, console.home)
            except CloudJobError as error:
                note.set_text(displayable(error.message))
                return
            limit_text = f"; the newest {len(rows)}" if total > len(rows) else ""
            note.set_text(f"{counted(total, 'job')} in the emulator{limit_text}")
            table.run_grid_method("setGridOption", "rowData", rows)

        await ui.context.client.connected()
        await refresh()
        ui.timer(_REFRESH_S, refresh)

    @page("/emulator/{key}")
    async def log_page(key: str) -> None:
        job = await in_thread(EmulatedJob, console.home, key)
        with frame(displayable(job.name), "Emulator", displayable(job.name)):
            ui.label("Another client created this job: the console shows its log.").classes("quiet")
            log.build(job)


def _rows(home: Path) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of jobs, and the rows of the newest."""
    listed = daemon.jobs(home)
    with Records(records_path(home)) as db:
        # modelarts+http://HOST/PROJECT/ID/JOB
        parts = [record.handle.split("/") for record in db.list()]
    own_jobs = {handle[-2]: handle[-1] for handle in parts if handle[0] == "modelarts+http:"}
    rows = []
    for job in listed["jobs"]:
        ran_ms = (job["end_ms"] or job["start_ms"]) - job["start_ms"]
        rows.append(
            {
                "id": job["id"],
                "name": displayable(job["name"]),
                "link": f"/job/{own_jobs[job['id']]}"
                if job["id"] in own_jobs
                else f"/emulator/{job['id']}",
                "phase": job["phase"],
                "nodes": job["nodes"],
                "user": displayable(job["user_name"]),
                "created": job["create_ms"] / 1000,
                "duration": span(ran_ms / 1000) if job["end_ms"] and job["start_ms"] else "",
            }
        )
    return int(listed["total"]), rows
