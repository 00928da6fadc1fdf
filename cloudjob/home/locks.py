"""Lock files of running processes: the kernel releases a lock however its process ends.

They are locks of an open file (``F_OFD_SETLK``), so a child that inherits the descriptor shares
the lock, and ``is_held`` tests a lock without taking it. Systems other than Linux use ``flock``:
a test takes a shared lock for a moment, and ``acquire`` waits for that.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cloudjob.home import hosts
from cloudjob.home.hosts import Relation

# ``struct flock``: type, whence, start, length, process.
_FLOCK = "hhqqi4x"
# Seconds that ``acquire`` waits if another process may be testing the lock with ``flock``.
_TESTED_S = 0.5


def acquire(path: Path, flags: int = os.O_CREAT) -> int | None:
    """Lock the file and return its descriptor, or None if another process holds the lock.

    Raises:
        OSError: The file cannot be opened, or its file system has no locks.
    """
    return _locked(_opened(path, flags))


def acquire_new(path: Path, data: bytes) -> int:
    """Create a file that is locked from the moment it appears, and return its descriptor.

    Raises:
        OSError: The file exists or cannot be created, or its file system has no locks.
    """
    new = path.with_name(f".{path.name}-{os.urandom(4).hex()}")
    descriptor = _locked(_opened(new, os.O_CREAT | os.O_EXCL))
    assert descriptor is not None
    try:
        os.write(descriptor, data)
        os.link(new, path)
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        new.unlink()
    return descriptor


@contextmanager
def hold(path: Path) -> Iterator[None]:
    """Hold the file's lock, waiting until no other process has it.

    Raises:
        OSError: The file cannot be opened, or its file system has no locks.
    """
    descriptor = _opened(path, os.O_CREAT)
    try:
        _lock(descriptor, is_waiting=True)
        yield
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Whether a running process holds the lock; any number of processes may call this at once.

    A lock that another machine holds may be invisible here; see ``is_unseen``.

    Raises:
        OSError: The file cannot be read, or its file system has no locks, so it is unknown whether
            the process is running.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        return _is_locked(descriptor)
    finally:
        os.close(descriptor)


def is_unseen(path: Path) -> bool:
    """Whether a lock that seems free belongs to another machine, which may hold it."""
    creator = hosts.creator_of(path)
    return creator is not None and creator.relation(hosts.this_host()) is Relation.ELSEWHERE


def _opened(path: Path, flags: int) -> int:
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)


def _locked(descriptor: int) -> int | None:
    """Lock the descriptor and return it; if another process holds the lock, close it."""
    try:
        _lock(descriptor, is_waiting=False)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return None
        raise
    return descriptor


if sys.platform == "linux":

    def _lock(descriptor: int, *, is_waiting: bool) -> None:
        _control(descriptor, fcntl.F_OFD_SETLKW if is_waiting else fcntl.F_OFD_SETLK)

    def _is_locked(descriptor: int) -> bool:
        return _control(descriptor, fcntl.F_OFD_GETLK) != fcntl.F_UNLCK

    def _control(descriptor: int, command: int) -> int:
        """Run a lock command on the whole file and return the type of lock in its answer."""
        request = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind: int = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, command, request))[0]
        return kind

else:

    def _lock(descriptor: int, *, is_waiting: bool) -> None:
        end_s = time.monotonic() + _TESTED_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if is_waiting else fcntl.LOCK_NB))
                return
            except BlockingIOError:
                if time.monotonic() > end_s:
                    raise
                time.sleep(0.001)

    def _is_locked(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
