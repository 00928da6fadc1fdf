"""The ASGI application of the API: checks a request, injects faults, and calls its handler."""

from __future__ import annotations

import asyncio
import secrets
import traceback
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router

from cloudjob.emulator.errors import ServiceRefusal, error_body, gateway_error
from cloudjob.emulator.http_server import IDLE_S, LOOPBACK, is_from_here, target_of
from cloudjob.emulator.request import Request
from cloudjob.emulator.state import CONTROL_HEADER, CONTROL_PREFIX, User

if TYPE_CHECKING:
    from cloudjob.emulator.service import EmulatedService

LIMIT_BYTES = 12 << 20
_IAM = "/v3"
# The segment of a path after the project -> the resource in the actions of IAM policies.
_RESOURCES = {
    "training-jobs": "trainJob",
    "training-job-searches": "trainJob",
    "modelarts-training-job": "trainJob",
    "training-experiments": "trainJob",
    "algorithms": "aiAlgorithm",
    "images": "image",
    "workspaces": "workspace",
    "authorizations": "authorization",
    "agency": "authorization",
    "pools": "pool",
    "networks": "network",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """The response to a request.

    Args:
        body: Sent as JSON; None for an empty body.
    """

    status: int = 200
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An operation of the API.

    Args:
        method: One method, or several separated by spaces.
        handler: Returns the body of the response, or an ``Answer``.
        status: The status of the response if the handler returns only its body.
    """

    method: str
    path: str
    handler: Callable[[EmulatedService, Request], Any]
    status: int = 200

    @property
    def action(self) -> str:
        """The action that the user needs permission for; empty for none."""
        resource = _RESOURCES.get((self.path.split("/") + [""] * 4)[3], "")
        return f"modelarts:{resource}:{self._verb}" if resource else ""

    @property
    def _verb(self) -> str:
        collection = self.path.count("/") == 3
        if self.method == "DELETE" or self.path.endswith("delete"):
            return "delete"
        if self.method == "GET":
            return "get" if "{" in self.path.replace("{project_id}", "") else "list"
        if self.path.endswith(("-searches", "/filter", "/count")):
            return "list"
        is_new = collection or self.path.endswith("/save-image-job")
        return "create" if self.method == "POST" and is_new else "update"


class Api:
    """The application.

    Args:
        services: The service of each project by its id; the first one is that of the region.
        control_token: Authorizes the control requests of the emulator's owner.
        clock: The time of the service, which each response contains in its header ``Date``.
        addresses: The addresses of the application; requests for other hosts are refused.
    """

    def __init__(
        self,
        endpoints: Iterable[Endpoint],
        services: Mapping[str, EmulatedService],
        control_token: str,
        clock: Callable[[], float],
        addresses: Collection[str] = (LOOPBACK,),
    ) -> None:
        self._addresses = addresses
        self._services = services
        self._service = next(iter(services.values()))
        self._control_token = control_token
        self._clock = clock
        routes = [
            Route(item.path, self._served(item), methods=item.method.split()) for item in endpoints
        ]
        self._router = Router(routes, redirect_slashes=False, default=self._unknown)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request; a slash at the end of its path makes no difference."""
        scope = {**scope, "path": scope["path"].rstrip("/") or "/", "app": self}
        try:
            await self._router(scope, receive, send)
        except HTTPException:
            await self._unknown(scope, receive, send)
        except ClientDisconnect:
            pass

    async def _unknown(self, scope: Any, receive: Any, send: Any) -> None:
        answer = _refused(ServiceRefusal("APIGW.0101"), request_id := uuid.uuid4().hex)
        await self._response(answer, request_id)(scope, receive, send)

    def _served(self, endpoint: Endpoint) -> Callable[[HttpRequest], Any]:
        async def serve(request: HttpRequest) -> Response:
            try:
                content = await asyncio.wait_for(_read(request), IDLE_S)
            except asyncio.TimeoutError:
                return self.refusal(408)
            if content is None:
                # The connection closes, because the unread body would be parsed as a request.
                return self.refusal(413)
            api_request = Request(
                method=request.method,
                target=target_of(request.scope),
                headers=dict(request.headers),
                content=content,
                id=uuid.uuid4().hex,
                path_params=request.path_params,
            )
            answer = await run_in_threadpool(self._answer, endpoint, api_request)
            if answer is None:
                request.state.transport.abort()
                await request.receive()
                return Response()
            return self._response(answer, api_request.id)

        return serve

    def refusal(self, status: int) -> Response:
        """Return the response to a request that cannot be read."""
        body = gateway_error(status, request_id := uuid.uuid4().hex)
        return self._response(Answer(status, body, {"Connection": "close"}), request_id)

    def _answer(self, endpoint: Endpoint, request: Request) -> Answer | None:
        """Return the response; None if an injected fault drops it."""
        try:
            request = replace(request, user=self._checked(endpoint, request))
            service = self._services.get(request.path_params.get("project_id", ""), self._service)
            answer = endpoint.handler(service, request)
            is_of_owner = request.path.startswith(CONTROL_PREFIX)
            if not is_of_owner and service.faults.take("lost-answer", path=request.path):
                return None
        except ServiceRefusal as error:
            return _refused(error, request.id)
        except Exception:  # noqa: BLE001 (a bug here is an internal error of the service)
            traceback.print_exc()
            return _refused(ServiceRefusal("ModelArts.0010"), request.id)
        return answer if isinstance(answer, Answer) else Answer(endpoint.status, answer)

    def _checked(self, endpoint: Endpoint, request: Request) -> User | None:
        """Check host, injected faults, identity and permission of a request; return its user.

        Raises:
            ServiceRefusal: The request is refused.
        """
        path = request.path
        if not is_from_here(request.headers, self._addresses):
            raise ServiceRefusal("APIGW.0101")
        if path.startswith(CONTROL_PREFIX):
            token = request.headers.get(CONTROL_HEADER.lower(), "")
            if not secrets.compare_digest(token.encode(), self._control_token.encode()):
                raise ServiceRefusal("APIGW.0301", "this is for the owner of the emulator")
            return None
        if self._service.faults.take("throttle", path=path):
            raise ServiceRefusal("APIGW.0308", "1,time:1 second")
        if self._service.faults.take("error", path=path):
            raise ServiceRefusal("ModelArts.0010")
        if path.startswith(_IAM):
            return None
        return self._service.access.check(request, endpoint.action)

    def _response(self, answer: Answer, request_id: str) -> Response:
        headers = {
            "Server": "api-gateway",
            "Date": formatdate(self._clock(), usegmt=True),
            "X-Request-Id": request_id,
            **answer.headers,
        }
        if answer.body is None:
            return Response(None, answer.status, headers, "application/json")
        return JSONResponse(answer.body, answer.status, headers)


async def _read(request: HttpRequest) -> bytes | None:
    """Return the body; None if it is larger than the service accepts."""
    body = bytearray()
    if int(request.headers.get("content-length", "0")) > LIMIT_BYTES:
        return None
    async for data in request.stream():
        body += data
        if len(body) > LIMIT_BYTES:
            return None
    return bytes(body)


def _refused(error: ServiceRefusal, request_id: str) -> Answer:
    body = None if error.status == 204 else error_body(error, request_id)
    return Answer(error.status, body, {"Retry-After": "1"} if error.status == 429 else {})
