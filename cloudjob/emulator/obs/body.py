"""Checks bodies of requests to OBS while they pass, and builds those that name objects anew."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import NamedTuple
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from cloudjob.emulator.obs.names import is_reserved, stored_name
from cloudjob.emulator.obs.request import Refused

_EMPTY = hashlib.sha256().hexdigest()
_LINE_BYTES = 8192
_MOST_KEYS = 1000
_CHUNK = re.compile(rb"([0-9a-fA-F]{1,16})(?:;chunk-signature=([0-9a-f]{64}))?\Z")
_TRAILER = re.compile(rb"([A-Za-z0-9-]{1,64}):([\x20-\x7e]{0,512})\Z")
_TRAILER_SIGNATURE = "x-amz-trailer-signature"


class ChunkKey(NamedTuple):
    """What signs the chunks of a body.

    Args:
        seed: The signature of the headers.
        scope: Date, region and service.
    """

    key: bytes
    seed: str
    moment: str
    scope: str


async def held(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield pieces; the last one waits until ``pieces`` has ended, and so accepted the whole.

    A store that never gets the last piece stores nothing.
    """
    last = b""
    async for piece in pieces:
        if piece:
            if last:
                yield last
            last = piece
    if last:
        yield last


async def with_digest(body: AsyncIterator[bytes], digest: str) -> AsyncIterator[bytes]:
    """Yield a body, and check its digest at the end, which SeaweedFS does not.

    Raises:
        Refused: The body is another one.
    """
    hasher = hashlib.sha256()
    async for piece in body:
        hasher.update(piece)
        yield piece
    if hasher.hexdigest() != digest:
        raise Refused(
            400, "XAmzContentSHA256Mismatch", "The provided 'x-amz-content-sha256' does not match."
        )


@dataclass(slots=True)
class Chunks:
    """A body in chunks as clients sign and send it, ``aws-chunked``.

    Args:
        size_bytes: The size of the content.
        key: What signed the chunks; None if nothing did.
        trailer: The name of the header that follows the last chunk; empty for none.
    """

    body: AsyncIterator[bytes]
    size_bytes: int
    key: ChunkKey | None
    trailer: str
    _read: bytearray = field(default_factory=bytearray)
    _last: str = ""

    async def plain(self) -> AsyncIterator[bytes]:
        """Yield the content.

        Raises:
            Refused: The body is invalid, or the signature of a chunk is wrong.
        """
        async for data in self._pieces():
            yield data
        if await self._line():
            raise _incomplete()

    async def coded(self) -> AsyncIterator[bytes]:
        """Yield the content in chunks without signatures, with its trailer.

        Raises:
            Refused: The body is invalid, or the signature of a chunk is wrong.
        """
        async for data in self._pieces():
            yield b"%x\r\n%s\r\n" % (len(data), data)
        yield b"0\r\n%s\r\n" % await self._trailer()

    async def _pieces(self) -> AsyncIterator[bytes]:
        """Yield the content of all chunks, each of which is checked at its end."""
        self._last = self.key.seed if self.key else ""
        left, size = self.size_bytes, -1
        while size:
            size, signature = self._head(await self._line())
            left -= size
            if left < 0 or (not size and left):
                raise _incomplete()
            digest, remaining = hashlib.sha256(), size
            while remaining:
                data = await self._some(remaining)
                digest.update(data)
                remaining -= len(data)
                yield data
            self._check(digest.hexdigest(), signature)
            if size and await self._line():
                raise _incomplete()

    def _head(self, line: bytes) -> tuple[int, str]:
        match = _CHUNK.match(line)
        if match is None or bool(match[2]) != bool(self.key):
            raise _incomplete()
        return int(match[1], 16), (match[2] or b"").decode("ascii")

    def _check(self, digest: str, signature: str) -> None:
        if self.key is None:
            return
        lines = ("AWS4-HMAC-SHA256-PAYLOAD", self.key.moment, self.key.scope, self._last, _EMPTY)
        self._last = _compared(self.key.key, "\n".join((*lines, digest)), signature)

    async def _trailer(self) -> bytes:
        trailer: dict[str, str] = {}
        while line := await self._line():
            pair = _TRAILER.match(line)
            if pair is None or pair[1].decode().lower() in trailer:
                raise _incomplete()
            trailer[pair[1].decode().lower()] = pair[2].decode().strip()
        signature = trailer.pop(_TRAILER_SIGNATURE, "")
        if list(trailer) != [self.trailer]:
            raise _incomplete()
        text = f"{self.trailer}:{trailer[self.trailer]}\n"
        if self.key:
            digest = hashlib.sha256(text.encode()).hexdigest()
            lines = ("AWS4-HMAC-SHA256-TRAILER", self.key.moment, self.key.scope, self._last)
            _compared(self.key.key, "\n".join((*lines, digest)), signature)
        return text.rstrip().encode() + b"\r\n"

    async def _line(self) -> bytes:
        while (end := self._read.find(b"\r\n")) < 0:
            if len(self._read) > _LINE_BYTES or not await self._fill():
                raise _incomplete()
        line = bytes(self._read[:end])
        del self._read[: end + 2]
        return line

    async def _some(self, most: int) -> bytes:
        if not self._read and not await self._fill():
            raise _incomplete()
        data = bytes(self._read[:most])
        del self._read[: len(data)]
        return data

    async def _fill(self) -> bool:
        async for piece in self.body:
            if piece:
                self._read += piece
                return True
        return False


def keys_to_delete(body: bytes) -> bytes:
    """Return the body of a request that deletes objects, built anew with the store's names.

    Raises:
        Refused: It is not such a body.
    """
    try:
        root = ElementTree.fromstring(body)
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise _malformed() from error
    objects = [item for item in root if _tag(item) == "Object"]
    if _tag(root) != "Delete" or not 1 <= len(objects) <= _MOST_KEYS:
        raise _malformed()
    is_quiet = any(_tag(item) == "Quiet" and (item.text or "").strip() == "true" for item in root)
    return (
        f"<Delete>{''.join(map(_object, objects))}<Quiet>{str(is_quiet).lower()}</Quiet></Delete>"
    ).encode()


def _object(item: ElementTree.Element) -> str:
    texts = {_tag(inner): inner.text or "" for inner in item}
    key, version = texts.get("Key", ""), texts.get("VersionId", "")
    if not key or len(texts) != len(item) or is_reserved(key):
        raise _malformed()
    text = f"<Key>{escape(stored_name(key))}</Key>"
    if version:
        text += f"<VersionId>{escape(version)}</VersionId>"
    return f"<Object>{text}</Object>"


def _tag(item: ElementTree.Element) -> str:
    return item.tag.rpartition("}")[2]


def _compared(key: bytes, text: str, signature: str) -> str:
    expected = hmac.digest(key, text.encode(), "sha256").hex()
    if not hmac.compare_digest(expected, signature):
        raise Refused(403, "SignatureDoesNotMatch", "The signature of a chunk does not match.")
    return expected


def _incomplete() -> Refused:
    return Refused(400, "IncompleteBody", "The body is not what its headers announce.")


def _malformed() -> Refused:
    return Refused(400, "MalformedXML", "The XML you provided was not well-formed.")
