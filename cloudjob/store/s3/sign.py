"""Signature version 4, as S3 and OBS check it. No I/O; ``botocore`` judges it in the tests.

OBS takes no other digest of a body than UNSIGNED-PAYLOAD, so what protects a body is another
header.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cloudjob.store.s3.keys import Keys

_ALGORITHM = "AWS4-HMAC-SHA256"
_UNSIGNED = "UNSIGNED-PAYLOAD"


class Call(NamedTuple):
    """What is signed.

    Args:
        path: Percent-encoded, as it is sent.
        query: Names and values, not encoded.
    """

    method: str
    host: str
    path: str
    query: Sequence[tuple[str, str]] = ()
    headers: Mapping[str, str] = {}


def query_text(query: Sequence[tuple[str, str]]) -> str:
    """Return a query as it is signed, and sent."""
    quoted = (tuple(urllib.parse.quote(text, safe="~") for text in pair) for pair in query)
    return "&".join(f"{name}={value}" for name, value in sorted(quoted))


def headers(call: Call, keys: Keys, region: str, at_s: float) -> dict[str, str]:
    """Return the headers of ``call``, by their names in small letters, with its signature."""
    at = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(at_s))
    result = {name.lower(): " ".join(value.split()) for name, value in call.headers.items()}
    result["host"] = call.host
    result["x-amz-content-sha256"] = _UNSIGNED
    result["x-amz-date"] = at
    if keys.token:
        result["x-amz-security-token"] = keys.token.strip()
    names = sorted(result)
    signed = ";".join(names)
    lines = "".join(f"{name}:{result[name]}\n" for name in names)
    query = query_text(call.query) if call.query else ""
    canonical = f"{call.method}\n{call.path}\n{query}\n{lines}\n{signed}\n{_UNSIGNED}"
    place = f"{at[:8]}/{region}/s3/aws4_request"
    digest = hashlib.sha256(canonical.encode("utf-8")).hexdigest()
    text = f"{_ALGORITHM}\n{at}\n{place}\n{digest}".encode("ascii")
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
