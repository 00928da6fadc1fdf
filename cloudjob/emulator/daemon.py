"""Starts, stops and queries the emulator's process."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cloudjob import installation
from cloudjob.backends import open_backend
from cloudjob.emulator import state
from cloudjob.emulator.state import CONTROL_HEADER, READY, Address, run_dir_of
from cloudjob.errors import BackendError, UsageError
from cloudjob.home import locks, make_home, writing
from jobentry.system.trees import remove_tree

_POLL_S = 0.05
_END_S = 60.0
_ANSWER_S = 60.0
_LIBRARIES = ("boto3", "httpx", "huaweicloudsdkcore", "pydantic", "starlette", "uvicorn")


def folder(home: Path) -> Path:
    """Return the folder of the emulator's state."""
    return home / "emulator"


def up(home: Path, *, config: Path | None = None, port: int = 0) -> Address:
    """Start the emulator unless it is running; return where it listens.

    Args:
        config: The settings file; later starts use the same settings.
        port: The port of the API; 0 for the same as before.

    Raises:
        CloudJobError: The emulator does not start.
    """
    with _locked(home) as place:
        return _up(place, config, port)


def down(home: Path) -> bool:
    """Stop the emulator; return whether it was running.

    Raises:
        BackendError: The emulator does not stop.
    """
    with _locked(home) as place:
        return _down(place)


def _up(place: Path, config: Path | None, port: int) -> Address:
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if state.is_running(place):
        if config or port:
            raise UsageError(
                "starting the emulator: it is already running, perhaps with other settings",
                hint="cloudjob emulator down",
            )
        return _address_of(place)
    _need_libraries()
    if config:
        from cloudjob.emulator import settings

        settings.load(config)
        shutil.copyfile(config, place / state.SETTINGS)
    _start(place, port)
    return _address_of(place)


def _down(place: Path) -> bool:
    if not state.is_running(place):
        return False
    address = _address_of(place)
    with contextlib.suppress(ProcessLookupError):
        os.kill(address.pid, signal.SIGTERM)
    end = time.monotonic() + _END_S
    while state.is_running(place):
        if time.monotonic() > end:
            raise BackendError(
                f"stopping the emulator: process {address.pid} is still running",
                hint=f"kill -9 {address.pid}",
            )
        time.sleep(_POLL_S)
    return True


def reset(home: Path) -> bool:
    """Delete all jobs, objects and keys; return whether the emulator was running and is restarted.

    Raises:
        CloudJobError: The emulator does not stop or start.
    """
    with _locked(home) as place:
        ran = _down(place)
        _end_jobs(place)
        kept = place / state.SETTINGS
        text = kept.read_bytes() if kept.exists() else None
        with contextlib.suppress(OSError):
            remove_tree(place)
        if text is not None:
            place.mkdir(mode=0o700, exist_ok=True)
            kept.write_bytes(text)
        if ran:
            _up(place, None, 0)
    return ran


def status(home: Path) -> dict[str, Any]:
    """Return addresses, keys, jobs and faults; only ``is_running`` if the emulator is stopped."""
    place = folder(home)
    if not state.is_running(place):
        return {"is_running": False}
    return {"is_running": True, **_address_of(place).shown(), **_call(place, "GET", "status")}


def is_running(home: Path) -> bool:
    """Whether an emulator runs with this state folder."""
    return state.is_running(folder(home))


def jobs(home: Path) -> dict[str, Any]:
    """Return the number of jobs in the emulator, and the newest, from all clients."""
    return _call(folder(home), "GET", "jobs")


def add_fault(home: Path, **values: Any) -> dict[str, Any]:
    """Inject a fault; see ``fault_injection.KINDS``."""
    return _call(folder(home), "POST", "faults", values)


def faults(home: Path) -> list[dict[str, Any]]:
    """Return the active faults."""
    faults_set: list[dict[str, Any]] = _call(folder(home), "GET", "faults")["faults"]
    return faults_set


def clear_faults(home: Path) -> int:
    """End all faults; return how many there were."""
    return int(_call(folder(home), "DELETE", "faults")["cleared"])


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[Path]:
    """Hold the lock that a command needs to start or stop the emulator; yield its folder."""
    with contextlib.ExitStack() as stack:
        with writing("starting or stopping the emulator", home):
            make_home(home)
            stack.enter_context(locks.hold(home / "emulator.lock"))
        yield folder(home)


# -- the process ----------------------------------------------------------------------------------


def _need_libraries() -> None:
    for name in _LIBRARIES:
        if find_spec(name) is None:
            raise BackendError(
                f"starting the emulator: {name} is not installed",
                hint="pip install 'cloudjob[emulator]'",
            )


def _start(place: Path, port: int) -> None:
    module = "cloudjob.emulator.main"
    with (place / state.LOG).open("ab") as log:
        process = subprocess.Popen(
            installation.argv_of(module, str(place), str(port), is_isolated=False),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd="/",
            start_new_session=True,
        )
    assert process.stdout is not None
    with process.stdout as output:
        first = output.readline()
        rest = b"" if first == READY else output.read()
    if first != READY:
        process.wait()
        message = first.decode("utf-8", "replace").strip()
        last = state.last_line(place / state.LOG)
        raise BackendError(
            message or f"starting the emulator: {last or 'it ended without an error message'}",
            hint=rest.decode("utf-8", "replace").strip() or f"see {place / state.LOG}",
        )
    # The emulator outlives this process, which does not wait for it.
    process.returncode = 0


def _address_of(place: Path) -> Address:
    address = state.address(place)
    if address is None:
        raise BackendError(
            f"looking for the emulator: {place / state.ADDRESS} cannot be read",
            hint="another `cloudjob emulator up` may be running; try again",
        )
    return address


def _end_jobs(place: Path) -> None:
    """End the jobs that still run after the emulator has stopped."""
    home = place / state.BACKENDS
    for name in ("process", "docker"):
        if not (home / name).is_dir():
            continue
        backend = open_backend(name, home)
        for path in (home / name).iterdir():
            if path.is_dir():
                backend.remove(f"{name}://local/{path.name}")
                shutil.rmtree(run_dir_of(path.name), ignore_errors=True)


def _call(place: Path, method: str, path: str, body: Any = None) -> dict[str, Any]:
    if not state.is_running(place):
        raise BackendError("asking the emulator: it is not running", hint="cloudjob emulator up")
    import requests

    address = _address_of(place)
    url, headers = address.endpoint + state.CONTROL_PREFIX + path, {CONTROL_HEADER: address.control}
    try:
        with requests.Session() as session:
            session.trust_env = False
            answer = session.request(method, url, json=body, headers=headers, timeout=_ANSWER_S)
        values: dict[str, Any] = answer.json()
    except requests.RequestException as error:
        raise BackendError(
            f"asking the emulator at {address.endpoint}: {error}", hint=f"see {place / state.LOG}"
        ) from error
    if not answer.ok:
        raise UsageError(f"asking the emulator: {values.get('error_msg')}")
    return values
