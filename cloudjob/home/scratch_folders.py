"""Folders of running processes: each has a lock, and the next process removes those without one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cloudjob.home import hosts, locks, private_folder, writing
from cloudjob.home.hosts import Host
from jobentry.system.trees import remove_tree

_LOCK = "lock"
# A folder exists for a moment before its lock is taken.
_NEW_S = 60.0
# No process uses a scratch folder for longer than this.
_OLD_S = 7 * 24 * 3600.0


@contextmanager
def new(folder: Path, name: str = "") -> Iterator[Path]:
    """Create an empty folder below ``folder`` and remove it at the end.

    The next call removes folders that killed processes left.

    Args:
        name: The name of the new folder, by default random; ``is_in_use`` takes this name.

    Raises:
        BackendError: The folder cannot be created.
    """
    with writing("creating a folder", folder):
        private_folder(folder)
        remove_unused(folder)
        path = folder / (name or f"tmp-{os.urandom(8).hex()}")
        path.mkdir(mode=0o700)
        lock = locks.acquire_new(path / _LOCK, hosts.first_line())
    try:
        yield path
    finally:
        with suppress(OSError):
            remove_tree(path)
        os.close(lock)


def is_in_use(folder: Path, name: str) -> bool:
    """Whether a running process uses the scratch folder ``name`` below ``folder``."""
    return locks.is_held(folder / name / _LOCK)


def user_elsewhere(folder: Path, name: str) -> Host | None:
    """Return the other machine that may use a scratch folder; None if there is none."""
    path = folder / name / _LOCK
    return hosts.creator_of(path) if locks.is_unseen(path) else None


def remove_unused(folder: Path) -> None:
    """Remove the scratch folders below ``folder`` whose processes were killed."""
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError):
                if not _may_be_in_use(path):
                    remove_tree(path)


def _may_be_in_use(folder: Path) -> bool:
    age_s = time.time() - folder.stat().st_mtime
    lock = folder / _LOCK
    if not lock.exists():
        return age_s < _NEW_S
    return locks.is_held(lock) or (age_s < _OLD_S and locks.is_unseen(lock))
