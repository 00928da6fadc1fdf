"""The front end of the emulated OBS: passes requests to SeaweedFS, or injects faults."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from cloudjob.emulator import obs_keys
from cloudjob.emulator.http_server import is_from_here, target_of

Headers = list[tuple[bytes, bytes]]
# Headers of a single connection, which a proxy does not pass on.
_CONNECTION_HEADERS = (b"connection", b"keep-alive", b"proxy-connection", b"upgrade", b"te")
_WRITES = ("PUT", "POST")
_SOURCES = (b"x-amz-copy-source", b"x-obs-copy-source")
_DELETE_BYTES = 8 << 20


class Message(NamedTuple):
    """The parts of a request that a signature covers."""

    method: str
    target: str
    headers: Headers

    def values(self) -> dict[str, str]:
        """Return the headers."""
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in self.headers}


@dataclass(frozen=True, slots=True)
class Refusal:
    """The error response to a request; without a status, only a delay of the response."""

    status: int = 0
    code: str = ""
    message: str = ""
    delay_s: float = 0.0


_FOREIGN = Refusal(403, "AccessDenied", "The request is for another host or of another origin.")
# status -> code and message for a request that cannot be read.
_UNREADABLE = {
    400: ("BadRequest", "The request is invalid."),
    414: ("UriTooLong", "The request line is too long."),
    431: ("RequestHeaderSectionTooLarge", "The headers are too large."),
    501: ("NotImplemented", "The server does not support this."),
}
_UNAVAILABLE = Refusal(503, "ServiceUnavailable", "The object store does not answer.")


class Proxy:
    """An ASGI application that passes requests to an S3 server on a Unix socket.

    A signature covers the target and most headers, so these are passed on unchanged, except for
    names that the server would change and requests that ``sign`` signs again. Bodies are streamed
    in both directions.

    Args:
        addresses: The addresses of the proxy; requests for other hosts are refused.
        inject: Returns the fault for a request (method, target), or None.
        sign: Returns the signed request, from the original and the one with the server's names.
    """

    def __init__(
        self,
        socket: str,
        addresses: Collection[str],
        inject: Callable[[str, str], Refusal | None],
        sign: Callable[[Message, Message], Message | Refusal],
    ) -> None:
        self._addresses = addresses
        self._inject = inject
        self._sign = sign
        # A new connection for each request, because an idle one may be closed just as it is used.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        transport = httpx.AsyncHTTPTransport(uds=socket, limits=limits, verify=False)
        self._client = httpx.AsyncClient(transport=transport, timeout=None, trust_env=False)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        request = Request(scope, receive)
        found = await self._request(request)
        target = target_of(request.scope)
        refusal = found if isinstance(found, Refusal) else self._inject(request.method, target)
        if refusal:
            await asyncio.sleep(refusal.delay_s)
            if refusal.status:
                await _error(request, refusal)(scope, receive, send)
                return
        assert isinstance(found, httpx.Request)
        try:
            response = await self._client.send(found, stream=True)
        except ClientDisconnect:
            return
        except httpx.TransportError:
            await _error(request, _UNAVAILABLE)(scope, receive, send)
            return
        try:
            answer = await _answer_of(request, response)
            await answer(scope, receive, send)
        except httpx.TransportError:
            # The server broke off in the middle of its response, so the client's is aborted, too.
            request.state.transport.abort()
        finally:
            await response.aclose()

    def refusal(self, status: int) -> Response:
        """Return the response to a request that cannot be read."""
        return _answer(Refusal(status, *_UNREADABLE.get(status, _UNREADABLE[400])))

    async def _request(self, request: Request) -> httpx.Request | Refusal:
        # SeaweedFS answers every preflight with permissive CORS headers.
        if request.method == "OPTIONS" or not is_from_here(request.headers, self._addresses):
            return _FOREIGN
        given = Message(request.method, target_of(request.scope), request.headers.raw)
        content: Any = None
        if _has_body(request):
            content = await request.body() if _names_many(request) else request.stream()
        sent, content = _stored(given, content)
        signed = self._sign(given, sent)
        if isinstance(signed, Refusal):
            return signed
        return httpx.Request(
            request.method,
            "http://seaweedfs",
            # By the time a body is read, uvicorn has answered `Expect: 100-continue`.
            headers=_passed_on(signed.headers, b"expect"),
            content=content,
            extensions={"target": signed.target.encode("ascii")},
        )


def _has_body(request: Request) -> bool:
    return "transfer-encoding" in request.headers or (
        request.headers.get("content-length", "0") != "0"
    )


def _names_many(request: Request) -> bool:
    """Whether the body of a request names objects to delete."""
    size = request.headers.get("content-length", "")
    is_small = size.isdecimal() and int(size) <= _DELETE_BYTES
    return request.method == "POST" and "delete" in request.query_params and is_small


def _stored(given: Message, content: Any) -> tuple[Message, Any]:
    """Return a request and its body with the server's names of objects."""
    changes: dict[bytes, bytes] = {}
    for name, value in given.headers:
        if name in _SOURCES:
            changes[name] = obs_keys.stored_source(value.decode("latin-1")).encode("latin-1")
    if isinstance(content, bytes) and (body := obs_keys.stored_in_body(content)) != content:
        content = body
        changes[b"content-length"] = str(len(body)).encode()
        changes[b"content-md5"] = base64.b64encode(hashlib.md5(body).digest())
        changes[b"x-amz-content-sha256"] = hashlib.sha256(body).hexdigest().encode()
        # Checksums of the original body do not match.
        given = given._replace(
            headers=[item for item in given.headers if b"checksum" not in item[0]]
        )
    headers = [(name, changes.get(name, value)) for name, value in given.headers]
    return Message(given.method, obs_keys.stored_target(given.target), headers), content


async def _answer_of(request: Request, response: httpx.Response) -> Response:
    """Return the response; names of objects in lists are those that clients use."""
    is_list = request.method == "POST" or (
        request.method == "GET" and "/" not in request.url.path.strip("/")
    )
    if is_list and "xml" in response.headers.get("content-type", ""):
        await response.aread()
        answer = Response(obs_keys.client_names(response.content), response.status_code)
        length = answer.headers["content-length"]
        headers = _passed_on(response.headers.raw, b"content-length")
        answer.raw_headers = [*headers, (b"content-length", length.encode())]
        return answer
    stream = StreamingResponse(response.aiter_raw(), response.status_code)
    stream.raw_headers = _passed_on(response.headers.raw, b"transfer-encoding")
    return stream


def is_write(method: str, target: str) -> bool:
    """Whether a request needs disk space."""
    return method in _WRITES and "delete" not in target.partition("?")[2].split("&")


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
