"""The source folder as the scan found it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

FILE, FOLDER, LINK = "file", "folder", "link"


class LeftOut(NamedTuple):
    """A path of the source that is not in the package; a folder's path ends with ``/``."""

    path: str
    reason: str


class Seen(NamedTuple):
    """What ``stat`` returned for a file; while it stays the same, so does the content."""

    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int


class SourceEntry(NamedTuple):
    """One file, folder or link of the source.

    Args:
        seen: For a file.
        target: Where a link points.
        is_named: Whether a line of ``.cloudjobignore`` spells it out to keep it.
        real: Where to read a file that a followed link leads to; empty for all others.
        kept_by: The line of an ignore file that keeps it, if there is one.
    """

    name: str
    kind: str
    mode: int
    seen: Seen | None = None
    target: str = ""
    is_named: bool = False
    real: str = ""
    kept_by: str = ""

    @property
    def size_bytes(self) -> int:
        """The size of a file; 0 for all else."""
        return self.seen.size_bytes if self.seen else 0


class Tree(NamedTuple):
    """What goes into the package, sorted by the bytes of its names, and what does not."""

    source: Path
    entries: tuple[SourceEntry, ...]
    left_out: tuple[LeftOut, ...]
