"""Explains whether a path goes into the package, and which rule decides."""

from __future__ import annotations

import os
import posixpath
from pathlib import Path
from typing import NamedTuple

from cloudjob.errors import PackageError
from cloudjob.package.messages import shown
from cloudjob.package.scan import covers, walk
from cloudjob.package.tree import FOLDER


class Explained(NamedTuple):
    """The decision about one path.

    Args:
        path: Relative to the source; a folder's ends with ``/``.
        goes: Whether it is in the package.
        rule: The line, as ``FILE:LINE: TEXT``, or the default that decided.
        decided_at: The folder above that is left out as a whole; else ``path`` itself.
    """

    path: str
    goes: bool
    rule: str
    decided_at: str


def explain(
    source: Path, path: str, *, home: Path | None = None, follow_links: bool = False
) -> Explained:
    """Return the decision about ``path``, relative to the source or absolute.

    Raises:
        PackageError: There is no such path in the source, or the source cannot be read.
    """
    name = _name(source, path)
    found = walk(source, home=home, follow_links=follow_links)
    for entry in found.entries:
        if entry.name == name:
            listed = name + "/" if entry.kind == FOLDER else name
            return Explained(listed, True, entry.kept_by or "no rule leaves it out", listed)
    for refused in found.refused:
        if refused.name == name:
            return Explained(name, False, f"refused: it {refused.fault}", name)
    for out, reason in found.left_out:
        if covers(out, name):
            return Explained(name, False, reason, out)
    raise PackageError(
        f"explain {shown(path)}: no such file in {shown(source)}",
        hint="the path is relative to --source",
    )


def _name(source: Path, path: str) -> str:
    """Return a path as the package would name it."""
    given = posixpath.normpath(path)
    if posixpath.isabs(given):
        # Its last segment may be a link, which is explained itself.
        above = os.path.realpath(posixpath.dirname(given))
        given = os.path.relpath(
            posixpath.join(above, posixpath.basename(given)), os.path.realpath(source)
        )
    if given == "." or given.split("/", 1)[0] == "..":
        raise PackageError(
            f"explain {shown(path)}: not in the source {shown(source)}",
            hint="the path is relative to --source",
        )
    return given
