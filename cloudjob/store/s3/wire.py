"""Signed requests to a service of S3 over kept connections, tried again when that may help."""

from __future__ import annotations

import http.client
import os
import random
import ssl
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib import request as urllib_request

from cloudjob.errors import StoreError
from cloudjob.store.base import PATIENCE_S, Tell, quiet
from cloudjob.store.s3 import refusals
from cloudjob.store.s3.connection import Connection, Head
from cloudjob.store.s3.keys import KeyRing
from cloudjob.store.s3.place import Endpoint, Place
from cloudjob.store.s3.refusals import Refusal, Stalled
from cloudjob.waits import Waits
from jobentry.contract import sigv4
from jobentry.contract.sigv4 import Keys

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

PIECE_BYTES = 256 * 1024
# Lists, errors, descriptors; what is larger goes to a sink.
_LONGEST_BODY_BYTES = 64 * 1024 * 1024
_SHORT_BODY_BYTES = 16 * 1024
# The time limits for a service that was given up because it did not answer.
_GONE_S = 5.0
# A connection that has been quiet for so long was probably closed by the other side.
_IDLE_S = 20.0


class Patience(NamedTuple):
    """For how long a request that fails is sent again.

    Args:
        total_s: Since it began to fail.
        tries: How often at least, if the service answers or takes bytes: on a slow connection one
            try may take longer than ``total_s``.
        first_s: About how long the first pause is; each further one is twice as long.
        longest_s: No pause is longer.
        connect_s: How long a connection may take.
        stall_s: How long nothing may come, or less than ``least_bytes_per_s``.
    """

    total_s: float = PATIENCE_S
    tries: int = 8
    first_s: float = 0.3
    longest_s: float = 5.0
    connect_s: float = 5.0
    stall_s: float = 20.0
    least_bytes_per_s: float = 1024.0

    def of(self, total_s: float) -> Patience:
        """Return the same, but with no time limit longer than ``total_s``."""
        return self._replace(
            total_s=total_s,
            connect_s=min(self.connect_s, total_s),
            stall_s=min(self.stall_s, total_s),
        )


class Refused(StoreError):
    """The service refuses for good."""

    def __init__(self, error: StoreError, code: str) -> None:
        super().__init__(error.message, hint=error.hint)
        self.code = code


class Body(Protocol):
    """What a request carries; it can be read again when the request is sent again."""

    @property
    def size_bytes(self) -> int:
        """How long it is."""

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Yield it from its beginning, in pieces of ``PIECE_BYTES`` at most."""


class Sink(Protocol):
    """Where the body of an answer goes."""

    def begin(self, answer: Answer) -> None:
        """Forget what came before: a body begins, perhaps once more."""

    def take(self, data: memoryview) -> None:
        """Take the next bytes."""

    def end(self) -> None:
        """Say whether all is well; raise ``Damaged`` when the bytes are not the object's."""


class Request(NamedTuple):
    """One request.

    Args:
        doing: What it is for, as a message begins: ``put job/code in s3://bucket``.
        key: The object; empty for the bucket.
        sink: Where a successful answer's body goes instead of ``Answer.body``.
        tell: Hears how many bytes of the body were sent; less than zero takes some back.
    """

    method: str
    doing: str
    key: str = ""
    query: tuple[tuple[str, str], ...] = ()
    headers: Mapping[str, str] = MappingProxyType({})
    body: Body | None = None
    sink: Sink | None = None
    tell: Tell = quiet


class Answer(NamedTuple):
    """An answer: a success, or a refusal that is final.

    Args:
        headers: By their names in small letters.
        is_digest_tag: Whether the tag is made of digests; that of an encrypted object is not.
    """

    status: int
    headers: Mapping[str, str]
    is_digest_tag: bool = True
    body: bytes = b""
    refusal: Refusal | None = None

    @property
    def etag(self) -> str:
        """The entity tag without its quotes."""
        return self.headers.get("etag", "").strip('"')


class Wire:
    """The connections to the endpoint of one store; any number of threads may use it.

    Args:
        endpoint: Where it goes.
        keys: What signs the requests.
        patience: When to give up.
    """

    def __init__(self, place: Place, endpoint: Endpoint, keys: KeyRing, patience: Patience) -> None:
        self.endpoint = endpoint
        self.skew_s = 0.0
        self._date = ""
        self._place = place
        self.keys = keys
        self.patience = patience
        self._lock = threading.Lock()
        self._aborted = threading.Condition(self._lock)
        self._idle: list[tuple[float, Connection]] = []
        self._busy: set[Connection] = set()
        self._aborts = 0
        self._waits = Waits()
        # A request was given up because the service did not answer; none has been answered since.
        self._is_gone = False
        self._tls: ssl.SSLContext | None = None
        self._proxy = _proxy(endpoint)

    @property
    def has_checksums(self) -> bool:
        """Whether the service may be told of checksums beside MD5; OBS would store them."""
        return not self._place.is_obs

    def send(self, request: Request) -> Answer:
        """Send a request until it succeeds or is refused for good.

        A missing object is an answer; every other refusal is an error.

        Raises:
            StoreError: It is refused, or the service did not answer for as long as it is tried.
        """
        answer = self.ask(request)
        if answer.refusal is not None and not answer.refusal.is_missing:
            raise self.refused(request.doing, answer.refusal)
        return answer

    def refused(self, doing: str, refusal: Refusal) -> Refused:
        """Return the error for a refusal."""
        error = refusals.refused(doing, refusal, self._place, self.endpoint)
        return Refused(error, refusal.code)

    def ask(self, request: Request) -> Answer:
        """Send a request until it succeeds or is refused for good; a refusal is an answer too.

        Raises:
            StoreError: The service did not answer for as long as it is tried.
        """
        keys = self.keys.current()
        answer = self._tried(request, keys)
        refusal = answer.refusal
        # Temporary keys end in the middle of things, and whoever made them may have made others.
        if refusal and refusal.code in refusals.STALE_KEYS and self.keys.renew(keys):
            answer = self._tried(request, self.keys.current())
        return answer

    def _tried(self, request: Request, keys: Keys) -> Answer:
        tries = _Tries(self.patience, self._aborts)
        while True:
            tries.begin()
            try:
                answer = self._once(request, keys)
            except refusals.BROKEN as error:
                self._check_aborts(request, tries, error)
                broken = refusals.broken(request.doing, error, self.endpoint)
                is_silent = refusals.is_mute(error) or refusals.is_unreached(error)
                pause_s = tries.pause_s(is_silent=is_silent)
                if pause_s is None or refusals.is_lasting(error) or self._is_gone:
                    self._is_gone = is_silent
                    raise broken from error
                self._waits.tell(tries.since_s, broken.message)
            else:
                self._is_gone = False
                if not answer.refusal or not answer.refusal.may_pass:
                    return answer
                pause_s = tries.pause_s(answer.headers.get("retry-after", ""))
                if pause_s is None:
                    return answer
                self._waits.tell(tries.since_s, self.refused(request.doing, answer.refusal).message)
            with self._aborted:
                self._aborted.wait_for(lambda: self._aborts != tries.aborts, pause_s)
            self._check_aborts(request, tries)

    def _check_aborts(
        self, request: Request, tries: _Tries, error: Exception | None = None
    ) -> None:
        if self._aborts != tries.aborts:
            raise StoreError(f"{request.doing}: interrupted") from error

    def abort(self) -> None:
        """Break off every request, so that no thread waits for an answer that nobody wants."""
        with self._lock:
            self._aborts += 1
            self._aborted.notify_all()
            busy = list(self._busy)
        for connection in busy:
            with suppress(OSError):
                connection.interrupt()

    # -- one try ------------------------------------------------------------------------------

    def _once(self, request: Request, keys: Keys) -> Answer:
        while True:
            connection, has_served = self.connection()
            sent = _Sent(request)
            try:
                self._write(connection, request, keys, sent)
                answer = self.read(connection, request)
            except BaseException as error:
                self.let_go(connection, is_kept=False)
                sent.take_back()
                # The other side may close a kept connection at any time, and so just then.
                if has_served and isinstance(error, ConnectionError):
                    continue
                raise
            self.let_go(connection, is_kept=connection.is_reusable)
            if answer.refusal is not None:
                sent.take_back()
            return answer

    def _write(self, connection: Connection, request: Request, keys: Keys, sent: _Sent) -> None:
        head = self.head(request, keys)
        if request.body is None:
            connection.send(head)
            return
        try:
            for number, piece in enumerate(request.body.pieces()):
                # A small object is one call of the system.
                connection.send(piece if number else b"".join((head, piece)))
                sent.add(len(piece))
            if not request.body.size_bytes:
                connection.send(head)
        except (BrokenPipeError, ConnectionResetError):
            # A refusal may have come before the whole body was wanted; if not, reading fails too.
            connection.limit(self.patience.connect_s)

    def head(self, request: Request, keys: Keys) -> bytes:
        """Return how a request begins."""
        path = self.endpoint.target(request.key)
        given = {"host": self.endpoint.host, **request.headers}
        signed = sigv4.Request(request.method, path, request.query, given)
        scope = sigv4.Scope(self.endpoint.region, time.strftime(sigv4.MOMENT, time.gmtime()))
        headers = sigv4.headers(signed, keys, scope)
        if request.method in ("PUT", "POST"):
            headers["content-length"] = str(request.body.size_bytes if request.body else 0)
        query = f"?{sigv4.query_text(request.query)}" if request.query else ""
        is_absolute = self._proxy and self.endpoint.url.startswith("http:")
        target = f"http://{self.endpoint.host}{path}" if is_absolute else path
        lines = [f"{request.method} {target}{query} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join(lines)
        if head.count("\n") != len(headers) or head.count("\r") != len(headers):
            raise StoreError(
                f"{request.doing}: a header of the request would hold a line break",
                hint="is there one in a key or in the name of a region?",
            )
        return f"{head}\r\n\r\n".encode()

    def read(self, connection: Connection, request: Request) -> Answer:
        """Read what comes for a request; a success goes to its sink."""
        connection.on_quiet = partial(self.tell_quiet, request, time.monotonic())
        head = connection.head(request.method)
        date = head.headers.get("date", "")
        if date != self._date:
            self._date, self.skew_s = date, refusals.skew_s(date)
        is_digest_tag = self._is_digest_tag(head.headers)
        if head.status < 300 and request.sink is not None:
            answer = Answer(head.status, head.headers, is_digest_tag)
            self._pass_on(connection, head, request.sink, answer)
        else:
            data = _whole(connection)
            if head.status < 300:
                refusal = _late_refusal(data, head.headers)
            else:
                refusal = refusals.refusal(head.status, data, head.headers)
            answer = Answer(head.status, head.headers, is_digest_tag, data, refusal)
        return answer

    def tell_quiet(self, request: Request, since_s: float) -> None:
        """Say that nothing comes for a request, if we have waited for long."""
        found = f"{request.doing}: {self.endpoint.url}: nothing comes back"
        self._waits.tell(since_s, found, "still waiting")

    def _pass_on(self, connection: Connection, head: Head, sink: Sink, answer: Answer) -> None:
        """Pass a body on as it comes, unless it comes too slowly."""
        sink.begin(answer)
        buffer = memoryview(bytearray(min(PIECE_BYTES, head.size_bytes or PIECE_BYTES)))
        window = _Window(self.patience)
        while count := connection.read(buffer):
            sink.take(buffer[:count])
            window.add(count)
        sink.end()

    def _is_digest_tag(self, headers: Mapping[str, str]) -> bool:
        kind = headers.get("x-amz-server-side-encryption", "")
        if "x-amz-server-side-encryption-customer-algorithm" in headers:
            return False
        # AWS encrypts everything with keys of its own, and those tags are digests all the same.
        return not kind or (kind == "AES256" and not self._place.is_obs)

    # -- connections --------------------------------------------------------------------------

    def connection(self) -> tuple[Connection, bool]:
        """Return a connection that is ours until ``let_go``, and whether it has served before."""
        with self._lock:
            while self._idle:
                since_s, kept = self._idle.pop()
                if time.monotonic() - since_s < _IDLE_S:
                    self._busy.add(kept)
                    return kept, True
                kept.close()
        made = self._connected()
        with self._lock:
            self._busy.add(made)
        return made, False

    def _connected(self) -> Connection:
        is_tls = self.endpoint.url.startswith("https:")
        host, port = _host_and_port(self._proxy or f"//{self.endpoint.host}", is_tls=is_tls)
        limit_s = self._limit_s(self.patience.connect_s)
        if is_tls:
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, port, timeout=limit_s, context=self._tls_context()
            )
        else:
            connection = http.client.HTTPConnection(host, port, timeout=limit_s)
        if is_tls and self._proxy:
            far_host, far_port = _host_and_port(f"//{self.endpoint.host}", is_tls=True)
            connection.set_tunnel(far_host, far_port)
        connection.connect()
        return Connection(connection, self._limit_s(self.patience.stall_s))

    def _limit_s(self, limit_s: float) -> float:
        """Return a time limit, a short one for a service that has not answered for long."""
        return min(limit_s, _GONE_S) if self._is_gone else limit_s

    def _tls_context(self) -> ssl.SSLContext:
        with self._lock:
            if self._tls is None:
                bundle = os.environ.get("AWS_CA_BUNDLE") or os.environ.get("REQUESTS_CA_BUNDLE")
                self._tls = ssl.create_default_context(cafile=bundle)
            return self._tls

    def let_go(self, connection: Connection, *, is_kept: bool) -> None:
        """Take a connection back."""
        with self._lock:
            self._busy.discard(connection)
            if is_kept:
                self._idle.append((time.monotonic(), connection))
        if not is_kept:
            connection.close()


class _Tries:
    """The tries of one request, and for how long it has failed."""

    def __init__(self, patience: Patience, aborts: int) -> None:
        self.aborts = aborts
        self.since_s = 0.0
        self._patience = patience
        self._count = 0
        self._begun_s = 0.0

    def begin(self) -> None:
        """Count one more try."""
        self._count += 1
        self._begun_s = time.monotonic()

    def pause_s(self, asked: str = "", *, is_silent: bool = False) -> float | None:
        """Return how long to wait before the next try; None when there is none.

        A random time, so that many clients do not come in waves.

        Args:
            asked: The pause for which the service asks, in seconds.
            is_silent: Whether nothing came back at all.
        """
        now_s, patience = time.monotonic(), self._patience
        if self._count == 1:
            self.since_s = self._begun_s if is_silent else now_s
        bound_s = min(patience.longest_s, patience.first_s * 2 ** min(self._count - 1, 30))
        pause_s = random.uniform(bound_s / 2, bound_s)
        if asked.isascii() and asked.isdecimal():
            pause_s = max(pause_s, min(int(asked), patience.longest_s))
        is_over = now_s + pause_s - self.since_s > patience.total_s
        is_enough = is_silent or self._count >= patience.tries
        return None if is_over and is_enough else pause_s


class _Sent:
    """How much of a request's body was reported as sent."""

    def __init__(self, request: Request) -> None:
        self._tell = request.tell
        self._bytes = 0

    def add(self, count: int) -> None:
        self._bytes += count
        self._tell(count)

    def take_back(self) -> None:
        if self._bytes:
            self._tell(-self._bytes)
            self._bytes = 0


class _Window:
    """Notices a body that trickles: no read times out, and yet it would take for ever."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._begun_s = time.monotonic()
        self._bytes = 0

    def add(self, count: int) -> None:
        self._bytes += count
        took_s = time.monotonic() - self._begun_s
        if took_s < self._patience.stall_s:
            return
        if self._bytes < took_s * self._patience.least_bytes_per_s:
            raise Stalled(f"it stalls: {self._bytes} bytes in {took_s:.0f} s")
        self._begun_s, self._bytes = time.monotonic(), 0


def _whole(connection: Connection) -> bytes:
    """Return a short body."""
    pieces: list[bytes] = []
    room, rest = memoryview(bytearray()), _LONGEST_BODY_BYTES
    while rest and not connection.is_reusable:
        room = room or memoryview(bytearray(_SHORT_BODY_BYTES))
        count = connection.read(room[:rest])
        if not count:
            break
        pieces.append(bytes(room[:count]))
        rest -= count
    return b"".join(pieces)


def _late_refusal(data: bytes, headers: dict[str, str]) -> Refusal | None:
    """Return the refusal that stands in an answer of status 200, as a long copy may end in one."""
    if not data[:200].lstrip().startswith(b"<") or b"<Error>" not in data[:400]:
        return None
    return refusals.refusal(500, data, headers)


def _proxy(endpoint: Endpoint) -> str:
    """Return the proxy that the environment names for this endpoint, else nothing."""
    proxies = urllib_request.getproxies_environment()
    host = urllib.parse.urlsplit(f"//{endpoint.host}").netloc
    if urllib_request.proxy_bypass_environment(host, proxies):  # type: ignore[attr-defined]
        return ""
    found = proxies.get(endpoint.url.partition(":")[0], "")
    return found if "://" in found or not found else f"http://{found}"


def _host_and_port(url: str, *, is_tls: bool) -> tuple[str, int]:
    parts = urllib.parse.urlsplit(url)
    return parts.hostname or "", parts.port or (443 if is_tls else 80)


# -- signatures -------------------------------------------------------------------------------


def presigned(method: str, endpoint: Endpoint, key: str, keys: Keys, limit_s: int) -> str:
    """Return the address of an object with a signature in it."""
    from botocore.auth import S3SigV4QueryAuth
    from botocore.awsrequest import AWSRequest

    scheme = endpoint.url.partition(":")[0]
    made: Any = AWSRequest(method, f"{scheme}://{endpoint.host}{endpoint.target(key)}")
    S3SigV4QueryAuth(keys, "s3", endpoint.region, expires=limit_s).add_auth(made)
    return str(made.url)


def document(answer: Answer, doing: str) -> Element:
    """Return the XML that an answer brings.

    Raises:
        StoreError: It brings something else.
    """
    from xml.etree.ElementTree import ParseError, fromstring

    try:
        return fromstring(answer.body)
    except ParseError as error:
        raise StoreError(
            f"{doing}: the answer is no XML", hint="is the endpoint one of a service of S3?"
        ) from error


def text(found: Element, name: str) -> str:
    """Return the text of a child, empty when there is none, whatever the namespace."""
    return found.findtext(f"{{*}}{name}") or ""


def query(**values: str | int) -> tuple[tuple[str, str], ...]:
    """Return the words of a query; an underscore stands for a dash."""
    return tuple((name.replace("_", "-"), str(value)) for name, value in values.items())
