"""Signature version 4, as S3 and OBS check it: a function from a request to its headers. No I/O."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from typing import Mapping, NamedTuple, Sequence
from urllib.parse import quote

# OBS takes no other; on others it stands where nobody knows the digest of the body.
UNSIGNED = "UNSIGNED-PAYLOAD"
_ALGORITHM = "AWS4-HMAC-SHA256"


class Keys(NamedTuple):
    """Credentials; ``token`` is there when they are temporary."""

    access_key: str
    secret_key: str
    token: str = ""


class Request(NamedTuple):
    """What is signed.

    Args:
        path: Percent-encoded, as it is sent.
        query: Names and values, not encoded.
        headers: ``Host`` among them; all of them are signed.
    """

    method: str
    path: str
    query: Sequence[tuple[str, str]]
    headers: Mapping[str, str]


class Scope(NamedTuple):
    """Where and when a signature holds.

    Args:
        at_s: Seconds since 1970.
    """

    region: str
    at_s: float
    service: str = "s3"


def encoded(text: str | bytes, safe: str = "") -> str:
    """Percent-encode all but the letters that the signature leaves alone."""
    return quote(text, safe=safe + "-_.~")


def query_text(query: Sequence[tuple[str, str]]) -> str:
    """Return a query as it is signed, and sent: encoded, in the order of its bytes."""
    pairs = sorted((encoded(name), encoded(value)) for name, value in query)
    return "&".join(f"{name}={value}" for name, value in pairs)


def headers(request: Request, keys: Keys, scope: Scope, payload: str = UNSIGNED) -> dict[str, str]:
    """Return the headers of ``request`` with those that sign it.

    Args:
        payload: SHA-256 of the body in hexadecimal, or ``UNSIGNED``.
    """
    moment = time.gmtime(scope.at_s)
    at = time.strftime("%Y%m%dT%H%M%SZ", moment)
    place = "/".join((at[:8], scope.region, scope.service, "aws4_request"))
    result = {**request.headers, "X-Amz-Date": at, "X-Amz-Content-SHA256": payload}
    if keys.token:
        result["X-Amz-Security-Token"] = keys.token
    lines = {name.lower(): re.sub(" +", " ", text.strip()) for name, text in result.items()}
    signed = ";".join(sorted(lines))
    canonical = (
        request.method,
        request.path,
        query_text(request.query),
        *(f"{name}:{lines[name]}" for name in sorted(lines)),
        "",
        signed,
        payload,
    )
    digest = hashlib.sha256("\n".join(canonical).encode("utf-8")).hexdigest()
    text = "\n".join((_ALGORITHM, at, place, digest))
    signature = hmac.new(_key(keys, place), text.encode("utf-8"), hashlib.sha256).hexdigest()
    result["Authorization"] = (
        f"{_ALGORITHM} Credential={keys.access_key}/{place}, "
        f"SignedHeaders={signed}, Signature={signature}"
    )
    return result


def _key(keys: Keys, place: str) -> bytes:
    key = b"AWS4" + keys.secret_key.encode("utf-8")
    for word in place.split("/"):
        key = hmac.new(key, word.encode("utf-8"), hashlib.sha256).digest()
    return key
