"""AWS Signature Version 4 for S3 and OBS: computes the headers of a request. No I/O.

The tests compare it with ``botocore`` and with the examples in the documentation of S3.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from typing import Mapping, NamedTuple, Sequence
from urllib.parse import quote

# Sent instead of the body's digest: OBS accepts nothing else, and S3 accepts it for an unknown
# digest.
UNSIGNED = "UNSIGNED-PAYLOAD"
# The time format, for time.strftime.
MOMENT = "%Y%m%dT%H%M%SZ"
_ALGORITHM = "AWS4-HMAC-SHA256"


class Keys(NamedTuple):
    """Credentials; temporary ones have a ``token``."""

    access_key: str
    secret_key: str
    token: str = ""

    def __repr__(self) -> str:
        return f"Keys({self.access_key!r}, ***)"


class Request(NamedTuple):
    """The request to sign.

    Args:
        path: The path, percent-encoded.
        query: Names and values, not encoded.
        headers: The headers to sign, including ``Host``.
    """

    method: str
    path: str
    query: Sequence[tuple[str, str]]
    headers: Mapping[str, str]


class Scope(NamedTuple):
    """The region and time for which a signature is valid.

    Args:
        at: UTC in the format ``MOMENT``.
    """

    region: str
    at: str


def encoded(text: str | bytes, safe: str = "") -> str:
    """Percent-encode all characters except those that signatures leave unencoded."""
    return quote(text, safe=safe + "~")


def query_text(query: Sequence[tuple[str, str]]) -> str:
    """Return the query as it is signed and sent: encoded and sorted."""
    pairs = sorted((encoded(name), encoded(value)) for name, value in query)
    return "&".join(f"{name}={value}" for name, value in pairs)


def headers(request: Request, keys: Keys, scope: Scope, payload: str = UNSIGNED) -> dict[str, str]:
    """Return the headers of ``request`` and its signature, with names in lower case.

    Args:
        payload: SHA-256 of the body in hexadecimal, or ``UNSIGNED``.
    """
    scope_text = f"{scope.at[:8]}/{scope.region}/s3/aws4_request"
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
    text = f"{_ALGORITHM}\n{scope.at}\n{scope_text}\n{digest}".encode()
    signature = hmac.digest(signing_key(keys.secret_key, scope_text), text, "sha256").hex()
    result["authorization"] = (
        f"{_ALGORITHM} Credential={keys.access_key}/{scope_text}, "
        f"SignedHeaders={signed}, Signature={signature}"
    )
    return result


@functools.lru_cache(maxsize=4)
def signing_key(secret_key: str, scope_text: str) -> bytes:
    """Return the signing key of one day."""
    key = b"AWS4" + secret_key.encode("utf-8")
    for part in scope_text.split("/"):
        key = hmac.digest(key, part.encode("utf-8"), "sha256")
    return key
