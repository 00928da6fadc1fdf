"""Write files below a folder of the user; names come from a store to which others may write.

No link below the folder is followed, so nothing is written outside of it, even if the store lists a
link and then a file behind that link, or an earlier download made the link.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from cloudjob.store.files import TEMPORARY
from jobentry.system.trees import folder_below, set_modified

_NEW_FOLDER = 0o777


@contextlib.contextmanager
def file(root: Path, name: str) -> Iterator[Path]:
    """Yield the path of a new file that becomes the file ``name`` below ``root``."""
    _make_folders(root)
    fresh = root / f"{TEMPORARY}{os.urandom(8).hex()}"
    try:
        yield fresh
        with _above(root, name) as (folder, last):
            os.replace(fresh, last, dst_dir_fd=folder)
    finally:
        fresh.unlink(missing_ok=True)


def link(root: Path, name: str, target: str, *, replaces: bool = True) -> None:
    """Make a link below ``root``.

    Args:
        replaces: Whether it replaces a file of that name.

    Raises:
        OSError: There is something else.
    """
    _make_folders(root)
    with _above(root, name) as (folder, last):
        if not replaces:
            os.symlink(target, last, dir_fd=folder)
            return
        fresh = f"{TEMPORARY}{os.urandom(8).hex()}"
        os.symlink(target, fresh, dir_fd=folder)
        try:
            os.replace(fresh, last, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            os.unlink(fresh, dir_fd=folder)
            raise


def folder(root: Path, name: str, mode: int) -> None:
    """Make a folder below ``root``, or give the one that is there its permission bits.

    A new one gets those that the umask allows. One that was there may be the user's, with files
    that others must not see, so it gets no bits that it does not have.
    """
    _make_folders(root)
    with folder_below(os.fspath(root), name, makes=True, mode=_NEW_FOLDER) as parent:
        descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.fchmod(descriptor, mode & stat.S_IMODE(os.fstat(descriptor).st_mode) | stat.S_IRWXU)
    finally:
        os.close(descriptor)


def set_metadata(path: Path, mode: int, modified_ns: int) -> None:
    """Give a new file its permission bits and its time; a mode or a time of 0 is unknown.

    Not every user of this machine may write to it, whatever others have stored.
    The time stays as it is if the file system cannot store it.
    """
    if mode:
        path.chmod(mode & ~stat.S_IWOTH)
    if modified_ns:
        set_modified(os.fspath(path), modified_ns)


@contextlib.contextmanager
def _above(root: Path, name: str) -> Iterator[tuple[int, str]]:
    above, _, last = name.rpartition("/")
    with folder_below(os.fspath(root), above, makes=True, mode=_NEW_FOLDER) as descriptor:
        yield descriptor, last


def _make_folders(folder: Path) -> None:
    """Make a folder and its parents; ``Path.mkdir`` fails at a depth of about a thousand."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for parent in reversed(missing):
        parent.mkdir(exist_ok=True)
