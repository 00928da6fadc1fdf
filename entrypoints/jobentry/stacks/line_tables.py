"""Which line an instruction is on: CPython's tables in code objects, by version.

Sources: CPython's ``Objects/lnotab_notes.txt`` (up to 3.10) and ``Objects/locations.md``.
"""

from __future__ import annotations

from typing import Iterator

_NO_LINE = -128
# How an entry of a location table is coded.
_ONE_LINE_FIRST, _COLUMNS_ONLY, _LONG, _NO_LOCATION = 10, 13, 14, 15


def line_at(version: tuple[int, int], table: bytes, first_line: int, offset: int) -> int:
    """Return the line of an instruction.

    Args:
        table: ``co_linetable``, or ``co_lnotab`` before 3.10.
        first_line: ``co_firstlineno``.
        offset: Of the instruction, in bytes from the first one.
    """
    if version >= (3, 11):
        return _in_locations(table, first_line, offset)
    if version == (3, 10):
        return _in_ranges(table, first_line, offset)
    return _in_increments(table, first_line, offset)


def _in_increments(table: bytes, line: int, offset: int) -> int:
    start = 0
    for length, step in zip(table[::2], table[1::2]):
        start += length
        if start > offset:
            break
        line += _signed(step)
    return line


def _in_ranges(table: bytes, line: int, offset: int) -> int:
    end = 0
    for length, step in zip(table[::2], table[1::2]):
        end += length
        if _signed(step) != _NO_LINE:
            line += _signed(step)
        if offset < end:
            break
    return line


def _signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def _in_locations(table: bytes, line: int, offset: int) -> int:
    content = iter(table)
    end = 0
    for head in content:
        end += ((head & 7) + 1) * 2
        line += _line_step(head >> 3 & 15, content)
        if offset < end:
            break
    return line


def _line_step(code: int, content: Iterator[int]) -> int:
    """Return by how many lines an entry steps, and read the entry to its end."""
    if code == _NO_LOCATION:
        return 0
    if code >= _COLUMNS_ONLY:
        step = _variable(content)
        if code == _LONG:
            for _ in range(3):
                _variable(content)
        return -(step >> 1) if step & 1 else step >> 1
    if code >= _ONE_LINE_FIRST:
        next(content, 0)
        next(content, 0)
        return code - _ONE_LINE_FIRST
    next(content, 0)
    return 0


def _variable(content: Iterator[int]) -> int:
    """Return a number of 6 bits a byte, the lowest first."""
    value = shift = 0
    for byte in content:
        value |= (byte & 63) << shift
        shift += 6
        if not byte & 64:
            break
    return value
