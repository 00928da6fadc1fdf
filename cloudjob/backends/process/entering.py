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


def command(entry: int, start: Sequence[str], node_dir: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that starts the node half beside an entry.

    Args:
        entry: The process id of the node's entry.
        start: The command that starts the node half on the node.
        node_dir: The folder of the entry there.
        arguments: Those of the node half, such as ``--enter -- hostname``.

    Raises:
        OSError: The entry has ended, and its process id may be another user's by now.
        BackendError: This machine has no nsenter.
    """
    if Path(f"/proc/{entry}").stat().st_uid != os.getuid():
        raise ProcessLookupError(entry)
    variable = f"{names.CLOUDJOB_NODE_DIR}={node_dir}"
    return [*_nsenter(entry), "env", variable, *start, *arguments]


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
