"""Talks HTTP: connections that are used again, proxies, certificates, and another try.

A request that breaks is made again after a pause that grows and is never the same for two nodes,
until it has made no progress for ``Patience.total_s``. What comes in slower than a trickle counts
as broken. A server that was given up is *down* until it answers again: other requests to it do not
wait for as long once more, so that a node ends soon after its store has gone.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import os
import random
import ssl
import threading
import time
import urllib.parse
import urllib.request
from math import inf
from typing import IO, Callable, Iterator, Mapping, NamedTuple, TypeVar

from jobentry.contract import names
from jobentry.log import say
from jobentry.objects.base import ObjectError, ObjectMissing, came_back, translated

Result = TypeVar("Result")

# Seconds to try before the first notice, and between two notices.
_FIRST_WORD_S, _NEXT_WORD_S = 5.0, 10.0
# For how long a request to a server that is down is tried, and how often one is tried at all.
_DOWN_S, _DOWN_PAUSE_S = 5.0, 5.0
# How much of an error's text is read.
_ERROR_BYTES = 64 * 1024
# A write to a socket has one time limit for all of it, so what is written at once is small.
_BLOCK_BYTES = 256 * 1024
_AGAIN = frozenset((408, 429, 500, 502, 503, 504))
# S3 says these with a status that would not be worth another try.
_AGAIN_WORDS = frozenset(
    (
        "RequestTimeout",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "InternalError",
        "ServiceUnavailable",
        "BadDigest",
        "XAmzContentSHA256Mismatch",
        "IncompleteBody",
    )
)


class Patience(NamedTuple):
    """How long is waited for what.

    Args:
        stall_s: For the next bytes of an answer.
        total_s: Since the last progress, over all tries.
        pause_s: Before the second try, at most; it doubles each time.
        longest_pause_s: The most that it grows to.
        slowest_bytes_s: What comes in slower than this for ``stall_s`` has stalled.
    """

    stall_s: float = 30.0
    total_s: float = 180.0
    pause_s: float = 0.4
    longest_pause_s: float = 10.0
    slowest_bytes_s: int = 512


def patience() -> Patience:
    """Return how patient the environment asks us to be."""
    try:
        total_s = float(os.environ.get(names.CLOUDJOB_STORE_PATIENCE_S, ""))
    except ValueError:
        return Patience()
    return Patience(stall_s=min(30.0, max(1.0, total_s / 3)), total_s=total_s)


class Wire(NamedTuple):
    """A request as it goes over the wire.

    Args:
        origin: Scheme, host and port: ``https://host:port``.
        target: Path and query, encoded.
        is_checked: Whether the server must prove who it is.
    """

    method: str
    origin: str
    target: str
    headers: Mapping[str, str]
    body: bytes | FileBody = b""
    is_checked: bool = True


class FileBody(NamedTuple):
    """A whole file as the body of a request."""

    path: str
    size_bytes: int


class Answer(NamedTuple):
    """An answer that was not awaited, or one of which nothing is left to read.

    Args:
        headers: Their names in small letters.
        word: What S3 calls the fault.
        text: What it says of it.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    word: str = ""
    text: str = ""


class Refused(ObjectError):
    """The server has understood, and says no."""

    def __init__(self, message: str, hint: str, answer: Answer) -> None:
        super().__init__(message, hint)
        self.answer = answer


# The servers that were given up, and when they were last tried.
_down: dict[str, float] = {}


class Tries:
    """Counts the tries of one exchange; progress makes it as patient as at first."""

    # Of all exchanges: many at a time may wait for the same server.
    _next_word = 0.0

    def __init__(self, patience: Patience) -> None:
        self.patience = patience
        self.progress()

    def progress(self) -> None:
        """Something has come in."""
        self.count = 0
        self._since = time.monotonic()

    def of(self, origin: str) -> Patience:
        """Return how patient the next try is."""
        if origin not in _down:
            return self.patience
        stall_s, total_s = min(self.patience.stall_s, _DOWN_S), min(self.patience.total_s, _DOWN_S)
        return self.patience._replace(stall_s=stall_s, total_s=total_s)

    def pause(self, fault: str, origin: str, at_least_s: float = 0.0) -> bool:
        """Wait before the next try; return whether there is one.

        Args:
            fault: What failed, for the log if this lasts; empty for nothing.
            origin: The server.
        """
        longest = min(self.patience.longest_pause_s, self.patience.pause_s * 2**self.count)
        pause_s = max(at_least_s, random.uniform(longest / 2, longest))
        self.count += 1
        if time.monotonic() + pause_s > self._since + self.of(origin).total_s:
            _down[origin] = time.monotonic()
            return False
        if fault:
            self._tell(fault)
        time.sleep(pause_s)
        return True

    def _tell(self, fault: str) -> None:
        now = time.monotonic()
        if now - self._since >= _FIRST_WORD_S and now >= Tries._next_word:
            Tries._next_word = now + _NEXT_WORD_S
            say(fault + "; it is tried again")


class Response:
    """An answer whose bytes are still to come."""

    def __init__(self, response: http.client.HTTPResponse, patience: Patience) -> None:
        self._response = response
        self._patience = patience
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}

    def read(self, limit_bytes: int) -> bytes:
        """Return the whole body, which may have ``limit_bytes`` at most.

        Raises:
            OSError: It is longer, shorter than announced, or it stalls.
        """
        data = bytearray()
        for piece in self.pieces(bytearray(min(limit_bytes + 1, _BLOCK_BYTES))):
            data += piece
            if len(data) > limit_bytes:
                raise OSError(f"more than {limit_bytes} bytes came")
        return bytes(data)

    def pieces(self, buffer: bytearray) -> Iterator[memoryview]:
        """Yield the body piece by piece, each of them in ``buffer`` until the next is asked for."""
        left = self._response.length
        view = memoryview(buffer)
        since, moved = time.monotonic(), 0
        while left is None or left > 0:
            passed_s = time.monotonic() - since
            if passed_s > self._patience.stall_s:
                if moved < self._patience.slowest_bytes_s * passed_s:
                    raise OSError(f"only {moved} bytes came in {passed_s:.0f} s")
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

    def rest(self) -> bytes:
        """Return what an error says, as far as it is worth reading."""
        try:
            return self._response.read(_ERROR_BYTES)
        except (OSError, http.client.HTTPException):
            return b""

    @property
    def is_done(self) -> bool:
        """Whether the connection can take the next request."""
        return self._response.isclosed() and not self._response.will_close


Read = Callable[[Response], Result]
Explain = Callable[[Answer], str]


def exchange(
    make: Callable[[], Wire],
    take: Read[Result],
    doing: str,
    what: str,
    tries: Tries,
    explain: Callable[[bytes], tuple[str, str]] = lambda body: ("", ""),
) -> Result:
    """Make a request, again where that may help, and return what ``take`` makes of the answer.

    Args:
        make: Called for every try, since a signature does not hold for long.
        take: Called with an answer of 2xx; what breaks in it on the line is tried again.
        explain: Returns the word and the text of a fault.

    Raises:
        Refused: The server said no.
        ObjectError: It did not answer, or not whole, for as long as we are patient.
    """
    while True:
        wire = make()
        if not tries.count and _was_just_down(wire.origin):
            raise ObjectError(f"{doing}: {what}: the server does not answer", _NO_ANSWER)
        try:
            with _sent(wire, tries.of(wire.origin)) as response:
                _note_answer(wire.origin, response.status)
                if 200 <= response.status < 300:
                    return take(response)
                body = response.rest()
                answer = Answer(response.status, response.headers, body, *explain(body))
            fault, at_least_s = _words(answer), _retry_after(answer)
            if not _is_worth_another(answer):
                raise _refused(doing, what, fault, answer)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, ssl.SSLCertVerificationError):
                raise ObjectError(f"{doing}: {what}: {came_back(error)}", _UNTRUSTED) from error
            fault, at_least_s = came_back(error), 0.0
        text = f"{doing}: {what}: {fault}" if doing else ""
        total_s = tries.of(wire.origin).total_s
        if not tries.pause(text, wire.origin, at_least_s):
            text += f", for {total_s:g} s and {tries.count} tries"
            raise ObjectError(text, _NO_ANSWER)


_UNTRUSTED = "SSL_CERT_FILE names the certificates that are trusted; has the image ca-certificates?"
_NO_ANSWER = (
    "can this node reach the server? HTTPS_PROXY and NO_PROXY say through what;"
    f" {names.CLOUDJOB_STORE_PATIENCE_S} how long is waited"
)
_DENIED = "have these keys the right to do so, and do they belong to this server?"


def _was_just_down(origin: str) -> bool:
    return time.monotonic() < _down.get(origin, -inf) + _DOWN_PAUSE_S


def _note_answer(origin: str, status: int) -> None:
    if status not in _AGAIN:
        _down.pop(origin, None)


def _is_worth_another(answer: Answer) -> bool:
    return answer.status in _AGAIN or answer.word in _AGAIN_WORDS


def _refused(doing: str, what: str, fault: str, answer: Answer) -> ObjectError:
    if answer.status in (404, 410) and answer.word != "NoSuchBucket":
        return ObjectMissing(f"{doing}: {what}: {fault}", "is its name right?")
    hint = _DENIED if answer.status in (401, 403) else ""
    return Refused(f"{doing}: {what}: {fault}", hint, answer)


def _words(answer: Answer) -> str:
    reason = answer.word or http.client.responses.get(answer.status, "")
    text = f"{answer.status} {reason}".strip()
    return f"{text} ({_one_line(answer.text)})" if answer.text else text


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if line.isprintable() and len(line) <= 200 else repr(line[:200])[1:-1]


def _retry_after(answer: Answer) -> float:
    text = answer.headers.get("retry-after", "")
    return min(60.0, float(text)) if text.isdecimal() and len(text) < 6 else 0.0


# -- connections --------------------------------------------------------------------------------


_idle: dict[tuple[str, bool], list[http.client.HTTPConnection]] = {}
_lock = threading.Lock()
_MOST_IDLE = 16


@contextlib.contextmanager
def _sent(wire: Wire, patience: Patience) -> Iterator[Response]:
    """Send a request and yield the answer; a connection that is still good is kept for the next."""
    place = (wire.origin, wire.is_checked)
    connection, is_used = _taken(place)
    connection = connection or _opened(wire, patience)
    is_good = False
    try:
        try:
            response = _answer(connection, wire, patience)
        except (http.client.RemoteDisconnected, ConnectionError):
            if not is_used:
                raise
            # The server had closed it since the last request; that says nothing of this one.
            connection.close()
            connection = _opened(wire, patience)
            response = _answer(connection, wire, patience)
        yield response
        is_good = response.is_done
    finally:
        if is_good:
            _give(place, connection)
        else:
            connection.close()


def _answer(connection: http.client.HTTPConnection, wire: Wire, patience: Patience) -> Response:
    if connection.sock is not None:
        connection.sock.settimeout(patience.stall_s)
    target = wire.target
    if getattr(connection, "is_proxy", False):
        target = wire.origin + target
    headers = {**wire.headers, **getattr(connection, "proxy_headers", {})}
    with _body(wire.body) as (body, size_bytes):
        is_sent = size_bytes > 0 or wire.method in ("PUT", "POST")
        if is_sent:
            headers["Content-Length"] = str(size_bytes)
        # A body without a length would be sent in chunks, even an empty one.
        connection.request(wire.method, target, body=body if is_sent else None, headers=headers)
    return Response(connection.getresponse(), patience)


@contextlib.contextmanager
def _body(body: bytes | FileBody) -> Iterator[tuple[IO[bytes], int]]:
    """Yield what is read in small blocks, so that no single one has to beat the clock."""
    if isinstance(body, bytes):
        yield io.BytesIO(body), len(body)
        return
    with translated("read file", body.path):
        file = open(body.path, "rb")  # noqa: SIM115 (only to open it is translated)
    with file:
        yield file, body.size_bytes


def _taken(place: tuple[str, bool]) -> tuple[http.client.HTTPConnection | None, bool]:
    with _lock:
        found = _idle.get(place)
        return (found.pop(), True) if found else (None, False)


def _give(place: tuple[str, bool], connection: http.client.HTTPConnection) -> None:
    with _lock:
        kept = _idle.setdefault(place, [])
        if len(kept) < _MOST_IDLE:
            kept.append(connection)
            return
    connection.close()


class _Plain(http.client.HTTPConnection):
    """A connection without encryption, to a server or to a proxy that asks it."""

    is_proxy = False
    proxy_headers: Mapping[str, str] = {}


def _opened(wire: Wire, patience: Patience) -> http.client.HTTPConnection:
    parts = urllib.parse.urlsplit(wire.origin)
    host, is_secure = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if is_secure else 80)
    proxy = _proxy(parts.scheme, parts.netloc)
    near = (proxy.hostname or "", proxy.port or 80) if proxy else (host, port)
    said = login(proxy, "Proxy-Authorization") if proxy else {}
    if not is_secure:
        plain = _Plain(*near, timeout=patience.stall_s, blocksize=_BLOCK_BYTES)
        plain.is_proxy, plain.proxy_headers = proxy is not None, said
        return plain
    context = _context(is_checked=wire.is_checked)
    secure = http.client.HTTPSConnection(
        *near, timeout=patience.stall_s, context=context, blocksize=_BLOCK_BYTES
    )
    if proxy:
        secure.set_tunnel(host, port, said)
    return secure


def _context(*, is_checked: bool) -> ssl.SSLContext:
    # Made once: to read the certificates takes longer than a request.
    with _lock:
        if is_checked not in _contexts:
            # It looks at SSL_CERT_FILE and SSL_CERT_DIR.
            context = ssl.create_default_context()
            if not is_checked:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            _contexts[is_checked] = context
        return _contexts[is_checked]


_contexts: dict[bool, ssl.SSLContext] = {}


def _proxy(scheme: str, place: str) -> urllib.parse.SplitResult | None:
    """Return the proxy that the environment names for this server, as urllib would choose it."""
    text = urllib.request.getproxies_environment().get(scheme, "")
    if not text or urllib.request.proxy_bypass_environment(place):  # type: ignore[attr-defined]
        return None
    return urllib.parse.urlsplit(text if "://" in text else "http://" + text)


def login(parts: urllib.parse.SplitResult, header: str) -> dict[str, str]:
    """Return the header that says who we are, where a URI has a user in it."""
    if parts.username is None:
        return {}
    import base64

    words = urllib.parse.unquote(parts.username) + ":" + urllib.parse.unquote(parts.password or "")
    return {header: "Basic " + base64.b64encode(words.encode()).decode("ascii")}
