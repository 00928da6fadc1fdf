"""Parts of several pages: tables, a command to copy, and a question."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from nicegui import ui

from cloudjob.console.pages.frame import heading
from cloudjob.console.text import displayable

_ROW_PX, _HEAD_PX, _MAX_ROWS = 30, 56, 16


def column(field: str, header: str, **more: Any) -> dict[str, Any]:
    """Return a column of a ``grid``; JavaScript values have keys that begin with a colon."""
    return {"field": field, "headerName": header, **more}


NAME = column("name", "Name", flex=1, minWidth=160, cellClass="mono")
# A row contains the number of bytes, for sorting, and the size as text.
SIZE = column(
    "bytes", "Size", width=110, type="numericColumn", **{":valueFormatter": "p => p.data.size"}
)


def grid(columns: Sequence[Mapping[str, Any]], **options: Any) -> ui.aggrid:
    """Show a table that can be sorted; ``options`` are those of AG Grid."""
    return ui.aggrid(
        {"columnDefs": columns, "defaultColDef": {"sortable": True, "resizable": True}, **options},
        theme="quartz",
        auto_size_columns=False,
    )


def short_grid(
    columns: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], **options: Any
) -> ui.aggrid:
    """Show a table with the height of its rows, at most half a screen."""
    height_px = _HEAD_PX + _ROW_PX * min(len(rows), _MAX_ROWS)
    table = grid(columns, rowData=rows, rowHeight=_ROW_PX, **options)
    return table.classes("outputs-grid").style(f"height: {height_px}px")


def toggle(options: Sequence[str], value: str, on_change: Callable[[Any], Any]) -> ui.toggle:
    """Show buttons of which one is chosen."""
    choice = ui.toggle(list(options), value=value, on_change=on_change).classes("states")
    choice.props("dense unelevated no-caps toggle-color=primary toggle-text-color=on-colour")
    return choice


def text_table(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Show names and texts in a panel."""
    with ui.card().classes("panel"):
        heading(title)
        show_texts(rows)


def show_texts(rows: Iterable[tuple[str, str]]) -> None:
    """Show names and texts, each in a row."""
    body = "".join(
        f"<tr><th scope='row'>{escape(displayable(name))}</th>"
        f"<td class='mono'>{escape(displayable(text))}</td></tr>"
        for name, text in rows
    )
    ui.html(f'<table class="plain">{body}</table>', sanitize=False).classes("w-full")


def show_command(text: str, command: str) -> None:
    """Show a command with a button that copies it."""
    with ui.row().classes("items-center gap-2"):
        ui.label(text).classes("quiet")
        ui.html(f'<code class="mono">{escape(command)}</code>', sanitize=False)
        button = ui.button(icon="content_copy", on_click=lambda: ui.clipboard.write(command))
        button.props('flat dense round size=sm aria-label="Copy the command"')


async def confirm(question: str, yes: str, no: str, *, is_dangerous: bool = True) -> bool:
    """Ask in a dialog; closing it means no."""
    colour = "negative" if is_dangerous else "primary"
    with ui.dialog() as dialog, ui.card():
        ui.label(question)
        with ui.row().classes("w-full justify-end"):
            ui.button(no, on_click=lambda: dialog.submit(False)).props("flat no-caps")
            ui.button(yes, on_click=lambda: dialog.submit(True)).props(
                f"no-caps color={colour} text-color=on-colour"
            )
    return bool(await dialog)
