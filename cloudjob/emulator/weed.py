"""SeaweedFS, the S3 server behind the emulated OBS: started, watched, ended with us."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from cloudjob.emulator.access import Account
from cloudjob.errors import BackendError
from jobentry.contract import sigv4

# SeaweedFS serves gRPC at each port + 10000; both lie below the ports that clients are given.
_PORTS = range(12_000, 21_000)
_NAMES = ("s3", "master", "volume", "filer", "admin")
_START_S = 120.0
_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1
# Less memory at no cost that we could measure. GOMEMLIMIT has one: near it the server does nothing
# but collect garbage.
_GO = {"GOGC": "40"}


def program() -> str:
    """Return the path of SeaweedFS's program.

    Raises:
        BackendError: There is none.
    """
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if not found:
        raise BackendError(
            "looking for SeaweedFS, the emulator's OBS: there is no program weed",
            hint="pip install 'cloudjob[emulator]'",
        )
    return found


class Weed:
    """One SeaweedFS, whose objects lie below ``folder``.

    Its life is that of the thread which starts it: the kernel ends it when that thread is gone.
    """

    def __init__(self, folder: Path, account: Account) -> None:
        self._folder = folder
        self._account = account
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            BackendError: It does not.
        """
        words = program()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self._folder / "data").mkdir(exist_ok=True)
        self._write_keys()
        end = time.monotonic() + _START_S
        while time.monotonic() < end:
            self.port = _free_ports()
            self._spawn(words)
            if self._await_answer(end):
                return
            self.stop()
        raise BackendError(
            f"starting SeaweedFS: {self._last_line()}", hint=f"see {self._folder / 'log'}"
        )

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """End it as a crash would: SIGTERM takes it up to 25 s, and it loses nothing either way."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _write_keys(self) -> None:
        account = self._account
        identity = {
            "name": "emulator",
            "credentials": [{"accessKey": account.access_key, "secretKey": account.secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        path = self._folder / "s3.json"
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            json.dump({"identities": [identity]}, file)

    def _spawn(self, words: str) -> None:
        folder = self._folder
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    words,
                    "mini",
                    f"-dir={folder}/data",
                    "-ip=127.0.0.1",
                    "-ip.bind=127.0.0.1",
                    *(f"-{name}.port={self.port + i}" for i, name in enumerate(_NAMES)),
                    f"-s3.config={folder}/s3.json",
                    "-s3.allowDeleteBucketNotEmpty=false",
                    "-s3.port.iceberg=0",
                    # Else servers that start together race for a port after 9101, and one dies.
                    "-s3.port.lance=0",
                    "-webdav=false",
                    "-admin.ui=false",
                    # It would tell its makers that it runs.
                    "-master.telemetry=false",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                env={**os.environ, **_GO},
                preexec_fn=_end_with_parent,
            )

    def _await_answer(self, end: float) -> bool:
        while time.monotonic() < end and self.is_alive():
            with contextlib.suppress(OSError):
                if self._answers():
                    return True
            time.sleep(_POLL_S)
        return False

    def _answers(self) -> bool:
        """Ask for the buckets, as only we may: another server may have taken the port meanwhile."""
        host = f"127.0.0.1:{self.port}"
        keys = sigv4.Keys(self._account.access_key, self._account.secret_key)
        scope = sigv4.Scope("local", time.strftime(sigv4.MOMENT, time.gmtime()))
        headers = sigv4.headers(sigv4.Request("GET", "/", (), {"Host": host}), keys, scope)
        connection = http.client.HTTPConnection(host, timeout=5)
        try:
            connection.request("GET", "/", headers=headers)
            # Until the filer is there it answers 500s.
            return connection.getresponse().status == 200
        except http.client.HTTPException:
            return False
        finally:
            connection.close()

    def _last_line(self) -> str:
        lines = (self._folder / "log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it does not answer"


def _free_ports() -> int:
    for _ in range(200):
        port = random.choice(_PORTS)
        if all(_is_free(port + i + grpc) for i in range(len(_NAMES)) for grpc in (0, 10_000)):
            return port
    raise BackendError("starting SeaweedFS: no five free ports in a row between 12000 and 21000")


def _is_free(port: int) -> bool:
    with socket.socket() as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
