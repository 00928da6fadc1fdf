"""What every store does with keys and with files of this machine."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from cloudjob.errors import StoreError

# A writer that is killed leaves such a file behind; it is no object, and no key can name it.
TEMPORARY = ".cloudjob-tmp-"

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
    _make_folders(target.parent)
    temporary = f"{target.parent}/{TEMPORARY}{os.urandom(8).hex()}"
    try:
        # To read as well: what came may have to be proven once all of it is there.
        with open(temporary, "x+b", opener=_private) as file:
            yield file
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        os.replace(temporary, target)  # noqa: PTH105 (a Path costs as much as the call)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    if is_durable:
        _sync_folder(target.parent)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _make_folders(folder: Path) -> None:
    """Make a folder and the ones above it, each of them on the disk when this returns."""
    missing = [folder] if not os.path.exists(folder) else []  # noqa: PTH110 (as above)
    while missing and not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
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
