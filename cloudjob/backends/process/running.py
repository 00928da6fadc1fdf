"""Finds the jobs that run on this machine, and the leftovers of killed jobs.

A file ``running/<job>`` is created and locked before anything else of a job. The submitter holds
the lock, then the controller, its keepers and the entries, which inherit it. The controller removes
the file when only the job's log and state are left. So a file without a lock belongs to a job whose
processes were killed, and lists the folders that they left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from cloudjob.backends.process import STATE
from cloudjob.home import locks, private_folder, writing
from jobentry.system.trees import remove_tree

_FOLDER = "running"
# Seconds that a new file may keep its temporary name.
_NEW_S = 60.0


def path_of(home: Path, job: str) -> Path:
    """Return the file of a job that runs."""
    return home / _FOLDER / job


def register(home: Path, job: str, folder: Path, temporary: Sequence[str]) -> int:
    """Create the file of a job, and return its locked descriptor.

    Args:
        folder: The job's own folder.
        temporary: Folders to remove when the job has ended.

    Raises:
        OSError: The file cannot be created.
    """
    private_folder(home / _FOLDER)
    sweep_job(home, job)
    text = json.dumps({"folder": str(folder), "temporary": list(temporary)})
    return locks.acquire_new(path_of(home, job), text.encode("ascii") + b"\n")


def note_controller(descriptor: int, process: int) -> None:
    """Write the controller's process id into the file of its job."""
    os.write(descriptor, b"%d\n" % process)


def is_running(home: Path, job: str) -> bool:
    """Whether the job's controller, a keeper or an entry is alive.

    Raises:
        BackendError: The lock cannot be tested.
    """
    path = path_of(home, job)
    with writing(f"checking whether job {job} is running", path):
        return locks.is_held(path)


def controller_of(home: Path, job: str) -> int:
    """Return the process id of a job's controller; 0 if it is gone or not started yet."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        process = int(path_of(home, job).read_bytes().split(b"\n")[1])
        argv = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        if process_name(job).encode() in argv:
            return process
    return 0


def processes_of(home: Path, job: str) -> list[int]:
    """Return the processes that hold the lock of a job: controller, keepers and entries."""
    path = path_of(home, job)
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdecimal() and _has_open(folder, path):
                found.append(int(folder.name))
    return found


def _has_open(process: Path, path: Path) -> bool:
    target = path.stat()
    for link in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            if os.path.samestat(link.stat(), target):
                return True
    return False


def process_name(job: str) -> str:
    """Return the word in the argv of a controller, and of its keepers, that names the job."""
    return f"cloudjob-{job}"


def sweep(home: Path) -> None:
    """Remove the leftovers of jobs whose processes were killed."""
    with contextlib.suppress(OSError):
        for path in (home / _FOLDER).iterdir():
            with contextlib.suppress(OSError):
                if path.name.startswith("."):
                    _sweep_new(path)
                else:
                    sweep_job(home, path.name)


def sweep_job(home: Path, job: str) -> None:
    """Remove the leftovers of a job whose processes were killed.

    Raises:
        OSError: Something could not be removed; the next sweep tries again.
    """
    path = path_of(home, job)
    if not path.exists() or locks.is_held(path):
        return
    try:
        found = json.loads(path.read_bytes().split(b"\n")[0])
        folder, temporary = Path(found["folder"]), [str(item) for item in found["temporary"]]
    except (ValueError, KeyError, TypeError):
        folder, temporary = home / "process" / job, []
    if not (folder / STATE).exists():
        temporary.append(str(folder))
    for item in temporary:
        remove_tree(item)
    path.unlink(missing_ok=True)


def _sweep_new(path: Path) -> None:
    """Remove a file whose creator was killed before it could rename the file."""
    if time.time() - path.stat().st_mtime > _NEW_S and not locks.is_held(path):
        path.unlink()
