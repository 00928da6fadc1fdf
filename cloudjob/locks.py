"""Files that say who lives: the system takes a lock from a process that ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from cloudjob.home import writing

_LOCK = "lock"
# A folder is there a moment before its lock is taken.
_NEW_S = 60.0


def take(path: Path, flags: int = os.O_CREAT) -> int | None:
    """Return a descriptor of the file that holds its lock; None when another process has it.

    Raises:
        OSError: The file can't be opened, or its file system has no locks.
    """
    return _locked(_opened(path, flags))


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Wait until no other process has the file's lock, and hold it.

    Raises:
        OSError: The file can't be opened, or its file system has no locks.
    """
    descriptor = _opened(path, os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Whether a process lives that has taken the lock.

    Raises:
        OSError: The file system has no locks: then nobody may be taken for dead.
    """
    try:
        opened = _opened(path, 0)
    except OSError:
        return False
    descriptor = _locked(opened)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False


def _opened(path: Path, flags: int) -> int:
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)


def _locked(descriptor: int) -> int | None:
    """Return the descriptor with its lock, else close it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """Give an empty folder below ``folder``, and remove it at the end.

    What a process had that was killed is removed by the next one.

    Raises:
        BackendError: None can be made.
    """
    with writing("making a folder", folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sweep(folder)
        made = TemporaryDirectory(dir=folder)
        lock = take(Path(made.name, _LOCK))
    try:
        with made as name:
            yield Path(name)
    finally:
        if lock is not None:
            os.close(lock)


def _sweep(folder: Path) -> None:
    for path in folder.iterdir():
        with suppress(OSError):
            age_s = time.time() - path.stat().st_mtime
            if age_s > _NEW_S and not is_held(path / _LOCK):
                shutil.rmtree(path)
