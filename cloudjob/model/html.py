"""Tables as HTML, for notebooks."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def table(rows: Iterable[tuple[str, object]]) -> str:
    """Return a table of names and values, without the rows whose value is empty."""
    cells = (
        f"<tr><th style='text-align:left'>{escape(name)}</th>"
        f"<td style='text-align:left'>{escape(str(value))}</td></tr>"
        for name, value in rows
        if value not in (None, "")
    )
    return f"<table>{''.join(cells)}</table>"
