"""Install each peer in its own virtual environment, byte-compiled and kept between runs."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "benchmarks" / "peers"
CACHE = ROOT / ".cache" / "bench"
_COMPLETE = "complete"


class NotRun(Exception):
    """A subject cannot be measured here; the message is the reason."""


def requirements(peer: str) -> str:
    """Return the contents of the peer's requirements file."""
    return (PEERS / f"{peer}.txt").read_text()


def version(peer: str) -> str:
    """Return the version of ``peer`` in its requirements file."""
    for line in requirements(peer).splitlines():
        name, _, pinned = line.partition("==")
        if name.replace("_", "-") == peer:
            return pinned
    raise LookupError(f"benchmarks/peers/{peer}.txt does not pin {peer}")


def prepare(peer: str) -> Path:
    """Return the folder of the peer's environment, created if it does not exist.

    Raises:
        NotRun: It cannot be installed.
    """
    key = f"{sys.version_info[:2]} {sysconfig.get_platform()}\n{requirements(peer)}"
    folder = CACHE / f"{peer}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if not (folder / _COMPLETE).exists():
        print(f"installing {peer} ...", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        _install(peer, folder)
        (folder / _COMPLETE).touch()
    return folder


def empty(folder: Path) -> None:
    """Create an empty environment, without pip."""
    subprocess.run((sys.executable, "-m", "venv", "--without-pip", str(folder)), check=True)


def compile_bytes(python: Path, *folders: Path) -> None:
    """Byte-compile ``folders``; without that, starts take two or three times as long."""
    argv = (str(python), "-m", "compileall", "-q", *map(str, folders))
    # Some packages contain templates that cannot be compiled and are never imported.
    subprocess.run(argv, check=False, capture_output=True, env=_env())


def _install(peer: str, folder: Path) -> None:
    python = folder / "bin" / "python"
    _call(peer, sys.executable, "-m", "venv", str(folder))
    _call(peer, str(python), "-m", "pip", "install", "-q", "-r", str(PEERS / f"{peer}.txt"))
    compile_bytes(python, folder / "lib")


def _call(peer: str, *argv: str) -> None:
    done = subprocess.run(argv, check=False, capture_output=True, text=True, env=_env())
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or ["no message"]
        raise NotRun(f"{peer} {version(peer)} cannot be installed: {lines[0][:200]}")


def _env() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
