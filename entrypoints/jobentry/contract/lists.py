"""Lists as text: ranks or nodes as ``0-3,7``, the first of many names, and tables."""

from __future__ import annotations

from itertools import groupby
from typing import Sequence

_LIMIT = 100_000


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text: ``0-3,7``."""
    texts = []
    for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        texts.append("%d-%d" % (run[0], run[-1]) if len(run) > 1 else "%d" % run[0])
    return ",".join(texts)


def numbers(text: str) -> list[int]:
    """Return the numbers that ``ranges`` made this text of.

    Raises:
        ValueError: It is no such text, or has too many numbers.
    """
    ranks: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        begin, end = int(first), int(last or first)
        if not 0 <= begin <= end < _LIMIT or len(ranks) > _LIMIT:
            raise ValueError("not a list of ranks")
        ranks += range(begin, end + 1)
    return ranks


def some(texts: Sequence[str], most: int) -> str:
    """Return the first of these texts, and how many more there are: ``a, b and 3 more``."""
    listed = ", ".join(texts[:most])
    return f"{listed} and {len(texts) - most} more" if len(texts) > most else listed


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of a table as lines of text, with the cells below each other."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    ]
