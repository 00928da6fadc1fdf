"""Addresses of a program's exported symbols: ELF files of 64 bits, little-endian (elf(5))."""

from __future__ import annotations

import os
import struct
from typing import IO, NamedTuple

from jobentry.stacks.memory import UnreadableError

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_LOADED, _DYNAMIC_SYMBOLS = 1, 11  # PT_LOAD, SHT_DYNSYM
_FUNCTIONS = (2, 10)  # STT_FUNC, STT_GNU_IFUNC
# The symbols of PyTorch's largest library take 20 MB with their names.
_MOST_BYTES = 64 * 1024 * 1024
_MOST_HEADERS = 4096


class Segment(NamedTuple):
    """A part of the file that is loaded: its place in the file, and its address in the program."""

    file_offset: int
    address: int
    size_bytes: int


class Symbol(NamedTuple):
    """An exported name; its address is relative to where the file is loaded."""

    address: int
    size_bytes: int
    name: str
    is_function: bool


class Elf:
    """What a program or library exports.

    Args:
        path: A file that another program's user may have written, so nothing in it is trusted.

    Raises:
        UnreadableError: It cannot be read, or is not such a file.
    """

    def __init__(self, path: str) -> None:
        try:
            with open(path, "rb") as file:
                self._read(file)
        except (OSError, struct.error, IndexError) as error:
            raise UnreadableError("%s is not a program that can be read" % path) from error

    def _read(self, file: IO[bytes]) -> None:
        header = _HEADER.unpack(file.read(_HEADER.size))
        if header[0][:6] != b"\x7fELF\x02\x01":
            raise UnreadableError("not an ELF file of 64 bits")
        self.segments = [
            Segment(row[2], row[3], row[5])
            for row in _table(file, _PROGRAM_HEADER, header[5], header[10])
            if row[0] == _LOADED
        ]
        sections = _table(file, _SECTION_HEADER, header[6], header[12])
        self._symbols, self._names = b"", b""
        for section in sections:
            if section[1] == _DYNAMIC_SYMBOLS:
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

    def functions(self) -> list[Symbol]:
        """Return the exported functions, by address."""
        return sorted(
            Symbol(row[4], row[5], self._name(row[0]), True)
            for row in _rows(self._symbols)
            if row[4] and row[1] & 15 in _FUNCTIONS
        )

    def _name(self, position: int) -> str:
        end = self._names.find(b"\0", position)
        return self._names[position:end].decode("utf-8", "replace")

    def load_bias(self, start: int, file_offset: int) -> int:
        """Return what to add to an address of the file, given where a part of it is mapped.

        Raises:
            UnreadableError: No segment of the file begins there.
        """
        for segment in self.segments:
            shift = segment.file_offset - file_offset
            if 0 <= shift < _PAGE:
                return start + shift - segment.address
        raise UnreadableError("no part of the program is loaded where it is mapped")


_PAGE = os.sysconf("SC_PAGE_SIZE")


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
