"""The emulated OBS as its clients reach it: passes requests to SeaweedFS, or injects a fault."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from cloudjob.emulator.http_server import is_from_here, target_of

Headers = list[tuple[bytes, bytes]]
# Headers of one connection, which a proxy does not pass on.
_OF_CONNECTION = (b"connection", b"keep-alive", b"proxy-connection", b"upgrade", b"te")
_WRITES = ("PUT", "POST")


@dataclass(frozen=True, slots=True)
class Refusal:
    """The error that a request gets; without a status only a delay before its answer."""

    delay_s: float = 0.0
    status: int = 0
    code: str = ""
    message: str = ""


_FOREIGN = Refusal(0, 403, "AccessDenied", "The request is for another host or of another origin.")
# status -> code and message for a request that cannot be read.
_UNREADABLE = {
    400: ("BadRequest", "The request is invalid."),
    414: ("UriTooLong", "The request line is too long."),
    431: ("RequestHeaderSectionTooLarge", "The headers are too large."),
    501: ("NotImplemented", "The server does not support this."),
}
_UNAVAILABLE = Refusal(0, 503, "ServiceUnavailable", "The object store does not answer.")


class Proxy:
    """An ASGI application that passes requests to an S3 server on a Unix socket.

    A signature covers the target and most headers, so they pass unchanged, except for what
    ``sign`` signs again. Bodies are streamed in both directions.

    Args:
        addresses: Our own addresses; requests for another host are refused.
        inject: Returns what a request (method, target) gets instead of its answer.
        sign: Returns the headers that are passed on (given method, target and headers).
    """

    def __init__(
        self,
        socket: str,
        addresses: Collection[str],
        inject: Callable[[str, str], Refusal | None],
        sign: Callable[[str, str, Headers], Headers | Refusal],
    ) -> None:
        self._addresses = addresses
        self._inject = inject
        self._sign = sign
        # A new connection for each request: an idle one may be closed just when it is used.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        transport = httpx.AsyncHTTPTransport(uds=socket, limits=limits, verify=False)
        self._client = httpx.AsyncClient(transport=transport, timeout=None, trust_env=False)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        request = Request(scope, receive)
        found = self._request(request)
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
            answer = StreamingResponse(response.aiter_raw(), response.status_code)
            answer.raw_headers = _passed_on(response.headers.raw, b"transfer-encoding")
            await answer(scope, receive, send)
        except httpx.TransportError:
            # The server stopped in the middle of its answer: the client sees the same.
            request.state.transport.abort()
        finally:
            await response.aclose()

    def refusal(self, status: int) -> Response:
        """Return the answer to a request that cannot be read."""
        return _answer(Refusal(0, status, *_UNREADABLE.get(status, _UNREADABLE[400])))

    def _request(self, request: Request) -> httpx.Request | Refusal:
        # SeaweedFS answers every preflight with permissive CORS headers.
        if request.method == "OPTIONS" or not is_from_here(request.headers, self._addresses):
            return _FOREIGN
        target = target_of(request.scope)
        headers = self._sign(request.method, target, request.headers.raw)
        if isinstance(headers, Refusal):
            return headers
        has_body = "transfer-encoding" in request.headers or (
            request.headers.get("content-length", "0") != "0"
        )
        return httpx.Request(
            request.method,
            "http://seaweedfs",
            # uvicorn has answered an `Expect: 100-continue` by the time a body is read.
            headers=_passed_on(headers, b"expect"),
            content=request.stream() if has_body else None,
            extensions={"target": target.encode("ascii")},
        )


def is_write(method: str, target: str) -> bool:
    """Whether a request needs space."""
    return method in _WRITES and "delete" not in target.partition("?")[2].split("&")


def _passed_on(headers: Headers, other: bytes) -> Headers:
    return [
        (name, value) for name, value in headers if name.lower() not in (*_OF_CONNECTION, other)
    ]


def _error(request: Request, refusal: Refusal) -> Response:
    # The client does not send the body now, so the next request would be read as the body.
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
