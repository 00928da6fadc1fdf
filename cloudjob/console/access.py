"""Controls access to the console: only a browser that opened the one-time link may use it."""

from __future__ import annotations

import hmac
import secrets
from typing import Any
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOGIN = "/login"
_TOKEN_BYTES = 32
_FORBIDDEN, _UNAUTHORIZED = 403, 401
_POLICY_VIOLATION = 1008
_HEADERS = {
    # NiceGUI's pages contain their own scripts and compile templates, hence the two 'unsafe'.
    "Content-Security-Policy": (
        "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
        "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
        "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
    ),
    # Pages on other ports of this host belong to the same site, but to another origin.
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Access:
    """Wraps an application: checks host, origin and session of each request.

    Any local user can connect to a loopback port, so a request needs the cookie that only the
    one-time link sets. Host and origin are checked because a web page that the user visits could
    make the browser connect.

    Browsers share the cookies of a host among all its ports. So the cookie's name contains the
    port, a console ignores the cookies of others, and requests from pages on other ports are
    refused. The remaining risk: if the user opens a server on another port, it receives the cookie
    and can use it until the console ends.

    Args:
        app: The application that receives accepted requests.
        port: The port that the console listens on.
    """

    def __init__(self, app: ASGIApp, port: int) -> None:
        self.app = app  # NiceGUI follows this attribute to find its server
        self._hosts = {f"{host}:{port}" for host in ("127.0.0.1", "localhost")}
        # The prefix ``__Host-`` would need TLS; path, domain and flags still meet its rules.
        self._cookie = f"cloudjob-console-{port}"
        self._token: str | None = None
        self._session = secrets.token_urlsafe(_TOKEN_BYTES)

    def new_login_path(self) -> str:
        """Return the path and query of a new link, which works once; the one before is invalid."""
        self._token = secrets.token_urlsafe(_TOKEN_BYTES)
        return f"{LOGIN}?token={self._token}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, or pass it on."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope, headers)
        if refusal is None:
            await self.app(scope, receive, _with_headers(send))
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            await refusal(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """Return the response to a request that is not passed on; None if it is accepted."""
        host = headers.get("host", "")
        origin = headers.get("origin")
        if host not in self._hosts or origin not in (None, f"http://{host}"):
            return PlainTextResponse("this host or origin may not use the console\n", _FORBIDDEN)
        is_login = scope["path"] == LOGIN
        if not is_login and headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            return PlainTextResponse("requests from other pages are refused\n", _FORBIDDEN)
        if self._has_session(headers):
            return RedirectResponse("/", 303) if is_login else None
        if is_login and self._takes_token(scope):
            # Not a redirect: browsers send no strict cookie after a navigation that another site
            # started, such as the file that opens the link.
            answer = HTMLResponse('<meta http-equiv="refresh" content="0; url=/">')
            answer.set_cookie(self._cookie, self._session, httponly=True, samesite="strict")
            return answer
        return PlainTextResponse(
            "open the link that `cloudjob console` printed; it works once.\n"
            "If it was used already, press Enter there for a new one, or start it again.\n",
            _UNAUTHORIZED,
        )

    def _takes_token(self, scope: Scope) -> bool:
        """Whether the request has the token, which is then invalidated."""
        token = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if self._token is None or not _equal(token, self._token):
            return False
        self._token = None
        return True

    def _has_session(self, headers: Headers) -> bool:
        # The standard library stops at the first cookie that it cannot parse, and any other program
        # on this host may have set such a cookie.
        cookie = cookie_parser(headers.get("cookie", "")).get(self._cookie)
        return cookie is not None and _equal(cookie, self._session)


def _equal(token: str, expected: str) -> bool:
    return hmac.compare_digest(token.encode(), expected.encode())


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers: Any = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return send_with_headers
