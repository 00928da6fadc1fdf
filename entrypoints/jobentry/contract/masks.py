"""How a node's log marks secrets, which the laptop shows as ``***``.

The log keeps every byte of the ranks. Before a line that contains secrets, the entry writes their
positions: ``jobentry# {"mask":[3,60,17,31]}`` means that in the next line of rank 3, which has 60
bytes after the rank's prefix, the bytes from 17 up to, but not including, 31 are a secret. More
pairs may follow. A platform may change a line (bytes that are not UTF-8); a line with another
length is masked as a whole.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import Iterable, Sequence, Tuple

from jobentry.contract import journal, lines

MASK = "***"
# The offset of the first byte of a secret, and of the byte after its last one.
Range = Tuple[int, int]

_MASK = re.compile(rb'\{"mask":\[(\d{1,9}),(\d{1,9}(?:,\d{1,9},\d{1,9})+)\]\}')
# A line with more secrets is masked from the first to the last.
_MAX_RANGES = 1000


def write(rank: int, data: bytes, ranges: Iterable[Range]) -> bytes:
    """Return the stream text of complete lines with the marks of ``ranges``, which are in order."""
    pieces, at = [], 0
    for begin, group in groupby(ranges, lambda each: data.rfind(b"\n", 0, each[0]) + 1):
        pieces.append(lines.write(rank, data[at:begin])[0])
        size = data.index(b"\n", begin) - begin
        pieces.append(_mark(rank, size, [(start - begin, end - begin) for start, end in group]))
        at = begin
    pieces.append(lines.write(rank, data[at:])[0])
    return b"".join(pieces)


def write_part(rank: int, data: bytes, ranges: Sequence[Range]) -> bytes:
    """Return the stream text of an incomplete line with the marks of ``ranges``."""
    text = lines.write_part(rank, data)
    return _mark(rank, len(data), ranges) + text if ranges else text


def _mark(rank: int, size_bytes: int, ranges: Sequence[Range]) -> bytes:
    if len(ranges) > _MAX_RANGES:
        ranges = [(ranges[0][0], ranges[-1][1])]
    pairs = b"".join(b",%d,%d" % each for each in ranges)
    return journal.MARK + b'{"mask":[%d,%d%s]}\n' % (rank, size_bytes, pairs)


class Splitter:
    """Splits the log of one node into its text, with secrets masked, and its journal."""

    def __init__(self) -> None:
        # The size of the next line of a rank, and the ranges in it.
        self._next: dict[int, list[int]] = {}

    def split(self, data: bytes) -> tuple[bytes, list[bytes]]:
        """Return whole lines of the log, and those of the journal among them without their mark."""
        if not self._next and journal.MARK not in data:
            return data, []
        others, masks = [], []
        for text, line in journal.parts(data):
            others.append(self._masked_lines(text) if self._next else text)
            match = _MASK.fullmatch(line) if line is not None else None
            if match is not None:
                self._next[int(match[1])] = [int(text) for text in match[2].split(b",")]
            elif line is not None:
                masks.append(line)
        return b"".join(others), masks

    def _masked_lines(self, text: bytes) -> bytes:
        """Return lines with their secrets masked; those after the last secret stay as they are."""
        at, masked = 0, []
        while self._next and at < len(text):
            end = text.find(b"\n", at)
            end = len(text) if end < 0 else end
            masked += [self._masked(text[at:end]), text[end : end + 1]]
            at = end + 1
        return b"".join(masked) + text[at:]

    def _masked(self, line: bytes) -> bytes:
        rank, data = lines.read(line)
        if rank not in self._next:
            return line
        size_bytes, *places = self._next.pop(rank)
        if size_bytes != len(data):
            places = [0, len(data)]
        at, pieces = 0, [line[: len(line) - len(data)]]
        for start, end in zip(places[::2], places[1::2]):
            pieces += [data[at:start], MASK.encode()]
            at = end
        return b"".join((*pieces, data[at:]))
