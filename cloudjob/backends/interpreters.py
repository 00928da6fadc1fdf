"""The interpreters of a job that finds this machine's folders on its nodes: script, entry, MPI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import cloudjob
from cloudjob.errors import BackendError
from cloudjob.home import writing


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
    """Return the bytecode of the entry for our Python, made below ``home`` when it is first used.

    The zipapp lies beside it: a script may be for another Python.

    Raises:
        BackendError: There is no room for it, or no right to write there.
    """
    zipapp = Path(cloudjob.__file__).parent / "jobentry.pyz"
    found = zipapp.stat()
    name = f"{found.st_mtime_ns:x}-{found.st_size:x}-{sys.implementation.cache_tag}"
    compiled = home / "entry" / name / "jobentry.pyc"
    copy = compiled.with_suffix(".pyz")
    if not compiled.exists():
        with writing("making the entry", compiled):
            compiled.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = copy.with_suffix(f".{os.getpid()}")
            shutil.copyfile(zipapp, new)
            new.replace(copy)
        words = [sys.executable, "-I", "-S", str(copy), "--compile", str(compiled)]
        # It is only faster with bytecode; what is wrong with the disk shows soon enough.
        subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return str(compiled if compiled.exists() else copy)
