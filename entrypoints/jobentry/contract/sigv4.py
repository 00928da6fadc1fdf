"""Signature version 4, as S3 and OBS check it: a function from a request to its headers. No I/O.

Both halves sign with it; ``botocore`` and the examples of S3's documentation judge it in the tests.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from typing import Mapping, NamedTuple, Sequence
from urllib.parse import quote

# OBS takes no other; on others it stands where nobody knows the digest of the body.
UNSIGNED = "UNSIGNED-PAYLOAD"
# How a moment is written, for time.strftime.
MOMENT = "%Y%m%dT%H%M%SZ"
_ALGORITHM = "AWS4-HMAC-SHA256"


class Keys(NamedTuple):
    """Credentials; ``token`` is there when they are temporary."""

    access_key: str
    secret_key: str
    token: str = ""

    def __repr__(self) -> str:
        return f"Keys({self.access_key!r}, ***)"


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
        at: UTC, in the form ``MOMENT``.
    """

    region: str
    at: str


def encoded(text: str | bytes, safe: str = "") -> str:
    """Percent-encode all but the letters that the signature leaves alone."""
    return quote(text, safe=safe + "~")


def query_text(query: Sequence[tuple[str, str]]) -> str:
    """Return a query as it is signed, and sent: encoded, in the order of its bytes."""
    pairs = sorted((encoded(name), encoded(value)) for name, value in query)
    return "&".join(f"{name}={value}" for name, value in pairs)


def headers(request: Request, keys: Keys, scope: Scope, payload: str = UNSIGNED) -> dict[str, str]:
    """Return the headers of ``request``, by their names in small letters, with those that sign it.

    Args:
        payload: SHA-256 of the body in hexadecimal, or ``UNSIGNED``.
    """
    place = f"{scope.at[:8]}/{scope.region}/s3/aws4_request"
    result = {name.lower(): " ".join(text.split()) for name, text in request.headers.items()}
    result["x-amz-content-sha256"] = payload
    result["x-amz-date"] = scope.at
    if keys.token:
        result["x-amz-security-token"] = keys.token.strip()
    names = sorted(result)
    signed = ";".join(names)
    lines = "".join(f"{name}:{result[name]}\n" for name in names)
    query = query_text(request.query) if request.query else ""
    canonical = f"{request.method}\n{request.path}\n{query}\n{lines}\n{signed}\n{payload}"
    digest = hashlib.sha256(canonical.encode("utf-8")).hexdigest()
    text = f"{_ALGORITHM}\n{scope.at}\n{place}\n{digest}".encode()
    signature = hmac.digest(_key(keys.secret_key, place), text, "sha256").hex()
    result["authorization"] = (
        f"{_ALGORITHM} Credential={keys.access_key}/{place}, "
        f"SignedHeaders={signed}, Signature={signature}"
    )
    return result


@functools.lru_cache(maxsize=4)
def _key(secret_key: str, place: str) -> bytes:
    """Return what signs everything of one day."""
    key = b"AWS4" + secret_key.encode("utf-8")
    for word in place.split("/"):
        key = hmac.digest(key, word.encode("utf-8"), "sha256")
    return key
