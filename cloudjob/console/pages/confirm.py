"""A question before something that cannot be undone."""

from __future__ import annotations

from nicegui import ui


async def confirm(question: str, yes: str, no: str) -> bool:
    """Ask in a dialog; closing it means no."""
    with ui.dialog() as dialog, ui.card():
        ui.label(question)
        with ui.row().classes("w-full justify-end"):
            ui.button(no, on_click=lambda: dialog.submit(False)).props("flat no-caps")
            ui.button(yes, on_click=lambda: dialog.submit(True)).props("no-caps color=negative")
    return bool(await dialog)
