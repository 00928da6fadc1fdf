"""Reads the files of scripts: their bytes, and the syntax trees of Python files."""

from __future__ import annotations

import ast
import stat
import threading
import warnings
from pathlib import Path

# A script written by hand is a few thousand lines; a larger file holds data.
_MAX_BYTES = 1_000_000
# Python 3.11 raises SystemError if two threads parse at the same time (CPython issue 106905).
_PARSING = threading.Lock()


def read(path: Path) -> bytes:
    """Return the content of a script; empty if it cannot be read or is too large for a script.

    Only a regular file is read: a named pipe would never end.
    """
    try:
        status = path.stat()
        is_script = stat.S_ISREG(status.st_mode) and status.st_size <= _MAX_BYTES
        return path.read_bytes() if is_script else b""
    except OSError:
        # For example, it belongs to another user.
        return b""


def parse(source: bytes) -> ast.Module:
    """Return the syntax tree of a Python file; an empty one if it cannot be parsed."""
    try:
        with _PARSING, warnings.catch_warnings():
            # Warnings about the user's code belong in the log of the job.
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])
