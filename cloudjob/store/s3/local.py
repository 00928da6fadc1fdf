"""Our own side of a transfer: what is sent, and where what comes goes."""

from __future__ import annotations

import base64
import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from cloudjob.store.base import Tell
from cloudjob.store.s3.refusals import Damaged
from cloudjob.store.s3.wire import PIECE_BYTES, Answer


class LocalError(Exception):
    """A file of this machine cannot be read or written: no fault of the network's."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class SourceChanged(Exception):
    """The file is not what it was when the transfer began."""


class Readable(Protocol):
    """Bytes that can be read from anywhere."""

    def read(self, offset: int, count: int) -> bytes | memoryview:
        """Return up to ``count`` bytes from ``offset``."""


class Source(Readable, Protocol):
    """What is put: bytes, or a file."""

    @property
    def size_bytes(self) -> int:
        """How long it is."""

    def check(self) -> None:
        """Raise ``SourceChanged`` when it is not what it was."""


class Bytes(NamedTuple):
    """Bytes that are put."""

    data: bytes

    @property
    def size_bytes(self) -> int:
        """How long they are."""
        return len(self.data)

    def read(self, offset: int, count: int) -> memoryview:
        """Return up to ``count`` bytes from ``offset``."""
        return memoryview(self.data)[offset : offset + count]

    def check(self) -> None:
        """They cannot change."""


class File:
    """A file that is put, open until ``close``.

    Raises:
        OSError: It cannot be opened, or is no file.
    """

    def __init__(self, path: Path) -> None:
        # A FIFO would wait for a writer.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self._was = self._now()
        self.size_bytes = self._was[0]

    def read(self, offset: int, count: int) -> bytes:
        """Return up to ``count`` bytes from ``offset``."""
        try:
            return os.pread(self._descriptor, count, offset)
        except OSError as error:
            raise LocalError(error) from error

    def check(self) -> None:
        """Raise ``SourceChanged`` when it was written to since it was opened."""
        if self._now() != self._was:
            raise SourceChanged

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)

    def _now(self) -> tuple[int, int, int]:
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns, found.st_ctime_ns


class Part(NamedTuple):
    """A part of some bytes; reads them anew each time, so it takes no memory.

    Args:
        number: 1 for the first.
    """

    source: Readable
    number: int
    offset: int
    size_bytes: int

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Yield it in pieces.

        Raises:
            SourceChanged: It ends before its time.
        """
        at, end = self.offset, self.offset + self.size_bytes
        while at < end:
            piece = self.source.read(at, min(PIECE_BYTES, end - at))
            if not piece:
                raise SourceChanged
            yield piece
            at += len(piece)

    def digest(self, kind: Kind) -> bytes:
        """Return its digest."""
        digest = kind()
        for piece in self.pieces():
            digest.update(piece)
        return digest.digest()


def parts(source: Source, part_bytes: int) -> list[Part]:
    """Return the parts of a source; one empty part for an empty one."""
    starts = range(0, max(source.size_bytes, 1), part_bytes)
    size = source.size_bytes
    return [
        Part(source, number, start, min(part_bytes, size - start))
        for number, start in enumerate(starts, 1)
    ]


def base64_text(digest: bytes) -> str:
    """Return a digest as headers have it."""
    return base64.b64encode(digest).decode("ascii")


# -- digests ----------------------------------------------------------------------------------

# All of these are against damage, not against people: against those there is TLS.


class Digest(Protocol):
    """The digest of bytes that come one after another."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Take the next bytes."""

    def digest(self) -> bytes:
        """Return what all of them make."""

    def copy(self) -> Digest:
        """Return one that goes on by itself."""


Kind = Callable[[], Digest]


def md5() -> Digest:
    """Begin the digest that every service of S3 checks."""
    made: Digest = hashlib.md5(usedforsecurity=False)
    return made


class Crc32:
    """The checksum that newer services check beside it, at a fiftieth of its cost."""

    def __init__(self, value: int = 0) -> None:
        self._value = value
        self._crc32 = _fastest_crc32()

    def update(self, data: bytes | memoryview, /) -> None:
        """Take the next bytes."""
        self._value = self._crc32(data, self._value)

    def digest(self) -> bytes:
        """Return what all of them make."""
        return self._value.to_bytes(4, "big")

    def copy(self) -> Crc32:
        """Return one that goes on by itself."""
        return Crc32(self._value)


@functools.cache
def _fastest_crc32() -> Callable[[bytes | memoryview, int], int]:
    """Return what makes 40 GB a second with the processor's own words for it, else 2."""
    try:
        from isal.isal_zlib import crc32
    except ImportError:
        from zlib import crc32
    return crc32


def digest_of(kind: Kind, *pieces: bytes | memoryview) -> bytes:
    """Return the digest of some bytes."""
    digest = kind()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


# -- what comes -------------------------------------------------------------------------------


class Range:
    """A sink: writes one range of an object to its place, and takes its digest.

    Args:
        write: Takes bytes and their offset in the object.
        start: Where the range begins.
        tell: Hears how many bytes came; less than zero takes some back.
        begun: The digest of what lies before the range and belongs to it; None when nobody will
            ask, as a digest costs a second a gigabyte.
    """

    def __init__(
        self,
        write: Callable[[memoryview, int], None],
        start: int,
        tell: Tell,
        begun: Digest | None = None,
    ) -> None:
        self._write = write
        self._start = start
        self._tell = tell
        self._begun = begun
        self._digest = begun.copy() if begun else None
        self.answer: Answer | None = None
        self.came_bytes = 0

    def begin(self, answer: Answer) -> None:
        """Forget what came before."""
        self._tell(-self.came_bytes)
        self.came_bytes = 0
        self._digest = self._begun.copy() if self._begun else None
        self.answer = answer

    def take(self, data: memoryview) -> None:
        """Write the next bytes."""
        try:
            self._write(data, self._start + self.came_bytes)
        except OSError as error:
            raise LocalError(error) from error
        if self._digest is not None:
            self._digest.update(data)
        self.came_bytes += len(data)
        self._tell(len(data))

    def end(self) -> None:
        """Compare an object that came in one piece with its tag."""
        assert self.answer is not None
        whole = whole_bytes(self.answer)
        if self._start or self.came_bytes != whole or not is_md5(self.answer):
            return
        if self.digest.hex() != self.answer.etag:
            raise Damaged("its bytes are not those that were stored: they were changed on the way")

    @property
    def digest(self) -> bytes:
        """The digest of what came, empty when nobody wanted one."""
        return self._digest.digest() if self._digest else b""


def is_md5(answer: Answer) -> bool:
    """Whether the tag of an object is the digest of all of its bytes."""
    return answer.is_digest_tag and len(answer.etag) == 32 and _is_hex(answer.etag)


def is_whole(answer: Answer) -> bool:
    """Whether the body of an answer is all of the object, and its tag says so."""
    is_all = len(answer.body) == whole_bytes(answer)
    return is_all and is_md5(answer) and digest_of(md5, answer.body).hex() == answer.etag


def whole_bytes(answer: Answer) -> int:
    """Return how long the object is, of which an answer brings a range or all."""
    total = answer.headers.get("content-range", "").rpartition("/")[2]
    return int(total if total.isdecimal() else answer.headers.get("content-length", "0"))


def combined_etag(digests: list[bytes]) -> str:
    """Return the tag of an object that was put in parts: the digest of the parts' digests."""
    return f"{digest_of(md5, *digests).hex()}-{len(digests)}"


def combined_crc32(digests: list[bytes]) -> str:
    """Return the checksum of an object that was put in parts, as services say it."""
    return f"{base64_text(digest_of(Crc32, *digests))}-{len(digests)}"


def _is_hex(text: str) -> bool:
    return set(text) <= set("0123456789abcdef")
