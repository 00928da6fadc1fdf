"""The files that a job has stored so far."""

from __future__ import annotations

from nicegui import ui

from cloudjob.console.pages import words
from cloudjob.console.pages.command import show_command
from cloudjob.console.threads import in_thread
from cloudjob.errors import CloudJobError
from cloudjob.package.messages import size_text
from cloudjob.tracking import Job

_COLUMNS = [
    {"field": "name", "headerName": "File", "flex": 1, "cellClass": "mono"},
    {"field": "size", "headerName": "Size", "width": 120, "type": "numericColumn"},
    {"field": "note", "headerName": "", "width": 120},
]


async def build(job: Job) -> None:
    """List the files; the store may take a while to answer."""
    with ui.card().classes("panel") as panel:
        ui.spinner()
    error = ""
    try:
        files = list(await in_thread(job.outputs))
    except CloudJobError as failure:
        files, error = [], failure.message
    panel.clear()
    with panel:
        if not files:
            ui.label(words.text(error) or "No outputs are stored.").classes("quiet")
            return
        total = size_text(sum(file.size_bytes for file in files))
        ui.label(f"{words.files(len(files))}, {total}").classes("panel-title")
        rows = [
            {
                "name": words.text(file.name),
                "size": size_text(file.size_bytes),
                "note": "incomplete" if file.is_incomplete else "",
            }
            for file in files
        ]
        ui.aggrid(
            {"columnDefs": _COLUMNS, "rowData": rows, "rowHeight": 32},
            theme="quartz",
            auto_size_columns=False,
        ).classes("outputs-grid")
        show_command("Download them:", f"cloudjob outputs {job.id} --to DIR")
