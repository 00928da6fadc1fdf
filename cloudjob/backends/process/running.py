"""Finds the jobs that run on this machine, and the leftovers of killed jobs.

A file ``running/<job>`` is created and locked before anything else of a job. The submitter holds
the lock, then the controller, its keepers and the entries, which inherit it. The controller removes
the file when only the job's log and state are left. So a file without a lock belongs to a job whose
processes were killed, and lists the folders that they left behind. A job of another machine that
shares ``$CLOUDJOB_HOME`` may run although its file seems to have no lock.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from cloudjob.backends.process import STATE
from cloudjob.home import hosts, locks, private_folder, writing
from cloudjob.home.hosts import Relation
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
    remove_leftovers_of(home, job)
    line = hosts.first_line(folder=str(folder), temporary=list(temporary))
    return locks.acquire_new(path_of(home, job), line)


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


def unseen_host(home: Path, job: str) -> str:
    """Return the machine that started a job whose processes are invisible here, else "".

    Such a job may still run, whether or not its lock can be seen here.
    """
    path = path_of(home, job)
    return name_of_host(home, job) if locks.is_unseen(path) else ""


def is_local(home: Path, job: str) -> bool:
    """Whether the processes of a job are visible here, or were until they ended."""
    host = hosts.creator_of(path_of(home, job))
    return host is None or host.relation(hosts.this_host()) is Relation.HERE


def name_of_host(home: Path, job: str) -> str:
    """Return the name of the machine or container that started a job; empty if unknown."""
    host = hosts.creator_of(path_of(home, job))
    return host.name if host else ""


def controller_of(home: Path, job: str) -> int:
    """Return the process id of a job's controller; 0 if it is gone, invisible or not started."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        process = int(path_of(home, job).read_bytes().split(b"\n")[1])
        if _belongs_to(process, job):
            return process
    # Outside a container, its processes have other numbers; a keeper is a child of the controller.
    with contextlib.suppress(OSError):
        processes = [each for each in processes_of(home, job) if _belongs_to(each, job)]
        return next((each for each in processes if _parent_of(each) not in processes), 0)
    return 0


def _belongs_to(process: int, job: str) -> bool:
    """Whether a process is the controller, a keeper or an entry of a job."""
    with contextlib.suppress(OSError):
        argv = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        return process_name(job).encode() in argv
    return False


def _parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[1])


def processes_of(home: Path, job: str) -> list[int]:
    """Return the processes that hold the lock of a job: controller, keepers and entries."""
    path = path_of(home, job)
    processes = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdecimal() and _has_open(folder, path):
                processes.append(int(folder.name))
    return processes


def _has_open(process: Path, path: Path) -> bool:
    target = path.stat()
    for link in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            if os.path.samestat(link.stat(), target):
                return True
    return False


def process_name(job: str) -> str:
    """Return the word in the argv of a controller, and of its forks, that names the job."""
    return f"cloudjob-{job}"


def remove_leftovers(home: Path) -> None:
    """Remove the leftovers of jobs whose processes were killed."""
    with contextlib.suppress(OSError):
        for path in (home / _FOLDER).iterdir():
            with contextlib.suppress(OSError):
                if path.name.startswith("."):
                    _remove_unfinished(path)
                else:
                    remove_leftovers_of(home, path.name)


def run_dir_of(home: Path, job: str) -> Path | None:
    """Return the folder for sockets and temporary files of a job; None if it is not known."""
    entry = hosts.read_first_line(path_of(home, job))
    try:
        return Path(entry["temporary"][0])
    except (IndexError, KeyError, TypeError):
        return None


def remove_leftovers_of(home: Path, job: str) -> None:
    """Remove the leftovers of a job whose processes were killed.

    Raises:
        OSError: Something could not be removed; the next command tries again.
    """
    path = path_of(home, job)
    if not path.exists() or locks.is_held(path) or unseen_host(home, job):
        return
    entry = hosts.read_first_line(path)
    try:
        folder, temporary = Path(entry["folder"]), [str(item) for item in entry["temporary"]]
    except (KeyError, TypeError):
        folder, temporary = home / "process" / job, []
    if not (folder / STATE).exists():
        temporary.append(str(folder))
    for item in temporary:
        remove_tree(item)
    path.unlink(missing_ok=True)


def _remove_unfinished(path: Path) -> None:
    """Remove a file whose creator was killed before it could rename the file."""
    if time.time() - path.stat().st_mtime > _NEW_S and not locks.is_held(path):
        path.unlink()
