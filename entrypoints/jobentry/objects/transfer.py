"""Reads objects over HTTP: in ranges, in parallel, resumed where one breaks, and verified.

One rule for digests: the SHA-256 that the caller knows, or else the MD5 that the store gives as
ETag. An object that was uploaded in parts has no such ETag, and without a SHA-256 is not verified.
"""

from __future__ import annotations

import abc
import hashlib
import os
import re
import sys
import threading
from functools import partial
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence, TypeVar

from jobentry.objects.base import (
    CHUNK_BYTES,
    Entry,
    ObjectDamaged,
    ObjectError,
    ObjectMissing,
    Progress,
    fresh_file,
    in_parallel,
    no_progress,
    reserve,
    translated,
    write_all,
)
from jobentry.objects.client import Refused, Response, Retries
from jobentry.objects.s3_xml import when

Result = TypeVar("Result")

# The first request: a small object comes completely, and of a large one we learn the size.
_FIRST_BYTES = 2 * CHUNK_BYTES
_RANGE_BYTES = 8 * CHUNK_BYTES
_MOST_RANGES = 10_000
_THREADS = 4
# How often an object that changed or arrived damaged is fetched.
_ROUNDS = 3
# What is read into memory is a manifest or a descriptor.
_MOST_READ_BYTES = 1024 * CHUNK_BYTES


class Call(NamedTuple):
    """What is asked of an object.

    Args:
        doing: For messages: ``fetch object``.
        headers: Returns those of the next attempt.
        body: Bytes, or the path of a file.
    """

    doing: str
    method: str = "GET"
    headers: Callable[[], Mapping[str, str]] = dict
    body: bytes | str = b""
    query: Sequence[tuple[str, str]] = ()


class RemoteObject(abc.ABC):
    """An object of a server.

    Attributes:
        uri: As messages may show it.
        is_in_store: Whether the server speaks S3: ETags are MD5s then, and ``If-Match`` works.
    """

    uri: str
    is_in_store: bool

    @abc.abstractmethod
    def request(
        self, call: Call, read: Callable[[Response], Result], retries: Retries | None = None
    ) -> Result:
        """Send a request, and return what ``read`` makes of the answer."""

    def fetch(self, path: str, sha256: str = "", progress: Progress = no_progress) -> None:
        """Write the object to the file ``path``, complete and verified."""

        def download() -> None:
            with translated("write file", path), fresh_file(path) as descriptor:
                _Download(self, descriptor, path, progress).run(sha256)

        _until_intact(download)

    def read(self) -> bytes:
        """Return the object's bytes."""

        def take(response: Response) -> bytes:
            data = response.read(_MOST_READ_BYTES)
            digest, expected = self.digest(response.headers)
            if digest is not None:
                digest.update(data)
                self.check_digest(digest.hexdigest(), expected)
            return data

        return _until_intact(lambda: self.request(Call("read object"), take))

    def look(self) -> Entry:
        """Return the facts of the object, from a GET: some keys may do nothing else."""

        def take(response: Response) -> Entry:
            if response.status == 206:
                nothing(response)
            tag = response.headers.get("etag", "").strip('"')
            at = when(response.headers.get("last-modified", ""))
            return Entry("", self.uri, _size(response), tag, at)

        return self.request_start("find object", 1, take)

    def write(self, data: bytes) -> None:
        """Store ``data`` as the object."""
        self.request(Call("write object", "PUT", body=data), nothing)

    def delete(self) -> None:
        """Delete the object if there is one."""
        try:
            self.request(Call("delete object", "DELETE"), nothing)
        except ObjectMissing:
            return

    def request_start(self, doing: str, length: int, take: Callable[[Response], Result]) -> Result:
        """Request the first bytes; of an empty object, which has none, everything."""
        try:
            return self.request(Call(doing, headers=lambda: _range(0, length)), take)
        except Refused as error:
            if error.answer.status != 416:
                raise
            return self.request(Call(doing), take)

    def digest(self, headers: Mapping[str, str], sha256: str = "") -> tuple[Any, str]:
        """Return a new hash and the digest that it must have; None if nobody knows it."""
        if sha256:
            return hashlib.sha256(), sha256
        tag = headers.get("etag", "").strip('"')
        # With a key of the customer or of a key service the ETag is another value.
        is_plain = headers.get("x-amz-server-side-encryption", "") in ("", "AES256")
        is_plain &= "x-amz-server-side-encryption-customer-algorithm" not in headers
        is_md5 = self.is_in_store and is_plain and re.match(r"[0-9a-f]{32}\Z", tag)
        return (md5(), tag) if is_md5 else (None, "")

    def check_digest(self, found: str, expected: str) -> None:
        """Raise ``ObjectDamaged`` if two digests differ."""
        if found != expected:
            raise ObjectDamaged(
                f"fetch object: {self.uri}: its digest is {found}, not {expected}",
                "it was damaged on its way or in the store, or is another version: store it again",
            )


def nothing(response: Response) -> None:
    """Read to the end of an answer, so that its connection can be reused."""
    response.read(CHUNK_BYTES)


def md5(data: bytes = b"") -> Any:
    """Return an MD5 hash, also if the library forbids MD5 for security: here it is a checksum."""
    # Python 3.8 does not know this argument.
    arguments = {"usedforsecurity": False} if sys.version_info >= (3, 9) else {}
    return hashlib.new("md5", data, **arguments)


class _Download:
    """One download into an open file."""

    def __init__(
        self, source: RemoteObject, descriptor: int, path: str, progress: Progress
    ) -> None:
        self._source = source
        self._descriptor = descriptor
        self._path = path
        self._progress = progress
        self._stop = threading.Event()
        self._size_bytes = self._come_bytes = 0
        self._headers: Mapping[str, str] = {}

    def run(self, sha256: str) -> None:
        """Fetch the beginning, then the rest in parallel; digest it in order meanwhile."""
        self._source.request_start("fetch object", _FIRST_BYTES, self._take_first)
        ranges = list(_ranges(self._come_bytes, self._size_bytes))
        tasks = [partial(self._fetch_range, *place) for place in ranges]
        digest, expected = self._source.digest(self._headers, sha256)
        self._update(digest, 0, self._come_bytes)
        for (begin, end), _ in zip(ranges, in_parallel(tasks, _THREADS, self._stop)):
            self._update(digest, begin, end)
        if digest is not None:
            self._source.check_digest(digest.hexdigest(), expected)

    def _take_first(self, response: Response) -> None:
        self._headers, self._size_bytes, self._come_bytes = response.headers, _size(response), 0
        # An error of the disk must not look like one of the network, which is retried.
        with translated("write file", self._path):
            os.ftruncate(self._descriptor, 0)
            if self._size_bytes > 0:
                reserve(self._descriptor, self._size_bytes)
        # A server that knows no ranges sends everything.
        for piece in response.pieces():
            self._write(piece, self._come_bytes)
            self._come_bytes += len(piece)
        self._size_bytes = max(self._size_bytes, self._come_bytes)

    def _fetch_range(self, offset: int, end: int) -> None:
        """Fetch a part of the object; where it breaks, only what is missing is requested again."""
        retries = Retries()
        tag = self._headers.get("etag", "")

        condition = {"If-Match": tag} if tag and self._source.is_in_store else {}

        def headers() -> Mapping[str, str]:
            return {**_range(offset, end), **condition}

        def take(response: Response) -> None:
            nonlocal offset
            found = response.headers.get("content-range", "")
            if response.headers.get("etag", tag) != tag or f"bytes {offset}-" not in found:
                raise self._changed()
            for piece in response.pieces():
                if self._stop.is_set():
                    raise ObjectError(f"fetch object: {self._source.uri}: another range failed")
                self._write(piece[: end - offset], offset)
                offset = min(end, offset + len(piece))
                retries.progress()

        try:
            self._source.request(Call("fetch object", headers=headers), take, retries)
        except Refused as error:
            if error.answer.status in (412, 416):
                raise self._changed() from error
            raise

    def _write(self, data: memoryview, offset: int) -> None:
        with translated("write file", self._path):
            write_all(self._descriptor, data, offset)
        self._progress(len(data))

    def _update(self, digest: Any, begin: int, end: int) -> None:
        """Digest a part of what was written."""
        while digest is not None and begin < end:
            data = os.pread(self._descriptor, min(CHUNK_BYTES, end - begin), begin)
            digest.update(data)
            begin += len(data) or end

    def _changed(self) -> ObjectDamaged:
        return ObjectDamaged(
            f"fetch object: {self._source.uri}: it was replaced while it was read",
            "give every version of it a name of its own",
        )


def _until_intact(act: Callable[[], Result]) -> Result:
    for _ in range(_ROUNDS - 1):
        try:
            return act()
        except ObjectDamaged:
            continue
    return act()


def _range(begin: int, end: int) -> dict[str, str]:
    return {"Range": "bytes=%d-%d" % (begin, end - 1)}


def _ranges(begin: int, end: int) -> Iterator[tuple[int, int]]:
    step = max(_RANGE_BYTES, (end - begin) // _MOST_RANGES + 1)
    while begin < end:
        yield begin, min(end, begin + step)
        begin += step


def _size(response: Response) -> int:
    """Return the size of the whole object; -1 if the server does not send it."""
    text = response.headers.get("content-length", "")
    if response.status == 206:
        text = response.headers.get("content-range", "").rpartition("/")[2]
    return int(text) if text.isdecimal() else -1
