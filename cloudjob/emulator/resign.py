"""Requests to OBS with a temporary key, signed again with the account's own key. No I/O.

The S3 server behind knows one key and takes a security token for one of its own making. So the gate
checks the signature of a temporary key itself, and signs what the server gets.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, unquote

from cloudjob.emulator.gate import Refusal

_ALGORITHM = "AWS4-HMAC-SHA256"
_AUTHORIZATION = re.compile(
    rf"{_ALGORITHM} Credential=([^/]+)/([^,\s]+), ?SignedHeaders=([^,\s]+), ?Signature=([0-9a-f]+)"
)
_TOKENS = ("x-amz-security-token", "x-obs-security-token")
# Each piece of such a body is signed with what signs the head.
_SIGNED_PIECES = "STREAMING-AWS4-HMAC-SHA256"


@dataclass(frozen=True, slots=True)
class Key:
    """A temporary key.

    Args:
        token: What must come with it.
        expires_s: Seconds since the epoch.
    """

    secret: str
    token: str
    expires_s: float


def resigned(
    head: bytes, own: tuple[str, str], find: Callable[[str], Key | None], now_s: float
) -> bytes | Refusal:
    """Return the head of a request as the server gets it, or why it gets none.

    Args:
        own: The account's access key and secret key.
        find: Gives the temporary key of an access key; None when there is none.
    """
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    pairs = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    headers = {name.lower(): value for name, value in pairs}
    found = _AUTHORIZATION.match(headers.get("authorization", ""))
    if not found or found[1] == own[0]:
        return head
    key = find(found[1])
    if key is None:
        return head  # the server says itself that it knows no such key
    token = next((headers[name] for name in _TOKENS if name in headers), "")
    if token != key.token:
        return Refusal(0.0, 403, "InvalidToken", "The provided token is malformed or invalid.")
    if now_s >= key.expires_s:
        return Refusal(0.0, 403, "ExpiredToken", "The provided token has expired.")
    if headers.get("x-amz-content-sha256", "").startswith(_SIGNED_PIECES):
        return Refusal(0.0, 501, "NotImplemented", "Signed pieces with a temporary key.")
    scope, names = found[2], found[3].split(";")
    if not hmac.compare_digest(_signature(first, headers, names, scope, key.secret), found[4]):
        return Refusal(0.0, 403, "SignatureDoesNotMatch", "The request signature does not match.")
    kept = [(name, value) for name, value in pairs if name.lower() not in _TOKENS]
    names = [name for name in names if name not in _TOKENS]
    made = _signature(first, headers, names, scope, own[1])
    authorization = (
        f"{_ALGORITHM} Credential={own[0]}/{scope}, SignedHeaders={';'.join(names)}, "
        f"Signature={made}"
    )
    text = [first] + [
        f"{name}: {authorization if name.lower() == 'authorization' else value}"
        for name, value in kept
    ]
    return ("\r\n".join(text) + "\r\n\r\n").encode("latin-1")


def _signature(
    first: str, headers: dict[str, str], names: list[str], scope: str, secret: str
) -> str:
    method, target, _ = first.split(" ", 2)
    path, _, query = target.partition("?")
    canonical = "\n".join(
        (
            method,
            quote(unquote(path), safe="/~"),
            _query(query),
            "".join(f"{name}:{' '.join(headers.get(name, '').split())}\n" for name in names),
            ";".join(names),
            headers.get("x-amz-content-sha256", ""),
        )
    )
    digest = hashlib.sha256(canonical.encode("latin-1")).hexdigest()
    text = "\n".join((_ALGORITHM, headers.get("x-amz-date", ""), scope, digest))
    key = f"AWS4{secret}".encode()
    for part in (*scope.split("/"), text):
        key = hmac.new(key, part.encode("latin-1"), hashlib.sha256).digest()
    return key.hex()


def _query(query: str) -> str:
    pairs = parse_qsl(query, keep_blank_values=True)
    quoted = sorted((quote(key, safe="~"), quote(value, safe="~")) for key, value in pairs)
    return "&".join(f"{key}={value}" for key, value in quoted)
