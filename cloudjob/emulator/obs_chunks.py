"""Bodies of which each chunk has a signature, as clients that stream send them to OBS."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import AsyncIterator

from cloudjob.emulator.proxy import BadChunk, Message
from jobentry.contract import sigv4

# What such a body has in place of its digest.
SIGNED_CHUNKS = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
_LINE_BYTES, _CHUNK_BYTES = 4096, 64 << 20
_EMPTY = hashlib.sha256().hexdigest()


class ChunkSigner:
    """Turns a body in signed chunks into the plain one.

    Args:
        secret: The secret key that signs the request.
        signature: That of the headers, which the first chunk's continues.
    """

    def __init__(self, secret: str, scope: str, moment: str, signature: str) -> None:
        self._key = sigv4.signing_key(secret, scope)
        self._head = f"{moment}\n{scope}"
        self._last = signature

    def whole(self, sent: Message) -> Message:
        """Return the request with the headers of the plain body."""
        values = sent.values()
        words = map(str.strip, values.get("content-encoding", "").split(","))
        codings = [word for word in words if word != "aws-chunked"]
        changes = {
            b"content-length": values.get("x-amz-decoded-content-length", "").encode("latin-1"),
            b"content-encoding": ",".join(codings).encode("latin-1"),
            b"x-amz-decoded-content-length": b"",
            b"x-amz-trailer": b"",
        }
        headers = [(name, changes.get(name, value)) for name, value in sent.headers]
        return sent._replace(
            headers=[item for item in headers if item[1] or item[0] not in changes]
        )

    async def plain(self, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the chunks of a body.

        Raises:
            BadChunk: A chunk has a wrong form or a wrong signature.
        """
        reader = _Reader(body)
        data = b"-"
        while data:
            size, _, signature = (await reader.line()).partition(";chunk-signature=")
            data = await reader.exactly(_size(size))
            self._check(data, signature)
            # After the last chunk there may be a trailer, whose checksum covers what these do.
            if data and await reader.line():
                raise BadChunk
            if data:
                yield data

    def _check(self, data: bytes, signature: str) -> None:
        digest = hashlib.sha256(data).hexdigest()
        text = f"AWS4-HMAC-SHA256-PAYLOAD\n{self._head}\n{self._last}\n{_EMPTY}\n{digest}"
        self._last = hmac.digest(self._key, text.encode(), "sha256").hex()
        if not secrets.compare_digest(self._last, signature):
            raise BadChunk


def _size(text: str) -> int:
    try:
        size = int(text, 16)
    except ValueError as error:
        raise BadChunk from error
    if not 0 <= size <= _CHUNK_BYTES:
        raise BadChunk
    return size


class _Reader:
    def __init__(self, body: AsyncIterator[bytes]) -> None:
        self._body = body
        self._held = bytearray()

    async def line(self) -> str:
        while b"\r\n" not in self._held:
            if len(self._held) > _LINE_BYTES:
                raise BadChunk
            await self._more()
        line, _, self._held = self._held.partition(b"\r\n")
        return line.decode("latin-1")

    async def exactly(self, size: int) -> bytes:
        while len(self._held) < size:
            await self._more()
        data = bytes(self._held[:size])
        del self._held[:size]
        return data

    async def _more(self) -> None:
        try:
            self._held += await anext(self._body)
        except StopAsyncIteration:
            raise BadChunk from None
