"""Several jobs: which are meant, how two differ, and what all of them have left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from fnmatch import fnmatchcase
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from cloudjob import layers
from cloudjob.backends import handles
from cloudjob.backends.base import Backend, NativeStatus
from cloudjob.errors import CloudJobError, JobNotFound, Unreachable
from cloudjob.home import records_path, store_uri
from cloudjob.job import leftovers
from cloudjob.job.one import GONE, Job, attach, backend_of
from cloudjob.layers import Collected
from cloudjob.records import SUBMITTING, JobRecord, Records
from cloudjob.status import JobStatus
from cloudjob.store import open_store

_DAY_S = 24 * 3600.0
# How many jobs are asked for at once in a list, and for how long.
_AT_ONCE = 8
_LIST_S = 20.0


class Filter(NamedTuple):
    """Which jobs are meant; what is empty says nothing.

    Args:
        names: Patterns as a shell has them, of the job's id or its name.
        since: RFC 3339 UTC: jobs submitted then or later.
    """

    backends: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    since: str = ""

    def takes(self, record: JobRecord) -> bool:
        """Whether a job may pass, as far as its record says: its state is not asked for here."""
        words = (record.job, record.name)
        return (
            (not self.backends or record.backend in self.backends)
            and (not self.names or any(fnmatchcase(w, n) for w in words for n in self.names))
            and record.created_at >= self.since
        )


def find_all(
    home: Path,
    which: Filter = Filter(),  # noqa: B008 (a value)
    *,
    limit: int | None = None,
) -> list[tuple[Job, JobStatus]]:
    """Return the jobs submitted from here that match, newest first, and their status.

    Jobs are UNKNOWN whose platform cannot be asked, or has not answered in time.

    Args:
        limit: Return only the newest.
    """
    leftovers.sweep(home)
    with Records(records_path(home)) as db:
        records = [record for record in db.list() if which.takes(record)]
    # A job that has ended stands in the records; only the others cost a question each.
    ended = [record for record in records if which.states and _is_out(record, which.states)]
    left_out = {record.job for record in ended}
    backends: dict[str, Backend[Any]] = {}
    jobs = []
    # With states a job that is left out makes room for an older one.
    for record in records if which.states else records[:limit]:
        if record.job not in left_out:
            if record.backend not in backends:
                backends[record.backend] = backend_of(record.backend, home)
            jobs.append(Job(record, backends[record.backend], home))
    found = [
        (job, status)
        for job, status in zip(jobs, _Question(jobs, backends).answers(), strict=True)
        if not which.states or status.state.value in which.states
    ]
    return found[:limit]


def _is_out(record: JobRecord, states: tuple[str, ...]) -> bool:
    """Whether a job has ended in a state that is not meant."""
    return bool(record.final_json) and record.state not in states


class _Question:
    """Asks for the status of many jobs at once, within a time limit.

    A platform that can list its jobs is asked for all of them together; one that does not answer is
    not asked again.
    """

    def __init__(self, jobs: list[Job], backends: Mapping[str, Backend[Any]]) -> None:
        self._jobs = jobs
        self._backends = backends
        self._silent: dict[str, str] = {}
        self._listed: dict[str, Future[Mapping[str, NativeStatus | None]]] = {}
        self._next = iter(range(len(jobs)))
        self._found: dict[int, Callable[[], JobStatus]] = {}
        self._changed = threading.Condition()

    def answers(self) -> list[JobStatus]:
        """Return the status of each job, in their order."""
        deadline_s = time.monotonic() + _LIST_S
        # They end with the process, whatever a platform does.
        for _ in range(min(_AT_ONCE, len(self._jobs))):
            threading.Thread(target=self._work, daemon=True).start()
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._found) == len(self._jobs), deadline_s - time.monotonic()
            )
            found = dict(self._found)
        late = f"no answer within {_LIST_S:g} s"
        return [found[n]() if n in found else job.unknown(late) for n, job in enumerate(self._jobs)]

    def _work(self) -> None:
        while True:
            with self._changed:
                index = next(self._next, None)
            if index is None:
                return
            answer = self._answer(self._jobs[index])
            with self._changed:
                self._found[index] = answer
                self._changed.notify_all()

    def _answer(self, job: Job) -> Callable[[], JobStatus]:
        """Return what gives the status of a job, or raises what nobody has foreseen."""
        try:
            status = self._status(job)
        except Exception as error:  # noqa: BLE001 (raised in the caller's thread)
            return partial(_raise, error)
        return lambda: status

    def _status(self, job: Job) -> JobStatus:
        platform = handles.platform(job.handle)
        if platform in self._silent:
            return job.unknown(self._silent[platform])
        try:
            found = {} if job.is_kept or not job.handle else self._statuses(platform, job)
            if job.handle in found:
                return job.status_in_list(found[job.handle])
            return job.status()
        except CloudJobError as error:
            if isinstance(error, Unreachable):
                self._silent[platform] = error.message
            return job.unknown(error.message)

    def _statuses(self, platform: str, job: Job) -> Mapping[str, NativeStatus | None]:
        """Return what the platform of a job says of all its jobs together."""
        with self._changed:
            is_first = platform not in self._listed
            future = self._listed.setdefault(platform, Future())
        if is_first:
            asked = [
                other.handle
                for other in self._jobs
                if not other.is_kept and handles.platform(other.handle) == platform
            ]
            try:
                future.set_result(self._backends[job.backend_name].statuses(asked))
            except Exception as error:  # noqa: BLE001 (raised for each of these jobs)
                future.set_exception(error)
        return future.result()


def _raise(error: Exception) -> NoReturn:
    raise error


def differences(first: Job, second: Job) -> list[tuple[str, Any, Any]]:
    """Return each key in which the descriptions of two jobs differ, with both values."""
    left, right = _flat(first), _flat(second)
    return [
        (key, left.get(key), right.get(key))
        for key in sorted({*left, *right})
        if left.get(key) != right.get(key)
    ]


def _flat(job: Job) -> dict[str, Any]:
    found = {"code.digest": job.code_digest}
    for key, value in job.spec().items():
        if isinstance(value, dict):
            found.update({f"{key}.{name}": item for name, item in value.items()})
        else:
            found[key] = value
    return found


def collect(home: Path, store: str, *, keep_days: float, dry_run: bool) -> Collected:
    """Delete the layers in a store that no job needs, and what killed writers have left half done.

    Args:
        store: Its URI; empty for the default.
        keep_days: For how long after its end a job keeps its package.

    Raises:
        CloudJobError: The store or the records cannot be used.
    """
    opened = open_store(store or store_uri(home))
    if not dry_run:
        opened.sweep(_DAY_S)
    return layers.collect(
        opened,
        keep_s=keep_days * _DAY_S,
        ended_at=lambda job: _ended_at(home, job),
        dry_run=dry_run,
    )


def _ended_at(home: Path, job: str) -> str | None:
    """Say when a job has ended, as it is known at this moment; empty: not yet; None: not known."""
    try:
        with Records(records_path(home)) as db:
            record = db.get(job)
        if record.job != job:
            return None
        status = attach(record, home).status()
    except JobNotFound:
        return None
    if status.native_state in GONE:
        return status.created_at
    return (status.ended_at or status.created_at) if status.state.is_final else ""


def sweep(home: Path) -> list[str]:
    """Remove what killed submits have left in the engine and on clusters; name their jobs."""
    from cloudjob.backends.docker.backend import DockerBackend

    with Records(records_path(home)) as db:
        records = db.list()
    known = {record.job for record in records if _was_sent(record, home)}
    # Without the SDK no submit of this installation has started containers.
    has_docker = find_spec("docker") is not None
    removed = DockerBackend(home, {}).sweep(known) if has_docker else []
    return removed + _sweep_kubernetes(home, records)


def _sweep_kubernetes(home: Path, records: list[JobRecord]) -> list[str]:
    handles = [
        record.handle
        for record in records
        if record.handle.startswith("kubernetes://") and not record.final_json
    ]
    if not handles:
        return []
    from cloudjob.backends.kubernetes.backend import KubernetesBackend

    return KubernetesBackend(home, {}).sweep(handles)


def _was_sent(record: JobRecord, home: Path) -> bool:
    """Whether the submit of a job came to its end, or is still at work."""
    if record.state != SUBMITTING or record.backend != "docker":
        return True
    return attach(record, home).status().native_state not in GONE
