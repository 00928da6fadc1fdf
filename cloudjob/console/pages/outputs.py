"""Browses and downloads the files that a job has stored so far."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from fastapi import Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse
from nicegui import app, ui

from cloudjob.console.archive import zipped
from cloudjob.console.pages.http import parameter, streamed, url
from cloudjob.console.pages.output_preview import show_preview
from cloudjob.console.pages.widgets import NAME, SIZE, column, short_grid, show_command
from cloudjob.console.preview import MAX_IMAGE_BYTES, media_type
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
    column("note", "Note", width=120),
    column("preview", "Preview", width=100, **{":cellRenderer": "console_ui.previewButton"}),
)


def register(console: Console) -> None:
    """Add the endpoints of downloads and of images."""
    _register_previews(console)

    @app.get("/api/jobs/{job_id}/output")
    async def output(job_id: str, request: Request) -> Response:
        name = parameter(request, "name")

        def start() -> tuple[Output, Iterator[bytes], bytes] | None:
            outputs = console.job(job_id).outputs()
            for file in outputs:
                if file.name == name:
                    pieces = outputs.read(file)
                    return file, pieces, next(pieces)
            return None

        started = await in_thread(start)
        if started is None:
            return PlainTextResponse("the job has stored no such file\n", 404)
        file, pieces, first = started
        return StreamingResponse(streamed(first, pieces), headers=_headers(file))


def _register_previews(console: Console) -> None:
    @app.get("/api/jobs/{job_id}/output/image")
    async def image(job_id: str, request: Request) -> Response:
        name = parameter(request, "name")

        def read() -> bytes:
            outputs = console.job(job_id).outputs()
            file = next((each for each in outputs if each.name == name), None)
            is_small = file is not None and file.size_bytes <= MAX_IMAGE_BYTES
            return b"".join(outputs.read(file)) if file and is_small else b""

        data = await in_thread(read)
        kind = media_type(data[:64])
        if not kind:
            return PlainTextResponse("the job has stored no such image\n", 404)
        # A stranger may have written it.
        headers = {
            "Content-Security-Policy": "sandbox; default-src 'none'",
            "Cache-Control": "no-store",
        }
        return Response(data, media_type=kind, headers=headers)

    @app.get("/api/jobs/{job_id}/outputs.zip")
    async def archive(job_id: str, request: Request) -> Response:
        folder = parameter(request, "path").strip("/")

        def start() -> tuple[Iterator[bytes], bytes]:
            pieces = zipped(console.job(job_id).outputs(), folder)
            return pieces, next(pieces)

        pieces, first = await in_thread(start)
        name = quote(
            "-".join(filter(None, (job_id, folder.rpartition("/")[2]))), "", errors="replace"
        )
        headers = {
            "Content-Disposition": f"attachment; filename*=UTF-8''{name}.zip",
            "Cache-Control": "no-store",
        }
        return StreamingResponse(
            streamed(first, pieces), headers=headers, media_type="application/zip"
        )


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
    files: list[Output] = []

    async def show(event: Any) -> None:
        place = event.args
        if isinstance(place, int) and 0 <= place < len(files):
            await show_preview(job, files[place])

    ui.on("output-preview", show)
    path = parameter(ui.context.client.request, "path").strip("/")
    with ui.card().classes("panel") as panel:
        # The store may take a while to answer.
        ui.spinner()
    error = ""
    try:
        files += await in_thread(job.outputs)
    except CloudJobError as failure:
        error = failure.message
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
        archive = url(f"/api/jobs/{job.id}/outputs.zip", path=path)
        save = ui.button("Zip", icon="download", on_click=lambda: ui.navigate.to(archive))
        save.props('flat dense no-caps aria-label="Download this folder as a zip file"')
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
    for place, file in enumerate(files):
        name, slash, _ = file.name[len(start) :].partition("/")
        if not file.name.startswith(start):
            continue
        if slash:
            folders[name].append(file)
        else:
            link = url(f"/api/jobs/{job.id}/output", name=file.name)
            row = _row(name, [file], link, "incomplete" if file.is_incomplete else "")
            file_rows.append({**row, "place": place})
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
