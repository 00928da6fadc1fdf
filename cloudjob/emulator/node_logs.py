"""The logs of a job's nodes, with the lines of the service and the output of the job.

A node's log consists of several files that are read as one: for each attempt the lines of the
service before it, the output of the job, and the lines of the service after it. So after a crash,
writing the output can resume at the byte where it stopped.
"""

from __future__ import annotations

import time
from pathlib import Path

_BLOCK_BYTES = 1 << 20
_PARTS = ("before", "run", "after")


class NodeLog:
    """The log of one node, below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add_line(self, key: str, text: str, *, is_after: bool = False) -> None:
        """Add a line of the service."""
        moment = time.strftime("%Y-%m-%d-%H:%M:%S")
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._path(key, "after" if is_after else "before").open("a", encoding="utf-8") as file:
            file.write(f"[ModelArts Service Log][INFO][{moment}]: {text}\n")

    def run_path(self, key: str) -> Path:
        """Return the file for the output of an attempt."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._path(key, "run")

    def _path(self, key: str, part: str) -> Path:
        return self._folder / f"{key}-{_PARTS.index(part)}-{part}.log"

    def _files(self) -> list[tuple[Path, int]]:
        return [(path, path.stat().st_size) for path in sorted(self._folder.glob("*.log"))]

    @property
    def size_bytes(self) -> int:
        """The current size of the whole log."""
        return sum(size for _, size in self._files())

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes from ``begin`` up to ``end`` of the whole log."""
        parts = []
        at = 0
        for path, size in self._files():
            first, last = max(begin - at, 0), min(end - at, size)
            if first < last:
                with path.open("rb") as file:
                    file.seek(first)
                    parts.append(file.read(last - first))
            at += size
        return b"".join(parts)

    def tail(self, limit_bytes: int) -> tuple[bytes, int]:
        """Return the last bytes of the log, and the size of the whole log."""
        size = self.size_bytes
        return self.read(max(0, size - limit_bytes), size), size

    def write_to(self, path: Path) -> None:
        """Write the whole log to one file."""
        size = self.size_bytes
        with path.open("wb") as file:
            for begin in range(0, size, _BLOCK_BYTES):
                file.write(self.read(begin, min(begin + _BLOCK_BYTES, size)))


class Writer:
    """Stores the output of a node up to a limit, and resumes where an earlier writer stopped.

    Args:
        earlier_bytes: The number of bytes at the start that are in the files of earlier attempts.
    """

    def __init__(self, path: Path, limit_bytes: int, earlier_bytes: int = 0) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._size = path.stat().st_size if path.exists() else 0
        self._skip = self._size + earlier_bytes
        self._is_full = False

    def write(self, data: bytes) -> None:
        """Append the part of ``data`` that is not stored yet."""
        skipped = min(self._skip, len(data))
        self._skip -= skipped
        data = data[skipped:]
        if not data or self._is_full:
            return
        if self._size + len(data) > self._limit_bytes:
            self._is_full = True
            data = (
                f"modelarts-pope: log length overflow(max:{self._limit_bytes}; "
                "process will continue running silently\n"
            ).encode()
        self._size += len(data)
        with self._path.open("ab") as file:
            file.write(data)
