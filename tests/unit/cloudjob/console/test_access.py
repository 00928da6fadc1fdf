"""Tests of access: only a browser that opened the one-time link may use the console."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from cloudjob.console.access import Access

PORT = 8321
HOST = f"127.0.0.1:{PORT}"


def make() -> Access:
    return Access(PlainTextResponse("the page"), PORT)


def ask(access: Access, path: str = "/", kind: str = "http", **headers: str) -> dict[str, Any]:
    """Return the first message of the response, with its headers as a dictionary."""
    path, _, query = path.partition("?")
    sent: list[dict[str, Any]] = []
    all_headers = {"host": HOST, **headers}
    scope = {
        "type": kind,
        "method": "GET",
        "path": path,
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in all_headers.items()],
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(access(scope, receive, send))
    first = sent[0]
    first["headers"] = {k.decode(): v.decode() for k, v in first.get("headers", [])}
    return first


def login(access: Access, path: str = "") -> str:
    """Open a new link, or this one, and return the cookie."""
    answer = ask(access, path or access.new_login_path())
    assert answer["status"] == 200
    cookie, *attributes = answer["headers"]["set-cookie"].split("; ")
    assert str(PORT) in cookie
    # Without a Domain attribute, browsers send the cookie only to this host.
    assert sorted(attributes) == ["HttpOnly", "Path=/", "SameSite=strict"]
    return str(cookie)


def test_a_browser_that_opened_the_link_sees_the_page():
    access = make()

    assert ask(access, cookie=login(access))["status"] == 200


def test_without_the_cookie_nothing_is_shown():
    access = make()
    login(access)

    assert ask(access)["status"] == 401
    assert ask(access, "/api/jobs")["status"] == 401
    assert ask(access, cookie=f"cloudjob-console-{PORT}=guess")["status"] == 401
    assert ask(access, cookie="=;;;\x01=")["status"] == 401


def test_cookies_of_other_programs_on_this_host_are_ignored():
    access = make()
    session = login(access)

    assert ask(access, cookie=f'theirs={{"a": "b"}}; =;x; {session}')["status"] == 200


def test_the_link_works_once():
    access = make()
    path = access.new_login_path()
    login(access, path)

    assert ask(access, path)["status"] == 401


def test_a_new_link_logs_another_browser_in_and_ends_the_link_before():
    access = make()
    session, unused = login(access), access.new_login_path()

    assert login(access) == session
    assert ask(access, unused)["status"] == 401


@pytest.mark.parametrize("query", ["", "?token=", "?token=None", "?token=guess", "?token=%FF"])
def test_a_wrong_token_is_refused_and_leaves_the_link_valid(query: str):
    access = make()
    path = access.new_login_path()

    assert ask(access, f"/login{query}")["status"] == 401
    login(access, path)
    assert ask(access, f"/login{query}")["status"] == 401


@pytest.mark.parametrize("host", ["evil.example", f"evil.example:{PORT}", "127.0.0.1:80", ""])
def test_another_host_is_refused_whatever_its_cookie(host: str):
    access = make()
    cookie = login(access)

    assert ask(access, cookie=cookie, host=host)["status"] == 403


@pytest.mark.parametrize("origin", ["http://evil.example", "null", f"https://{HOST}"])
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_another_origin_is_refused_whatever_its_cookie(origin: str, kind: str):
    access = make()
    answer = ask(access, kind=kind, cookie=login(access), origin=origin)

    assert answer.get("status", answer.get("code")) in (403, 1008)


@pytest.mark.parametrize("site", ["same-site", "cross-site"])
def test_a_request_from_a_page_of_another_port_is_refused_whatever_its_cookie(site: str):
    access = make()
    cookie = login(access)

    assert ask(access, cookie=cookie, **{"sec-fetch-site": site})["status"] == 403
    assert ask(access, cookie=cookie, **{"sec-fetch-site": "same-origin"})["status"] == 200
    assert ask(access, cookie=cookie, **{"sec-fetch-site": "none"})["status"] == 200


def test_the_cookie_of_one_console_does_not_open_another():
    session = login(make())
    other = make()

    assert ask(other, cookie=session)["status"] == 401


def test_a_websocket_without_the_cookie_is_closed():
    access = make()

    assert ask(access, kind="websocket") == {"type": "websocket.close", "code": 1008, "headers": {}}


def test_pages_cannot_be_framed_and_load_nothing_from_elsewhere():
    access = make()
    headers = ask(access, cookie=login(access))["headers"]

    assert "default-src 'self'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["referrer-policy"] == "no-referrer"
