"""Remove what a killed mpirun leaves on a node: its daemons, and its temporary folders."""

from __future__ import annotations

import contextlib
import glob
import os
import signal
from typing import Collection

from jobentry.system import linux
from jobentry.system.trees import remove_below

_DAEMONS = (b"orted", b"prted", b"hydra_pmi_proxy", b"hydra_bstrap_proxy")


def end_daemons(node_dir: str) -> list[int]:
    """Kill the daemons of mpirun on the node with this folder; return their process ids.

    Emulated nodes of other jobs have a folder of the same name, but see other files.
    """
    mark = b"\0CLOUDJOB_NODE_DIR=" + os.fsencode(node_dir) + b"\0"
    files = os.readlink("/proc/self/ns/mnt")
    ended = []
    for process in linux.processes():
        with contextlib.suppress(OSError):
            program = os.path.basename(linux.read(process, "cmdline").partition(b"\0")[0])
            if program not in _DAEMONS or os.readlink("/proc/%d/ns/mnt" % process) != files:
                continue
            if mark in b"\0" + linux.read(process, "environ"):
                os.kill(process, signal.SIGKILL)
                ended.append(process)
    return ended


def remove_sessions(processes: Collection[int]) -> None:
    """Remove the temporary folders that killed processes of Open MPI have left.

    Only those with these process ids, as other jobs may share the folder. 4.1 makes
    ompi.HOST.UID/pid.ID, or jf.JOB with the id in the names of its files; 5.0 makes ompi.ID and
    prted.ID.
    """
    folder = os.environ.get("TMPDIR") or "/tmp"
    top = glob.escape(folder)
    for process in processes:
        found = glob.glob("%s/*.%d" % (top, process)) + glob.glob(
            "%s/ompi.*/pid.%d" % (top, process)
        )
        inner = glob.glob("%s/ompi.*/jf.*/*_%d" % (top, process))
        for path in found + [os.path.dirname(path) for path in inner]:
            if os.path.basename(path).startswith(("ompi.", "prted.", "pid.", "jf.")):
                # Other users may share the folder, and put a link to anywhere in it.
                with contextlib.suppress(OSError):
                    remove_below(folder, os.path.relpath(path, folder))
