"""Two or more jobs side by side: what differs in their descriptions and code."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from nicegui import ui

from cloudjob.console.job_list import row_of
from cloudjob.console.pages import words
from cloudjob.console.pages.frame import frame
from cloudjob.console.state import Console
from cloudjob.console.threads import in_thread
from cloudjob.errors import CloudJobError
from cloudjob.tracking import Job

MOST_JOBS = 8


def register(console: Console) -> None:
    """Add the page."""

    @ui.page("/compare")
    async def page(jobs: str = "") -> None:
        ids = [job for job in jobs.split(",") if job][:MOST_JOBS]
        with frame("Compare", "Compare"):
            # A platform may take longer to answer than NiceGUI gives a page.
            await ui.context.client.connected()
            try:
                found = [await in_thread(console.job, job) for job in ids]
                columns = [await in_thread(_values, job) for job in found]
            except CloudJobError as error:
                ui.label(words.text(error.message)).classes("text-negative")
                return
            if len(found) < 2:
                ui.label("Select two or more jobs in the list to compare them.").classes("quiet")
                return
            _Comparison([job.id for job in found], columns).build()


def _values(job: Job) -> dict[str, str]:
    """Return everything that can differ between jobs, as text."""
    try:
        status = job.status()
    except CloudJobError as error:
        status = job.unknown(error.message)
    row = row_of(status)
    values = {
        "state": row["state"],
        "backend": row["backend"],
        "duration": f"{row['ended'] - row['started']:.1f} s" if row["ended"] else "",
        "exit code": "" if row["exit_code"] is None else str(row["exit_code"]),
        "reason": row["reason"],
        "code": job.code_digest,
    }
    try:
        for key, value in job.spec().items():
            parts = value.items() if isinstance(value, dict) else (("", value),)
            for name, part in parts:
                values[f"{key}.{name}" if name else key] = _text(part)
    except CloudJobError as error:
        values["description"] = error.message
    return {words.text(key): words.text(value) for key, value in values.items()}


def _text(value: Any) -> str:
    if value in (None, "", [], {}):
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class _Comparison:
    def __init__(self, ids: list[str], columns: list[dict[str, str]]) -> None:
        self._ids = ids
        self._columns = columns
        self._shows_all = False

    def build(self) -> None:
        with ui.row().classes("toolbar items-center"):
            ui.switch("Show equal values, too", on_change=self._change).props("dense")
        self._table()

    def _change(self, event: Any) -> None:
        self._shows_all = bool(event.value)
        self._table.refresh()

    @ui.refreshable_method
    def _table(self) -> None:
        head = "".join(
            f'<th><a href="/job/{escape(job)}">{escape(job)}</a></th>' for job in self._ids
        )
        keys = dict.fromkeys(key for column in self._columns for key in column)
        rows = []
        for key in keys:
            cells = [column.get(key, "") for column in self._columns]
            differs = len(set(cells)) > 1
            if differs or (self._shows_all and any(cells)):
                kind = ' class="differs"' if differs and self._shows_all else ""
                texts = "".join(
                    f'<td class="mono">{escape(cell) or "&ndash;"}</td>' for cell in cells
                )
                rows.append(f'<tr{kind}><td class="quiet">{escape(key)}</td>{texts}</tr>')
        body = "".join(rows) or f'<tr><td colspan="{len(self._ids) + 1}">no difference</td></tr>'
        with ui.card().classes("panel").style("overflow-x: auto"):
            ui.html(
                f'<table class="plain"><thead><tr><th></th>{head}</tr></thead>'
                f"<tbody>{body}</tbody></table>",
                sanitize=False,
            ).classes("w-full")
