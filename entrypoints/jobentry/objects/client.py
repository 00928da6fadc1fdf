"""The HTTP client: ``urllib.request`` with one retry loop.

A failed request is repeated, after growing random pauses, until ``patience_s()`` have passed since
its first failure. A server that was given up is *down* until it answers again: other requests to it
fail sooner, so that a node ends soon after its store has become unreachable.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import os
import random
import ssl
import time
import urllib.error
import urllib.request
from email.message import Message
from http.client import HTTPException, HTTPResponse
from typing import Any, Callable, Iterator, Mapping, NamedTuple, TypeVar

from jobentry.contract import messages, names
from jobentry.log import log_message
from jobentry.objects import s3_xml
from jobentry.objects.base import ObjectError, ObjectMissing, reason_of
from jobentry.secrets import private_environ

Result = TypeVar("Result")

_PATIENCE_S = 180.0
# The timeout of a single read or write.
_STALL_S = 30.0
# The pause before the second attempt, which doubles up to the longest one.
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.4, 10.0
# Seconds before the first notice of a failing request, and between two notices of all requests.
_FIRST_NOTICE_S, _NEXT_NOTICE_S = 5.0, 10.0
# How long a request to a server that is down is retried, and the minimum pause before a new
# request.
_DOWN_S, _DOWN_PAUSE_S = 5.0, 5.0
_ERROR_BYTES = 64 * 1024
# Each read and each write may stall for ``_STALL_S``, so they are small.
_BLOCK_BYTES = 256 * 1024
# How often a request is corrected: its keys have expired, or it is redirected.
_MAX_CORRECTIONS = 5
_TEMPORARY_STATUS = frozenset((408, 429, 500, 502, 503, 504))
# S3 sends these codes with a status that otherwise means a permanent error.
_TEMPORARY_CODES = frozenset(
    (
        *("RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "InternalError"),
        *("ServiceUnavailable", "BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody"),
    )
)
_UNTRUSTED = (
    "for a private authority set AWS_CA_BUNDLE=FILE where you submit; for a public one, does the"
    " image have ca-certificates?"
)
_NO_ANSWER = (
    "can this node reach the server? HTTPS_PROXY and NO_PROXY name proxies;"
    f" {names.CLOUDJOB_STORE_PATIENCE_S} is how long requests are retried"
)
_DENIED = "do these keys have the right to do this, and do they belong to this server?"

# When each server that was given up was last tried, and what it answered.
_down: dict[str, tuple[float, str]] = {}
# Shared by all requests, as many at a time may wait for the same server.
_next_notice_at = 0.0


class Request(urllib.request.Request):
    """One attempt of a request.

    Args:
        is_verified: Whether the server's certificate is checked.
    """

    def __init__(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes = b"",
        *,
        is_verified: bool = True,
    ) -> None:
        super().__init__(url, None, dict(headers), method=method)
        self.is_verified = is_verified
        if body or method in ("PUT", "POST"):
            # Small blocks, as each may take as long as a server may stall.
            self.data = [body[at : at + _BLOCK_BYTES] for at in range(0, len(body), _BLOCK_BYTES)]
            self.add_header("Content-Length", str(len(body)))
            self.add_header("Content-Type", "application/octet-stream")


def patience_s() -> float:
    """Return how long the environment allows requests to be retried."""
    try:
        return float(os.environ.get(names.CLOUDJOB_STORE_PATIENCE_S, ""))
    except ValueError:
        return _PATIENCE_S


class Answer(NamedTuple):
    """An answer other than 2xx, with the error in its body if the server writes it as S3 does."""

    status: int
    headers: Message
    code: str
    message: str

    def __str__(self) -> str:
        reason = self.code or http.client.responses.get(self.status, "")
        text = f"{self.status} {reason}".strip()
        return f"{text} ({_one_line(self.message)})" if self.message else text


class Refused(ObjectError):
    """The server understood the request and refused it."""

    def __init__(self, message: str, hint: str, answer: Answer) -> None:
        super().__init__(message, hint)
        self.answer = answer


def send(
    make: Callable[[], Request],
    read: Callable[[HTTPResponse], Result],
    doing: str,
    correct: Callable[[Answer], bool] = lambda _: False,
    limit_s: float | None = None,
) -> Result:
    """Send a request, repeat it if that may help, and return the result of ``read``.

    Args:
        make: Returns the next attempt, as signatures expire.
        read: Gets a 2xx answer; an ``OSError`` of the network in it is retried.
        doing: For messages: what is being done to which object.
        correct: Gets an answer that refuses the request; returns whether ``make`` now makes another
            request that may succeed at once.
        limit_s: How long to retry; ``patience_s()`` by default.

    Raises:
        Refused: The server refused.
        ObjectError: It did not answer completely within the time limit.
    """
    retries = _Retries(doing, patience_s() if limit_s is None else limit_s)
    corrections = 0
    while True:
        request = make()
        # A proxy replaces the host of the request.
        host = request.host
        stall_s = retries.stall_s(host)
        try:
            with _opener(request).open(request, timeout=stall_s) as response:
                if response.status not in _TEMPORARY_STATUS:
                    _down.pop(host, None)
                if 200 <= response.status < 300:
                    return read(response)
                answer = _answer(response)
        except (OSError, HTTPException) as error:
            reason = _network_reason(doing, error)
        else:
            if corrections < _MAX_CORRECTIONS and correct(answer):
                corrections += 1
                continue
            reason = _temporary_reason(doing, answer)
        retries.pause(host, reason)


class _Retries:
    """The attempts of one request."""

    def __init__(self, doing: str, limit_s: float) -> None:
        self._doing = doing
        self._limit_s = limit_s
        self._count = 0
        # Time of the first failure: on a slow connection, a single attempt may take minutes.
        self._failed_at: float | None = None

    def stall_s(self, host: str) -> float:
        """Return how long the next attempt may stall.

        Raises:
            ObjectError: The server is down, and was asked a moment ago.
        """
        if host in _down:
            since, why = _down[host]
            if not self._count and time.monotonic() < since + _DOWN_PAUSE_S:
                raise ObjectError(f"{self._doing}: the server does not answer: {why}", _NO_ANSWER)
            self._limit_s = min(self._limit_s, _DOWN_S)
        return min(_STALL_S, max(1.0, self._limit_s / 3))

    def pause(self, host: str, reason: str) -> None:
        """Wait before the next attempt.

        Raises:
            ObjectError: This was the last one.
        """
        global _next_notice_at
        max_s = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2**self._count)
        pause_s = random.uniform(max_s / 2, max_s)
        self._count += 1
        now = time.monotonic()
        if self._failed_at is None:
            self._failed_at = now
        if now + pause_s > self._failed_at + self._limit_s:
            text = f"{reason}; gave up after {self._limit_s:g} s (attempts: {self._count})"
            _down[host] = now, text
            raise ObjectError(f"{self._doing}: {text}", _NO_ANSWER)
        if now >= max(self._failed_at + _FIRST_NOTICE_S, _next_notice_at):
            _next_notice_at = now + _NEXT_NOTICE_S
            log_message(messages.retry(f"{self._doing}: {reason}"))
        time.sleep(pause_s)


def pieces(response: HTTPResponse) -> Iterator[bytes]:
    """Yield the body piece by piece.

    Raises:
        OSError: It ends early.
    """
    while True:
        piece = response.read(_BLOCK_BYTES)
        if not piece:
            break
        yield piece
    if response.length:
        raise OSError(f"the answer ends {response.length} bytes early")


def nothing(_response: HTTPResponse) -> None:
    """Ignore the body of an answer."""


def _answer(response: HTTPResponse) -> Answer:
    body = b""
    with contextlib.suppress(OSError, http.client.HTTPException):
        body = response.read(_ERROR_BYTES)
    return Answer(response.status, response.headers, *s3_xml.error(body))


def _network_reason(doing: str, error: Exception) -> str:
    """Return the message for a network error; raise an error that cannot be temporary."""
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, Exception):
        error = error.reason
    if isinstance(error, ssl.SSLCertVerificationError):
        raise ObjectError(f"{doing}: {reason_of(error)}", _UNTRUSTED) from error
    return reason_of(error)


def _temporary_reason(doing: str, answer: Answer) -> str:
    """Return the message for a temporary error; raise any other."""
    if answer.status in _TEMPORARY_STATUS or answer.code in _TEMPORARY_CODES:
        return str(answer)
    if answer.status in (404, 410) and answer.code != "NoSuchBucket":
        raise ObjectMissing(f"{doing}: {answer}", "is its name right?")
    hint = _DENIED if answer.status in (401, 403) else ""
    raise Refused(f"{doing}: {answer}", hint, answer)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if line.isprintable() and len(line) <= 200 else repr(line[:200])[1:-1]


class _AnyStatus(urllib.request.HTTPErrorProcessor):
    """Return every answer, whatever its status: no exceptions, and no redirects that are hidden."""

    def http_response(self, request: urllib.request.Request, response: Any) -> Any:
        """Return the answer."""
        return response

    https_response = http_response


def _opener(request: Request) -> urllib.request.OpenerDirector:
    """Return an opener for the request, with the proxy that the environment names."""
    environ = private_environ.environ()
    bundles = tuple(environ.get(name, "") for name in _BUNDLES)
    trusted = environ.get(names.CLOUDJOB_CA_CERTIFICATES, "")
    context = _context(trusted, bundles, is_verified=request.is_verified)
    return urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), _AnyStatus)


# Files of certificates that the image or the job's variables name, beside those of OpenSSL.
_BUNDLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")


# Reading the certificates takes longer than a request.
@functools.lru_cache(maxsize=4)
def _context(trusted: str, bundles: tuple[str, ...], *, is_verified: bool) -> ssl.SSLContext:
    """Return the context of a connection.

    Args:
        trusted: Certificates of authorities, which are trusted beside those of this node.
        bundles: Files of such certificates; missing ones are ignored.
    """
    # This reads SSL_CERT_FILE and SSL_CERT_DIR.
    context = ssl.create_default_context()
    if trusted:
        context.load_verify_locations(cadata=trusted)
    for path in bundles:
        if os.path.exists(path):
            with contextlib.suppress(OSError):
                is_folder = os.path.isdir(path)
                context.load_verify_locations(**{"capath" if is_folder else "cafile": path})
    if trusted or any(bundles):
        # Python 3.13 refuses authorities without extensions that private ones often lack.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not is_verified:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
