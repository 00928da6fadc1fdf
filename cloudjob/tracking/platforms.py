"""Opens the backend of a job, or a stand-in if the backend cannot be used here."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, NoReturn

from cloudjob.backends import open_backend
from cloudjob.backends.base import Backend, NativeStatus
from cloudjob.errors import BackendError
from cloudjob.home.records import JobRecord
from cloudjob.model.rules import is_remote
from cloudjob.model.status import JobState

# Native states of an UNKNOWN job that will never change.
GONE = (
    "the submit was interrupted",
    "the backend has no such job",
    "this cloudjob has no such backend",
)
# The native state of a job that only its submitter can query, until its record exists.
ELSEWHERE = "not on this machine"
_POLL_S = 0.5


def backend_for(record: JobRecord, home: Path) -> Backend[Any]:
    """Return the backend of a job, if possible with the state folder of the job's submit.

    Backends that run jobs on this machine keep the jobs' state there; others only cache data there.
    """
    if record.home in ("", str(home)):
        return backend_of(record.backend, home)
    folder = Path(record.home)
    host = record.submitted_by.rpartition("@")[2]
    is_here = host == socket.gethostname() and os.access(folder, os.R_OK | os.W_OK | os.X_OK)
    if is_here and folder.stat().st_uid == os.geteuid():
        return backend_of(record.backend, folder)
    if is_remote(record.backend):
        return backend_of(record.backend, home)
    return _NoBackend(
        BackendError(
            f"asking the backend {record.backend} for {record.job}: it was submitted by "
            f"{record.submitted_by} with the state folder {record.home}",
            hint="only that user on that machine can ask it; its outputs can be downloaded here",
        ),
        ELSEWHERE,
    )


def backend_of(name: str, home: Path) -> Backend[Any]:
    """Return the backend with this name, or a stand-in if this cloudjob does not have it."""
    try:
        return open_backend(name, home)
    except BackendError as error:
        return _NoBackend(error, GONE[2])


class _NoBackend(Backend[Any]):
    """Stands in for a backend that cannot be used here; jobs can be listed and removed."""

    poll_s = _POLL_S

    def __init__(self, error: BackendError, native: str) -> None:
        self._error = error
        self._native = native

    def status(self, _handle: str) -> NativeStatus:
        return NativeStatus(JobState.UNKNOWN, self._native)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise self._error

    build = show = environments = handle = send = logs = log_ends = cancel = events = metrics = (
        _refuse
    )
    refresh = _refuse

    def remove(self, _handle: str) -> None:
        """Do nothing: the platform cannot be reached without its backend."""
