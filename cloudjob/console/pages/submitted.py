"""The submitted job: its description, its variables with secrets as ``***``, and its package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nicegui import ui

from cloudjob.console.facts import changed, texts_of
from cloudjob.console.pages.frame import heading
from cloudjob.console.pages.widgets import (
    NAME,
    SIZE,
    column,
    short_grid,
    show_command,
    show_texts,
    text_table,
)
from cloudjob.console.text import displayable
from cloudjob.console.threads import in_thread
from cloudjob.errors import CloudJobError
from cloudjob.model.text import counted, size_text
from cloudjob.tracking import Job
from jobentry.contract.packages import FILE, FOLDER, LINK, Entry

_COLUMNS = (NAME, SIZE, column("mode", "Mode", width=90, cellClass="mono"))
# A page with more files would take seconds to load.
_MAX_FILES = 20_000


async def build(job: Job) -> None:
    """Show the recorded description, and the package in the store."""
    _described(job)
    with ui.card().classes("panel") as panel:
        heading("Package")
        spinner = ui.spinner()
    error = ""
    try:
        entries = [each for each in await in_thread(job.code_files) if each.kind != FOLDER]
    except CloudJobError as failure:
        entries, error = [], failure.message
    spinner.delete()
    with panel:
        if entries:
            _package(entries)
        else:
            ui.label(displayable(error) or "The package has no files.").classes("quiet")


def _package(entries: list[Entry]) -> None:
    total = size_text(sum(entry.size_bytes for entry in entries))
    left_out = f"; the first {_MAX_FILES} are shown" if len(entries) > _MAX_FILES else ""
    ui.label(f"{counted(len(entries), 'file')}, {total}{left_out}").classes("quiet")
    rows = [
        {
            "name": displayable(each.name + (f" → {each.target}" if each.kind == LINK else "")),
            "bytes": each.size_bytes,
            "size": size_text(each.size_bytes) if each.kind == FILE else "link",
            "mode": f"{each.mode:04o}" if each.kind == FILE else "",
        }
        for each in entries[:_MAX_FILES]
    ]
    short_grid(_COLUMNS, rows, enableCellTextSelection=True)


def _described(job: Job) -> None:
    try:
        spec = job.spec()
    except CloudJobError as error:
        ui.label(displayable(error.message)).classes("quiet")
        return
    variables = spec.pop("env", None)
    description(spec)
    if variables:
        text_table("Variables", sorted(texts_of(variables).items()))
    show_command("Submit it again:", f"cloudjob cp {job.id}")


def description(spec: Mapping[str, Any]) -> None:
    """Show what of a description differs from the defaults, and all of it on request."""
    with ui.card().classes("panel"):
        with ui.row().classes("w-full items-center gap-3"):
            heading("Job description")
            ui.space()
            has_defaults = ui.switch("Show defaults").props("dense")
        rows = ui.column().classes("w-full")

    def show() -> None:
        chosen = spec if has_defaults.value else changed(spec)
        rows.clear()
        with rows:
            show_texts(texts_of(chosen, keeps_empty=False).items())

    has_defaults.on_value_change(show)
    show()
