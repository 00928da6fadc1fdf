"""Limits of this node that a job can run into: open files, CPU time, and space on its disks."""

from __future__ import annotations

import errno
import os
import resource
import signal
from typing import Sequence

from jobentry.contract.env import NodeEnv
from jobentry.errors import EntryError

# Open files of the entry or mpirun: for itself, for each rank, and for each other node.
_OWN_FILES = 24
_FILES_PER_RANK = 3
_FILES_PER_MPI_RANK = 6
_FILES_PER_NODE = 2
# With so many more, a head also reaches all its workers at once; it does with less.
_FILES_OF_HEAD = 256
_MIB = 1 << 20


def allow_open_files(node: NodeEnv, *, needs_mpi: bool) -> None:
    """Raise the limit on open files as far as this node needs and may.

    Child processes inherit the limit, so it stays as it is for jobs that need no more.

    Raises:
        EntryError: The hard limit is too low; mpirun, for example, would hang.
    """
    per_rank = _FILES_PER_MPI_RANK if needs_mpi else _FILES_PER_RANK
    needed = _OWN_FILES + per_rank * node.slots
    connections = _FILES_PER_NODE * (node.nodes - 1) if node.is_head else 0
    needed += connections
    useful = max(needed, _FILES_OF_HEAD + connections) if connections else needed
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= useful:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise EntryError(
            "preparing this node: %d open files are allowed, but about %d are needed for %d ranks"
            % (hard, needed, node.slots),
            hint="raise the limit on open files: `ulimit -n`, or that of the container",
        )
    most = useful if hard == resource.RLIM_INFINITY else min(useful, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def hint(error: OSError, folders: Sequence[str]) -> str:
    """Return what to do about an error of the system, else "".

    Args:
        folders: Where a job writes; those that are full are named if the error names no file.
    """
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "raise the limit on open files: `ulimit -n`, or that of the container"
    if error.errno == errno.EAGAIN:
        return "raise the limit on processes: `ulimit -u`, or that of the container (pids)"
    if error.errno == errno.EFBIG:
        return "raise the limit on the size of files: `ulimit -f`"
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    if error.filename:
        folders = (os.path.dirname(os.fsdecode(error.filename)),)
    else:
        folders = [folder for folder in folders if _is_full(folder)] or folders
    if error.errno == errno.EDQUOT:
        return "free some of your quota in " + ", ".join(folders)
    return "free some space in " + ", ".join(_with_space(folder) for folder in folders)


def of_cpu_time(number: int) -> str:
    """Return the limit that the kernel may have enforced with this signal, for a message; or ""."""
    limit_s = resource.getrlimit(resource.RLIMIT_CPU)[0]
    if limit_s == resource.RLIM_INFINITY or number not in (signal.SIGXCPU, signal.SIGKILL):
        return ""
    return f"; its limit is {limit_s} s of CPU time (ulimit -t)"


def _is_full(folder: str) -> bool:
    try:
        space = os.statvfs(folder)
    except OSError:
        return False
    has_inodes = space.f_favail > 0 or space.f_files == 0
    return space.f_bavail * space.f_frsize < _MIB or not has_inodes


def _with_space(folder: str) -> str:
    try:
        space = os.statvfs(folder)
    except OSError:
        return folder
    free_mib = space.f_bavail * space.f_frsize / _MIB
    inodes = ", no free inodes" if space.f_files and not space.f_favail else ""
    return "%s (%.1f MiB free%s)" % (folder, free_mib, inodes)
