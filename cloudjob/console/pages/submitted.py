"""What was submitted: the description, the variables with secrets as ``***``, and the package."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from typing import Any

from nicegui import ui

from cloudjob.console.pages import words
from cloudjob.console.pages.command import show_command
from cloudjob.console.threads import in_thread
from cloudjob.errors import CloudJobError
from cloudjob.model.text import counted
from cloudjob.package.messages import size_text
from cloudjob.tracking import Job
from jobentry.contract.packages import FILE, FOLDER, LINK, Entry

_COLUMNS: list[dict[str, Any]] = [
    {"field": "name", "headerName": "Name", "flex": 1, "minWidth": 160, "cellClass": "mono"},
    {
        "field": "bytes",
        "headerName": "Size",
        "width": 110,
        "type": "numericColumn",
        ":valueFormatter": "p => p.data.size",
    },
    {"field": "mode", "headerName": "Mode", "width": 90, "cellClass": "mono"},
]
# A page with more would take seconds to load.
_MOST_FILES = 20_000
_HEAD_PX, _ROW_PX, _MOST_ROWS = 56, 28, 16


async def build(job: Job) -> None:
    """Show the description as it was recorded, and the package as it is in the store."""
    _description(job)
    with ui.card().classes("panel") as panel:
        ui.label("Package").classes("panel-title")
        waits = ui.spinner()
    error = ""
    try:
        entries = [each for each in await in_thread(job.code_files) if each.kind != FOLDER]
    except CloudJobError as failure:
        entries, error = [], failure.message
    waits.delete()
    with panel:
        if entries:
            _package(entries)
        else:
            ui.label(words.text(error) or "The package has no files.").classes("quiet")


def _package(entries: list[Entry]) -> None:
    total = size_text(sum(entry.size_bytes for entry in entries))
    left_out = f"; the first {_MOST_FILES} are shown" if len(entries) > _MOST_FILES else ""
    ui.label(f"{counted(len(entries), 'file')}, {total}{left_out}").classes("quiet")
    rows = [
        {
            "name": words.text(each.name + (f" → {each.target}" if each.kind == LINK else "")),
            "bytes": each.size_bytes,
            "size": size_text(each.size_bytes) if each.kind == FILE else "link",
            "mode": f"{each.mode:04o}" if each.kind == FILE else "",
        }
        for each in entries[:_MOST_FILES]
    ]
    height_px = _HEAD_PX + _ROW_PX * min(len(rows), _MOST_ROWS)
    options = {
        "columnDefs": _COLUMNS,
        "rowData": rows,
        "rowHeight": _ROW_PX,
        "defaultColDef": {"sortable": True},
        "enableCellTextSelection": True,
    }
    table = ui.aggrid(options, theme="quartz", auto_size_columns=False)
    table.classes("w-full").style(f"height: {height_px}px")


def _description(job: Job) -> None:
    try:
        spec = job.spec()
    except CloudJobError as error:
        ui.label(words.text(error.message)).classes("quiet")
        return
    variables = spec.pop("env", None) or {}
    _table("Job description", ((k, v) for k, v in spec.items() if v not in (None, "", [], {})))
    if variables:
        _table("Variables", sorted(variables.items()))
    show_command("Submit it again:", f"cloudjob cp {job.id}")


def _table(title: str, rows: Iterable[tuple[str, object]]) -> None:
    with ui.card().classes("panel"):
        ui.label(title).classes("panel-title")
        text = "".join(
            f"<tr><td class='quiet'>{escape(words.text(name))}</td>"
            f"<td class='mono'>{escape(words.text(_text(value)))}</td></tr>"
            for name, value in rows
        )
        ui.html(f'<table class="plain">{text}</table>', sanitize=False).classes("w-full")


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
