"""Find the files of a folder that a process has open for writing, using /proc."""

from __future__ import annotations

import contextlib
import os
from typing import Iterator


def open_for_writing(folder: str) -> set[str]:
    """Return the paths, relative to ``folder``, of files below it that are open for writing.

    Processes of other users, whose files this process may not list, are left out.
    """
    top = os.path.join(os.path.realpath(folder), "")
    return {
        path[len(top) :]
        for process in filter(str.isdecimal, os.listdir("/proc"))
        for number, path in _open_files("/proc/" + process)
        if path.startswith(top) and _is_writable("/proc/%s/fdinfo/%s" % (process, number))
    }


def _open_files(process: str) -> Iterator[tuple[str, str]]:
    """Yield the number and the path of each open file of a process."""
    numbers: list[str] = []
    with contextlib.suppress(OSError):
        numbers = os.listdir(process + "/fd")
    for number in numbers:
        with contextlib.suppress(OSError):
            yield number, os.readlink("%s/fd/%s" % (process, number))


def _is_writable(path: str) -> bool:
    with contextlib.suppress(OSError, ValueError, IndexError), open(path, "rb") as file:
        # "pos: 0", then "flags: 0100001", in octal digits.
        flags = int(file.read().split(b"flags:")[1].split()[0], 8)
        # Not os.O_ACCMODE, which PyPy does not have.
        return bool(flags & (os.O_WRONLY | os.O_RDWR))
    return False
