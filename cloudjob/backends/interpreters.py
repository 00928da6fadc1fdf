"""The interpreters of a job that finds this machine's folders on its nodes: script, entry, MPI."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import cloudjob
from cloudjob.errors import BackendError
from cloudjob.home import writing
from jobentry.contract.paths import ENTRY


def python_of(asked: str, key: str) -> str:
    """Return the interpreter of the script: asked for, the active environment's, or our own.

    Args:
        key: Where it was asked for, for a message.

    Raises:
        BackendError: There is no such program.
    """
    if asked:
        found = shutil.which(asked)
        if found is None:
            raise BackendError(
                f"looking for {key}: {asked}: there is no such program",
                hint="give the path of a Python interpreter",
            )
        return str(Path(found).absolute())
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        prefix = os.environ.get(variable)
        if prefix and os.access(f"{prefix}/bin/python", os.X_OK):
            return f"{prefix}/bin/python"
    return sys.executable


def libmpi_of(mpirun: str, python: str) -> str:
    """Return the library of this mpirun, when mpi4py would take that of a wheel in another place.

    Ranks of one MPI under the mpirun of another work by luck; what they say when they fail is lost.
    """
    prefix = Path(mpirun).resolve().parent.parent
    environment = Path(python).parent.parent
    if prefix == environment or not any((environment / "lib").glob("libmpi.so*")):
        return ""
    found = sorted(prefix.glob("lib/libmpi.so.*")) + sorted(prefix.glob("lib/*/libmpi.so.*"))
    return str(found[0]) if found else ""


def entry_of(home: Path) -> str:
    """Return the folder of the unpacked entry, made below ``home`` when it is first used.

    Unpacked, it starts faster than the archive does.

    Raises:
        BackendError: There is no room for it, or no right to write there.
    """
    archive = Path(cloudjob.__file__).parent / ENTRY
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    folder = home / "entry" / f"{digest[:16]}-{sys.implementation.cache_tag}"
    if not folder.is_dir():
        with writing("unpacking the entry", folder):
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _unpack(archive, folder)
    return str(folder)


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack the entry; another cloudjob may do the same at this moment."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        words = [sys.executable, "-I", "-S", str(archive), "--unpack", f"{scratch}/entry"]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if done.returncode:
            raise OSError(0, os.fsdecode(done.stderr).strip().rpartition(": ")[2])
        try:
            Path(scratch, "entry").rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
