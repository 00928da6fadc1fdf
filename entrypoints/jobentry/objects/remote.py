"""Reads objects over HTTP: in ranges, in parallel, again where one breaks, and checked."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import sys
import zlib
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Protocol, TypeVar

from jobentry.objects import web
from jobentry.objects.base import (
    CHUNK_BYTES,
    Entry,
    ObjectDamaged,
    ObjectError,
    Stop,
    Tell,
    fresh_file,
    in_parallel,
    make_folders,
    quiet,
    translated,
    write_all,
)
from jobentry.objects.listing import when

Result = TypeVar("Result")

# What is asked for at first: a small object comes whole, and of a large one we learn its size.
_FIRST_BYTES = 2 * CHUNK_BYTES
_RANGE_BYTES = 8 * CHUNK_BYTES
_MOST_RANGES = 10_000
_BUFFER_BYTES = 256 * 1024
THREADS = 4
# How often an object that changed or came damaged is fetched anew.
_ROUNDS = 3


class Asked(NamedTuple):
    """What an object is asked for.

    Args:
        doing: What a message says that we do.
        headers: Returns those of the next try.
    """

    doing: str
    headers: Callable[[], Mapping[str, str]]
    method: str = "GET"
    body: bytes | web.FileBody = b""


class Source(NamedTuple):
    """An object that can be asked for.

    Args:
        shown: Its URI, as a message may show it.
        exchange: Asks for it, and returns what its second argument makes of the answer.
        is_store: Whether it speaks S3, where an ETag is an MD5 more often than not.
    """

    shown: str
    exchange: Callable[[Asked, web.Read[Any], web.Tries], Any]
    is_store: bool


class _Damaged(ObjectDamaged):
    """What has come is not what was sent, or half of it is of another version."""


class _First(NamedTuple):
    """What the first answer says.

    Args:
        size_bytes: Of the whole object, -1 where the server does not know.
        data: Its first bytes; None where the server sends only all at once.
    """

    size_bytes: int
    headers: Mapping[str, str]
    data: bytes | None

    @property
    def tag(self) -> str:
        """The ETag as it was sent."""
        return self.headers.get("etag", "")

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left to ask for."""
        return self.data is not None and len(self.data) == self.size_bytes


def fetch(source: Source, path: str, sha256: str = "", tell: Tell = quiet) -> None:
    """Write the object to the file ``path``, whole and as it was sent, or not at all.

    Args:
        sha256: The digest that it must have, in hexadecimal.
    """
    for left in reversed(range(_ROUNDS)):
        try:
            _fetch(source, path, sha256, tell)
            return
        except _Damaged:
            if not left:
                raise


def read(source: Source) -> bytes:
    """Return the object's bytes."""
    for left in reversed(range(_ROUNDS)):
        first = _ask(source, "read object")
        parts = [_whole(source) if first.data is None else first.data]
        if first.data is not None and not first.is_whole:
            ranges = _ranges(len(first.data), first.size_bytes)
            parts += [read_range(source, begin, end - begin, first.tag) for begin, end in ranges]
        try:
            with _Digest.chosen(source, first, "") as digest:
                for part in parts:
                    digest.update(part)
        except _Damaged:
            if not left:
                raise
        else:
            return b"".join(parts)
    raise AssertionError("the last round returns or raises")


def read_range(source: Source, offset: int, length: int, tag: str = "") -> bytes:
    """Return ``length`` of the object's bytes, fewer where it ends before."""
    if length <= 0:
        return b""

    def take(answer: web.Response) -> bytes:
        _check_tag(source, answer, tag)
        if answer.status == 206:
            return answer.read(length)
        # It gives only all at once: pass over what was not asked for.
        data, skipped = bytearray(), 0
        for piece in answer.pieces(bytearray(_BUFFER_BYTES)):
            start = max(0, offset - skipped)
            data += piece[start : start + length - len(data)]
            skipped += len(piece)
            if len(data) >= length:
                break
        return bytes(data)

    headers = _range(source, offset, offset + length, tag)
    try:
        return _exchange(source, "read object", headers, take)
    except web.Refused as error:
        if error.answer.status == 416:
            return b""
        raise _as_damage(source, error) from error


def look(source: Source) -> Entry:
    """Return the facts of the object; it is asked for, since who may read may do no more."""
    headers = _range(source, 0, 1)

    def take(answer: web.Response) -> Entry:
        size = _size(answer)
        tag = answer.headers.get("etag", "").strip('"')
        at = when(answer.headers.get("last-modified", ""))
        return Entry("", source.shown, size, tag, at)

    try:
        return _exchange(source, "find object", headers, take)
    except web.Refused as error:
        if error.answer.status != 416:
            raise
        return _exchange(source, "find object", {}, take)


# -- one object ---------------------------------------------------------------------------------


def _fetch(source: Source, path: str, sha256: str, tell: Tell) -> None:
    first = _ask(source, "fetch object")
    with translated("write file", path):
        make_folders(path)
        room_bytes = max(0, first.size_bytes)
        chosen = _Digest.chosen(source, first, sha256)
        with fresh_file(path, room_bytes) as descriptor, chosen as digest:
            target = _Target(descriptor, path, tell)
            if first.data is None:
                _pour(source, target, digest)
                return
            target.write(memoryview(first.data), 0)
            digest.update(first.data)
            _fill(source, first, target, digest)


class _Target(NamedTuple):
    descriptor: int
    path: str
    tell: Tell

    def write(self, data: memoryview, offset: int) -> None:
        """Write what came; a disk that refuses is no fault of the line."""
        with translated("write file", self.path):
            write_all(self.descriptor, data, offset)
        self.tell(len(data))


def _fill(source: Source, first: _First, target: _Target, digest: _Digest) -> None:
    """Fetch what the first answer has left out; digest it in order while the rest comes in."""
    assert first.data is not None
    ranges = list(_ranges(len(first.data), first.size_bytes))
    stop = Stop()
    tasks = [_Range(source, first.tag, target, begin, end, stop) for begin, end in ranges]
    for (begin, end), _ in zip(ranges, in_parallel(tasks, THREADS, stop)):
        digest.update_from(target.descriptor, begin, end)


class _Range:
    """A part of an object that is fetched; where it breaks, only what is missing comes again."""

    def __init__(
        self, source: Source, tag: str, target: _Target, begin: int, end: int, stop: Stop
    ) -> None:
        self._source = source
        self._tag = tag
        self._target = target
        self._offset = begin
        self._end = end
        self._stop = stop
        self._tries = web.Tries(web.patience())

    def __call__(self) -> None:
        """Fetch it."""
        try:
            asked = Asked("fetch object", self._headers)
            self._source.exchange(asked, self._take, self._tries)
        except web.Refused as error:
            raise _as_damage(self._source, error) from error

    def _headers(self) -> Mapping[str, str]:
        return _range(self._source, self._offset, self._end, self._tag)

    def _take(self, answer: web.Response) -> None:
        _check_tag(self._source, answer, self._tag)
        if not answer.headers.get("content-range", "").startswith(f"bytes {self._offset}-"):
            raise _Damaged(f"fetch object: {self._source.shown}: another range came")
        for piece in answer.pieces(bytearray(_BUFFER_BYTES)):
            if self._stop.is_set:
                raise ObjectError(f"fetch object: {self._source.shown}: given up")
            self._target.write(piece[: self._end - self._offset], self._offset)
            self._offset += len(piece)
            self._tries.progress()


def _pour(source: Source, target: _Target, digest: _Digest) -> None:
    """Write an object that comes only all at once, and of unknown size."""

    def take(answer: web.Response) -> None:
        offset = 0
        digest.restart()
        for piece in answer.pieces(bytearray(_BUFFER_BYTES)):
            target.write(piece, offset)
            digest.update(piece)
            offset += len(piece)
        os.ftruncate(target.descriptor, offset)

    _exchange(source, "fetch object", {}, take)


def _whole(source: Source) -> bytes:
    def take(answer: web.Response) -> bytes:
        return b"".join(bytes(piece) for piece in answer.pieces(bytearray(_BUFFER_BYTES)))

    return _exchange(source, "read object", {}, take)


def _ask(source: Source, doing: str) -> _First:
    """Ask for the beginning; a server that knows no ranges begins to send all."""

    def take(answer: web.Response) -> _First:
        size = _size(answer)
        is_small = 0 <= size <= _FIRST_BYTES
        data = answer.read(_FIRST_BYTES) if answer.status == 206 or is_small else None
        return _First(size, answer.headers, data)

    headers = {**_range(source, 0, _FIRST_BYTES)}
    if source.is_store:
        headers["x-amz-checksum-mode"] = "ENABLED"
    try:
        return _exchange(source, doing, headers, take)
    except web.Refused as error:
        # Nothing of an empty object can be asked for.
        if error.answer.status != 416:
            raise
        return _exchange(source, doing, {}, take)


def _exchange(
    source: Source, doing: str, headers: Mapping[str, str], take: web.Read[Result]
) -> Result:
    asked = Asked(doing, lambda: headers)
    result: Result = source.exchange(asked, take, web.Tries(web.patience()))
    return result


def _range(source: Source, begin: int, end: int, tag: str = "") -> dict[str, str]:
    headers = {"Range": "bytes=%d-%d" % (begin, end - 1)}
    if tag and source.is_store:
        headers["If-Match"] = tag
    return headers


def _ranges(begin: int, end: int) -> Iterator[tuple[int, int]]:
    step = max(_RANGE_BYTES, (end - begin) // _MOST_RANGES + 1)
    while begin < end:
        yield begin, min(end, begin + step)
        begin += step


def _size(answer: web.Response) -> int:
    text = answer.headers.get("content-length", "")
    if answer.status == 206:
        text = answer.headers.get("content-range", "").rpartition("/")[2]
    return int(text) if text.isdecimal() else -1


def _check_tag(source: Source, answer: web.Response, tag: str) -> None:
    if tag and answer.headers.get("etag", tag) != tag:
        raise _changed(source)


def _as_damage(source: Source, error: web.Refused) -> ObjectError:
    return _changed(source) if error.answer.status in (412, 416) else error


def _changed(source: Source) -> ObjectError:
    return _Damaged(
        f"fetch object: {source.shown}: it was replaced while it was read",
        "give every version of it a name of its own",
    )


# -- digests ------------------------------------------------------------------------------------


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def digest(self) -> bytes: ...


class _Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "big")


class _Digest:
    """Follows the bytes of an object and compares them at the end with what was promised."""

    def __init__(self, source: Source, make: Callable[[], _Hash] | None, wanted: bytes) -> None:
        self._source = source
        self._make = make
        self._hash = make() if make else None
        self._wanted = wanted

    @classmethod
    def chosen(cls, source: Source, first: _First, sha256: str) -> _Digest:
        """Return the best that there is: what the caller says, or else the server."""
        if sha256:
            return cls(source, hashlib.sha256, bytes.fromhex(sha256))
        found = _promised(source, first) if source.is_store else None
        return cls(source, *found) if found else cls(source, None, b"")

    def __enter__(self) -> _Digest:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._hash is not None and self._hash.digest() != self._wanted:
            raise _Damaged(
                f"fetch object: {self._source.shown}: its digest is {self._hash.digest().hex()},"
                f" not {self._wanted.hex()}",
                "it was damaged on its way or in the store, or is another version: store it anew",
            )

    def restart(self) -> None:
        """Forget what came: it comes again from its beginning."""
        self._hash = self._make() if self._make else None

    def update(self, data: bytes | memoryview) -> None:
        """Take in the next bytes."""
        if self._hash is not None:
            self._hash.update(data)  # type: ignore[arg-type]

    def update_from(self, descriptor: int, begin: int, end: int) -> None:
        """Take in what was written to a file."""
        if self._hash is None:
            return
        while begin < end:
            data = os.pread(descriptor, min(CHUNK_BYTES, end - begin), begin)
            if not data:
                return
            self._hash.update(data)
            begin += len(data)


def _promised(source: Source, first: _First) -> tuple[Callable[[], _Hash], bytes] | None:
    """Return the digest of the whole object that the server promises."""
    is_md5 = re.match(r'"?[0-9a-f]{32}"?\Z', first.tag) is not None
    headers = first.headers
    if not first.is_whole:
        # That of a range says nothing of the rest.
        headers = {} if is_md5 else _headers(source)
    for name, make in (("sha256", hashlib.sha256), ("sha1", hashlib.sha1), ("crc32", _Crc32)):
        wanted = _unpacked(headers.get("x-amz-checksum-" + name, ""))
        if wanted:
            return make, wanted
    encryption = first.headers.get("x-amz-server-side-encryption", "")
    if not is_md5 or encryption not in ("", "AES256") or _has_own_key(first.headers):
        return None
    return md5, bytes.fromhex(first.tag.strip('"'))


def _headers(source: Source) -> Mapping[str, str]:
    asked = Asked("fetch object", lambda: {"x-amz-checksum-mode": "ENABLED"}, "HEAD")
    found: Mapping[str, str] = source.exchange(
        asked, lambda answer: answer.headers, web.Tries(web.patience())
    )
    return found


def _has_own_key(headers: Mapping[str, str]) -> bool:
    return "x-amz-server-side-encryption-customer-algorithm" in headers


def _unpacked(text: str) -> bytes:
    # One that ends in -3 is made of the digests of three parts.
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return b""


def md5(data: bytes = b"") -> Any:
    """Return an MD5, also where the library forbids it for secrets, which this is none of."""
    # Python 3.8 does not know the word, and nobody else may say that it must.
    words = {"usedforsecurity": False} if sys.version_info >= (3, 9) else {}
    return hashlib.new("md5", data, **words)
