"""How the output of many ranks shares one stream: ``write`` in the entry, ``read`` on the laptop.

Each line of rank 3 stands behind ``[3] ``. A piece that does not end its line (a progress bar that
is waiting, a last line without a newline) stands behind ``[3]+ ``: its newline is ours, and what
comes next from that rank goes on in the same line. So every rank's bytes can be had back exactly,
and no line is ever cut by a line of another rank. All other lines are the entry's own words.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_MARK = re.compile(rb"\[(\d{1,9})\](\+?) ")


class Line(NamedTuple):
    """One line of the stream.

    Args:
        rank: Whose line it is, None for the entry's own words.
        data: The bytes, with their newline if they have one.
    """

    rank: int | None
    data: bytes


def write(rank: int, data: bytes) -> tuple[bytes, int]:
    """Return the stream text of the complete lines in ``data``, and how many bytes it took."""
    end = data.rfind(b"\n") + 1
    if not end:
        return b"", 0
    mark = b"[%d] " % rank
    # One replace at C speed for the whole piece: half a million lines pass in a blink.
    return mark + data[: end - 1].replace(b"\n", b"\n" + mark) + b"\n", end


def write_part(rank: int, data: bytes) -> bytes:
    """Return the stream text of a piece that does not end its line."""
    return b"[%d]+ %s\n" % (rank, data)


def read(line: bytes) -> Line:
    """Return what one line of the stream holds."""
    match = _MARK.match(line)
    if match is None:
        return Line(None, line)
    data = line[match.end() :]
    if match.group(2):
        data = data[:-1] if data.endswith(b"\n") else data
    return Line(int(match.group(1)), data)
