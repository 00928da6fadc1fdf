"""A small file that can still be written when the disk is full. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import os
import sys

STATE = "state.json"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# File systems and C libraries that cannot exchange two files, NFS for example.
_CANNOT = (errno.EINVAL, errno.ENOSYS)


class StateFile:
    """A text file that is replaced as a whole, from a second file with reserved room.

    The two files change places at each write, so that none of it needs new space.

    Args:
        size_bytes: The room for its text; blanks fill it.

    Raises:
        OSError: There is no room now.
    """

    def __init__(self, path: str, size_bytes: int) -> None:
        self._path = path
        self._next = f"{path}.new"
        self._size_bytes = size_bytes
        self._reserve()

    def write(self, text: bytes) -> None:
        """Replace the text of the file.

        Raises:
            OSError: The file could not be written and is unchanged.
        """
        data = text.ljust(self._size_bytes)
        descriptor = os.open(self._next, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.write(descriptor, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._next)
        finally:
            os.close(descriptor)
        if os.path.exists(self._path) and _exchanged(self._next, self._path):
            return
        os.replace(self._next, self._path)
        self._reserve()

    def _reserve(self) -> None:
        descriptor = os.open(self._next, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if sys.platform == "linux":
                os.posix_fallocate(descriptor, 0, self._size_bytes)
        finally:
            os.close(descriptor)

    def release(self) -> None:
        """Release the reserved room; the file stays."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._next)


def _exchanged(first: str, second: str) -> bool:
    """Exchange two files; return False where that is not possible."""
    import ctypes

    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    words = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    if renameat2(*words) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), second)
