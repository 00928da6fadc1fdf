"""The log of a node in the job's store: numbered chunks beside the exit record, compressed.

Each chunk is a gzip stream of whole pieces of the log, as the node wrote it to its stdout and
stderr. The last one is stored again as it grows, so its stream may have no end.
"""

from __future__ import annotations

import re
import zlib
from typing import Any, Iterator, NamedTuple

# The prefix of every name.
PREFIX = "log-"
_NAME = re.compile(r"log-(\d{1,9})-(\d{13})-(\d{6})\.gz")
_GZIP = 31
_PIECE_BYTES = 1 << 20
# Limits for reading. A node writes chunks of about a mebibyte, which may stand for a gibibyte.
CHUNK_LIMIT_BYTES = 4 << 20
_TEXT_LIMIT_BYTES = 2 << 30


class Chunk(NamedTuple):
    """A chunk of the log of one node; chunks sort in the order of the log.

    Args:
        attempt_ms: When the node's entry started, in milliseconds since 1970: a restarted job has
            several logs.
    """

    node: int
    attempt_ms: int
    number: int

    @property
    def name(self) -> str:
        """The name of its object."""
        return "log-%d-%013d-%06d.gz" % self


def read_name(name: str) -> Chunk | None:
    """Return the chunk with this object name; None if the object is not a chunk."""
    match = _NAME.fullmatch(name)
    return None if match is None else Chunk(*(int(text) for text in match.groups()))


def compressor() -> Any:
    """Return a compressor for one chunk; a fast one, because the ranks' output waits for it."""
    return zlib.compressobj(1, zlib.DEFLATED, _GZIP)


def unpack(data: bytes) -> Iterator[bytes]:
    """Yield the bytes of a chunk in pieces, up to its limit or the point where it is damaged."""
    reader = zlib.decompressobj(_GZIP)
    left_bytes = _TEXT_LIMIT_BYTES
    while data and not reader.eof and left_bytes > 0:
        try:
            piece = reader.decompress(data, _PIECE_BYTES)
        except zlib.error:
            return
        if not piece and data == reader.unconsumed_tail:
            return
        data = reader.unconsumed_tail
        left_bytes -= len(piece)
        yield piece
