"""Open, write and remove files below a folder without following links; both halves use it.

What others may write to (a store, a folder of a container) may contain links to anywhere, and a
folder may be replaced by a link at any time. So each folder on the way is opened relative to the
one above it.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from contextlib import contextmanager, suppress
from itertools import groupby

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO

# Python 3.9 of PyPy lacks the name; macOS has no such flag.
_O_PATH = getattr(os, "O_PATH", 0o10000000 if sys.platform == "linux" else 0)
# With such a descriptor, no other process can replace the folder by a link in the meantime.
_PRIVATE = 0o700
_FOLDER = _O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# The unit of ``st_blocks``, whatever the file system's own block is.
_BLOCK_OF_STAT_BYTES = 512
# The shortest run of zeros that is left out, at a multiple of its length.
_ZEROS = bytes(64 * 1024)


@contextmanager
def folder_below(
    root: str, path: str, *, makes: bool = False, shares: bool = False, mode: int = 0o700
) -> Iterator[int]:
    """Yield a descriptor of the folder ``path`` below ``root``; no link below ``root`` is followed.

    Args:
        path: Names joined by ``/``; empty for ``root`` itself.
        makes: Whether to make missing folders.
        mode: That of new folders, with the umask. Private ones survive a crash.
        shares: Whether a new folder is open to all if the one above it is.

    Raises:
        NotADirectoryError: A link or a file is in the place of a folder.
    """
    descriptor = os.open(root, _O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in filter(None, path.split("/")):
            inner = _inner(name, descriptor, mode if makes else None, shares=shares)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def is_open(folder: os.stat_result) -> bool:
    """Whether a folder is shared with other users, who then read and remove the files in it.

    A folder with the sticky bit, like /tmp, does not count.
    """
    return bool(folder.st_mode & 0o002) and not folder.st_mode & 0o1000


def _inner(name: str, above: int, mode: int | None, *, shares: bool) -> int:
    _check_name(name)
    try:
        return os.open(name, _FOLDER, dir_fd=above)
    except FileNotFoundError:
        if mode is None:
            raise
    with suppress(FileExistsError):
        os.mkdir(name, mode, dir_fd=above)
        if mode == _PRIVATE:
            sync(above)
    inner = os.open(name, _FOLDER, dir_fd=above)
    if shares and is_open(os.fstat(above)):
        with suppress(OSError):
            os.chmod("/proc/self/fd/%d" % inner, 0o777)
    return inner


def _check_name(name: str) -> None:
    if name in (".", "..") or "\0" in name:
        raise ValueError("%r is not the name of a file" % name)


def open_file_below(root: str, path: str) -> int:
    """Open a regular file below ``root`` for reading; neither a link nor a FIFO is opened.

    Raises:
        OSError: There is no such file.
    """
    above, _, name = path.rpartition("/")
    with folder_below(root, above) as folder:
        _check_name(name)
        # A FIFO would wait for its writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=folder)
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode):
        os.close(descriptor)
        if stat.S_ISDIR(facts.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        raise OSError(errno.ENXIO, "not a regular file", path)
    return descriptor


def remove_below(root: str, path: str) -> None:
    """Remove a file, a link or a folder with its contents below ``root``, if there is one.

    Raises:
        OSError: It cannot be removed, or is not reached without following a link.
    """
    above, _, name = path.rpartition("/")
    with suppress(FileNotFoundError), folder_below(root, above) as folder:
        _check_name(name)
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            remove_tree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)


def has_holes(facts: os.stat_result) -> bool:
    """Whether a file takes less space than its size, as a sparse file does."""
    return facts.st_blocks * _BLOCK_OF_STAT_BYTES < facts.st_size


def write_sparse(file: IO[bytes], data: bytes) -> None:
    """Write to a new file, but leave a hole for each block of zeros.

    The size of a file that ends in a hole is wrong until the caller sets it with ``truncate``.
    """

    def is_hole(begin: int) -> bool:
        return data[begin : begin + len(_ZEROS)] == _ZEROS

    for hole, begins in groupby(range(0, len(data), len(_ZEROS)), is_hole):
        run = list(begins)
        part = data[run[0] : run[-1] + len(_ZEROS)]
        if hole:
            file.seek(len(part), os.SEEK_CUR)
        else:
            file.write(part)


def set_modified(file: int | str, modified_ns: int) -> bool:
    """Set the time of a file; return whether its file system can store it."""
    try:
        os.utime(file, ns=(modified_ns, modified_ns))
    except (OSError, OverflowError):
        return False
    return True


def sync(folder: int) -> None:
    """Make the names in a folder survive a crash, which may otherwise undo a rename."""
    descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(path: str | os.PathLike[str], *, dir_fd: int | None = None) -> None:
    """Remove the folder ``path`` with everything in it; a missing folder is fine.

    ``shutil.rmtree`` calls itself for each level and keeps a descriptor open for each, so it fails
    on trees that are deeper than 1,000. Here each nested folder is first moved to the top, so that
    no path grows long. Folders without write permission are removed as well. No symbolic link is
    followed, even if another process puts one in the place of a folder.

    Args:
        dir_fd: The folder that a relative path starts at.

    Raises:
        OSError: The first error; raised after everything else has been removed.
    """
    name = os.fspath(path)
    errors: list[OSError] = []
    with _noted(errors):
        with _writable(name, dir_fd) as top:
            _empty(top, errors)
        os.rmdir(name, dir_fd=dir_fd)
    if errors:
        if errors[0].filename != name:
            errors[0].filename = "%s/%s" % (name, errors[0].filename)
        raise errors[0]


def _empty(top: int, errors: list[OSError]) -> None:
    """Remove everything in a folder."""
    folders = _emptied_of_files(top, errors)
    prefix = os.urandom(6).hex()
    for folder in folders:  # it grows while it is read
        with _noted(errors), _writable(folder, top) as above:
            for name in _emptied_of_files(above, errors):
                # Moving a folder changes its entry "..", which needs the right to write in it.
                with _noted(errors), _writable(name, above):
                    moved = "%s-%d" % (prefix, len(folders))
                    os.rename(name, moved, src_dir_fd=above, dst_dir_fd=top)
                    folders.append(moved)
    for folder in folders:
        with _noted(errors):
            os.rmdir(folder, dir_fd=top)


@contextmanager
def _noted(errors: list[OSError]) -> Iterator[None]:
    """Add an ``OSError`` to ``errors``; ignore files that no longer exist."""
    try:
        yield
    except FileNotFoundError:
        pass
    except OSError as error:
        errors.append(error)


@contextmanager
def _writable(name: str, above: int | None = None) -> Iterator[int]:
    """Yield a descriptor of a folder, which is made writable if this user owns it."""
    descriptor = os.open(name, _FOLDER, dir_fd=above)
    try:
        with suppress(OSError):  # owned by another user; it may be empty
            os.chmod("/proc/self/fd/%d" % descriptor, 0o700)
        yield descriptor
    finally:
        os.close(descriptor)


def _emptied_of_files(folder: int, errors: list[OSError]) -> list[str]:
    """Remove all but the folders from a folder, and return their names."""
    folders: list[str] = []
    descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        with os.scandir(descriptor) as entries:
            for entry in list(entries):
                with _noted(errors):
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.name)
                    else:
                        os.unlink(entry.name, dir_fd=folder)
    finally:
        os.close(descriptor)
    return folders
