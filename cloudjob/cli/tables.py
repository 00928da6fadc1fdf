"""Prints tables on stdout: wrapped to the width of a terminal, else as wide as their content."""

from __future__ import annotations

import os
import re
from shutil import get_terminal_size

from cloudjob.cli.messages import has_colours
from cloudjob.model.text import one_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from rich.table import Table

# Longer tables are printed without colours, because rich needs a millisecond for each row.
_MAX_ROWS = 500
# Blanks at the end of a line, perhaps in a style.
_END_BLANKS = re.compile(r" +((?:\x1b\[0m)?)$", re.MULTILINE)
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
    rows: Sequence[Sequence[object]],
    headers: Sequence[str] = (),
    *,
    numbers: Sequence[str] = (),
    spare: Sequence[str] = (),
) -> None:
    """Print rows in columns, each cell on one line without terminal control characters.

    Args:
        numbers: The headers of the columns that are aligned to the right.
        spare: Those of columns that a narrow terminal does not show, as for ``without_spare``.
    """
    headers, rows = without_spare(headers, rows, spare)
    cells = [[one_line(str(cell)) for cell in row] for row in rows]
    if (os.isatty(1) or has_colours(1)) and len(cells) <= _MAX_ROWS:
        print(_folded(cells, headers, numbers), end="")
    else:
        _print_plain([list(headers), *cells] if headers else cells, headers, numbers)


def print_fitting(
    rows: Sequence[Sequence[object]],
    headers: Sequence[str],
    *,
    numbers: Sequence[str] = (),
    spare: Sequence[str] = (),
    height: int,
) -> int:
    """Print the first rows that fit on the terminal, and return their number, at least 1.

    Args:
        height: The lines of the terminal that may be used, with the headers.
    """
    from rich.console import Console
    from rich.text import Text

    headers, rows = without_spare(headers, rows[: max(1, height)], spare)
    cells = [[one_line(str(cell)) for cell in row] for row in rows]
    width = Console().width
    printed, used, count = [], 0, -1  # the headers are no row
    for line in _folded(cells, headers, numbers).splitlines():
        line = line.rstrip()
        text = Text.from_ansi(line)
        used += max(1, -(-text.cell_len // width))
        # The lines of a wrapped cell begin with blanks.
        is_new = not text.plain.startswith(" ")
        if is_new and used > height and count >= 1:
            break
        count += is_new
        printed.append(line)
    print("\n".join(printed))
    return count


def without_spare(
    headers: Sequence[str], rows: Sequence[Sequence[Any]], spare: Sequence[str]
) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
    """Return a table for the terminal, without spare columns for which it is too narrow.

    Args:
        spare: The headers of columns, of which the first is left out first.
    """
    if not (os.isatty(1) and rows):
        return headers, rows
    for name in spare:
        *whole, last = _widths(headers, rows)
        if sum(whole) + 2 * len(whole) + min(last, _LAST_WIDTH) <= get_terminal_size().columns:
            break
        if name in headers:
            at = headers.index(name)
            headers, *rows = ((*row[:at], *row[at + 1 :]) for row in (headers, *rows))
    return headers, rows


def _widths(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[int]:
    from rich.cells import cell_len

    return [
        max(cell_len(str(cell)) for cell in cells) for cells in zip(headers, *rows, strict=True)
    ]


def new_table(headers: Sequence[str], *, numbers: Sequence[str] = ()) -> Table:
    """Return a table without rows or lines; empty ``headers`` are not shown."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(headers))
    for name in headers:
        table.add_column(name, overflow="fold", justify="right" if name in numbers else "left")
    return table


def _folded(cells: list[list[str]], headers: Sequence[str], numbers: Sequence[str]) -> str:
    """Return a table with its last column wrapped to the width of the terminal."""
    from rich.console import Console
    from rich.text import Text

    names = headers or [""] * len(cells[0])
    table = new_table(names, numbers=numbers)
    for column in table.columns[:-1]:
        # Only the last column is wrapped, so that a job's id can be copied.
        column.no_wrap = True
    for row in cells:
        table.add_row(*(Text(cell, _STYLES.get(cell, "")) for cell in row))
    *whole, last = _widths(names, cells)
    needed = sum(whole) + 2 * len(whole)
    width = Console().width if os.isatty(1) else needed + last
    # If there is too little room to wrap the last column, the terminal wraps the lines itself.
    has_room = width >= needed + min(last, _LAST_WIDTH)
    console = Console(width=width if has_room else needed + last, highlight=False)
    with console.capture() as capture:
        console.print(table)
    # A heading has the width of its column; a narrower terminal would show its blanks as lines.
    return _END_BLANKS.sub(r"\1", capture.get())


def _print_plain(cells: list[list[str]], headers: Sequence[str], numbers: Sequence[str]) -> None:
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    is_number = [name in numbers for name in headers or [""] * len(widths)]
    for row in cells:
        aligned = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        )
        print("  ".join(aligned).rstrip())
