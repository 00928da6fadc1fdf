"""Turns what boto3 raises into a ``StoreError``: what came back, and what to try."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from cloudjob.errors import StoreError
from cloudjob.store.s3.place import CREDENTIALS_HINTS, Place

# A request that fails with one of these may succeed a moment later.
_PASSING_STATUS = frozenset((408, 429, 500, 502, 503, 504))
_PASSING_CODES = frozenset(
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
_UNKNOWN_NAME = "its name is not known"
_REACH = "is the endpoint right, and can this machine reach it?"
# What came back, and what to try, by the code of the service. A HEAD has only a status.
_CODES = {
    "InvalidAccessKeyId": ("it does not know the access key", "is it the key of this service?"),
    "SignatureDoesNotMatch": (
        "the signature is wrong",
        "is the secret key the one of this access key, without a blank at its end?",
    ),
    "RequestTimeTooSkewed": ("the clocks differ too much", "set this machine's clock"),
    "NoSuchBucket": ("no such bucket", "is its name right? cloudjob makes no buckets"),
    "NoSuchKey": ("no such object", "cloudjob list shows the jobs whose objects are there"),
    "AccessDenied": ("access denied", "do these keys have read and write access to the bucket?"),
    "ExpiredToken": ("the temporary keys have expired", "get fresh ones, and submit again"),
    "InvalidToken": ("the token of the temporary keys is not valid", "get fresh ones"),
    "SlowDown": ("it asks to slow down, again and again", "try again in a few minutes"),
    "PreconditionFailed": ("it was replaced while it was read", "try again"),
    "EntityTooLarge": ("it is too large for this service", ""),
    "QuotaExceeded": ("the quota is used up", "remove what is no longer needed: cloudjob rm JOB"),
    "BadDigest": ("the bytes did not arrive as they were sent, again and again", ""),
}
_SAME = {
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
_ELSEWHERE = frozenset(
    (
        "301",
        "307",
        "AuthorizationHeaderMalformed",
        "IllegalLocationConstraintException",
        "PermanentRedirect",
    )
)


@contextmanager
def translated(doing: str, place: Place) -> Iterator[None]:
    """Turn every error of boto3 into a ``StoreError`` that begins with ``doing``."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError
    from s3transfer.exceptions import RetriesExceededError, S3DownloadFailedError
    from urllib3.exceptions import HTTPError

    try:
        yield
    except Boto3Error as error:
        # What s3transfer failed with, which boto3 turns into a sentence.
        cause = error.__cause__ or error.__context__
        if isinstance(cause, ClientError):
            raise _refused(doing, place, cause) from error
        raise StoreError(f"{doing}: {one_line(str(error))}") from error
    except ClientError as error:
        raise _refused(doing, place, error) from error
    except S3DownloadFailedError as error:
        # A range of another version of the object; s3transfer asks for all of the first one's.
        came_back, hint = _CODES["PreconditionFailed"]
        raise StoreError(f"{doing}: {came_back}", hint=hint) from error
    except RetriesExceededError as error:
        came_back, hint = _broken(error.last_exception)
        raise StoreError(f"{doing}: {came_back}", hint=hint) from error
    except (BotoCoreError, HTTPError) as error:
        # botocore lets an error of urllib3 pass when a refusal breaks off in its body.
        came_back, hint = _broken(error)
        raise StoreError(f"{doing}: {came_back}", hint=hint) from error


def is_missing(error: Exception) -> bool:
    """Whether there is no such object, in a bucket that is there."""
    response = getattr(error, "response", {})
    return response.get("Error", {}).get("Code", "") in ("NoSuchKey", "404", "NotFound")


def unusable(place: Place, error: Exception) -> StoreError:
    """Return the error for a store without credentials, or with settings that cannot be read."""
    from botocore.exceptions import NoCredentialsError

    found = f"looking for keys: {one_line(str(error))}"
    if isinstance(error, NoCredentialsError):
        found = "no keys: not in the environment, nor in a profile file"
    return StoreError(f"open store {place.root}: {found}", hint=CREDENTIALS_HINTS[place.scheme])


def passing_trouble(response: Any, error: Exception | None) -> str:
    """Return what came back where the same request may succeed a moment later, else nothing."""
    from botocore.exceptions import ConnectionError, HTTPClientError, SSLError

    if error is not None:
        found = _broken(error)[0]
        is_network = isinstance(error, (ConnectionError, HTTPClientError))
        is_lasting = isinstance(error, SSLError) or found.endswith(_UNKNOWN_NAME)
        return found if is_network and not is_lasting else ""
    answer, parsed = response
    code = str(parsed.get("Error", {}).get("Code", ""))
    if answer.status_code in _PASSING_STATUS or code in _PASSING_CODES:
        return f"{answer.status_code} {code}".strip()
    return ""


def clock_ahead_s(date: str) -> float:
    """Return by how many seconds this machine's clock is ahead of a ``Date`` header."""
    try:
        then = parsedate_to_datetime(date)
    except (TypeError, ValueError):
        return 0.0
    return (datetime.now(timezone.utc) - then).total_seconds()


def one_line(text: str) -> str:
    """Return a service's words so that they can neither break a line nor a terminal."""
    text = " ".join(text.split()).rstrip(".")
    return text if text.isprintable() else repr(text)[1:-1]


def _refused(doing: str, place: Place, error: Any) -> StoreError:
    found = error.response.get("Error", {})
    meta = error.response.get("ResponseMetadata", {})
    status, headers = str(meta.get("HTTPStatusCode", "")), meta.get("HTTPHeaders", {})
    code = str(found.get("Code", ""))
    known = _SAME.get(code, code)
    came_back, hint = _CODES.get(known) or (str(found.get("Message", "")) or f"status {status}", "")
    if code in _ELSEWHERE:
        region = headers.get("x-amz-bucket-region") or found.get("Region") or ""
        came_back = f"the bucket is in {region or 'another region'}"
        hint = f"{place.root}?region={region or 'REGION'}"
    elif known == "RequestTimeTooSkewed":
        ahead_s = clock_ahead_s(headers.get("date", ""))
        came_back += f": this one is {abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'}"
    number = status if code in ("", status) else f"{status} {code}"
    return StoreError(f"{doing}: {one_line(came_back)} ({number.strip()})", hint=hint)


def _broken(error: Exception) -> tuple[str, str]:
    """Return what happened to a request that got no answer, and what to try."""
    from botocore import exceptions

    address = urlsplit(str(getattr(error, "kwargs", {}).get("endpoint_url") or ""))
    where = f"{address.scheme}://{address.netloc}"
    text = one_line(str(getattr(error, "kwargs", {}).get("error") or error))
    if isinstance(error, exceptions.SSLError):
        if "CERTIFICATE_VERIFY_FAILED" in text:
            hint = "a CA of your own: AWS_CA_BUNDLE=FILE; a bucket with dots: ?addressing=path"
            return f"{where}: its certificate is not trusted", hint
        return f"{where}: no TLS", "http:// or https://?"
    if isinstance(error, (exceptions.ConnectTimeoutError, exceptions.ReadTimeoutError)):
        return f"{where}: it does not answer", _REACH
    for sign, words in (
        ("refused", "connection refused"),
        ("resolve", _UNKNOWN_NAME),
        ("Name or service", _UNKNOWN_NAME),
    ):
        if sign in text:
            return f"{where}: {words}", _REACH
    if isinstance(error, (exceptions.ConnectionError, exceptions.HTTPClientError)):
        return f"{where}: the connection broke off", _REACH
    return text, ""
