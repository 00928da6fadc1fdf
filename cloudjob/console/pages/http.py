"""Requests and responses of the endpoints; file names may contain bytes that are not UTF-8."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol
from urllib.parse import parse_qs, urlencode

from fastapi import Response
from starlette.requests import HTTPConnection

from cloudjob.console.threads import in_thread


class NamedValues(Protocol):
    """A named tuple."""

    def _asdict(self) -> dict[str, Any]: ...


def json_response(values: NamedValues) -> Response:
    """Return values as ASCII JSON, because texts of jobs may contain bytes that are not UTF-8."""
    return Response(json.dumps(values._asdict()), media_type="application/json")


def parameter(request: HTTPConnection | None, name: str) -> str:
    """Return a parameter of a request; empty if it is missing."""
    text: bytes = request.scope["query_string"] if request else b""
    return parse_qs(text.decode("ascii", "replace"), errors="surrogateescape").get(name, [""])[0]


def url(path: str, /, **parameters: str) -> str:
    """Return a URL with parameters that ``parameter`` reads."""
    return f"{path}?{urlencode(parameters, errors='surrogateescape')}"


async def streamed(first: bytes, rest: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield pieces that a thread reads, the first of which was read already."""
    yield first
    while piece := await in_thread(next, rest, b""):
        yield piece
