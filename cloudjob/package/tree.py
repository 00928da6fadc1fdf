"""The source folder, as scanned."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import NamedTuple

FILE, FOLDER, LINK = "file", "folder", "link"


class Rule(Enum):
    """The kind of rule by which a path is left out."""

    IGNORE_FILE = "a line of an ignore file"
    DEFAULT = "a default of cloudjob"
    SECRET = "it may hold secrets"
    STATE = "it is the state of cloudjob on this machine"


class LeftOut(NamedTuple):
    """A path of the source that is not in the package; a folder's path ends with ``/``.

    Args:
        reason: The rule by which it is left out, in words for people.
    """

    path: str
    reason: str
    rule: Rule = Rule.IGNORE_FILE


class FileStat(NamedTuple):
    """What ``stat`` returned for a file; while it stays the same, so does the content."""

    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int


class SourceEntry(NamedTuple):
    """One file, folder or link of the source.

    Args:
        file_stat: For a file.
        target: Where a link points.
        is_named: Whether a line of ``.cloudjobignore`` keeps it by its full name.
        real: Where to read the target of a followed link; empty for all others.
        kept_by: The line of an ignore file that keeps it, if there is one.
    """

    name: str
    kind: str
    mode: int
    file_stat: FileStat | None = None
    target: str = ""
    is_named: bool = False
    real: str = ""
    kept_by: str = ""

    @property
    def size_bytes(self) -> int:
        """The size of a file; 0 for anything else."""
        return self.file_stat.size_bytes if self.file_stat else 0


class Tree(NamedTuple):
    """The paths that go into the package, sorted by the bytes of their names, and the others."""

    source: Path
    entries: tuple[SourceEntry, ...]
    left_out: tuple[LeftOut, ...]
