"""SeaweedFS, the S3 server behind the emulated OBS.

SeaweedFS serves its S3 API on a Unix socket in a private folder, and every TCP port it opens
requires a client certificate that only SeaweedFS has. Its filer, master and volume server have no
users: a client that reaches one of them can read and replace every object.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import http.client
import ipaddress
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from cloudjob.emulator.state import last_line, write_private
from cloudjob.errors import BackendError
from jobentry.contract import sigv4
from jobentry.contract.sigv4 import Keys

# SeaweedFS serves gRPC at each port + 10000; both are below the ports that systems give to clients.
_PORTS = range(12_000, 21_000)
_NAMES = ("s3", "master", "volume", "filer", "admin")
_GRPC = 10_000
_START_S = 120.0
_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1
_CERTIFICATE, _KEY, _SOCKET, _PORT, _PID = "tls.crt", "tls.key", "s3.sock", "port", "pid"
# The longest path of a Unix socket on macOS, without the terminating NUL.
_MAX_SOCKET_BYTES = 103
# The components of SeaweedFS that listen or connect to others. The paths below are relative to its
# folder.
_COMPONENTS = ("master", "volume", "filer", "s3", "admin", "worker", "msg_broker", "mq", "client")
_TLS = f'cert = "{_CERTIFICATE}"\nkey = "{_KEY}"\n'
_SECURITY = (
    f'[grpc]\nca = "{_CERTIFICATE}"\n'
    + "".join(f"[grpc.{name}]\n{_TLS}" for name in _COMPONENTS)
    + "".join(
        f'[https.{name}]\n{_TLS}ca = "{_CERTIFICATE}"\n'
        for name in ("master", "volume", "filer", "admin")
    )
    + f'[https.client]\nenabled = true\n{_TLS}ca = "{_CERTIFICATE}"\n'
)
_ACLS = ("ReadAcp", "WriteAcp")
# This saves memory at no measurable cost, unlike GOMEMLIMIT: near that limit the server only
# collects garbage.
_GO = {"GOGC": "40"}


def program() -> str:
    """Return the path of the program.

    Raises:
        BackendError: The program is not installed.
    """
    candidate = Path(sys.executable).with_name("weed")
    weed = str(candidate) if candidate.exists() else shutil.which("weed")
    if not weed:
        raise BackendError(
            "looking for SeaweedFS, the emulator's OBS: there is no program weed",
            hint="pip install 'cloudjob[emulator]'"
            + ("; on a Mac with Intel, brew install seaweedfs" if sys.platform == "darwin" else ""),
        )
    return weed


class SeaweedFS:
    """A SeaweedFS process, with its objects below ``folder``.

    On Linux, the kernel kills the process when the thread that started it ends; elsewhere the next
    ``launch`` kills the process that a killed emulator has left.

    Args:
        bucket: A bucket that exists from the start.
    """

    def __init__(self, folder: Path, bucket: str) -> None:
        self._folder = folder
        # It accepts no other keys; the emulator itself knows the users. Those for buckets create
        # the bucket of an object that does not exist, so they are not used for objects.
        self.bucket_keys, self.object_keys = _new_keys(), _new_keys()
        self._bucket = bucket
        self._process: subprocess.Popen[bytes] | None = None
        self._program = ""
        self.port = 0
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The path of its Unix socket; on Linux it is short even if the folder's path is long.
        self.socket = str(folder / _SOCKET)
        if sys.platform == "linux":
            directory = os.open(folder, os.O_PATH | os.O_DIRECTORY)
            self.socket = f"/proc/self/fd/{directory}/{_SOCKET}"

    def start(self) -> None:
        """Start SeaweedFS and wait until it answers.

        Raises:
            BackendError: It does not answer.
        """
        self.launch()
        self.await_ready()

    def launch(self) -> None:
        """Start SeaweedFS with new keys and certificates.

        Raises:
            BackendError: The program is not installed, or its socket's path is too long.
        """
        if len(os.fsencode(self.socket)) > _MAX_SOCKET_BYTES:
            raise BackendError(
                f"starting SeaweedFS: the path of its socket is too long: {self.socket}",
                hint=f"set CLOUDJOB_HOME so that this has at most {_MAX_SOCKET_BYTES} bytes",
            )
        self._program = program()
        self._end_orphan()
        (self._folder / "data").mkdir(exist_ok=True)
        self._write_keys()
        self._write_certificate()
        self._spawn()

    def await_ready(self) -> None:
        """Wait until SeaweedFS answers; if it ends before, restart it on other ports.

        Raises:
            BackendError: It does not answer.
        """
        end = time.monotonic() + _START_S
        while not self._await_answer(end):
            self.stop()
            if time.monotonic() > end:
                log = self._folder / "log"
                reason = last_line(log) or "it does not answer"
                raise BackendError(f"starting SeaweedFS: {reason}", hint=f"see {log}")
            self._spawn()

    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """Kill the process: SIGTERM takes up to 25 s, and neither signal loses data."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self._remove_sockets()

    def _end_orphan(self) -> None:
        """Kill the process that a killed emulator left, on systems whose kernel does not."""
        path = self._folder / _PID
        if sys.platform == "linux" or not path.exists():
            return
        argv = ["ps", "-o", "command=", "-p", path.read_text()]
        for _ in range(100):
            listing = subprocess.run(argv, capture_output=True, check=False).stdout
            if b"-s3.config=s3.json" not in listing:
                return
            with contextlib.suppress(OSError):
                os.kill(int(argv[-1]), signal.SIGKILL)
            time.sleep(_POLL_S)

    def _remove_sockets(self) -> None:
        """Remove the sockets that an earlier process of this folder left in /tmp."""
        path = self._folder / _PORT
        port = int(path.read_text()) if path.exists() else 0
        if port and is_free(port):
            for index, name in enumerate(_NAMES):
                socket_of = Path(f"/tmp/seaweedfs-{name}-grpc-{port + index + _GRPC}.sock")
                socket_of.unlink(missing_ok=True)

    def _write_keys(self) -> None:
        identities = [
            {
                "name": name,
                "credentials": [{"accessKey": keys.access_key, "secretKey": keys.secret_key}],
                "actions": actions,
            }
            for name, keys, actions in (
                ("buckets", self.bucket_keys, ["Admin"]),
                ("objects", self.object_keys, ["Read", "Write", "List", "Tagging", *_ACLS]),
            )
        ]
        write_private(self._folder / "s3.json", json.dumps({"identities": identities}))

    def _write_certificate(self) -> None:
        key, certificate = _self_signed()
        write_private(self._folder / _KEY, key)
        write_private(self._folder / _CERTIFICATE, certificate)
        write_private(self._folder / "security.toml", _SECURITY)

    def _spawn(self) -> None:
        self._remove_sockets()
        self.port = _free_ports()
        write_private(self._folder / _PORT, str(self.port))
        folder = self._folder
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    self._program,
                    "mini",
                    "-dir=data",
                    "-ip=127.0.0.1",
                    "-ip.bind=127.0.0.1",
                    *(f"-{name}.port={self.port + i}" for i, name in enumerate(_NAMES)),
                    f"-bucket={self._bucket}",
                    "-filer.localSocket=filer.sock",
                    f"-s3.localSocket={_SOCKET}",
                    f"-s3.cert.file={_CERTIFICATE}",
                    f"-s3.key.file={_KEY}",
                    f"-s3.cacert.file={_CERTIFICATE}",
                    "-s3.tlsVerifyClientCert",
                    "-s3.config=s3.json",
                    "-s3.iam=false",
                    "-s3.allowDeleteBucketNotEmpty=false",
                    "-s3.port.iceberg=0",
                    # Otherwise servers that start together race for a port, and one fails.
                    "-s3.port.lance=0",
                    "-webdav=false",
                    "-admin.ui=false",
                    # Otherwise it sends usage reports to its vendor.
                    "-master.telemetry=false",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                env={**os.environ, **_GO},
                preexec_fn=end_with_parent if sys.platform == "linux" else None,
            )
        write_private(folder / _PID, str(self._process.pid))

    def _await_answer(self, end: float) -> bool:
        while time.monotonic() < end and self.is_alive():
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._answers():
                    return True
            time.sleep(_POLL_S)
        return False

    def _answers(self) -> bool:
        """Whether the bucket exists; the status is 500 until the filer runs, then 404 at first."""
        scope = sigv4.Scope("local", time.strftime(sigv4.MOMENT, time.gmtime()))
        request = sigv4.Request("HEAD", f"/{self._bucket}", (), {"Host": "localhost"})
        # httpx would leak a socket for each connection that fails.
        with contextlib.closing(http.client.HTTPConnection("localhost")) as connection:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(5)
            connection.sock.connect(self.socket)
            connection.request(
                "HEAD", request.path, headers=sigv4.headers(request, self.bucket_keys, scope)
            )
            return connection.getresponse().status == 200


def _new_keys() -> Keys:
    return Keys(secrets.token_hex(10).upper(), secrets.token_urlsafe(30))


def _self_signed() -> tuple[str, str]:
    """Return a private key and a self-signed certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "cloudjob emulator")])
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    utc = datetime.timezone.utc
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Each start makes a new certificate, and the clock of a laptop may be wrong.
        .not_valid_before(datetime.datetime(2000, 1, 1, tzinfo=utc))
        .not_valid_after(datetime.datetime(9999, 12, 31, tzinfo=utc))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private.decode("ascii"), certificate.public_bytes(pem).decode("ascii")


def _free_ports() -> int:
    for _ in range(200):
        port = random.choice(_PORTS)
        if all(is_free(port + i + grpc) for i in range(len(_NAMES)) for grpc in (0, _GRPC)):
            return port
    raise BackendError("starting SeaweedFS: no five free ports in a row between 12000 and 21000")


def is_free(port: int) -> bool:
    """Whether a server can listen on a port of the loopback interface."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; for ``preexec_fn``."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
