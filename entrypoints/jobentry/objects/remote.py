"""Reads objects over HTTP: in parallel ranges, which are resumed when they break, and verified.

The digest to verify is the SHA-256 if the caller knows it, or else the MD5 that the store sends as
ETag. An object that was uploaded in parts has no such ETag, so without a SHA-256 it is not
verified.
"""

from __future__ import annotations

import abc
import contextlib
import hashlib
import http.client
import os
import re
import sys
from functools import partial
from http.client import HTTPResponse
from typing import Any, Callable, NamedTuple, Sequence, TypeVar

from jobentry.objects.base import (
    CHUNK_BYTES,
    Entry,
    ObjectDamaged,
    ObjectMissing,
    Progress,
    check_digest,
    fresh_file,
    in_parallel,
    no_progress,
    translated,
)
from jobentry.objects.client import Refused, nothing, pieces
from jobentry.objects.s3_xml import when
from jobentry.system.trees import write_sparse

Result = TypeVar("Result")
# Writes bytes at an offset of the new file.
Write = Callable[[bytes, int], None]

# The size of the first request: it gets all of a small object, and the size of a large one.
_FIRST_BYTES = 2 * CHUNK_BYTES
_RANGE_BYTES = 8 * CHUNK_BYTES
_THREADS = 4
# How long a look at a small object is retried: not long enough for a message.
_PEEK_S = 4.0
# How often an object that changed or arrived damaged is fetched.
_ROUNDS = 3


class Call(NamedTuple):
    """A request for an object.

    Args:
        doing: For messages: ``fetching``.
    """

    doing: str
    method: str = "GET"
    headers: Sequence[tuple[str, str]] = ()
    body: bytes = b""
    query: Sequence[tuple[str, str]] = ()


class RemoteObject(abc.ABC):
    """An object on a server.

    Attributes:
        uri: The URI as messages may show it.
        is_in_store: Whether the server speaks S3, so that ETags are MD5s and ``If-Match`` works.
    """

    uri: str
    is_in_store: bool

    @abc.abstractmethod
    def request(
        self, call: Call, read: Callable[[HTTPResponse], Result], limit_s: float | None = None
    ) -> Result:
        """Send a request, and return the result of ``read``."""

    def fetch(self, path: str, sha256: str = "", progress: Progress = no_progress) -> None:
        """Write the object to the file ``path``, complete and verified."""

        def download() -> None:
            with translated("writing", path), fresh_file(path) as fresh:
                self._download(fresh, path, sha256, progress)

        _until_intact(download)

    def _download(self, fresh: str, path: str, sha256: str, progress: Progress) -> None:
        """Fetch the beginning, then the rest in parallel."""

        def write(data: bytes, offset: int) -> None:
            # An error of the disk must not look like one of the network, which is retried.
            with translated("writing", path), open(fresh, "r+b") as file:
                file.seek(offset)
                write_sparse(file, data)
            progress(len(data))

        def take(response: HTTPResponse) -> tuple[HTTPResponse, int]:
            with translated("writing", path):
                open(fresh, "wb").close()
            come_bytes = 0
            # A server that does not support ranges sends everything.
            for piece in pieces(response):
                write(piece, come_bytes)
                come_bytes += len(piece)
            return response, come_bytes

        first, come_bytes = self._request_start("fetching", _FIRST_BYTES, take)
        begins = range(come_bytes, _size(first), _RANGE_BYTES)
        tasks = [partial(self._fetch_range, begin, first, write) for begin in begins]
        try:
            in_parallel(tasks, _THREADS)
        except Refused as error:
            if error.answer.status in (412, 416):
                raise self._changed() from error
            raise
        # It may end in a hole.
        with translated("writing", path):
            os.truncate(fresh, max(come_bytes, _size(first)))
        digest, expected = self._digest(first, sha256)
        if digest is not None:
            with open(fresh, "rb") as file:
                for data in iter(partial(file.read, CHUNK_BYTES), b""):
                    digest.update(data)
            check_digest(self.uri, digest.hexdigest(), expected)

    def _fetch_range(self, offset: int, first: HTTPResponse, write: Write) -> None:
        """Fetch a range of the object; after a break, request only the bytes that are missing."""
        end = min(_size(first), offset + _RANGE_BYTES)
        tag = first.headers.get("etag", "")
        condition = (("If-Match", tag),) if tag and self.is_in_store else ()

        def take(response: HTTPResponse) -> int:
            """Return the offset of the first byte that is missing."""
            range_text = response.headers.get("content-range", "")
            if response.headers.get("etag", tag) != tag or f"bytes {offset}-" not in range_text:
                raise self._changed()
            at = offset
            try:
                for piece in pieces(response):
                    write(piece[: end - at], at)
                    at += len(piece)
            except (OSError, http.client.HTTPException):
                if at == offset:
                    raise
            return min(at, end)

        while offset < end:
            call = Call("fetching", headers=(_range(offset, end), *condition))
            offset = self.request(call, take)

    def _changed(self) -> ObjectDamaged:
        return ObjectDamaged(
            f"fetching {self.uri}: it was replaced while it was read",
            "store each version under its own name",
        )

    def read(self) -> bytes:
        """Return the object's bytes."""

        def take(response: HTTPResponse) -> bytes:
            data = response.read()
            digest, expected = self._digest(response)
            if digest is not None:
                digest.update(data)
                check_digest(self.uri, digest.hexdigest(), expected)
            return data

        return _until_intact(lambda: self.request(Call("reading"), take))

    def peek(self, limit_bytes: int) -> bytes:
        """Return the object's first bytes; a server that does not answer is soon given up."""
        call = Call("looking at", headers=(_range(0, limit_bytes),))
        return self.request(call, lambda response: response.read(limit_bytes), _PEEK_S)

    def stat(self) -> Entry:
        """Return the metadata of the object, with a GET, as some keys allow nothing else."""

        def take(response: HTTPResponse) -> Entry:
            tag = response.headers.get("etag", "").strip('"')
            at = when(response.headers.get("last-modified", ""))
            return Entry("", self.uri, _size(response), tag, at)

        return self._request_start("looking for", 1, take)

    def write(self, data: bytes) -> None:
        """Store ``data`` as the object."""
        self.request(Call("writing", "PUT", body=data), nothing)

    def delete(self) -> None:
        """Delete the object if there is one."""
        with contextlib.suppress(ObjectMissing):
            self.request(Call("deleting", "DELETE"), nothing)

    def _request_start(
        self, doing: str, length: int, take: Callable[[HTTPResponse], Result]
    ) -> Result:
        """Request the first bytes; for an empty object, which has none, everything."""
        try:
            return self.request(Call(doing, headers=(_range(0, length),)), take)
        except Refused as error:
            if error.answer.status != 416:
                raise
            return self.request(Call(doing), take)

    def _digest(self, response: HTTPResponse, sha256: str = "") -> tuple[Any, str]:
        """Return a new hash and the digest that it must have; None if the digest is not known."""
        if sha256:
            return hashlib.sha256(), sha256
        headers = response.headers
        tag = headers.get("etag", "").strip('"')
        # With a customer's key or a key service, the ETag is not an MD5.
        is_plain = headers.get("x-amz-server-side-encryption", "") in ("", "AES256")
        is_plain &= "x-amz-server-side-encryption-customer-algorithm" not in headers
        is_md5 = self.is_in_store and is_plain and re.match(r"[0-9a-f]{32}\Z", tag)
        return (md5(), tag) if is_md5 else (None, "")


def md5(data: bytes = b"") -> Any:
    """Return an MD5 hash, even if the library forbids MD5 for security: here it is a checksum."""
    # Python 3.8 does not have this argument.
    arguments = {"usedforsecurity": False} if sys.version_info >= (3, 9) else {}
    return hashlib.new("md5", data, **arguments)


def _until_intact(act: Callable[[], Result]) -> Result:
    for _ in range(_ROUNDS - 1):
        with contextlib.suppress(ObjectDamaged):
            return act()
    return act()


def _range(begin: int, end: int) -> tuple[str, str]:
    return "Range", "bytes=%d-%d" % (begin, end - 1)


def _size(response: HTTPResponse) -> int:
    """Return the size of the whole object; -1 if the server does not send it."""
    text = response.headers.get("content-length", "")
    if response.status == 206:
        text = response.headers.get("content-range", "").rpartition("/")[2]
    return int(text) if text.isdecimal() else -1
