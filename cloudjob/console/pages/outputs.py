"""Browses and downloads the files that a job has stored so far."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from fastapi import Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse
from nicegui import app, ui

from cloudjob.console.pages.http import parameter, streamed, url
from cloudjob.console.pages.widgets import NAME, SIZE, column, short_grid, show_command
from cloudjob.console.state import Console
from cloudjob.console.text import displayable
from cloudjob.console.threads import in_thread
from cloudjob.errors import CloudJobError
from cloudjob.model.text import counted, size_text
from cloudjob.tracking import Job
from cloudjob.tracking.outputs import Output

_COLUMNS = (
    {**NAME, ":cellRenderer": "console_ui.file"},
    SIZE,
    column("modified", "Written", width=190, **{":valueFormatter": "console_ui.date"}),
    column("note", "", width=120),
)


def register(console: Console) -> None:
    """Add the endpoint of downloads."""

    @app.get("/api/jobs/{job_id}/output")
    async def output(job_id: str, request: Request) -> Response:
        name = parameter(request, "name")

        def start() -> tuple[Output, Iterator[bytes], bytes] | None:
            found = console.job(job_id).outputs()
            for file in found:
                if file.name == name:
                    pieces = found.read(file)
                    return file, pieces, next(pieces)
            return None

        try:
            started = await in_thread(start)
        except CloudJobError as error:
            return PlainTextResponse(f"{displayable(error.message)}\n", 502)
        if started is None:
            return PlainTextResponse("the job has stored no such file\n", 404)
        file, pieces, first = started
        return StreamingResponse(streamed(first, pieces), headers=_headers(file))


def _headers(file: Output) -> dict[str, str]:
    # An attachment, so that browsers never show a file as a page of the console.
    name = quote(file.name.rpartition("/")[2], "", errors="surrogateescape")
    headers = {
        "Content-Type": "application/octet-stream",
        "Content-Disposition": f"attachment; filename*=UTF-8''{name}",
        "Cache-Control": "no-store",
    }
    # Only files of a manifest have a known size.
    return {**headers, "Content-Length": str(file.size_bytes)} if file.digests else headers


async def build(job: Job) -> None:
    """List the folder of the outputs that ``?path=`` chooses."""
    path = parameter(ui.context.client.request, "path").strip("/")
    with ui.card().classes("panel") as panel:
        # The store may take a while to answer.
        ui.spinner()
    error = ""
    try:
        files = list(await in_thread(job.outputs))
    except CloudJobError as failure:
        files, error = [], failure.message
    panel.clear()
    with panel:
        if not files:
            ui.label(displayable(error) or "No outputs are stored.").classes("quiet")
            return
        _show(job, files, path)
        show_command("Download all:", f"cloudjob outputs {job.id} --to DIR")


def _show(job: Job, files: list[Output], path: str) -> None:
    base_url = f"/job/{job.id}/outputs"
    rows = _rows(job, files, path)
    with ui.row().classes("items-center gap-1 w-full"):
        parents = [part for part in path.split("/") if part]
        ui.link("Outputs", base_url).classes("panel-title")
        for depth, part in enumerate(parents, 1):
            ui.label("/").classes("quiet")
            ui.link(displayable(part), url(base_url, path="/".join(parents[:depth])))
        total = size_text(sum(row["bytes"] for row in rows))
        ui.label(f"{counted(len(rows), 'entry', 'entries')}, {total}").classes("quiet")
        ui.space()
        reload = ui.button(icon="refresh", on_click=ui.navigate.reload)
        reload.props('flat dense round size=sm aria-label="List again"')
    short_grid(
        _COLUMNS,
        rows,
        **{
            "overlayNoRowsTemplate": "This folder is empty.",
            ":onGridReady": "p => console_ui.outputs(p.api)",
        },
    )


def _rows(job: Job, files: list[Output], path: str) -> list[dict[str, Any]]:
    """Return the rows of a folder, subfolders first; each counts the files below it."""
    start = f"{path}/" if path else ""
    folders: defaultdict[str, list[Output]] = defaultdict(list)
    file_rows = []
    for file in files:
        name, slash, _ = file.name[len(start) :].partition("/")
        if not file.name.startswith(start):
            continue
        if slash:
            folders[name].append(file)
        else:
            link = url(f"/api/jobs/{job.id}/output", name=file.name)
            file_rows.append(_row(name, [file], link, "incomplete" if file.is_incomplete else ""))
    base_url = f"/job/{job.id}/outputs"
    return [
        _row(f"{name}/", below, url(base_url, path=start + name), counted(len(below), "file"))
        for name, below in folders.items()
    ] + file_rows


def _row(name: str, files: list[Output], link: str, note: str) -> dict[str, Any]:
    size_bytes = sum(file.size_bytes for file in files)
    return {
        "name": displayable(name),
        "link": link,
        "bytes": size_bytes,
        "size": size_text(size_bytes) if size_bytes or not note else "",
        "modified": max(file.modified_ns for file in files) / 1e9,
        "note": note,
    }
