"""Addresses and names of a program's symbols: ELF files of 64 bits, little-endian (elf(5))."""

from __future__ import annotations

import bisect
import os
import struct
from typing import IO, NamedTuple, Sequence

from jobentry.stacks.memory import UnreadableError

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_LOADED = 1  # PT_LOAD
_ALL_SYMBOLS, _DYNAMIC_SYMBOLS = 2, 11  # SHT_SYMTAB, SHT_DYNSYM
_FUNCTIONS = (2, 10)  # STT_FUNC, STT_GNU_IFUNC
# The symbols of PyTorch's largest library take 20 MB with their names.
_MOST_BYTES = 64 * 1024 * 1024
# More internal symbols than these are those of a large library, whose exported ones have to do.
_MOST_INTERNAL_BYTES = 16 * 1024 * 1024
_MOST_HEADERS = 4096
_MOST_NAME = 4096
_MOST_ADDRESS = 1 << 64
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Segment(NamedTuple):
    """A part of the file that is loaded: its place in the file, and its address in the program."""

    file_offset: int
    address: int
    size_bytes: int


class Elf:
    """The symbols of a program or library.

    Args:
        path: A file that another program's user may have written, so nothing in it is trusted.
        with_internal: Whether to read all symbols of a program that has kept them, unless they
            are too many, instead of the exported ones.

    Raises:
        UnreadableError: It cannot be read, or is not such a file.
    """

    def __init__(self, path: str, *, with_internal: bool = False) -> None:
        try:
            with open(path, "rb") as file:
                self._read(file, with_internal)
        except (OSError, struct.error, IndexError) as error:
            raise UnreadableError("%s is not a program that can be read" % path) from error

    def _read(self, file: IO[bytes], with_internal: bool) -> None:
        header = _HEADER.unpack(file.read(_HEADER.size))
        if header[0][:6] != b"\x7fELF\x02\x01":
            raise UnreadableError("not an ELF file of 64 bits")
        self.segments = [
            Segment(row[2], row[3], row[5])
            for row in _table(file, _PROGRAM_HEADER, header[5], header[10])
            if row[0] == _LOADED
        ]
        sections = _table(file, _SECTION_HEADER, header[6], header[12])
        symbols = {section[1]: section for section in sections}
        section = symbols.get(_DYNAMIC_SYMBOLS)
        every = symbols.get(_ALL_SYMBOLS)
        if with_internal and every and every[5] + sections[every[6]][5] <= _MOST_INTERNAL_BYTES:
            section = every
        self._symbols, self._names = b"", b""
        self._functions: list[tuple[int, int, int]] | None = None
        if section is not None:
            self._symbols = _content(file, section[4], section[5])
            strings = sections[section[6]]
            self._names = _content(file, strings[4], strings[5])

    def address_of(self, name: str) -> int | None:
        """Return the address of an exported symbol, relative to where the file is loaded."""
        # The names stand one after another, each with a zero byte at its end.
        position = self._names.find(b"\0" + name.encode() + b"\0") + 1
        if position == 0:
            return None
        for row in _rows(self._symbols):
            if row[0] == position and row[4]:
                return int(row[4])
        return None

    def function_at(self, address: int) -> str:
        """Return the function at an address of the file; empty if it has no name there."""
        if self._functions is None:
            self._functions = sorted(
                (row[4], row[5], row[0])
                for row in _rows(self._symbols)
                if row[4] and row[1] & 15 in _FUNCTIONS
            )
        at = bisect.bisect_right(self._functions, (address, _MOST_ADDRESS, 0)) - 1
        if at < 0:
            return ""
        start, size_bytes, name = self._functions[at]
        return self._name(name) if address - start < max(size_bytes, 1) else ""

    def _name(self, position: int) -> str:
        end = self._names.find(b"\0", position, position + _MOST_NAME)
        return self._names[position:end].decode("utf-8", "replace") if end > 0 else ""

    def address_in_file(self, file_offset: int) -> int | None:
        """Return the address that a part of the file is loaded at, before it is relocated."""
        for segment in self.segments:
            if 0 <= file_offset - segment.file_offset < segment.size_bytes:
                return segment.address + file_offset - segment.file_offset
        return None


def load_bias(segments: Sequence[Segment], start: int, file_offset: int) -> int:
    """Return what to add to an address of a file, given where a part of it is mapped.

    Raises:
        UnreadableError: No segment of the file begins there.
    """
    for segment in segments:
        shift = segment.file_offset - file_offset
        if 0 <= shift < _PAGE:
            return start + shift - segment.address
    raise UnreadableError("no part of the program is loaded where it is mapped")


def file_key(path: str) -> tuple[int, int, int]:
    """Return what no two files have in common; it changes with the content.

    Raises:
        OSError: There is no such file.
    """
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _rows(symbols: bytes) -> list[tuple[int, ...]]:
    whole = len(symbols) - len(symbols) % _SYMBOL.size
    return list(_SYMBOL.iter_unpack(symbols[:whole]))


def _table(file: IO[bytes], row: struct.Struct, offset: int, count: int) -> list[tuple[int, ...]]:
    if count > _MOST_HEADERS:
        raise UnreadableError("it has %d headers" % count)
    file.seek(offset)
    return list(row.iter_unpack(file.read(row.size * count)))


def _content(file: IO[bytes], offset: int, size_bytes: int) -> bytes:
    if size_bytes > _MOST_BYTES:
        raise UnreadableError("its symbols take %d bytes" % size_bytes)
    file.seek(offset)
    return file.read(size_bytes)
