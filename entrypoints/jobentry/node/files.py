"""Files of this node that no other user may read."""

from __future__ import annotations

import contextlib
import os


def write_private(path: str, data: bytes) -> None:
    """Write a new file for its owner alone.

    Raises:
        OSError: It cannot be written.
    """
    remove(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def remove(path: str) -> None:
    """Remove a file if it exists."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
