"""Blocks of a node's log: most are searched as a whole and not line by line."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from cloudjob.model.patterns import Pattern
from jobentry.contract import journal

_BLOCK_BYTES = 64 * 1024
# How the part of a line begins, wherever it is in a block.
PART_MARK = b"]+ "
_JSON = re.compile(rb"^\[[0-9]+\] \{", re.MULTILINE)


def blocks(data: bytes) -> Iterator[bytes]:
    """Yield whole lines in blocks; a longer line is a block."""
    start = 0
    while start < len(data):
        end = data.find(b"\n", start + _BLOCK_BYTES) + 1 or len(data)
        yield data[start:end]
        start = end


def is_plain(block: bytes, unfinished: Collection[int]) -> bool:
    """Whether each line of a block is whole: no line has parts, and no rank goes on with one.

    Args:
        unfinished: The ranks of which an earlier line is not finished.
    """
    is_whole = not (PART_MARK in block or b"\r" in block or journal.MARK in block)
    return is_whole and not any(b"[%d] " % rank in block for rank in unfinished)


def matching_lines(
    block: bytes, patterns: Collection[Pattern], *, with_json: bool = False
) -> list[bytes] | None:
    """Return the lines of a plain block that may match a pattern, in order.

    Args:
        with_json: Also return the lines of ranks that may be JSON objects.

    Returns:
        None if each line must be searched on its own.
    """
    if not is_utf8(block):
        return None
    starts: set[int] = {match.start() for match in _JSON.finditer(block)} if with_json else set()
    for pattern in patterns:
        of_pattern = pattern.line_starts(block)
        if of_pattern is None:
            return None
        starts.update(of_pattern)
    return [block[start : block.find(b"\n", start) + 1] for start in sorted(starts)]


def as_utf8(text: bytes) -> bytes:
    """Return a text with bytes that are not UTF-8 replaced; its lines stay the same ones."""
    return text if text.isascii() else text.decode("utf-8", "replace").encode()


def is_utf8(text: bytes) -> bool:
    """Whether a text is UTF-8."""
    return text == as_utf8(text)
