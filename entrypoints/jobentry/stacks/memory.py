"""The memory of another process, and which files it has mapped: proc(5), ``mem`` and ``maps``."""

from __future__ import annotations

import os
import struct
from types import TracebackType
from typing import NamedTuple

_WORD = struct.Struct("<Q")
_INT32 = struct.Struct("<i")
_PAGE_BYTES = 4096


class UnreadableError(Exception):
    """A process whose memory cannot be read, or does not contain what was expected."""


class Mapping(NamedTuple):
    """A part of a file that a process has mapped.

    Args:
        start: Its first address.
        end: The address after its last.
        file_offset: Where in the file it begins, in bytes.
        is_code: Whether it may be executed.
    """

    start: int
    end: int
    file_offset: int
    is_code: bool
    path: str


class Memory:
    """Reads the memory of a process of this user. Use it as a context manager.

    Raises:
        UnreadableError: The process is gone, or may not be read: it belongs to another user, or the
            kernel's Yama forbids it (``ptrace_scope`` is 2 or 3).
    """

    def __init__(self, process: int) -> None:
        self.process = process
        try:
            self._descriptor = os.open("/proc/%d/mem" % process, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UnreadableError("its memory cannot be opened: %s" % error.strerror) from error

    def __enter__(self) -> Memory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading."""
        os.close(self._descriptor)

    def read(self, address: int, size_bytes: int) -> bytes:
        """Return ``size_bytes`` bytes.

        Raises:
            UnreadableError: Nothing is mapped there.
        """
        try:
            content = os.pread(self._descriptor, size_bytes, address)
        except (OSError, OverflowError) as error:
            raise UnreadableError("nothing is mapped at %#x" % address) from error
        if len(content) < size_bytes:
            raise UnreadableError("nothing is mapped behind %#x" % address)
        return content

    def word(self, address: int) -> int:
        """Return an unsigned number of 64 bits."""
        (value,) = _WORD.unpack(self.read(address, 8))
        return int(value)

    def int32(self, address: int) -> int:
        """Return a signed number of 32 bits."""
        (value,) = _INT32.unpack(self.read(address, 4))
        return int(value)


class Pages:
    """Memory of a process as it was a moment ago: each page is read once, when it is first needed.

    The frames of a thread lie close together, so this saves most of the system calls of a look.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._pages: dict[int, bytes] = {}

    def read(self, address: int, size_bytes: int) -> bytes:
        """Return ``size_bytes`` bytes.

        Raises:
            UnreadableError: Nothing is mapped there.
        """
        offset = address % _PAGE_BYTES
        start, end = address - offset, offset + size_bytes
        if end <= _PAGE_BYTES:
            return self._page(start)[offset:end]
        starts = range(start, start + end, _PAGE_BYTES)
        return b"".join(map(self._page, starts))[offset:end]

    def are_current(self) -> bool:
        """Whether the process has not changed any of these pages since."""
        try:
            return all(
                self._memory.read(start, _PAGE_BYTES) == page for start, page in self._pages.items()
            )
        except UnreadableError:
            return False

    def _page(self, start: int) -> bytes:
        page = self._pages.get(start)
        if page is None:
            page = self._pages[start] = self._memory.read(start, _PAGE_BYTES)
        return page


def mappings(process: int) -> list[Mapping]:
    """Return the files that a process has mapped, by address.

    Raises:
        UnreadableError: The process is gone, or another user's.
    """
    try:
        with open("/proc/%d/maps" % process, "rb") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise UnreadableError("its mappings cannot be read: %s" % error.strerror) from error
    parsed = (_mapping(line) for line in lines)
    return [mapping for mapping in parsed if mapping is not None]


def _mapping(line: bytes) -> Mapping | None:
    """Return the mapping that a line of ``maps`` describes; None if it is of no file."""
    fields = line.split(None, 5)
    if len(fields) < 6 or not fields[5].startswith(b"/"):
        return None
    start, _, end = fields[0].partition(b"-")
    return Mapping(
        int(start, 16), int(end, 16), int(fields[2], 16), b"x" in fields[1], os.fsdecode(fields[5])
    )


def path_of(process: int, mapping: Mapping) -> str:
    """Return a path at which this process can open a file that another one has mapped.

    The other process may be in another mount namespace, as emulated nodes are.
    """
    return "/proc/%d/root%s" % (process, mapping.path)
