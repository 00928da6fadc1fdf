"""Statuses as HTML, for notebooks."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from cloudjob.model.times import local

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.model.status import JobStatus


def table(rows: Iterable[tuple[str, object]]) -> str:
    """Return a table of names and values, without the rows whose value is empty."""
    cells = (
        f"<tr><th style='text-align:left'>{escape(name)}</th>"
        f"<td style='text-align:left'>{escape(str(value))}</td></tr>"
        for name, value in rows
        if value not in (None, "")
    )
    return f"<table>{''.join(cells)}</table>"


def status_table(status: JobStatus, handle: str = "") -> str:
    """Return a status as a table."""
    failure = status.failure
    return table(
        [
            ("job", status.job),
            ("handle", handle),
            ("state", status.state),
            ("backend", f"{status.backend} ({status.native_state})"),
            ("nodes", status.nodes),
            ("ranks per node", status.procs_per_node),
            ("created", local(status.created_at)),
            ("started", local(status.started_at or "")),
            ("ended", local(status.ended_at or "")),
            ("exit code", status.exit_code),
            ("cause", status.cause),
            ("failed on node", failure and failure.node),
            ("failed rank", failure and failure.rank),
            ("message", failure and failure.message),
            ("stacks", failure and "\n".join(failure.stack_lines)),
            ("last lines", failure and "\n".join(failure.last_lines)),
        ]
    )
