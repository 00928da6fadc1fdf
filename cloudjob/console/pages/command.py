"""A command line to copy."""

from __future__ import annotations

from html import escape

from nicegui import ui


def show_command(text: str, command: str) -> None:
    """Show a command with a button that copies it."""
    with ui.row().classes("items-center gap-2"):
        ui.label(text).classes("quiet")
        ui.html(f'<code class="mono">{escape(command)}</code>', sanitize=False)
        button = ui.button(icon="content_copy", on_click=lambda: ui.clipboard.write(command))
        button.props('flat dense round size=sm aria-label="Copy the command"')
