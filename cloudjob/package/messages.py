"""Paths and errors of the file system in messages about packing."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cloudjob.errors import PackageError

CLOUDJOBIGNORE = ".cloudjobignore"
_ELSEWHERE = "set CLOUDJOB_HOME, or TMPDIR for --dry-run, to a folder on another disk"


class ChangedError(PackageError):
    """A file has changed since the source was scanned."""


def shown(path: str | Path) -> str:
    """Return a path as one printable line, whatever bytes its name has."""
    text = os.fspath(path)
    return text if text.isprintable() else ascii(text)


def reason_of(error: OSError) -> str:
    """Return what the file system answered."""
    return (error.strerror or str(error)).lower()


def changed(source: Path, name: str) -> ChangedError:
    """Return the error for a file that changed after the scan."""
    return ChangedError(
        f"packing {shown(source)}: {shown(name)}: changed while it was read",
        hint=f"is something writing to it? A line in {CLOUDJOBIGNORE} leaves it out",
    )


@contextmanager
def reading(source: Path, name: str) -> Iterator[None]:
    """Turn an ``OSError`` about one path of the source into a ``PackageError``."""
    try:
        yield
    except OSError as error:
        raise source_error(source, name, error) from error


@contextmanager
def writing(destination: Path) -> Iterator[None]:
    """Turn an ``OSError`` about the new layer into a ``PackageError``."""
    try:
        yield
    except OSError as error:
        is_large = error.errno == errno.EFBIG
        raise PackageError(
            f"writing the package to {shown(destination)}: {reason_of(error)}",
            hint="is there a limit on the size of files (ulimit -f)?" if is_large else _ELSEWHERE,
        ) from error


def source_error(source: Path, name: str, error: OSError) -> PackageError:
    """Return the error for an ``OSError`` about one path of the source."""
    if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.ENOTDIR):
        return changed(source, name)
    advice = f"make it readable, or leave it out with a line in {CLOUDJOBIGNORE}"
    return PackageError(
        f"packing {shown(source)}: reading {shown(name)}: {reason_of(error)}",
        hint="is the path right?" if error.errno == errno.ENAMETOOLONG else advice,
    )
