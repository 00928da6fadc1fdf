"""The common parts of all pages: header, colours, keys, dark mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from nicegui import ui

from cloudjob.installation import VERSION

STATIC = Path(__file__).parent.parent / "static"
_DARK_COOKIE = "cloudjob-console-dark"
# A page at an address; on a busy machine, reading a job takes longer than NiceGUI's 3 seconds.
page = partial(ui.page, response_timeout=60.0)


@contextlib.contextmanager
def frame(title: str, *crumbs: str) -> Iterator[None]:
    """Build the page around the content; its heading is the last crumb, or else the title.

    Args:
        title: The title of the browser's tab.
        crumbs: The path from the list of jobs to the page.
    """
    ui.page_title(f"{title} - cloudjob")
    ui.add_head_html(
        f"<script>{(STATIC / 'again.js').read_text()}</script>"
        '<link rel="stylesheet" href="/static/console.css">'
        '<script src="/static/console.js"></script>'
    )
    ui.colors(primary="#1d4ed8")
    request = ui.context.client.request
    chosen = request.cookies.get(_DARK_COOKIE) if request else None
    dark = ui.dark_mode(None if chosen is None else chosen == "1")

    def switch(event: Any) -> None:
        dark.set_value(event.args)

    keys = _keys()
    with ui.header().classes("items-center console-header").props("height-hint=48"):
        with ui.link(target="/").classes("brand").props('aria-label="cloudjob: all jobs"'):
            ui.html('<img src="/static/icon.svg" alt="" width="22" height="22">', sanitize=False)
            ui.label("cloudjob")
        for crumb in crumbs:
            ui.label("/").classes("crumb-mark").props("aria-hidden=true")
            ui.label(crumb).classes("crumb")
        ui.space()
        ui.button(icon="keyboard", on_click=keys.open).props(
            'flat dense round color=grey-4 aria-label="Keyboard shortcuts"'
        ).classes("wide-only")
        ui.button(
            icon="contrast",
            on_click=lambda: ui.run_javascript("console_ui.switchDark()"),
        ).props('flat dense round color=grey-4 aria-label="Dark or light"')
    ui.on("console-dark", switch)
    with ui.column().classes("console-page"):
        heading(crumbs[-1] if crumbs else title, 1).classes("unseen")
        yield


def _keys() -> ui.dialog:
    with ui.dialog() as dialog, ui.card():
        heading("Keyboard").classes("text-h6")
        for key, does in (
            ("/", "search"),
            ("g then j", "all jobs"),
            ("1 … 7", "the views of a job"),
            ("d", "dark or light"),
            ("Esc", "leave a field"),
        ):
            with ui.row().classes("items-center"):
                ui.html(f"<kbd>{key}</kbd>", sanitize=False)
                ui.label(does)
        ui.label(f"cloudjob {VERSION}").classes("quiet")
    return dialog


def heading(text: str, level: int = 2) -> ui.label:
    """Show a heading of the page, or of a part of it."""
    return ui.label(text).classes("panel-title").props(f"role=heading aria-level={level}")


def badge(state: str) -> ui.badge:
    """Show the state of a job."""
    return ui.badge(state, color=None).classes(f"state badge-{state}").props("rounded")
