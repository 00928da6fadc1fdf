"""What a service of S3 refuses, or a network does, in words: what came back, and what to try."""

from __future__ import annotations

import re
import socket
import ssl
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from http.client import HTTPException, RemoteDisconnected

from cloudjob.errors import StoreError
from cloudjob.store.s3.place import Endpoint, Place

_THROTTLED = (429, 503)
_PASSING = (408, 500, 502, 503, 504)
_PASSING_CODES = frozenset(
    (
        "BadDigest",
        "IncompleteBody",
        "InternalError",
        "OperationAborted",
        "RequestTimeout",
        "RequestTimeoutException",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
    )
)
STALE_KEYS = frozenset(
    ("ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired")
)

# What came back, and what to try, by the code of the service.
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
    "SlowDown": ("it asks us to slow down, again and again", "try again in a few minutes"),
    "EntityTooLarge": ("it is too large for this service", ""),
    "QuotaExceeded": ("the quota is used up", "remove what is no longer needed: cloudjob rm JOB"),
    "InsufficientStorageSpace": (
        "the bucket's quota is used up",
        "remove what is no longer needed: cloudjob rm JOB",
    ),
    "BadDigest": ("the bytes did not arrive as they were sent, again and again", ""),
}
# A HEAD is refused without a code.
_STATUS_CODES = {401: "AccessDenied", 403: "AccessDenied", 404: "NoSuchKey", 507: "QuotaExceeded"}
_SAME = {
    "ExpiredTokenException": "ExpiredToken",
    "AllAccessDisabled": "AccessDenied",
    "AccountProblem": "AccessDenied",
    "TooManyRequests": "SlowDown",
    "ServiceUnavailable": "SlowDown",
    "TokenRefreshRequired": "ExpiredToken",
}
_REGION_CODES = frozenset(
    ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException")
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that is no success.

    Args:
        code: The service's word for it; empty when it gave none.
        message: Its own sentence.
        region: Where the bucket is, when the service says that it is elsewhere.
        date: The service's clock, as the header has it.
    """

    status: int
    code: str = ""
    message: str = ""
    region: str = ""
    date: str = ""

    @property
    def may_pass(self) -> bool:
        """Whether the same request may well succeed a moment later."""
        return self.status in (*_PASSING, *_THROTTLED) or self.code in _PASSING_CODES

    @property
    def is_missing(self) -> bool:
        """Whether there is no such object, in a bucket that is there."""
        return self.status == 404 and self.code in ("", "NoSuchKey", "NotFound")


def refusal(status: int, body: bytes, headers: dict[str, str]) -> Refusal:
    """Return what an answer says that is no success."""
    text = body[:16_384].decode("utf-8", "replace")
    return Refusal(
        status=status,
        code=_element(text, "Code"),
        message=_element(text, "Message"),
        region=headers.get("x-amz-bucket-region", "") or _element(text, "Region"),
        date=headers.get("date", ""),
    )


def _element(text: str, name: str) -> str:
    # An error may come from anything on the way and be no XML at all, so nothing parses it.
    found = re.search(f"<{name}>([^<]*)</{name}>", text)
    return found[1] if found else ""


def skew_s(date: str) -> float:
    """Return how far this machine's clock is ahead of a ``Date`` header, 0 when it says nothing."""
    try:
        then = parsedate_to_datetime(date)
    except (TypeError, ValueError):
        return 0.0
    return (datetime.now(timezone.utc) - then).total_seconds()


def refused(doing: str, answer: Refusal, place: Place, endpoint: Endpoint) -> StoreError:
    """Return the error for an answer that is final."""
    code = _SAME.get(answer.code, answer.code) or _STATUS_CODES.get(answer.status, "")
    came_back, hint = _CODES.get(code, (answer.message or f"status {answer.status}", ""))
    if code in _REGION_CODES or answer.status in (301, 307):
        came_back, hint = _elsewhere(answer, place, endpoint)
    elif code == "RequestTimeTooSkewed":
        ahead_s = skew_s(answer.date)
        came_back += f": this one is {abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'}"
    number = f"{answer.status} {answer.code}".rstrip()
    return StoreError(f"{doing}: {one_line(came_back)} ({number})", hint=hint)


def _elsewhere(answer: Refusal, place: Place, endpoint: Endpoint) -> tuple[str, str]:
    if not answer.region or answer.region == endpoint.region:
        return "the bucket is in another region", f"{place.root}?region=REGION"
    came_back = f"the bucket is in {answer.region}, not in {endpoint.region}"
    return came_back, f"{place.root}?region={answer.region}"


def one_line(text: str) -> str:
    """Return a service's words so that they can neither break a line nor a terminal."""
    text = " ".join(text.split()).rstrip(".")
    return text if text.isprintable() else repr(text)[1:-1]


# -- the network ------------------------------------------------------------------------------

BROKEN = (OSError, HTTPException)


class Damaged(HTTPException):
    """An answer came, but not as it was sent: too short, or with another digest."""


class Stalled(Damaged):
    """An answer came too slowly."""


def is_lasting(error: Exception) -> bool:
    """Whether trying again is of no use."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return True
    return isinstance(error, socket.gaierror) and error.errno == socket.EAI_NONAME


def is_mute(error: Exception) -> bool:
    """Whether nothing came back, or next to nothing, for as long as that may be."""
    return isinstance(error, (TimeoutError, Stalled))


def is_unreached(error: Exception) -> bool:
    """Whether not even a connection came about."""
    return isinstance(error, (socket.gaierror, ConnectionRefusedError))


def broken(doing: str, error: Exception, endpoint: Endpoint) -> StoreError:
    """Return the error for a connection that did not do, however often it was tried."""
    came_back, hint = _words(error)
    return StoreError(f"{doing}: {endpoint.url}: {came_back}", hint=hint)


def _words(error: Exception) -> tuple[str, str]:
    reach = "is the endpoint right, and can this machine reach it?"
    if isinstance(error, socket.gaierror):
        return "its name is not known", "is the endpoint right, and is there a network?"
    if isinstance(error, ssl.SSLCertVerificationError):
        hint = "a CA of your own: AWS_CA_BUNDLE=FILE; a bucket with dots: ?addressing=path"
        return f"its certificate is not trusted: {one_line(error.verify_message)}", hint
    if isinstance(error, ssl.SSLError):
        return f"no TLS: {one_line(error.reason or str(error)).lower()}", "http:// or https://?"
    if isinstance(error, TimeoutError):
        return "it does not answer", reach
    if isinstance(error, RemoteDisconnected):
        return "it closes the connection without an answer", reach
    if isinstance(error, Damaged):
        return str(error), "try again; what was sent so far is kept"
    if isinstance(error, OSError):
        return one_line(error.strerror or str(error)).lower(), reach
    return f"it does not speak HTTP: {one_line(str(error))}", reach
