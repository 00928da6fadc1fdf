"""Turn exceptions of boto3 into a ``StoreError`` with what came back and a hint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from cloudjob.errors import ObjectMissing, StoreError
from cloudjob.store.s3.bucket_uri import CREDENTIALS_HINTS, BucketUri

# Responses to which the same request may succeed a moment later.
_TRANSIENT_STATUS = frozenset((408, 429, 500, 502, 503, 504))
_TRANSIENT_CODES = frozenset(
    (
        "BadDigest",
        "IncompleteBody",
        "InternalError",
        "OperationAborted",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "TooManyRequests",
        "XAmzContentChecksumMismatch",
        "XAmzContentSHA256Mismatch",
    )
)
_UNKNOWN_NAME = "the host name cannot be resolved"
_REACH_HINT = "is the endpoint right, and can this machine reach it?"
# Error code of the service -> what came back and a hint. A HEAD request has only a status.
_MEANINGS = {
    "InvalidAccessKeyId": (
        "the service does not know the access key",
        "is it a key for this service?",
    ),
    "SignatureDoesNotMatch": (
        "the signature is wrong",
        "does the secret key belong to this access key, without a space at its end?",
    ),
    "RequestTimeTooSkewed": ("the clocks differ too much", "set this machine's clock"),
    "NoSuchBucket": ("no such bucket", "is its name right? cloudjob makes no buckets"),
    "NoSuchKey": ("no such object", "cloudjob list shows the jobs whose objects are there"),
    "AccessDenied": ("access denied", "do these keys have read and write access to the bucket?"),
    "ExpiredToken": ("the temporary keys have expired", "get fresh ones, and submit again"),
    "InvalidToken": ("the token of the temporary keys is not valid", "get fresh ones"),
    "SlowDown": ("the service kept asking to slow down", "try again in a few minutes"),
    "PreconditionFailed": ("the object was replaced while it was read", "try again"),
    "EntityTooLarge": ("the object is too large for this service", ""),
    "QuotaExceeded": ("the quota is used up", "remove what is no longer needed: cloudjob rm JOB"),
    "BadDigest": ("the data arrived damaged in every attempt", ""),
}
_SYNONYMS = {
    "401": "AccessDenied",
    "403": "AccessDenied",
    "404": "NoSuchKey",
    "412": "PreconditionFailed",
    "507": "QuotaExceeded",
    "AccountProblem": "AccessDenied",
    "AllAccessDisabled": "AccessDenied",
    "ExpiredTokenException": "ExpiredToken",
    "InsufficientStorageSpace": "QuotaExceeded",
    "ServiceUnavailable": "SlowDown",
    "TokenRefreshRequired": "ExpiredToken",
    "TooManyRequests": "SlowDown",
    "XAmzContentChecksumMismatch": "BadDigest",
    "XAmzContentSHA256Mismatch": "BadDigest",
}
_OTHER_REGION = frozenset(
    (
        "301",
        "307",
        "AuthorizationHeaderMalformed",
        "IllegalLocationConstraintException",
        "PermanentRedirect",
    )
)


@contextmanager
def translated(doing: str, uri: BucketUri) -> Iterator[None]:
    """Turn every exception of boto3 into a ``StoreError`` whose message starts with ``doing``."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError
    from s3transfer.exceptions import RetriesExceededError, S3DownloadFailedError
    from urllib3.exceptions import HTTPError

    try:
        yield
    except Boto3Error as error:
        # boto3 wraps the exception of s3transfer and keeps only its text.
        cause = error.__cause__ or error.__context__
        if isinstance(cause, ClientError):
            raise _refused(doing, uri, cause) from error
        raise StoreError(f"{doing}: {one_line(str(error))}") from error
    except ClientError as error:
        raise _refused(doing, uri, error) from error
    except S3DownloadFailedError as error:
        # The object changed between two ranges; s3transfer requests all with the first one's ETag.
        came_back, hint = _MEANINGS["PreconditionFailed"]
        raise StoreError(f"{doing}: {came_back}", hint=hint) from error
    except RetriesExceededError as error:
        came_back, hint = _broken(error.last_exception)
        raise StoreError(f"{doing}: {came_back}", hint=hint) from error
    except (BotoCoreError, HTTPError) as error:
        # botocore does not wrap an error of urllib3 while it reads the body of an error response.
        came_back, hint = _broken(error)
        raise StoreError(f"{doing}: {came_back}", hint=hint) from error


def is_missing(error: Exception) -> bool:
    """Whether the object does not exist, but its bucket does."""
    response = getattr(error, "response", {})
    return response.get("Error", {}).get("Code", "") in ("NoSuchKey", "404", "NotFound")


def unusable(uri: BucketUri, error: Exception) -> StoreError:
    """Return the error for missing credentials or unreadable settings."""
    from botocore.exceptions import NoCredentialsError

    found = f"reading credentials: {one_line(str(error))}"
    if isinstance(error, NoCredentialsError):
        found = "no credentials in the environment or in a profile file"
    return StoreError(f"open store {uri.root}: {found}", hint=CREDENTIALS_HINTS[uri.scheme])


def transient_failure(response: Any, error: Exception | None) -> str:
    """Return what came back if the same request may succeed a moment later, else ``""``."""
    from botocore.exceptions import ConnectionError, HTTPClientError, SSLError

    if error is not None:
        found = _broken(error)[0]
        is_network = isinstance(error, (ConnectionError, HTTPClientError))
        is_lasting = isinstance(error, SSLError) or found.endswith(_UNKNOWN_NAME)
        return found if is_network and not is_lasting else ""
    answer, parsed = response
    code = str(parsed.get("Error", {}).get("Code", ""))
    if answer.status_code in _TRANSIENT_STATUS or code in _TRANSIENT_CODES:
        return f"{answer.status_code} {code}".strip()
    return ""


def clock_ahead_s(date: str) -> float:
    """Return the seconds by which this machine's clock is ahead of a ``Date`` header."""
    try:
        then = parsedate_to_datetime(date)
    except (TypeError, ValueError):
        return 0.0
    return (datetime.now(timezone.utc) - then).total_seconds()


def one_line(text: str) -> str:
    """Return a service's text on one line and without control characters."""
    text = " ".join(text.split()).rstrip(".")
    return text if text.isprintable() else repr(text)[1:-1]


def _refused(doing: str, uri: BucketUri, error: Any) -> StoreError:
    found = error.response.get("Error", {})
    meta = error.response.get("ResponseMetadata", {})
    status, headers = str(meta.get("HTTPStatusCode", "")), meta.get("HTTPHeaders", {})
    code = str(found.get("Code", ""))
    known = _SYNONYMS.get(code, code)
    came_back, hint = _MEANINGS.get(known) or (
        str(found.get("Message", "")) or f"status {status}",
        "",
    )
    if code in _OTHER_REGION:
        region = headers.get("x-amz-bucket-region") or found.get("Region") or ""
        came_back = f"the bucket is in {region or 'another region'}"
        hint = f"{uri.root}?region={region or 'REGION'}"
    elif known == "RequestTimeTooSkewed":
        ahead_s = clock_ahead_s(headers.get("date", ""))
        came_back += f": this one is {abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'}"
    number = status if code in ("", status) else f"{status} {code}"
    kind = ObjectMissing if is_missing(error) else StoreError
    return kind(f"{doing}: {one_line(came_back)} ({number.strip()})", hint=hint)


def _broken(error: Exception) -> tuple[str, str]:
    """Return what happened to a request that got no response, and a hint."""
    from botocore import exceptions

    address = urlsplit(str(getattr(error, "kwargs", {}).get("endpoint_url") or ""))
    where = f"{address.scheme}://{address.netloc}"
    text = one_line(str(getattr(error, "kwargs", {}).get("error") or error))
    if isinstance(error, exceptions.SSLError):
        if "CERTIFICATE_VERIFY_FAILED" in text:
            hint = (
                "for a private CA set AWS_CA_BUNDLE=FILE; for dots in the bucket ?addressing=path"
            )
            return f"{where}: its certificate is not trusted", hint
        return f"{where}: the TLS handshake failed", "should the endpoint be http:// or https://?"
    if isinstance(error, (exceptions.ConnectTimeoutError, exceptions.ReadTimeoutError)):
        return f"{where}: it does not answer", _REACH_HINT
    for pattern, message in (
        ("refused", "connection refused"),
        ("resolve", _UNKNOWN_NAME),
        ("Name or service", _UNKNOWN_NAME),
    ):
        if pattern in text:
            return f"{where}: {message}", _REACH_HINT
    if isinstance(error, (exceptions.ConnectionError, exceptions.HTTPClientError)):
        return f"{where}: the connection broke off", _REACH_HINT
    return text, ""
