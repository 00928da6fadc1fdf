"""Check whether a machine and a store can run jobs, with a hint for each problem."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudjob.backends import interpreters, open_backend
from cloudjob.backends.base import Backend, Check
from cloudjob.backends.docker import engine
from cloudjob.errors import BackendError, StoreError
from cloudjob.home import file_systems, make_home
from cloudjob.store import job_store, open_store
from cloudjob.store.parallel import call_with_timeout
from jobentry.contract import launchers

if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

_LIMIT_S = 60
# Seconds for a file system to answer.
_FILES_S = 15.0


def all_needed_ok(checks: list[Check]) -> bool:
    """Whether every check that jobs need has passed."""
    return all(check.is_ok for check in checks if check.is_needed)


# -- this machine ---------------------------------------------------------------------------------


def check_machine(home: Path) -> list[Check]:
    """Return the checks of this machine; ``home`` is ``$CLOUDJOB_HOME``."""
    docker = _engine()
    mpirun = _mpirun()
    return [
        Check(
            "python",
            sys.version_info >= (3, 10),
            f"{sys.version.split()[0]} ({sys.executable})",
            "cloudjob needs Python 3.10 or later",
        ),
        _script_python(),
        _state_folder(home),
        # Either mpirun or a container engine is enough for a first job.
        mpirun._replace(is_needed=not docker.is_ok),
        _namespaces(),
        docker._replace(is_needed=not mpirun.is_ok),
    ]


def check_backend(spec: JobSpec, home: Path) -> list[Check]:
    """Return the backend's own checks, for the job in ``spec`` if it describes one.

    A backend without checks of its own runs jobs on this machine, so the machine is checked.
    """
    backend: Backend[Any] = open_backend(spec.backend, home, dict(spec.section(spec.backend)))
    uri = job_store(spec.store, backend.store()[0], spec.sections)
    is_whole = bool(spec.flavor or spec.script or spec.section(spec.backend).get("pool_id"))
    checks = backend.checks(spec if is_whole else None, uri)
    return checks or check_machine(home)


def _state_folder(home: Path) -> Check:
    try:
        return call_with_timeout(_FILES_S, lambda: _writable_folder(home))
    except TimeoutError as error:
        text = f"{home}: its file system does not answer: {error}"
        return Check("CLOUDJOB_HOME", False, text, file_systems.UNANSWERED)


def _writable_folder(home: Path) -> Check:
    hint = "set CLOUDJOB_HOME to a folder that you may write to"
    try:
        make_home(home)
        with tempfile.NamedTemporaryFile(dir=home):
            pass
    except OSError as error:
        return Check("CLOUDJOB_HOME", False, f"{home}: {error.strerror}", hint)
    except BackendError as error:
        return Check("CLOUDJOB_HOME", False, error.message, error.hint)
    lacks = file_systems.missing_feature(home)
    if lacks:
        return Check("CLOUDJOB_HOME", False, f"{home}: {lacks[0]}", lacks[1])
    return Check("CLOUDJOB_HOME", True, str(home))


def _script_python() -> Check:
    """Return which interpreter runs scripts on emulated nodes, and why."""
    interpreter = interpreters.choose("", "process.python")
    text = f"{interpreter.stale}; {interpreter.shown}" if interpreter.stale else interpreter.shown
    return Check(
        "script's python", not interpreter.stale, text, "activate another one", is_needed=False
    )


def _mpirun() -> Check:
    hint = "for the backend process: pip install 'cloudjob[mpi]', or apt-get install openmpi-bin"
    path = shutil.which("mpirun", path=interpreters.path_with_mpirun())
    if path is None:
        return Check("mpirun", False, "not found", hint)
    try:
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("mpirun", False, f"{path}: {error}", hint)
    return mpi_check("mpirun", path, done.stdout.decode("utf-8", "replace"), hint)


def mpi_check(name: str, path: str, text: str, hint: str) -> Check:
    """Return the check of an MPI; ``text`` is what ``mpirun --version`` printed."""
    version = launchers.parse_mpi_version(text)
    if version is None:
        return Check(name, False, f"{path}: not an MPI implementation that cloudjob supports", hint)
    version_text = f"{version.family} {'.'.join(map(str, version.version))} ({path})"
    return Check(name, version.is_supported, version_text, "use Open MPI 4.1 or 5.0")


def _namespaces() -> Check:
    from cloudjob.backends.process import isolation

    level = isolation.possible_level()
    return Check(
        "namespaces",
        level == "files",
        {"files": "allowed", "names": "only for host names", "none": "not allowed"}[level],
        "without them emulated nodes share a host name and /tmp: "
        "sysctl kernel.unprivileged_userns_clone=1",
        is_needed=False,
    )


def _engine() -> Check:
    try:
        client = engine.connect()
        with (
            contextlib.closing(client),
            engine.translate_errors("asking the engine for its version"),
        ):
            version = client.version()
    except BackendError as error:
        return Check(
            "container engine", False, error.message, f"for the backend docker: {error.hint}"
        )
    name = next((part["Name"] for part in version.get("Components") or ()), "Engine")
    return Check("container engine", True, f"{name} {version['Version']} ({engine.host()})")


# -- a store --------------------------------------------------------------------------------------

# S3 and OBS refuse requests signed with a clock that is 15 minutes off.
_MAX_SKEW_S = 900
_WARN_SKEW_S = 300
# Seconds to retry while the store cannot be reached.
_STORE_S = 5.0


def check_store(uri: str) -> list[Check]:
    """Check that the store at ``uri`` writes, lists and reads an object; compare the clocks."""
    try:
        limit_s = _FILES_S if uri.startswith("file:") else _LIMIT_S
        return call_with_timeout(limit_s, lambda: _check_store(uri))
    except TimeoutError as error:
        text = f"{uri.partition('?')[0]}: it does not answer: {error}"
        return [Check("store", False, text, file_systems.UNANSWERED)]


def _check_store(uri: str) -> list[Check]:
    key, data = f"doctor/{os.urandom(8).hex()}", os.urandom(64)
    place = uri.partition("?")[0]
    try:
        store = open_store(uri, retry_s=_STORE_S)
        store.put_bytes(data, key)
        is_same = store.get_bytes(key) == data
        is_listed = list(store.list(key)) == [key]
        store.delete(key)
    except StoreError as error:
        return [Check("store", False, error.message, error.hint)]
    hint = "does a proxy between this machine and the store change the data?"
    result = f"{place}: an object was written, listed and read"
    if not (is_same and is_listed):
        result = f"{place}: the object that was read or listed is not the one that was written"
    checks = [Check("store", is_same and is_listed, result, hint)]
    ahead_s = store.clock_ahead_s
    if ahead_s:
        direction = "ahead of" if ahead_s > 0 else "behind"
        checks.append(
            Check(
                "clock",
                abs(ahead_s) < _WARN_SKEW_S,
                f"{abs(ahead_s):.0f} s {direction} the store's",
                f"set this machine's clock: a store refuses all requests beyond {_MAX_SKEW_S} s",
                is_needed=False,
            )
        )
    return checks
