"""Explains a failed job that did not find a file of the source: the package leaves it out."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator, Mapping
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


def hint(spec: Mapping[str, Any], failure: Failure | None) -> str:
    """Return why a file that the job did not find is not in the package; empty if it is not ours.

    Args:
        spec: The job as it was submitted; without a source if another machine submitted it.
    """
    source = spec.get("source")
    names = set(_missing(str(source), failure)) if source and failure else set[str]()
    if not names:
        return ""
    try:
        left_out = scan(Path(str(source)), follow_links=spec.get("links") == "follow").left_out
    except (PackageError, OSError):
        return ""
    for name in sorted(names):
        for item in left_out:
            if covers(item.path, name):
                return _text(name, item)
    return ""


def _missing(source: str, failure: Failure) -> Iterator[str]:
    """Yield the files that the job did not find, relative to the source."""
    for line in (failure.message, *failure.last_lines):
        for match in _NAMED.finditer(line):
            path = next(filter(None, match.groups()), "")
            inner = path.partition(_CODE)[2] or path
            if inner.startswith(source.rstrip("/") + "/"):
                inner = os.path.relpath(inner, source)
            name = posixpath.normpath(inner)
            if name and not posixpath.isabs(name) and name.split("/", 1)[0] != "..":
                yield name


def _text(name: str, item: LeftOut) -> str:
    return (
        f"{shown(name)} is not in the package: left out by {shown(item.reason)}; a line"
        f" !{shown(item.path)} in {CLOUDJOBIGNORE} keeps it, and --input passes large data"
    )
