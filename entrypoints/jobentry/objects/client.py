"""The HTTP client: connections that are reused, proxies, certificates, and one retry loop.

A failed request is repeated after a growing, random pause until it has made no progress for
``Patience.total_s``. An answer that trickles in counts as failed. A server that was given up is
*down* until it answers again: other requests to it fail sooner, so that a node ends soon after its
store has gone.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.client
import io
import os
import random
import ssl
import time
import urllib.parse
import urllib.request
from typing import IO, Callable, Iterator, Mapping, NamedTuple, TypeVar
from urllib.parse import SplitResult

from jobentry.contract import names
from jobentry.log import log_message
from jobentry.objects import s3_xml
from jobentry.objects.base import ObjectError, ObjectMissing, came_back, translated

Result = TypeVar("Result")

# Seconds before the first notice of a failing request, and between two notices of all requests.
_FIRST_NOTICE_S, _NEXT_NOTICE_S = 5.0, 10.0
# How long a request to a server that is down is retried, and how often one is sent at all.
_DOWN_S, _DOWN_PAUSE_S = 5.0, 5.0
_ERROR_BYTES = 64 * 1024
# One write to a socket has one time limit, so each write is small.
_BLOCK_BYTES = 256 * 1024
_MOST_IDLE = 16
# How often a request is corrected: the keys, the region and the clock (twice: a proxy may answer
# with its own) can all be wrong, and a web server may redirect five times.
_MOST_CORRECTIONS = 6
_TEMPORARY_STATUS = frozenset((408, 429, 500, 502, 503, 504))
# S3 sends these with a status that otherwise means a permanent error.
_TEMPORARY_CODES = frozenset(
    (
        *("RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "InternalError"),
        *("ServiceUnavailable", "BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody"),
    )
)
_UNTRUSTED = "SSL_CERT_FILE names the certificates that are trusted; has the image ca-certificates?"
_NO_ANSWER = (
    "can this node reach the server? HTTPS_PROXY and NO_PROXY name proxies;"
    f" {names.CLOUDJOB_STORE_PATIENCE_S} is how long requests are retried"
)
_DENIED = "have these keys the right to do so, and do they belong to this server?"


class Patience(NamedTuple):
    """How long to wait: for the next bytes, and since the last progress over all attempts.

    The pause before the second attempt is at most ``pause_s``, and doubles up to
    ``longest_pause_s``. An answer slower than ``slowest_bytes_s`` for ``stall_s`` has stalled.
    """

    stall_s: float = 30.0
    total_s: float = 180.0
    pause_s: float = 0.4
    longest_pause_s: float = 10.0
    slowest_bytes_s: int = 512


def patience() -> Patience:
    """Return the patience that the environment asks for."""
    try:
        total_s = float(os.environ.get(names.CLOUDJOB_STORE_PATIENCE_S, ""))
    except ValueError:
        return Patience()
    return Patience(stall_s=min(30.0, max(1.0, total_s / 3)), total_s=total_s)


class Request(NamedTuple):
    """One attempt of a request.

    Args:
        url: Encoded, without user and fragment.
        body: Bytes, or the path of a file that is streamed.
        is_verified: Whether the server's certificate is checked.
    """

    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes | str = b""
    is_verified: bool = True


class Answer(NamedTuple):
    """An answer other than 2xx.

    Args:
        headers: With names in lower case.
        error: What the server says about the error, if it says it as S3 does.
    """

    status: int
    headers: Mapping[str, str]
    error: s3_xml.Error

    @property
    def is_temporary(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status in _TEMPORARY_STATUS or self.error.code in _TEMPORARY_CODES

    @property
    def retry_after_s(self) -> float:
        """How long the server asks to wait."""
        text = self.headers.get("retry-after", "")
        return min(60.0, float(text)) if text.isdecimal() and len(text) < 6 else 0.0

    def __str__(self) -> str:
        reason = self.error.code or http.client.responses.get(self.status, "")
        text = f"{self.status} {reason}".strip()
        return f"{text} ({_one_line(self.error.message)})" if self.error.message else text


class Refused(ObjectError):
    """The server understood the request and refused it."""

    def __init__(self, message: str, hint: str, answer: Answer) -> None:
        super().__init__(message, hint)
        self.answer = answer


# When each server that was given up was last tried.
_down: dict[str, float] = {}


class Retries:
    """Counts the attempts of one request; progress resets the count and the time."""

    # Shared by all requests: many at a time may wait for the same server.
    _next_notice_at = 0.0

    def __init__(self, patience_: Patience | None = None) -> None:
        self._patience = patience_ or patience()
        self.progress()

    def progress(self) -> None:
        """Note that something was transferred."""
        self._count = 0
        self._since = time.monotonic()

    def patience_with(self, origin: str, doing: str) -> Patience:
        """Return the patience of the next attempt.

        Raises:
            ObjectError: The server is down, and was asked a moment ago.
        """
        tried_at = _down.get(origin)
        if tried_at is None:
            return self._patience
        if not self._count and time.monotonic() < tried_at + _DOWN_PAUSE_S:
            raise ObjectError(f"{doing}: the server does not answer", _NO_ANSWER)
        stall_s, total_s = self._patience[:2]
        return self._patience._replace(stall_s=min(stall_s, _DOWN_S), total_s=min(total_s, _DOWN_S))

    def pause(self, origin: str, fault: str, patience: Patience, at_least_s: float) -> None:
        """Wait before the next attempt.

        Raises:
            ObjectError: This was the last one.
        """
        longest_s = min(patience.longest_pause_s, patience.pause_s * 2**self._count)
        pause_s = max(at_least_s, random.uniform(longest_s / 2, longest_s))
        self._count += 1
        now = time.monotonic()
        if now + pause_s > self._since + patience.total_s:
            _down[origin] = now
            text = f"{fault}, for {patience.total_s:g} s and {self._count} tries"
            raise ObjectError(text, _NO_ANSWER)
        if now >= max(self._since + _FIRST_NOTICE_S, Retries._next_notice_at):
            Retries._next_notice_at = now + _NEXT_NOTICE_S
            log_message(fault + "; trying again")
        time.sleep(pause_s)


class Response:
    """An answer of 2xx whose bytes are still to come."""

    def __init__(self, response: http.client.HTTPResponse, patience: Patience) -> None:
        self._response = response
        self._patience = patience
        self.status = response.status
        self.headers = _headers(response)

    def read(self, limit_bytes: int) -> bytes:
        """Return the whole body.

        Raises:
            OSError: It is longer than the limit, shorter than announced, or it stalls.
        """
        data = bytearray()
        for piece in self.pieces():
            data += piece
            if len(data) > limit_bytes:
                raise OSError(f"more than {limit_bytes} bytes came")
        return bytes(data)

    def pieces(self) -> Iterator[memoryview]:
        """Yield the body piece by piece; a piece is overwritten by the next one."""
        left = self._response.length
        view = memoryview(bytearray(_BLOCK_BYTES if left is None else min(left, _BLOCK_BYTES)))
        since, moved = time.monotonic(), 0
        while left is None or left > 0:
            passed_s = time.monotonic() - since
            if passed_s > self._patience.stall_s:
                if moved < self._patience.slowest_bytes_s * passed_s:
                    raise OSError(f"received only {moved} bytes in {passed_s:.0f} s")
                since, moved = time.monotonic(), 0
            count = self._response.readinto(view)
            if not count:
                break
            left = None if left is None else left - count
            moved += count
            yield view[:count]
        if left:
            raise OSError(f"the answer ends {left} bytes early")
        # Python before 3.12 does not notice by itself that this was all.
        self._response.close()


def send(
    make: Callable[[], Request],
    read: Callable[[Response], Result],
    doing: str,
    retries: Retries | None = None,
    correct: Callable[[Answer], bool] = lambda _: False,
) -> Result:
    """Send a request, repeat it where that may help, and return what ``read`` makes of the answer.

    Args:
        make: Returns the next attempt: signatures expire, and a range goes on where it broke.
        read: Gets an answer of 2xx; an ``OSError`` of the network in it is retried.
        doing: For messages: what is being done to which object.
        correct: Gets an answer that refuses the request; returns whether ``make`` now makes another
            request that may succeed at once.

    Raises:
        Refused: The server refused.
        ObjectError: It did not answer, or not completely, for as long as we are patient.
    """
    retries = retries or Retries()
    corrections = 0
    while True:
        request = make()
        parts = urllib.parse.urlsplit(request.url)
        patience = retries.patience_with(parts.netloc, doing)
        after_s = 0.0
        try:
            with _response(request, parts, patience) as response:
                if 200 <= response.status < 300:
                    return read(Response(response, patience))
                answer = _answer(response)
            if corrections < _MOST_CORRECTIONS and correct(answer):
                corrections += 1
                continue
            fault, after_s = _temporary_fault(doing, answer), answer.retry_after_s
        except ssl.SSLCertVerificationError as error:
            raise ObjectError(f"{doing}: {came_back(error)}", _UNTRUSTED) from error
        except (OSError, http.client.HTTPException) as error:
            fault = came_back(error)
        retries.pause(parts.netloc, f"{doing}: {fault}", patience, after_s)


def _headers(response: http.client.HTTPResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in response.getheaders()}


def _answer(response: http.client.HTTPResponse) -> Answer:
    body = b""
    with contextlib.suppress(OSError, http.client.HTTPException):
        body = response.read(_ERROR_BYTES)
    return Answer(response.status, _headers(response), s3_xml.error(body))


def _temporary_fault(doing: str, answer: Answer) -> str:
    """Return what to report of a temporary error; raise any other."""
    if answer.is_temporary:
        return str(answer)
    if answer.status in (404, 410) and answer.error.code != "NoSuchBucket":
        raise ObjectMissing(f"{doing}: {answer}", "is its name right?")
    hint = _DENIED if answer.status in (401, 403) else ""
    raise Refused(f"{doing}: {answer}", hint, answer)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if line.isprintable() and len(line) <= 200 else repr(line[:200])[1:-1]


# -- connections --------------------------------------------------------------------------------

_idle: dict[tuple[str, str, bool], list[http.client.HTTPConnection]] = {}
# A forked child, such as a data loader, would mix its requests with those of its parent.
os.register_at_fork(after_in_child=_idle.clear)


@contextlib.contextmanager
def _response(
    request: Request, parts: SplitResult, patience: Patience
) -> Iterator[http.client.HTTPResponse]:
    """Send a request and yield the answer; a connection that is still good is reused later."""
    idle = _idle.setdefault((parts.scheme, parts.netloc, request.is_verified), [])
    is_reused = True
    connection: http.client.HTTPConnection | None
    try:
        connection = idle.pop()
    except IndexError:
        connection, is_reused = _connection(request, parts, patience), False
    try:
        try:
            response = _exchange(connection, request, parts, patience)
        except (http.client.RemoteDisconnected, ConnectionError):
            if not is_reused:
                raise
            # The server closed it after an earlier request, which means nothing for this one.
            connection.close()
            connection = _connection(request, parts, patience)
            response = _exchange(connection, request, parts, patience)
        if response.status not in _TEMPORARY_STATUS:
            _down.pop(parts.netloc, None)
        yield response
        if response.isclosed() and not response.will_close and len(idle) < _MOST_IDLE:
            idle.append(connection)
            connection = None
    finally:
        if connection is not None:
            connection.close()


def _exchange(
    connection: http.client.HTTPConnection, request: Request, parts: SplitResult, patience: Patience
) -> http.client.HTTPResponse:
    if connection.sock is not None:
        connection.sock.settimeout(patience.stall_s)
    target = (parts.path or "/") + ("?" + parts.query if parts.query else "")
    headers = dict(request.headers)
    proxy = _proxy(parts)
    if proxy and parts.scheme == "http":
        target = f"http://{parts.netloc}{target}"
        headers.update(basic_auth(proxy, "Proxy-Authorization"))
    with _opened(request.body) as (body, size_bytes):
        has_body = size_bytes > 0 or request.method in ("PUT", "POST")
        if has_body:
            headers["Content-Length"] = str(size_bytes)
        # A body without a length would be sent in chunks, even an empty one.
        connection.request(request.method, target, body if has_body else None, headers)
    return connection.getresponse()


@contextlib.contextmanager
def _opened(body: bytes | str) -> Iterator[tuple[IO[bytes], int]]:
    """Yield a file to read the body from in small blocks, and its size."""
    if isinstance(body, bytes):
        yield io.BytesIO(body), len(body)
        return
    with translated("read file", body):
        file = open(body, "rb")  # noqa: SIM115 (errors of the network are not translated)
    with file:
        yield file, os.fstat(file.fileno()).st_size


def _connection(
    request: Request, parts: SplitResult, patience: Patience
) -> http.client.HTTPConnection:
    """Return a connection that is not open yet."""
    is_secure = parts.scheme == "https"
    host, port = parts.hostname or "", parts.port or (443 if is_secure else 80)
    proxy = _proxy(parts)
    near = (proxy.hostname or "", proxy.port or 80) if proxy else (host, port)
    if not is_secure:
        return http.client.HTTPConnection(*near, patience.stall_s, blocksize=_BLOCK_BYTES)
    context = _context(is_verified=request.is_verified)
    connection = http.client.HTTPSConnection(
        *near, timeout=patience.stall_s, context=context, blocksize=_BLOCK_BYTES
    )
    if proxy:
        connection.set_tunnel(host, port, basic_auth(proxy, "Proxy-Authorization"))
    return connection


# Reading the certificates takes longer than a request.
@functools.lru_cache(maxsize=2)
def _context(*, is_verified: bool) -> ssl.SSLContext:
    # It reads SSL_CERT_FILE and SSL_CERT_DIR.
    context = ssl.create_default_context()
    if not is_verified:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _proxy(parts: SplitResult) -> SplitResult | None:
    """Return the proxy that the environment names for this server, as urllib chooses it."""
    text = urllib.request.getproxies().get(parts.scheme, "")
    if not text or urllib.request.proxy_bypass(parts.netloc):
        return None
    return urllib.parse.urlsplit(text if "://" in text else "http://" + text)


def basic_auth(parts: SplitResult, header: str) -> dict[str, str]:
    """Return the header that sends the user and the password of a URL, if it has any."""
    if parts.username is None:
        return {}
    text = urllib.parse.unquote(parts.username) + ":" + urllib.parse.unquote(parts.password or "")
    return {header: "Basic " + base64.b64encode(text.encode()).decode("ascii")}
