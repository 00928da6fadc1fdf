"""How a request to Huawei Cloud proves who sent it: SDK-HMAC-SHA256, and S3's own for buckets."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

from jobentry.contract import sigv4
from jobentry.contract.sigv4 import Keys

_ALGORITHM = "SDK-HMAC-SHA256"
_JSON = "application/json"


class Asked(NamedTuple):
    """A request before it is signed.

    Args:
        url: Scheme, host and path, without a query.
    """

    method: str
    url: str
    query: tuple[tuple[str, str], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""

    @property
    def target(self) -> str:
        """The whole URL, with its query as it is signed."""
        text = canonical_query(self.query)
        return f"{self.url}?{text}" if text else self.url


def signed(asked: Asked, keys: Keys, now: float) -> dict[str, str]:
    """Return the headers with which ``asked`` is sent.

    Args:
        now: Seconds since the epoch, as the service counts them.
    """
    parts = urlsplit(asked.url)
    headers = dict(asked.headers)
    if not headers.get("Content-Type", _JSON).startswith(_JSON):
        headers["X-Sdk-Content-Sha256"] = sigv4.UNSIGNED
    headers["X-Sdk-Date"] = time.strftime(sigv4.MOMENT, time.gmtime(now))
    headers["Host"] = parts.netloc
    if keys.token:
        headers["X-Security-Token"] = keys.token
    # The service takes a name with "_" for another with "-", so such a header is not signed.
    names = sorted(name.lower() for name in headers if "_" not in name)
    lower = {name.lower(): value.strip() for name, value in headers.items()}
    canonical = "\n".join(
        (
            asked.method.upper(),
            _canonical_path(parts.path),
            canonical_query(asked.query),
            *(f"{name}:{lower[name]}" for name in names),
            "",
            ";".join(names),
            _payload(asked.body, headers),
        )
    )
    text = f"{_ALGORITHM}\n{headers['X-Sdk-Date']}\n{_sha256(canonical.encode())}"
    signature = hmac.new(keys.secret_key.encode(), text.encode(), hashlib.sha256).hexdigest()
    headers["Authorization"] = (
        f"{_ALGORITHM} Access={keys.access_key}, SignedHeaders={';'.join(names)}, "
        f"Signature={signature}"
    )
    return headers


def signed_for_bucket(asked: Asked, keys: Keys, region: str, now: float) -> dict[str, str]:
    """Return the headers with which a question without a body is sent to OBS or S3."""
    parts = urlsplit(asked.url)
    request = sigv4.Request(asked.method, parts.path or "/", asked.query, {"host": parts.netloc})
    # OBS takes no hash of the body in this signature; TLS guards it.
    at = time.strftime(sigv4.MOMENT, time.gmtime(now))
    return sigv4.headers(request, keys, sigv4.Scope(region, at))


def canonical_query(pairs: Iterable[tuple[str, str]] | Mapping[str, str]) -> str:
    """Return the query as it is signed, and sent: sorted, and every odd character quoted."""
    items = pairs.items() if isinstance(pairs, Mapping) else pairs
    return "&".join(f"{_quoted(name)}={_quoted(value)}" for name, value in sorted(items))


def _canonical_path(path: str) -> str:
    """Return the path as it is signed: it ends in a slash, which the one that is sent need not."""
    text = "/".join(_quoted(part) for part in unquote(path).split("/"))
    return text if text.endswith("/") else text + "/"


def _payload(body: bytes, headers: Mapping[str, str]) -> str:
    """Return what stands for the body: only JSON is hashed, and what is empty."""
    unsigned = headers.get("X-Sdk-Content-Sha256", "")
    return unsigned if body and unsigned else _sha256(body)


def _quoted(text: str) -> str:
    return quote(text, safe="~")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
