"""Explains a failed job that did not find a file which this machine has.

Either the package leaves it out, or it is outside the folder that was packed.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cloudjob.errors import PackageError
from cloudjob.model.status import Failure
from cloudjob.package import LeftOut, scan
from cloudjob.package.messages import CLOUDJOBIGNORE, shown
from cloudjob.package.scan import covers

# How programs name the file that they did not find: Python, and coreutils with a shell.
_NAMED = re.compile(
    r"No such file or directory: b?'([^']{1,4096})'"
    r"|(?:cannot open|can't open|cannot access|cannot stat|open) '?([^':]{1,4096})'?:"
    r"|^(?:[\w./-]+: ){1,3}([^':]{1,4096}): No such file or directory"
)
# The folder of the package on a node.
_CODE = "/user-job-dir/code/"
# A log may name any number of files.
_MAX_PATHS = 50


def hint(spec: Mapping[str, Any], failure: Failure | None) -> str:
    """Return why the nodes lack a file that this machine has; empty if it does not have it.

    Args:
        spec: The job as it was submitted; without a source if another machine submitted it.
    """
    source = str(spec.get("source") or "")
    if not source or failure is None:
        return ""
    paths = sorted(set(_missing(failure)))[:_MAX_PATHS]
    names = [name for path in paths if (name := _in_source(source, path))]
    return left_out_text(spec, names) or _outside_text(spec, source, paths)


def left_out_text(spec: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return why the first of these paths of the source is not in the package; else empty."""
    source = spec.get("source")
    if not source or not names:
        return ""
    try:
        left_out = scan(Path(str(source)), follow_links=spec.get("links") == "follow").left_out
    except (PackageError, OSError):
        return ""
    pairs = ((name, item) for name in names for item in left_out if covers(item.path, name))
    return next((_text(name, item) for name, item in pairs), "")


def _missing(failure: Failure) -> Iterator[str]:
    """Yield the paths that the job did not find."""
    for line in (failure.message, *failure.last_lines):
        for match in _NAMED.finditer(line):
            if path := next(filter(None, match.groups()), ""):
                yield path


def _in_source(source: str, path: str) -> str:
    """Return a path relative to the source; empty if it is not in it."""
    inner = path.partition(_CODE)[2] or path
    if inner.startswith(source.rstrip("/") + "/"):
        inner = os.path.relpath(inner, source)
    name = posixpath.normpath(inner)
    return "" if posixpath.isabs(name) or name.split("/", 1)[0] == ".." else name


def _text(name: str, item: LeftOut) -> str:
    return (
        f"{shown(name)} is not in the package: left out by {shown(item.reason)}; a line"
        f" !{shown(item.path)} in {CLOUDJOBIGNORE} keeps it, and --input passes large data"
    )


def _outside_text(spec: Mapping[str, Any], source: str, paths: Sequence[str]) -> str:
    """Return that this machine has a file outside the source; empty if it has none of these."""
    if spec.get("backend") == "process":
        # Its nodes see the folders of this machine.
        return ""
    places = {Path.home(), Path(source).parent} - {Path("/")}
    for path in paths:
        local = Path(os.path.normpath(Path(source, path)))
        is_own = not places.isdisjoint(local.parents)
        if is_own and not _in_source(source, path) and os.path.lexists(local):
            return (
                f"{shown(path)} is on this machine, but outside the folder that was sent,"
                f" {shown(source)}: copy it there, or put it into a store and pass it with --input"
            )
    return ""
