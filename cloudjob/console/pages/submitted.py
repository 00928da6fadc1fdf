"""What was submitted: the job's description and its variables, secrets as ``***``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape

from nicegui import ui

from cloudjob.console.pages import words
from cloudjob.console.pages.command import show_command
from cloudjob.errors import CloudJobError
from cloudjob.tracking import Job


def build(job: Job) -> None:
    """Show the description as it was recorded."""
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
