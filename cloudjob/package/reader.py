"""Reads the files of a source, and fails if one has changed since the scan."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from cloudjob.package.messages import changed, reading
from cloudjob.package.tree import FileStat, SourceEntry

PIECE_BYTES = 8 * 1024 * 1024
# The file may have become a link or a pipe: do not follow or block.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def pieces(source: Path, entry: SourceEntry) -> Iterator[bytes]:
    """Yield the content of a file, which is verified only once the last piece is read.

    Raises:
        ChangedError: The file has changed since the source was scanned.
        PackageError: The file cannot be read.
    """
    rest = entry.size_bytes
    with reading(source, entry.name):
        descriptor = os.open(entry.real or f"{source}/{entry.name}", _FLAGS)
        try:
            while rest and (piece := os.read(descriptor, min(rest, PIECE_BYTES))):
                rest -= len(piece)
                yield piece
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
    file_stat = FileStat(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    if rest or file_stat != entry.file_stat:
        raise changed(source, entry.name)
