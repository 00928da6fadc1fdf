"""Turn exceptions of boto3 into a ``StoreError`` with what came back and a hint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from cloudjob.errors import SOCKS, ObjectMissing, StoreError
from cloudjob.store.s3.bucket_uri import BucketUri


class _Meaning(NamedTuple):
    """What an answer means; without ``reason``, the message is that of the service.

    Args:
        is_transient: Whether the same request may succeed a moment later.
    """

    reason: str = ""
    hint: str = ""
    is_transient: bool = False


# HTTP statuses after which the same request may succeed a moment later, whatever the error code.
_TRANSIENT_STATUS = frozenset((408, 429, 500, 502, 503, 504))
_REACH = "is the endpoint right, and can this machine reach it?"
_PROXY = "are HTTPS_PROXY and NO_PROXY right?"
# Error codes of the services; for a HEAD request, botocore uses the status as the code.
_TABLE = {
    "AccessDenied AccountProblem AllAccessDisabled 401 403": _Meaning(
        "access denied", "do these keys have read and write access to the bucket?"
    ),
    "InvalidAccessKeyId": _Meaning(
        "the service does not know the access key", "is it a key for this service?"
    ),
    "SignatureDoesNotMatch": _Meaning(
        "the signature is wrong",
        "does the secret key belong to this access key, without a space at its end?",
    ),
    "ExpiredToken ExpiredTokenException TokenRefreshRequired": _Meaning(
        "the temporary keys have expired", "get fresh ones, and submit again"
    ),
    "InvalidToken": _Meaning("the token of the temporary keys is not valid", "get fresh ones"),
    "RequestTimeTooSkewed": _Meaning(
        "the clocks differ too much: this one is {skew}", "set this machine's clock"
    ),
    "NoSuchBucket": _Meaning(
        "no such bucket", "is its name right? cloudjob does not create buckets"
    ),
    "NoSuchKey NotFound 404": _Meaning(
        "no such object", "cloudjob list shows the jobs whose objects are there"
    ),
    "AuthorizationHeaderMalformed IllegalLocationConstraintException PermanentRedirect 301 307": (
        _Meaning("the bucket is in {region}", "{root}?region={region_option}")
    ),
    "PreconditionFailed 412": _Meaning("the object was replaced while it was read", "try again"),
    "EntityTooLarge": _Meaning("the object is too large for this service"),
    "QuotaExceeded InsufficientStorageSpace 507": _Meaning(
        "the quota is used up", "remove what is no longer needed: cloudjob rm JOB"
    ),
    "SlowDown ServiceUnavailable TooManyRequests": _Meaning(
        "the service kept asking to slow down", "try again in a few minutes", is_transient=True
    ),
    "BadDigest XAmzContentChecksumMismatch XAmzContentSHA256Mismatch": _Meaning(
        "the data arrived damaged in every attempt", is_transient=True
    ),
    "IncompleteBody InternalError OperationAborted RequestTimeout Throttling": _Meaning(
        is_transient=True
    ),
}
_MEANINGS = {code: meaning for codes, meaning in _TABLE.items() for code in codes.split()}


@contextmanager
def translate_errors(doing: str, uri: BucketUri) -> Iterator[None]:
    """Turn every exception of boto3 into a ``StoreError`` whose message starts with ``doing``."""
    from botocore.exceptions import BotoCoreError, ClientError
    from s3transfer.exceptions import RetriesExceededError, S3DownloadFailedError
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ClientError as error:
        raise _refused(doing, uri, error.response) from error
    except S3DownloadFailedError as error:
        # The object changed between two ranges; s3transfer requests all with the first one's ETag.
        raise _failure(doing, _MEANINGS["PreconditionFailed"]) from error
    except (BotoCoreError, HTTPError, RetriesExceededError) as error:
        # botocore does not wrap an error of urllib3 while it reads the body of an error response.
        raise _failure(doing, _no_answer(getattr(error, "last_exception", error))) from error


def transient_failure(response: Any, error: Exception | None) -> str:
    """Return what came back if the same request may succeed a moment later, else ``""``."""
    if error is not None:
        meaning = _no_answer(error)
        return meaning.reason if meaning.is_transient else ""
    answer, parsed = response
    if answer.status_code in _TRANSIENT_STATUS or _meaning(parsed).is_transient:
        return f"{answer.status_code} {_code(parsed)}".strip()
    return ""


def clock_ahead_s(date: str) -> float:
    """Return the seconds by which this machine's clock is ahead of a ``Date`` header."""
    try:
        server_time = parsedate_to_datetime(date)
    except (TypeError, ValueError):
        return 0.0
    return (datetime.now(timezone.utc) - server_time).total_seconds()


def one_line(text: str) -> str:
    """Return a service's text on one line and without control characters."""
    text = " ".join(text.split()).rstrip(".")
    return text if text.isprintable() else repr(text)[1:-1]


def _code(response: Mapping[str, Any]) -> str:
    return str(response.get("Error", {}).get("Code", ""))


def _meaning(response: Mapping[str, Any]) -> _Meaning:
    return _MEANINGS.get(_code(response), _Meaning())


def _failure(doing: str, meaning: _Meaning) -> StoreError:
    return StoreError(f"{doing}: {meaning.reason}", hint=meaning.hint)


def _refused(doing: str, uri: BucketUri, response: Mapping[str, Any]) -> StoreError:
    error, meta = response.get("Error", {}), response.get("ResponseMetadata", {})
    status, headers = str(meta.get("HTTPStatusCode", "")), meta.get("HTTPHeaders", {})
    code, meaning = _code(response), _meaning(response)
    region = headers.get("x-amz-bucket-region") or error.get("Region") or ""
    ahead_s = clock_ahead_s(headers.get("date", ""))
    reason = meaning.reason.format(
        region=region or "another region",
        skew=f"{abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'}",
    )
    reason = reason or str(error.get("Message", "")) or f"status {status}"
    number = status if code in ("", status) else f"{status} {code}"
    kind = ObjectMissing if meaning is _MEANINGS["NoSuchKey"] else StoreError
    return kind(
        f"{doing}: {one_line(reason)} ({number.strip()})",
        hint=meaning.hint.format(root=uri.root, region_option=region or "REGION"),
    )


def _no_answer(error: Exception) -> _Meaning:
    """Return what happened to a request that got no response."""
    from botocore.exceptions import (
        ConnectionError,
        ConnectTimeoutError,
        HTTPClientError,
        ProxyConnectionError,
        ReadTimeoutError,
        SSLError,
    )

    details = getattr(error, "kwargs", {})
    text = one_line(str(details.get("error") or error))
    if isinstance(error, SSLError):
        meaning = _Meaning(
            "the TLS handshake failed", "should the endpoint be http:// or https://?"
        )
        if "CERTIFICATE_VERIFY_FAILED" in text:
            hint = (
                "for a private authority set AWS_CA_BUNDLE=FILE, which reaches the nodes, too;"
                " for dots in the bucket ?addressing=path"
            )
            meaning = _Meaning("its certificate is not trusted", hint)
    elif isinstance(error, (ConnectTimeoutError, ReadTimeoutError)):
        meaning = _Meaning("it does not answer", _REACH, is_transient=True)
    elif isinstance(error, ProxyConnectionError):
        # The address of the proxy may contain a password.
        if "://socks" in str(details.get("proxy_url")):
            return _Meaning(*SOCKS)
        return _Meaning("the proxy does not connect to it", _PROXY, is_transient=True)
    elif "resolve" in text or "Name or service" in text:
        meaning = _Meaning("the host name cannot be resolved", _REACH)
    elif isinstance(error, (ConnectionError, HTTPClientError)):
        broken = "connection refused" if "refused" in text else "the connection broke off"
        meaning = _Meaning(broken, _REACH, is_transient=True)
    else:
        return _Meaning(text)
    address = urlsplit(str(details.get("endpoint_url") or ""))
    return meaning._replace(reason=f"{address.scheme}://{address.netloc}: {meaning.reason}")
