"""Which machine holds a lock: several may share ``$CLOUDJOB_HOME``, for example on NFS.

A lock of another machine may be invisible here, and its processes always are. A lock file therefore
begins with a line of JSON that names the host of its creator.
"""

from __future__ import annotations

import functools
import json
import os
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

# A first line that is longer was not written by cloudjob.
_MAX_BYTES = 1 << 20


class Relation(Enum):
    """Where the processes of a host are, as seen from this process."""

    # In this process namespace, or ended because this machine was restarted.
    HERE = "here"
    # In a container or namespace of this machine: its locks are visible, its processes are not.
    BESIDE = "beside"
    # On another machine: neither its locks nor its processes need be visible.
    ELSEWHERE = "elsewhere"


class Host(NamedTuple):
    """A machine as its processes see it; unknown values are empty.

    Args:
        name: Its host name, which may change.
        boot: The id of the running kernel: equal for all containers of a machine.
        processes: The id of the process namespace, which is the container's.
        machine: The id of the installed system, which survives a restart.
    """

    name: str
    boot: str = ""
    processes: str = ""
    machine: str = ""

    def relation(self, here: Host) -> Relation:
        """Return where the processes of this host are for a process of the host ``here``."""
        if self.boot and here.boot:
            if self.boot == here.boot:
                is_same = self.processes == here.processes
                return Relation.HERE if is_same else Relation.BESIDE
            # After a restart, the kernel is another one, but the machine is the same.
            was_here = (self.name, self.machine) == (here.name, here.machine) and here.machine
            return Relation.HERE if was_here else Relation.ELSEWHERE
        return Relation.HERE if self.name == here.name else Relation.ELSEWHERE


@functools.cache
def this_host() -> Host:
    """Return the host of this process."""
    processes = ""
    with suppress(OSError):
        processes = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 (not a path)
    return Host(
        os.uname().nodename,
        _line_of("/proc/sys/kernel/random/boot_id"),
        processes,
        _line_of("/etc/machine-id"),
    )


def _line_of(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def first_line(**values: Any) -> bytes:
    """Return the first line of a lock file of this host, with further values."""
    return json.dumps({**values, "host": this_host()._asdict()}).encode("ascii") + b"\n"


def read_first_line(path: Path) -> dict[str, Any]:
    """Return the values in the first line of a lock file; empty if it has none."""
    try:
        with path.open("rb") as file:
            values = json.loads(file.readline(_MAX_BYTES))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def creator_of(path: Path) -> Host | None:
    """Return the host that created a lock file; None if it does not say."""
    values = read_first_line(path).get("host")
    if not isinstance(values, dict) or not values.get("name"):
        return None
    return Host(*(str(values.get(name) or "") for name in Host._fields))
