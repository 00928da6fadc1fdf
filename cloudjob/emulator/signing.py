"""SDK-HMAC-SHA256, the signature of a request to the service. No I/O."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from urllib.parse import parse_qsl, quote, unquote

ALGORITHM = "SDK-HMAC-SHA256"
DATE_FORMAT = "%Y%m%dT%H%M%SZ"
UNSIGNED = "UNSIGNED-PAYLOAD"
_CONTENT = "x-sdk-content-sha256"
_AUTHORIZATION = re.compile(
    rf"{ALGORITHM} +Access=([^, ]+), *SignedHeaders=([^, ]+), *Signature=([0-9a-f]{{64}})\Z"
)


@dataclass(frozen=True, slots=True)
class Signed:
    """What the header ``Authorization`` says.

    Args:
        access: The access key.
        headers: The names of the headers that are signed, in lower case.
    """

    access: str
    headers: tuple[str, ...]
    signature: str


def parse(authorization: str) -> Signed | None:
    """Return what the header says; None when it is of another kind."""
    found = _AUTHORIZATION.match(authorization)
    if not found:
        return None
    access, headers, signature = found.groups()
    return Signed(access, tuple(headers.split(";")), signature)


def moment(text: str) -> float | None:
    """Return the value of ``X-Sdk-Date`` in seconds since the epoch; None when it is not one."""
    try:
        return datetime.strptime(text, DATE_FORMAT).replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Text:
    """A request as it is signed.

    Args:
        target: The path and the query, as they stand in the request line.
        headers: By their names in lower case.
    """

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes


def signature(text: Text, names: tuple[str, ...], secret: str) -> str:
    """Return the signature of a request with these signed headers."""
    words = "\n".join(
        (
            ALGORITHM,
            text.headers.get("x-sdk-date", ""),
            hashlib.sha256(_canonical(text, names).encode()).hexdigest(),
        )
    )
    return hmac.new(secret.encode(), words.encode(), hashlib.sha256).hexdigest()


def is_valid(text: Text, signed: Signed, secret: str) -> bool:
    """Whether the request is signed with this secret key, body and all."""
    said = text.headers.get(_CONTENT, "")
    if said and said != UNSIGNED and said != hashlib.sha256(text.body).hexdigest():
        return False
    return hmac.compare_digest(signature(text, signed.headers, secret), signed.signature)


def _canonical(text: Text, names: tuple[str, ...]) -> str:
    path, _, query = text.target.partition("?")
    return "\n".join(
        (
            text.method.upper(),
            _path(path),
            _query(query),
            "".join(f"{name}:{text.headers.get(name, '').strip()}\n" for name in names),
            ";".join(names),
            _content(text),
        )
    )


def _content(text: Text) -> str:
    # An empty body is hashed even where the client says that it does not sign bodies.
    said = text.headers.get(_CONTENT, "") if text.body else ""
    return said or hashlib.sha256(text.body).hexdigest()


def _path(path: str) -> str:
    path = "/".join(quote(part, safe="~") for part in unquote(path).split("/"))
    return path if path.endswith("/") else path + "/"


def _query(query: str) -> str:
    pairs = sorted(parse_qsl(query, keep_blank_values=True))
    return "&".join(f"{quote(key, safe='~')}={quote(value, safe='~')}" for key, value in pairs)
