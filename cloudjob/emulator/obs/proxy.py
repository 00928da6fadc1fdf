"""The front end of the emulated OBS: passes requests to SeaweedFS, or injects faults."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from cloudjob.emulator.http_server import is_from_here, target_of
from cloudjob.emulator.obs.body import Chunks, held, keys_to_delete, with_digest
from cloudjob.emulator.obs.names import client_names, stored_parameter
from cloudjob.emulator.obs.request import (
    SIGNED_CHUNKS,
    UNSIGNED_CHUNKS,
    Headers,
    ObsRequest,
    Refusal,
    Refused,
    message_of,
    read,
    stored_path,
    stored_source,
)
from cloudjob.emulator.obs.signatures import ObsSignatures, Requester, check_permission
from cloudjob.emulator.state import User
from jobentry.contract import sigv4
from jobentry.contract.sigv4 import Keys

# Headers of a single connection, which a proxy does not pass on.
_CONNECTION_HEADERS = (b"connection", b"keep-alive", b"proxy-connection", b"upgrade", b"te")
_DELETE_BYTES = 8 << 20
_LISTED = "obs:bucket:ListBucket"
_XML = "http://s3.amazonaws.com/doc/2006-03-01/"

_FOREIGN = Refusal(403, "AccessDenied", "The request is for another host or of another origin.")
# status -> code and message for a request that cannot be read.
_UNREADABLE = {
    400: ("BadRequest", "The request is invalid."),
    414: ("UriTooLong", "The request line is too long."),
    431: ("RequestHeaderSectionTooLarge", "The headers are too large."),
    501: ("NotImplemented", "The server does not support this."),
}
_NO_BUCKET = Refusal(404, "NoSuchBucket", "The specified bucket does not exist.")
_NO_PARTS = Refusal(400, "MalformedXML", "The request names no part.")
_INVALID_PART = Refusal(400, "InvalidPart", "A part that the request names was not uploaded.")
_UNAVAILABLE = Refusal(503, "ServiceUnavailable", "The object store does not answer.")


class Proxy:
    """An ASGI application that passes requests to an S3 server on a Unix socket.

    A request is read into a value, which is judged; the server gets a new request that is built
    from this value and signed with the keys of the emulator. Bodies are streamed in both
    directions.

    Args:
        addresses: The addresses of the proxy; requests for other hosts are refused.
        keys: The keys that the server accepts for buckets, and those for objects.
        inject: Returns the fault for a request (target, whether it needs space), or None.
    """

    def __init__(
        self,
        socket: str,
        addresses: Collection[str],
        keys: tuple[Keys, Keys],
        inject: Callable[[str, bool], Refusal | None],
        signatures: ObsSignatures,
    ) -> None:
        self._addresses = addresses
        self._bucket_keys, self._object_keys = keys
        self._inject = inject
        self._signatures = signatures
        # A new connection for each request, because an idle one may be closed just as it is used.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        transport = httpx.AsyncHTTPTransport(uds=socket, limits=limits, verify=False)
        self._client = httpx.AsyncClient(transport=transport, timeout=None, trust_env=False)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        request = Request(scope, receive)
        try:
            wanted, signer = self._judged(request)
            fault = self._inject(target_of(scope), wanted.needs_space)
            if fault:
                await asyncio.sleep(fault.delay_s)
            if fault and fault.status:
                response: Response = _error(request, fault)
            else:
                await self._pass_on(request, wanted, signer, send)
                return
        except Refused as error:
            response = _error(request, error.refusal)
        except ClientDisconnect:
            return
        await response(scope, receive, send)

    def refusal(self, status: int) -> Response:
        """Return the response to a request that cannot be read."""
        return _answer(Refusal(status, *_UNREADABLE.get(status, _UNREADABLE[400])))

    def _judged(self, request: Request) -> tuple[ObsRequest, Requester]:
        """Return what a request asks for, and who signed it.

        Raises:
            Refused: It is invalid, or its user may not do this.
        """
        # SeaweedFS answers every preflight with permissive CORS headers.
        if request.method == "OPTIONS" or not is_from_here(request.headers, self._addresses):
            raise Refused(_FOREIGN.status, _FOREIGN.code, _FOREIGN.message)
        target = target_of(request.scope)
        message = message_of(request.method, target, request.headers.raw)
        signer = self._signatures.signer(message)
        wanted = read(message)
        check_permission(wanted, signer.user)
        return wanted, signer

    async def _pass_on(
        self, request: Request, wanted: ObsRequest, signer: Requester, send: Any
    ) -> None:
        """Send the request to the server, and its answer to the client."""
        try:
            changed, content = await _with_body(request, wanted, signer)
            response = await self._send(changed, content)
            if refusal := await self._refusal(wanted, content, response.status_code):
                await response.aclose()
                await _error(request, refusal)(request.scope, request.receive, send)
                return
        except httpx.TransportError:
            await _error(request, _UNAVAILABLE)(request.scope, request.receive, send)
            return
        try:
            answer = await _answer_of(wanted, signer.user, response)
            await answer(request.scope, request.receive, send)
        except httpx.TransportError:
            # The server broke off in the middle of its response, so the client's is aborted, too.
            request.state.transport.abort()
        finally:
            await response.aclose()

    async def _send(self, wanted: ObsRequest, content: Any) -> httpx.Response:
        keys = self._object_keys if wanted.key else self._bucket_keys
        return await self._client.send(_signed(wanted, content, keys), stream=True)

    async def _refusal(self, wanted: ObsRequest, content: Any, status: int) -> Refusal | None:
        """Return what OBS answers where SeaweedFS's answer means something else.

        SeaweedFS denies writes to a missing bucket, as it would have to create it, and it does not
        find an upload that has no parts yet.
        """
        if status == 403 and wanted.key and await self._status(wanted.looking("HEAD")) == 404:
            return _NO_BUCKET
        if status == 404 and wanted.names_parts:
            upload = wanted.looking("GET", wanted.key)
            if await self._status(upload) == 200:
                is_empty = isinstance(content, bytes) and b"<Part>" not in content
                return _NO_PARTS if is_empty else _INVALID_PART
        return None

    async def _status(self, wanted: ObsRequest) -> int:
        response = await self._send(wanted, None)
        await response.aclose()
        return response.status_code


async def _with_body(
    request: Request, wanted: ObsRequest, signer: Requester
) -> tuple[ObsRequest, Any]:
    """Return the request to the server without what belongs to the old body, and its body.

    Raises:
        Refused: The body is invalid.
    """
    headers = dict(wanted.headers)
    body: AsyncIterator[bytes] = request.stream()
    is_coded = wanted.payload.startswith("STREAMING-")
    if not is_coded and wanted.payload != sigv4.UNSIGNED:
        body = held(with_digest(body, wanted.payload))
    if wanted.names_many:
        content = keys_to_delete(await _small(body))
        for name in [name for name in headers if "checksum" in name or name == "content-md5"]:
            del headers[name]
        headers.pop("transfer-encoding", "")
        headers["content-length"] = str(len(content))
        return _changed(wanted, headers), content
    if wanted.method not in ("PUT", "POST"):
        for name in ("content-length", "transfer-encoding"):
            headers.pop(name, "")
        return _changed(wanted, headers), None
    trailer = headers.pop("x-amz-trailer", "").lower()
    size = headers.pop("x-amz-decoded-content-length", "")
    if "transfer-encoding" not in headers:
        headers.setdefault("content-length", "0")
    if not is_coded:
        read_body = _small if wanted.names_parts else _begun
        return _changed(wanted, headers), await read_body(body)
    sent, body = _without_chunks(wanted, headers, signer, body, size, trailer)
    return sent, await _begun(body)


def _signed(wanted: ObsRequest, content: Any, keys: Keys) -> httpx.Request:
    """Return the request to the server, signed with its keys."""
    headers = dict(wanted.headers)
    if wanted.source:
        headers["x-amz-copy-source"] = stored_source(wanted.source)
    query = [(name, stored_parameter(name, value)) for name, value in wanted.query]
    path = stored_path(wanted)
    # SeaweedFS refuses unsigned S3 headers.
    covered = {name: headers[name] for name in headers if name.startswith("x-amz-")}
    covered["host"] = headers.pop("host")
    scope = sigv4.Scope("obs", time.strftime(sigv4.MOMENT, time.gmtime()))
    signed = sigv4.headers(
        sigv4.Request(wanted.method, path, query, covered), keys, scope, wanted.payload
    )
    # The signature covers values without their superfluous spaces, which are sent nevertheless.
    sent = {**signed, **headers}
    target = path + ("?" + sigv4.query_text(query) if query else "")
    return httpx.Request(
        wanted.method,
        "http://seaweedfs",
        headers=[(n.encode(), v.encode("utf-8")) for n, v in sent.items()],
        content=content,
        extensions={"target": target.encode("ascii")},
    )


async def _small(body: AsyncIterator[bytes]) -> bytes:
    content = bytearray()
    async for piece in body:
        content += piece
        if len(content) > _DELETE_BYTES:
            raise Refused(400, "MalformedXML", "The request names too many objects.")
    return bytes(content)


async def _begun(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Return a body once its first piece is there, or it is known to be empty.

    SeaweedFS stores an empty object if its client breaks off before the first byte.
    """
    first = await anext(body, b"")

    async def whole() -> AsyncIterator[bytes]:
        if first:
            yield first
        async for piece in body:
            yield piece

    return whole()


def _without_chunks(
    wanted: ObsRequest,
    headers: dict[str, str],
    signer: Requester,
    body: AsyncIterator[bytes],
    size: str,
    trailer: str,
) -> tuple[ObsRequest, AsyncIterator[bytes]]:
    """Return a request whose body came in chunks, which are checked as they pass."""
    has_trailer = wanted.payload != SIGNED_CHUNKS
    if not size.isdecimal() or bool(trailer) != has_trailer or len(size) > 16:
        raise Refused(400, "InvalidRequest", "The headers do not fit a body in chunks.")
    chunks = Chunks(body, int(size), signer.chunk_key, trailer)
    headers.pop("content-length", "")
    headers.pop("transfer-encoding", "")
    if not trailer:
        headers["content-length"] = size
        return _changed(wanted, headers), held(chunks.plain())
    headers.update({"x-amz-trailer": trailer, "x-amz-decoded-content-length": size})
    return _changed(wanted, headers, UNSIGNED_CHUNKS), chunks.coded()


def _changed(
    wanted: ObsRequest, headers: dict[str, str], payload: str = sigv4.UNSIGNED
) -> ObsRequest:
    return replace(wanted, headers=headers, payload=payload)


async def _answer_of(wanted: ObsRequest, user: User, response: httpx.Response) -> Response:
    """Return the response; names of objects in lists are those that clients use."""
    if wanted.is_list and "xml" in response.headers.get("content-type", ""):
        content = await response.aread()
        if not wanted.bucket and response.status_code == 200:
            content = _visible(content, user)
        answer = Response(client_names(content), response.status_code)
        length = answer.headers["content-length"]
        headers = _passed_on(response.headers.raw, b"content-length")
        answer.raw_headers = [*headers, (b"content-length", length.encode())]
        return answer
    stream = StreamingResponse(response.aiter_raw(), response.status_code)
    stream.raw_headers = _passed_on(response.headers.raw, b"transfer-encoding")
    return stream


def _visible(content: bytes, user: User) -> bytes:
    """Return the list of buckets with only those that a user may list."""
    root = ElementTree.fromstring(content)
    buckets = root.find(f"{{{_XML}}}Buckets")
    for bucket in list(buckets) if buckets is not None else ():
        name = bucket.findtext(f"{{{_XML}}}Name", "")
        if buckets is not None and not user.may(_LISTED, name):
            buckets.remove(bucket)
    ElementTree.register_namespace("", _XML)
    encoded: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return encoded


def _passed_on(headers: Headers, other: bytes) -> Headers:
    return [
        (name, value)
        for name, value in headers
        if name.lower() not in (*_CONNECTION_HEADERS, other)
    ]


def _error(request: Request, refusal: Refusal) -> Response:
    # After `Expect`, the client does not send the body now, so the server would take the next
    # request for the body.
    return _answer(refusal, is_last="expect" in request.headers)


def _answer(refusal: Refusal, *, is_last: bool = True) -> Response:
    number = uuid.uuid4().hex.upper()
    body = (
        '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n'
        f"<Error><Code>{refusal.code}</Code><Message>{refusal.message}</Message>"
        f"<RequestId>{number}</RequestId><HostId>emulator</HostId></Error>"
    )
    headers = {"Server": "OBS", "x-obs-request-id": number, "x-amz-request-id": number}
    if is_last:
        headers["Connection"] = "close"
    return Response(body, refusal.status, headers, "application/xml")
