"""Blocks of a node's log: most are searched as a whole and not line by line."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from cloudjob.model import bars
from cloudjob.model.patterns import Pattern
from jobentry.contract import journal, lines

# Longer lines are cut where they are shown.
MAX_CHARS = 4000
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
    """Whether each line of a block is whole and is shown as it is: no progress bar is in it.

    Args:
        unfinished: The ranks of which an earlier line is not finished.
    """
    if has_parts(block, unfinished) or journal.MARK in block:
        return False
    return b"\r" not in block or b"\r" not in block.replace(b"\r\n", b"\n")


def has_parts(block: bytes, unfinished: Collection[int]) -> bool:
    """Whether a line of a block has parts, or a rank goes on with an unfinished one."""
    return PART_MARK in block or any(b"[%d] " % rank in block for rank in unfinished)


def without_overwritten(block: bytes) -> bytes:
    """Leave out most parts of progress bars that a later part of the block overwrites."""
    if PART_MARK not in block:
        return block
    texts = block.split(b"\n")
    overwritten = set[int]()
    # The number of each rank's last part that begins with a carriage return, by its mark.
    last_of: dict[bytes, int] = {}
    for number, text in enumerate(texts):
        mark, _, data = text.partition(b"]")
        before = last_of.pop(mark, None)
        if data.startswith(b"+ \r"):
            if before is not None:
                overwritten.add(before)
            # Nested bars are overwritten together.
            if bars.UP not in data:
                last_of[mark] = number
    return b"\n".join(text for number, text in enumerate(texts) if number not in overwritten)


class LineReader(dict[tuple[int, "int | None"], bytes]):
    """Makes whole lines of the blocks of all nodes; contains the line of each rank that has none.

    A progress bar overwrites itself, so only its last state is kept.
    """

    def unfinished(self, node: int) -> list[int]:
        """Return the ranks of a node whose line is not finished."""
        return [rank for of_node, rank in self if of_node == node and rank is not None]

    def add(self, node: int, block: bytes) -> Iterator[tuple[int | None, bytes]]:
        """Yield the lines that are whole now, each with its rank."""
        for text in block.split(b"\n")[:-1]:
            line = lines.read(text + b"\n")
            before = self.pop((node, line.rank), b"")
            if before.endswith(b"\n"):
                if not line.data.startswith(b"\r"):
                    yield line.rank, before
                before = b""
            whole = before + line.data
            if whole.endswith(b"\n") and not bars.is_overwritten(whole):
                yield line.rank, whole
            else:
                self[node, line.rank] = bars.reduced(whole)[-MAX_CHARS:]


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
