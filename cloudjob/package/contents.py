"""Reads the files of a source, once each: digest, search for secrets, bytes of the layer.

A file must be all along what ``scan`` saw. Small files are read into one buffer, one after another,
as they will lie in the layer: so the search and the write go over megabytes at a time and not over
thousands of small files.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from cloudjob.errors import PackageError
from cloudjob.package.secrets import Finding, Searcher
from cloudjob.package.tree import Entry
from cloudjob.package.words import changed, translated
from jobentry.contract.packages import RAW, ZLIB

BUFFER_BYTES = 4 * 1024 * 1024
_LEVEL = 1
_SAMPLE_BYTES = 16 * 1024
# What was a file may be a link or a pipe by now: follow nothing, wait for nothing.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class ChangedError(PackageError):
    """A file is not what it was when the source was scanned."""


class Stored(NamedTuple):
    """One file that was read.

    Args:
        offset: Where its bytes begin, from the beginning of all; meaningless when they are known.
        is_known: Whether a layer has them already.
    """

    digest: str
    offset: int
    stored_bytes: int
    encoding: str
    is_known: bool = False


class Read(NamedTuple):
    """What came of reading some files: one of each, and the secrets in them."""

    stored: list[Stored]
    findings: list[Finding]
    size_bytes: int


def read(
    source: Path,
    entries: Sequence[Entry],
    write: Callable[[memoryview | bytes], object],
    *,
    is_compressed: bool,
    searcher: Searcher | None = None,
    known: Mapping[str, int] = MappingProxyType({}),
) -> Read:
    """Read files in order and write the bytes of a layer.

    Args:
        write: Takes the bytes, all of them at once.
        searcher: Looks for secrets.
        known: The contents that layers have already, with their sizes; they are not written.

    Raises:
        ChangedError: A file is not what it was when the source was scanned.
        PackageError: A file cannot be read.
    """
    reader = _Reader(source, write, is_compressed, searcher, known)
    for entry in entries:
        reader.take(entry)
    reader.flush()
    return Read(reader.stored, reader.findings, reader.offset)


class _Reader:
    def __init__(
        self,
        source: Path,
        write: Callable[[memoryview | bytes], object],
        is_compressed: bool,
        searcher: Searcher | None,
        known: Mapping[str, int],
    ) -> None:
        self._source = source
        self._root = os.fspath(source) + "/"
        self._write = write
        self._is_compressed = is_compressed
        self._searcher = searcher
        self._known = known
        self._known_sizes = frozenset(known.values())
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._spans: list[tuple[Entry, int, int]] = []
        self._filled = 0
        self.offset = 0
        self.stored: list[Stored] = []
        self.findings: list[Finding] = []

    def take(self, entry: Entry) -> None:
        """Read one file."""
        size_bytes = entry.size_bytes
        if size_bytes >= BUFFER_BYTES:
            self.flush()
            self._stream(entry)
            return
        if self._filled + size_bytes >= BUFFER_BYTES:
            self.flush()
        begin, end = self._filled, self._filled + size_bytes
        # One byte more than there should be: a file that grows shows at once.
        self._fill(entry, self._buffer[begin : end + 1])
        self._spans.append((entry, begin, end))
        self._filled = end

    def flush(self) -> None:
        """Write what is in the buffer."""
        if self._searcher is not None and self._filled:
            self.findings += self._searcher.search(self._buffer[: self._filled], self._spans)
        digests = [
            hashlib.sha256(self._buffer[begin:end]).hexdigest() for _, begin, end in self._spans
        ]
        if self._is_compressed:
            self._flush_compressed(digests)
        else:
            self._flush_raw(digests)
        self._spans.clear()
        self._filled = 0

    def _flush_raw(self, digests: list[str]) -> None:
        """Write stretches of the buffer that lie between contents that are known."""
        begin = 0
        for digest, (_, start, end) in zip(digests, self._spans, strict=True):
            is_known = digest in self._known
            if is_known:
                self._put(self._buffer[begin:start])
                begin = end
            offset = self.offset + start - begin
            self.stored.append(Stored(digest, offset, end - start, RAW, is_known))
        self._put(self._buffer[begin : self._filled])

    def _flush_compressed(self, digests: list[str]) -> None:
        parts = []
        for digest, (_, start, end) in zip(digests, self._spans, strict=True):
            if digest in self._known:
                self.stored.append(Stored(digest, self.offset, end - start, RAW, True))
                continue
            data, encoding = _encoded(self._buffer[start:end])
            self.stored.append(Stored(digest, self.offset, len(data), encoding))
            self.offset += len(data)
            parts.append(data)
        self._write(b"".join(parts))

    def _put(self, data: memoryview) -> None:
        if data:
            self._write(data)
            self.offset += len(data)

    def _fill(self, entry: Entry, room: memoryview) -> None:
        """Read a whole file, which is one byte shorter than ``room``."""
        try:
            descriptor = os.open(entry.real or self._root + entry.name, _FLAGS)
            try:
                count = os.readv(descriptor, [room])
                status = os.fstat(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise self._translated(entry, error) from error
        if count != len(room) - 1 or not _is_as_seen(status, entry):
            raise self._changed(entry)

    def _stream(self, entry: Entry) -> None:
        """Read a file that does not fit into the buffer, piece by piece."""
        if entry.size_bytes in self._known_sizes:
            digest = self._digest(entry)
            if digest in self._known:
                self.stored.append(Stored(digest, self.offset, entry.size_bytes, RAW, True))
                return
        begin, sha256, deflater = self.offset, hashlib.sha256(), None
        for number, piece in enumerate(self._pieces(entry)):
            if number == 0 and self._is_compressed and _shrinks(piece):
                deflater = zlib.compressobj(_LEVEL)
            sha256.update(piece)
            self._put(piece if deflater is None else memoryview(deflater.compress(piece)))
        if deflater is not None:
            self._put(memoryview(deflater.flush()))
        encoding = RAW if deflater is None else ZLIB
        self.stored.append(Stored(sha256.hexdigest(), begin, self.offset - begin, encoding))

    def _digest(self, entry: Entry) -> str:
        sha256 = hashlib.sha256()
        for piece in self._pieces(entry):
            sha256.update(piece)
        return sha256.hexdigest()

    def _pieces(self, entry: Entry) -> Iterator[memoryview]:
        """Yield a whole file, each piece in the same room."""
        rest = entry.size_bytes
        with self._opened(entry) as descriptor:
            while rest:
                with self._reading(entry):
                    count = os.readv(descriptor, [self._buffer[: min(rest, BUFFER_BYTES)]])
                if not count:
                    raise self._changed(entry)
                yield self._buffer[:count]
                rest -= count
            with self._reading(entry):
                status = os.fstat(descriptor)
        if not _is_as_seen(status, entry):
            raise self._changed(entry)

    @contextmanager
    def _opened(self, entry: Entry) -> Iterator[int]:
        with self._reading(entry):
            descriptor = os.open(entry.real or self._root + entry.name, _FLAGS)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def _reading(self, entry: Entry) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._translated(entry, error) from error

    def _translated(self, entry: Entry, error: OSError) -> PackageError:
        fault = translated(self._source, entry.name, error)
        is_changed = fault.message == changed(self._source, entry.name).message
        return ChangedError(fault.message, hint=fault.hint) if is_changed else fault

    def _changed(self, entry: Entry) -> ChangedError:
        fault = changed(self._source, entry.name)
        return ChangedError(fault.message, hint=fault.hint)


def _is_as_seen(status: os.stat_result, entry: Entry) -> bool:
    return entry.seen == (
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_ino,
    )


def _encoded(data: memoryview) -> tuple[bytes | memoryview, str]:
    """Return a content as it is stored: deflated where that saves a tenth."""
    if len(data) >= 64 and _shrinks(data):
        deflated = zlib.compress(data, _LEVEL)
        if len(deflated) <= len(data) * 0.9:
            return deflated, ZLIB
    return data, RAW


def _shrinks(data: memoryview) -> bool:
    """Whether a sample says that deflating pays; a small content is its own sample."""
    if len(data) <= 4 * _SAMPLE_BYTES:
        return True
    sample = data[:_SAMPLE_BYTES]
    return len(zlib.compress(sample, _LEVEL)) <= len(sample) * 0.9
