"""Key checks, atomic file replacement and error texts that all stores share."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from cloudjob.errors import InvalidKey, UnreadableObject
from cloudjob.model.progress import log_once
from jobentry.contract.lists import some
from jobentry.system.trees import folder_below, sync, write_sparse

# Prefix of the temporary files that a killed writer leaves; no object may have such a name.
TEMPORARY = ".cloudjob-tmp-"
# Part of each temporary name, as other machines may write to the same folder. Read only once: every
# system call releases the interpreter lock, and threads wait to get it back.
_PROCESS_TOKEN = os.urandom(8).hex()
_NUMBERS = itertools.count()
_NEW_ATTEMPTS = 5
# How many refused keys an error names.
_NAMED = 5
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

_HINTS = {
    errno.ENOSPC: "free some space, or choose a store elsewhere",
    errno.EDQUOT: "free some of your quota, or choose a store elsewhere",
    errno.EFBIG: "is there a limit on the size of files (ulimit -f)?",
    errno.EACCES: "may this user read and write there?",
    errno.EPERM: "may this user read and write there?",
    errno.EROFS: "choose a store on a file system that is not read-only",
    errno.ENOENT: "cloudjob list shows the jobs whose objects are there",
    errno.ENOTDIR: "there is a file or a link where a folder should be",
    errno.ELOOP: "a store contains no links: replace it by a file or a folder",
    errno.EISDIR: "there is a folder where an object should be",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.EEXIST: "can its file system replace a file by renaming? choose a store elsewhere",
    errno.EINVAL: "can its file system make files durable (fsync)? choose a store elsewhere",
}


def is_temporary(key: str) -> bool:
    """Return whether a key is that of an unfinished write."""
    return f"/{TEMPORARY}" in f"/{key}"


def check_key(doing: str, key: str, *, may_be_temporary: bool = False) -> None:
    """Refuse a key that leaves the root or is not a file name.

    Args:
        may_be_temporary: Whether the key may be that of an unfinished write.
    """
    if "\0" in key or not {"", ".", ".."}.isdisjoint(key.split("/")):
        raise InvalidKey(
            f"{doing} {key!r}: not a valid key", hint="a key looks like job/outputs/model"
        )
    if is_temporary(key) and not may_be_temporary:
        raise InvalidKey(f"{doing} {key!r}: names that start with {TEMPORARY} are reserved")


def report_refused(refused: Sequence[InvalidKey]) -> None:
    """Raise one error about all keys that were refused while the others were deleted."""
    if refused:
        text = some(sorted(map(str, refused)), _NAMED)
        raise InvalidKey(text, hint="the others are deleted; for these, use the store's own tools")


class SparseFile:
    """A new file for boto3 to write, in any order; long runs of zeros take no space in it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._size_bytes = 0

    def seekable(self) -> bool:
        """Return that parts may be written in any order."""
        return True

    def tell(self) -> int:
        """Return the current offset."""
        return self._file.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Change the current offset, and return it."""
        return self._file.seek(offset, whence)

    def write(self, data: bytes) -> int:
        """Write at the current offset."""
        write_sparse(self._file, data)
        self._size_bytes = max(self._size_bytes, self._file.tell())
        return len(data)

    def finish(self) -> None:
        """Set the size of the file, which may end in a hole."""
        self._file.truncate(self._size_bytes)


@contextmanager
def replacing(target: Path, *, is_durable: bool = True) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces ``target`` at the end, or is removed on an error.

    Args:
        is_durable: Whether the file survives a crash of this machine. Not needed for files that can
            be fetched again: waiting for the disk took most of the time of a fetch of 200 MB.
    """
    # Strings: creating a Path costs as much as a system call.
    folder = os.path.dirname(os.fspath(target)) or "."  # noqa: PTH120
    temporary = f"{folder}/{TEMPORARY}{os.getpid()}-{_PROCESS_TOKEN}-{next(_NUMBERS)}"
    try:
        try:
            descriptor = os.open(temporary, _NEW, 0o600)
        except FileNotFoundError:
            _make_folders(Path(folder))
            descriptor = os.open(temporary, _NEW, 0o600)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                yield file
            if is_durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, target)  # noqa: PTH105
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    if is_durable:
        _sync_folder(folder)


@contextmanager
def replacing_below(root: Path, key: str) -> Iterator[IO[bytes]]:
    """Open a temporary file that becomes the file ``key`` below ``root``, and survives a crash.

    Others may write to a store; no link below its root is followed.
    """
    above, _, name = key.rpartition("/")
    temporary = f"{TEMPORARY}{os.getpid()}-{_PROCESS_TOKEN}-{next(_NUMBERS)}"
    with _new_file_below(root, above, temporary) as (folder, descriptor):
        try:
            try:
                with open(descriptor, "wb", closefd=False) as file:
                    yield file
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
            raise
        sync(folder)


@contextmanager
def _new_file_below(root: Path, above: str, name: str) -> Iterator[tuple[int, int]]:
    """Make a file, and yield the descriptors of its folder and of the file."""
    for attempt in range(_NEW_ATTEMPTS):
        if not root.exists():
            _make_folders(root)
        with folder_below(os.fspath(root), above, makes=True) as folder:
            try:
                descriptor = os.open(name, _NEW, 0o600, dir_fd=folder)
            except FileNotFoundError:
                # Another process has removed the folder, as it was empty.
                if attempt == _NEW_ATTEMPTS - 1:
                    raise
                continue
            yield folder, descriptor
            return


def _make_folders(folder: Path) -> None:
    """Create a folder and its parents durably."""
    missing = [folder]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
        _sync_folder(path.parent)


def _sync_folder(folder: str | Path) -> None:
    """Make the entries of a folder durable: without this a crash may undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def too_large(doing: str, limit_bytes: int) -> UnreadableObject:
    """Return the error for an object that is larger than cloudjob would have written it."""
    return UnreadableObject(
        f"{doing}: it is larger than {limit_bytes:,} bytes",
        hint="cloudjob has not written it: who may write to this store?",
    )


@contextmanager
def logged_if_unreadable() -> Iterator[None]:
    """Log that an object cannot be what cloudjob would have written, for readers that go on."""
    try:
        yield
    except UnreadableObject as error:
        log_once(error.message)
        raise


def text(error: OSError) -> str:
    """Return the system's error text for use within a message."""
    return (error.strerror or str(error)).lower()


def hint(error: OSError) -> str:
    """Return what to try; may be empty."""
    return _HINTS.get(error.errno or 0, "")
