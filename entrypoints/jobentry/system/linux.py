"""System calls and files of Linux that Python does not provide. Each rank imports this module."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing costs each rank seven milliseconds
    from typing import Callable, Iterator

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER
_MOST_ARENAS = -8  # M_ARENA_MAX


def prctl() -> Callable[[int, int], None]:
    """Return the function ``prctl(2)``, or one that does nothing on other systems.

    Call this before a fork, as nothing should be imported between fork and exec.
    """
    try:
        import ctypes

        call = ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return lambda option, value: None
    return lambda option, value: call(option, value, 0, 0, 0)


def save_address_space() -> None:
    """If `ulimit -v` limits it, let all threads allocate in one arena; glibc reserves 64 MB each.

    Otherwise too little may be left for a thread to begin, and Python waits for that for ever.
    """
    import resource

    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return
    import ctypes

    # Only glibc has arenas.
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option:
        set_option(_MOST_ARENAS, 1)


def processes() -> list[int]:
    """Return the ids of all processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def children(process: int) -> list[int]:
    """Return the ids of the children of a process, until it has waited for them.

    While children go, others may be left out, but never all of them.
    """
    child_ids: list[int] = []
    if not os.path.exists("/proc/thread-self/children"):  # not every kernel has it
        return [each for each in processes() if parent(each) == process]
    # The first thread last: it adopts the children of those that end.
    for thread in reversed(threads(process)):
        try:
            child_ids += map(int, read(process, "task/%d/children" % thread).split())
        except OSError:
            continue
    return child_ids


def parent(process: int) -> int:
    """Return the parent of a process; 0 if it is gone."""
    try:
        return int(stat(process)[1])
    except (OSError, IndexError):
        return 0


def threads(process: int) -> list[int]:
    """Return the ids of the threads of a process; none if it is gone."""
    try:
        return [int(name) for name in os.listdir("/proc/%d/task" % process)]
    except OSError:
        return []


def read(process: int, name: str) -> bytes:
    """Return a file of ``/proc`` about a process.

    Raises:
        OSError: The process is gone, or another user's.
    """
    with open("/proc/%d/%s" % (process, name), "rb", buffering=0) as file:
        return file.read() or b""


def open_files(process: int) -> Iterator[tuple[str, str]]:
    """Yield the number and the path of each open file of a process; none of another user's."""
    folder = "/proc/%d/fd" % process
    try:
        numbers = os.listdir(folder)
    except OSError:
        return
    for number in numbers:
        try:
            yield number, os.readlink(os.path.join(folder, number))
        except OSError:
            continue


def working_folder(process: int) -> str:
    """Return the working folder of a process; empty if it is gone, or another user's."""
    try:
        return os.readlink("/proc/%d/cwd" % process)
    except OSError:
        return ""


def stat(process: int, thread: int = 0) -> list[bytes]:
    """Return the fields of ``/proc/PID/stat`` from the third on: state, parent, and so on.

    Args:
        thread: The id of one of its threads, to return the thread's own fields.

    Raises:
        OSError: The process is gone.
    """
    # The name of a program may contain spaces and brackets; the last bracket ends it.
    name = "task/%d/stat" % thread if thread else "stat"
    return read(process, name).rpartition(b")")[2].split()


def start_ticks(process: int) -> bytes:
    """Return when a process started, in clock ticks since boot; empty if it is gone.

    An id is used again after some thousands of processes, but not with the same time of start.
    """
    try:
        return stat(process)[19]
    except (OSError, IndexError):
        return b""
