"""A dialog that shows the beginning of an output file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from nicegui import ui

from cloudjob.console.pages.frame import heading
from cloudjob.console.pages.http import url
from cloudjob.console.preview import FileKind, FilePreview, preview
from cloudjob.console.text import displayable
from cloudjob.console.threads import in_thread
from cloudjob.errors import CloudJobError
from cloudjob.model.text import size_text
from cloudjob.tracking import Job
from cloudjob.tracking.outputs import Output

_BROKEN = "The image is damaged."


async def show_preview(job: Job, file: Output) -> None:
    """Show a file in a dialog; a stranger may have written it, so it is escaped or an image."""
    name = displayable(file.name)
    with ui.dialog(value=True) as dialog, ui.card().classes("table-dialog"):
        with ui.row().classes("w-full items-center no-wrap"):
            heading(name).classes("mono")
            ui.label(size_text(file.size_bytes)).classes("quiet shrink-0")
            ui.space()
            link = url(f"/api/jobs/{job.id}/output", name=file.name)
            save = ui.button("Download", icon="download", on_click=lambda: ui.navigate.to(link))
            save.props("flat dense no-caps").classes("shrink-0")
            close = ui.button(icon="close", on_click=dialog.close)
            close.props('flat dense round aria-label="Close"')
        content = ui.column().classes("w-full preview")
        with content:
            ui.spinner()
    dialog.on_value_change(lambda event: None if event.value else dialog.delete())
    try:
        excerpt = await in_thread(_read, job, file)
    except CloudJobError as error:
        excerpt = FilePreview(FileKind.NOTHING, displayable(error.message))
    if dialog.is_deleted:
        return
    content.clear()
    with content:
        _show(excerpt, job, file)


def _read(job: Job, file: Output) -> FilePreview:
    outputs = job.outputs()
    current = next((each for each in outputs if each.name == file.name), None)
    if current is None:
        return FilePreview(FileKind.NOTHING, "The job has stored no such file.")
    head = next(outputs.read(current), b"")
    return preview(current.name, head, max(current.size_bytes, len(head)))


def _show(content: FilePreview, job: Job, file: Output) -> None:
    if content.kind is FileKind.IMAGE:
        source = url(f"/api/jobs/{job.id}/output/image", name=file.name)
        name = escape(displayable(file.name))
        says_so = f"this.replaceWith('{_BROKEN}')"
        picture = f'<img src="{escape(source)}" alt="{name}" onerror="{says_so}">'
        ui.html(picture, sanitize=False).classes("w-full")
    elif content.kind is FileKind.TABLE:
        ui.html(_table(content.rows), sanitize=False).classes("w-full")
    elif content.kind is FileKind.TEXT:
        text = f'<pre class="lines" tabindex="0">{escape(content.text) or "It is empty."}</pre>'
        ui.html(text, sanitize=False).classes("w-full")
    else:
        ui.label(content.text).classes("quiet")
    if content.is_cut:
        ui.label("The file has more than is shown here.").classes("quiet")


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows or [[]]
    names = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in body
    )
    return f'<table class="plain"><thead><tr>{names}</tr></thead><tbody>{lines}</tbody></table>'
