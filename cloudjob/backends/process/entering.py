"""The command that enters the namespaces of an emulated node."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from cloudjob.errors import BackendError
from jobentry.contract import names

# The namespaces that a node may have for itself, with nsenter's option for each; the first one
# gives a user who is not root the right to enter the others.
_NAMESPACES = {"user": "--user", "mnt": "--mount", "uts": "--uts"}
# How an entry is started: python -I -S ENTRY SCRIPT …
_START_ARGUMENTS = 4


def command(entry: int, arguments: Sequence[str]) -> list[str]:
    """Return the command that starts the node half beside an entry.

    Args:
        entry: The process id of the node's entry.
        arguments: Those of the node half, such as ``--enter -- hostname``.

    Raises:
        OSError: The entry has ended, and its process id may be another user's by now.
        BackendError: This machine has no nsenter.
    """
    if Path(f"/proc/{entry}").stat().st_uid != os.getuid():
        raise ProcessLookupError(entry)
    start = [os.fsdecode(word) for word in _words(entry, "cmdline")[:_START_ARGUMENTS]]
    mark = f"{names.CLOUDJOB_NODE_DIR}="
    node_dir = [
        word for word in map(os.fsdecode, _words(entry, "environ")) if word.startswith(mark)
    ]
    return [*_nsenter(entry), "env", *node_dir, *start, *arguments]


def _words(process: int, name: str) -> list[bytes]:
    return Path(f"/proc/{process}/{name}").read_bytes().split(b"\0")[:-1]


def _nsenter(process: int) -> list[str]:
    """Return the command that enters a process's namespaces; nothing if they are ours, too."""
    options = [
        option
        for name, option in _NAMESPACES.items()
        if Path(f"/proc/{process}/ns/{name}").readlink() != Path(f"/proc/self/ns/{name}").readlink()
    ]
    if not options:
        return []
    program = shutil.which("nsenter")
    if program is None:
        raise BackendError(
            "entering a node: nsenter not found on PATH", hint="apt-get install util-linux"
        )
    options += ["--preserve-credentials"] if "--user" in options else []
    options += ["--root", "--wd"] if "--mount" in options else []
    return [program, f"--target={process}", *options]
