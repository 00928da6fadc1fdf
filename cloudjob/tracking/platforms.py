"""Opens the backend of a job, or a stand-in if the backend cannot be used here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from cloudjob.backends import handles, open_backend
from cloudjob.backends.base import Backend
from cloudjob.backends.native import Absent
from cloudjob.errors import BackendError, CloudJobError
from cloudjob.home.records import JobRecord
from cloudjob.model.status import Absence

_POLL_S = 0.5
# The place in the handle of a job that cannot be asked for: that of its description is not kept.
_NOWHERE = "-"

# Returns the settings of each backend in the reader's configuration.
Sections = Callable[[], Mapping[str, Mapping[str, Any]]]


def no_sections() -> Mapping[str, Mapping[str, Any]]:
    """Return no settings: those of the environment and the vendors' files apply."""
    return {}


class Opened(NamedTuple):
    """The record of a job, with a handle that can be trusted, and the job's backend."""

    record: JobRecord
    backend: Backend[Any]


def opener(home: Path, sections: Sections) -> Callable[[JobRecord], Opened]:
    """Return a function that opens the backend of a job; jobs on one platform share theirs.

    A job that was submitted here is where its own handle says. The handle of any other comes from a
    description that others may have written, so it is made again from the configuration.

    Args:
        sections: Returns the reader's settings of each backend; called for jobs of others.
    """
    ours = cache(lambda name: backend_of(name, home))
    configured = cache(lambda name: open_backend(name, home, dict(sections().get(name, {}))))

    def open_job(record: JobRecord) -> Opened:
        if record.is_ours:
            return Opened(record, ours(record.backend))
        copies_files = False
        try:
            backend = configured(record.backend)
            copies_files = backend.copies_files
            handle = backend.own_handle(record.handle, record.job)
            return Opened(record._replace(handle=handle), backend)
        except (CloudJobError, ValueError) as error:
            refusal = BackendError(
                f"asking the backend {record.backend} for {record.job}, which "
                f"{record.submitted_by} submitted: {error}",
                hint=getattr(error, "hint", ""),
            )
            nowhere = handles.write(record.backend, _NOWHERE, record.job)
            stand_in = _NoBackend(refusal, Absence.OUT_OF_REACH, copies_files=copies_files)
            return Opened(record._replace(handle=nowhere), stand_in)

    return open_job


def backend_of(name: str, home: Path) -> Backend[Any]:
    """Return the backend with this name, or a stand-in if this cloudjob does not have it."""
    try:
        return open_backend(name, home)
    except BackendError as error:
        return _NoBackend(error, Absence.NO_BACKEND)


class _NoBackend(Backend[Any]):
    """Stands in for a backend that cannot be used here; jobs can be listed and removed."""

    poll_s = _POLL_S

    def __init__(self, error: BackendError, why: Absence, *, copies_files: bool = False) -> None:
        self.copies_files = copies_files
        self._error = error
        self._why = why

    def status(self, _handle: str) -> Absent:
        return Absent(self._why)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise self._error

    build = show = environments = handle = send = logs = log_ends = cancel = events = metrics = (
        _refuse
    )
    own_handle = refresh = ask = _refuse

    def remove(self, _handle: str) -> None:
        """Do nothing: the platform cannot be reached without its backend."""
