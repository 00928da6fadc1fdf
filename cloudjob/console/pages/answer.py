"""What the endpoints read and answer; names of files may hold what is not UTF-8."""

from __future__ import annotations

import json
from typing import Any, Protocol
from urllib.parse import parse_qs, quote

from fastapi import Response
from starlette.requests import HTTPConnection


class Values(Protocol):
    """A named tuple."""

    def _asdict(self) -> dict[str, Any]: ...


def answer(values: Values) -> Response:
    """Return values as JSON of ASCII, as texts of jobs may hold what is not UTF-8."""
    return Response(json.dumps(values._asdict()), media_type="application/json")


def query(request: HTTPConnection | None, name: str) -> str:
    """Return a parameter of a request's address; empty if it has none."""
    text: bytes = request.scope["query_string"] if request else b""
    words = text.decode("ascii", "replace")
    return parse_qs(words, errors="surrogateescape").get(name, [""])[0]


def address(path: str, /, **words: str) -> str:
    """Return an address with parameters that ``query`` reads."""
    pairs = (f"{name}={quote(text, '', errors='surrogateescape')}" for name, text in words.items())
    return f"{path}?{'&'.join(pairs)}"
