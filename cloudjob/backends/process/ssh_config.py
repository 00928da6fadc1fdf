"""The configuration of ssh on emulated nodes whose files belong to nobody.

The nodes of an ordinary user are in a user namespace, in which root's files belong to nobody. ssh
refuses such a file if another one includes it: "Bad owner or permissions on
/etc/ssh/ssh_config.d/…". Nodes therefore get a file of the user's own, with what it includes.
Standard library only.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from cloudjob.backends.process import SSH_CONFIG_PATH

# ssh follows as many levels.
_DEPTH = 16
_ALL = "Match all"


def write(path: Path) -> None:
    """Write the file for nodes, unless root runs them, whose files remain root's."""
    if os.geteuid():
        path.write_text(
            "\n".join(_lines(SSH_CONFIG_PATH, _DEPTH)) + "\n", "utf-8", "surrogateescape"
        )


def _lines(path: str, depth: int) -> Iterator[str]:
    """Yield the lines of a configuration, with the files that it includes in their place."""
    text = ""
    with contextlib.suppress(OSError):
        text = Path(path).read_text("utf-8", "surrogateescape")
    block = _ALL
    for line in text.splitlines():
        words = line.replace("=", " ", 1).split(maxsplit=1)
        keyword = words[0].lower() if words else ""
        if keyword in ("host", "match"):
            block = line
        if keyword != "include":
            yield line
            continue
        for each in _included(words[1:]) if depth else ():
            yield from _lines(each, depth - 1)
            # A block ends with its file.
            yield block


def _included(patterns: list[str]) -> Iterator[str]:
    with contextlib.suppress(ValueError):
        for pattern in shlex.split(" ".join(patterns)):
            yield from sorted(glob.glob(str(Path(SSH_CONFIG_PATH).parent / pattern)))  # noqa: PTH207
