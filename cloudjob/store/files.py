"""What every store does with keys and with files of this machine."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from cloudjob.errors import StoreError

# A writer that is killed leaves such a file behind; it is no object, and no key can name it.
TEMPORARY = ".cloudjob-tmp-"
# Others may write there at the same time, on other machines as well. Random bytes once: asking for
# them lets go of Python's lock, as does every call of the system, and threads wait to have it back.
_OURS = os.urandom(8).hex()
_NUMBERS = itertools.count()
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

_HINTS = {
    errno.ENOSPC: "free some space, or choose a store elsewhere",
    errno.EDQUOT: "free some of your quota, or choose a store elsewhere",
    errno.EFBIG: "is there a limit on the size of files (ulimit -f)?",
    errno.EACCES: "may this user read and write there?",
    errno.EPERM: "may this user read and write there?",
    errno.EROFS: "choose a store on a file system that is not read-only",
    errno.ENOENT: "cloudjob list shows the jobs whose objects are there",
    errno.ENOTDIR: "a file stands where a folder should be",
    errno.EISDIR: "a folder stands where an object should be",
    errno.ENAMETOOLONG: "use a shorter name",
}


def check_key(verb: str, key: str) -> None:
    """Refuse a key that would leave the root, name no file, or name a half-written one."""
    segments = key.split("/")
    if "\0" in key or any(segment in ("", ".", "..") for segment in segments):
        raise StoreError(f"{verb} {key!r}: not a key", hint="a key looks like job/outputs/model")
    if any(segment.startswith(TEMPORARY) for segment in segments):
        raise StoreError(f"{verb} {key!r}: names with {TEMPORARY} are the store's own")


@contextmanager
def replacing(target: Path, *, is_durable: bool = True) -> Iterator[IO[bytes]]:
    """Open a file that becomes ``target`` when all of it is there, or else vanishes.

    Args:
        is_durable: Whether it then outlives a crash of this machine. What can be fetched again need
            not: waiting for the disk took most of the time of a fetch of 200 MB.
    """
    with (
        replacing_descriptor(target, is_durable=is_durable) as descriptor,
        open(descriptor, "wb", closefd=False) as file,
    ):
        yield file


@contextmanager
def replacing_descriptor(target: Path, *, is_durable: bool = True) -> Iterator[int]:
    """As ``replacing``, but give the open file's descriptor, for reading as well."""
    # Text: a Path costs as much as a call of the system.
    folder = os.path.dirname(os.fspath(target)) or "."  # noqa: PTH120
    temporary = f"{folder}/{TEMPORARY}{os.getpid()}-{_OURS}-{next(_NUMBERS)}"
    try:
        try:
            descriptor = os.open(temporary, _NEW, 0o600)
        except FileNotFoundError:
            _make_folders(Path(folder))
            descriptor = os.open(temporary, _NEW, 0o600)
        try:
            yield descriptor
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


def _make_folders(folder: Path) -> None:
    """Make a folder and the ones above it, each of them on the disk when this returns."""
    missing = [folder]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
        _sync_folder(path.parent)


def _sync_folder(folder: str | Path) -> None:
    """Make the names in a folder outlive a crash: without this a rename may be forgotten."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def text(error: OSError) -> str:
    """Return what the system says, as a part of a sentence."""
    return (error.strerror or str(error)).lower()


def hint(error: OSError) -> str:
    """Return what to try; empty when there is nothing to say."""
    return _HINTS.get(error.errno or 0, "")
