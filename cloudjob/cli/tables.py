"""Prints tables on stdout: wrapped to the width of a terminal, else as wide as their content."""

from __future__ import annotations

import os

from cloudjob.cli.messages import has_colours
from cloudjob.model.text import one_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

# Longer tables are printed without colours, because rich needs a millisecond for each row.
_MAX_ROWS = 500
# The narrowest last column.
_LAST_WIDTH = 16
_STYLES = {
    "RUNNING": "cyan",
    "SUCCEEDED": "green",
    "FAILED": "red",
    "CANCELLED": "yellow",
    "OK": "green",
    "MISSING": "red",
}


def print_table(
    rows: Sequence[Sequence[object]], headers: Sequence[str] = (), *, numbers: Sequence[str] = ()
) -> None:
    """Print rows in columns, each cell on one line without terminal control characters.

    Args:
        numbers: The headers of the columns that are aligned to the right.
    """
    cells = [[one_line(str(cell)) for cell in row] for row in rows]
    if (os.isatty(1) or has_colours(1)) and len(cells) <= _MAX_ROWS:
        _print_folded(cells, headers, numbers)
    else:
        _print_plain([list(headers), *cells] if headers else cells, headers, numbers)


def new_table(headers: Sequence[str], *, numbers: Sequence[str] = ()) -> Table:
    """Return a table without rows or lines; empty ``headers`` are not shown."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(headers))
    for name in headers:
        table.add_column(name, overflow="fold", justify="right" if name in numbers else "left")
    return table


def _print_folded(cells: list[list[str]], headers: Sequence[str], numbers: Sequence[str]) -> None:
    from rich.console import Console
    from rich.text import Text

    names = headers or [""] * len(cells[0])
    table = new_table(names, numbers=numbers)
    for column in table.columns[:-1]:
        # Only the last column is wrapped, so that a job's id can be copied.
        column.no_wrap = True
    for row in cells:
        table.add_row(*(Text(cell, _STYLES.get(cell, "")) for cell in row))
    *whole, last = (max(len(cell) for cell in column) for column in zip(names, *cells, strict=True))
    needed = sum(whole) + 2 * len(whole)
    width = Console().width if os.isatty(1) else needed + last
    # If there is too little room to wrap the last column, the terminal wraps the lines itself.
    has_room = width >= needed + min(last, _LAST_WIDTH)
    Console(width=width if has_room else needed + last, highlight=False).print(table)


def _print_plain(cells: list[list[str]], headers: Sequence[str], numbers: Sequence[str]) -> None:
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    is_number = [name in numbers for name in headers or [""] * len(widths)]
    for row in cells:
        aligned = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        )
        print("  ".join(aligned).rstrip())
