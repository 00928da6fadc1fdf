"""Operations on several jobs: select, compare, and remove what they left behind."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime, timedelta, timezone
from fnmatch import fnmatchcase
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from cloudjob.backends.base import Backend, NativeStatus
from cloudjob.errors import CloudJobError, JobNotFound, Unreachable, UsageError
from cloudjob.home import records_path
from cloudjob.home.records import SUBMITTING, JobRecord, Records
from cloudjob.model import grid
from cloudjob.model.rules import BACKENDS
from cloudjob.model.status import JobState, JobStatus
from cloudjob.model.text import nearest
from cloudjob.package import collection
from cloudjob.package.collection import Collected
from cloudjob.store import open_store
from cloudjob.tracking import descriptions, leftovers
from cloudjob.tracking.job import Job
from cloudjob.tracking.lookup import attach
from cloudjob.tracking.platforms import GONE, backend_for

_DAY_S = 24 * 3600.0
# Status requests that a list sends at once, and the time limit of a list.
_AT_ONCE = 8
_LIST_S = 20.0


class Filter(NamedTuple):
    """Selects jobs; an empty field selects all.

    Args:
        names: Shell patterns for the job's id or name.
        since: RFC 3339 UTC: only jobs submitted at this time or later.
        sweep: The id of a sweep.
    """

    backends: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    since: str = ""
    sweep: str = ""

    def matches(self, record: JobRecord) -> bool:
        """Whether a job matches by its record, apart from ``states``, which need the platform."""
        ids = (record.job, record.name)
        return (
            (not self.backends or record.backend in self.backends)
            and (not self.names or any(fnmatchcase(i, n) for i in ids for n in self.names))
            and record.created_at >= self.since
            and (not self.sweep or grid.sweep_of(record.job) == self.sweep)
        )


def filter_of(
    *,
    backend: Sequence[str] = (),
    name: Sequence[str] = (),
    state: Sequence[str] = (),
    since: str = "",
    sweep: str = "",
) -> Filter:
    """Return the filter for values as users type them.

    Args:
        since: ``2h``, ``3d``, a date, or a date and a time.

    Raises:
        UsageError: A backend or state does not exist, or ``since`` is not a time.
    """
    states = tuple(word.upper() for word in state)
    known_states = tuple(each.value for each in JobState)
    for key, words, allowed in (("backend", backend, BACKENDS), ("state", states, known_states)):
        for word in words:
            if word not in allowed:
                raise UsageError(
                    f"reading the filter {key} {word}: no such {key}{nearest(word, allowed)}",
                    hint=f"one of {', '.join(allowed)}",
                )
    earliest = moment(since) if since else ""
    return Filter(tuple(backend), tuple(name), states, earliest, sweep)


def moment(text: str) -> str:
    """Return a time in the format of the records, from an age, a date, or a date and a time.

    Raises:
        UsageError: It is none of these.
    """
    age = re.fullmatch(r"([0-9]{1,6})([smhdw])", text)
    try:
        if age:
            units = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
            found = datetime.now(timezone.utc) - timedelta(**{units[age[2]]: int(age[1])})
        else:
            found = datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone(timezone.utc)
    except (ValueError, OverflowError) as error:
        raise UsageError(
            f"reading the filter since {text}: not a time", hint="2h, 3d, or 2026-01-31"
        ) from error
    return found.isoformat(timespec="milliseconds")[:23] + "Z"


def find_all(
    home: Path,
    which: Filter = Filter(),  # noqa: B008 (a value)
    *,
    limit: int | None = None,
    store: str = "",
) -> list[tuple[Job, JobStatus]]:
    """Return the matching jobs in the records, newest first, with their status.

    A job is UNKNOWN if its platform cannot be reached or does not answer in time.

    Args:
        limit: Return at most this many jobs.
        store: The URI of a store whose jobs are returned instead, whoever submitted them.
    """
    leftovers.sweep(home)
    records = [each for each in _records(home, store) if which.matches(each)]
    # The records hold the state of a job that has ended; each other job costs a request.
    if which.states:
        # With a state filter, a job that does not match makes room for an older one.
        asked = [record for record in records if not _is_out(record, which.states)]
    else:
        asked = records[:limit]
    found = [
        (job, status)
        for job, status in with_status(home, asked)
        if not which.states or status.state.value in which.states
    ]
    return found[:limit]


def with_status(home: Path, records: Sequence[JobRecord]) -> list[tuple[Job, JobStatus]]:
    """Return the jobs of these records with their status, UNKNOWN as for ``find_all``."""
    jobs = jobs_of(home, records)
    return list(zip(jobs, statuses_of(jobs), strict=True))


def statuses_of(jobs: list[Job]) -> list[JobStatus]:
    """Return the status of each job, UNKNOWN as for ``find_all``."""
    return _StatusQuery(jobs).answers()


def jobs_of(home: Path, records: Sequence[JobRecord]) -> list[Job]:
    """Return the jobs of these records; those on one platform share its backend."""
    backends: dict[tuple[str, str], Backend[Any]] = {}
    jobs = []
    for record in records:
        place = (record.backend, record.home)
        if place not in backends:
            backends[place] = backend_for(record, home)
        jobs.append(Job(record, backends[place], home))
    return jobs


def _records(home: Path, store: str) -> list[JobRecord]:
    """Return the records of this machine, or of all jobs in a store, newest first."""
    with Records(records_path(home)) as db:
        own = db.list()
    if not store:
        return own
    known = {record.job: record for record in own}
    found = (known.get(r.job, r) for r in descriptions.read_all(open_store(store), store))
    return sorted(found, key=lambda record: record.created_at, reverse=True)


def _is_out(record: JobRecord, states: tuple[str, ...]) -> bool:
    """Whether a job has ended in a state that is not one of these."""
    return bool(record.final_json) and record.state not in states


class _StatusQuery:
    """Requests the status of many jobs in parallel, within a time limit.

    A platform that can list its jobs gets one request for all of them; one that does not answer
    gets no further requests.
    """

    def __init__(self, jobs: list[Job]) -> None:
        self._jobs = jobs
        self._silent: dict[str, str] = {}
        self._listed: dict[str, Future[Mapping[str, NativeStatus | None]]] = {}
        self._next = iter(range(len(jobs)))
        self._found: dict[int, Callable[[], JobStatus]] = {}
        self._changed = threading.Condition()

    def answers(self) -> list[JobStatus]:
        """Return the status of each job, in their order."""
        deadline_s = time.monotonic() + _LIST_S
        # Daemon threads: a platform that does not answer cannot delay the end of the process.
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
        """Return a function that returns the status of a job, or raises an unexpected error."""
        try:
            status = self._status(job)
        except Exception as error:  # noqa: BLE001 (raised in the caller's thread)
            return partial(_raise, error)
        return lambda: status

    def _status(self, job: Job) -> JobStatus:
        platform = job.platform
        if platform in self._silent:
            return job.unknown(self._silent[platform])
        try:
            found = {} if job.has_final_status or not job.handle else self._statuses(platform, job)
            if job.handle in found:
                return job.status_in_list(found[job.handle])
            return job.status()
        except CloudJobError as error:
            if isinstance(error, Unreachable):
                self._silent[platform] = error.message
            return job.unknown(error.message)

    def _statuses(self, platform: str, job: Job) -> Mapping[str, NativeStatus | None]:
        """Return the statuses of all jobs on a platform, which are requested only once."""
        with self._changed:
            is_first = platform not in self._listed
            future = self._listed.setdefault(platform, Future())
        if is_first:
            handles_here = [
                other.handle
                for other in self._jobs
                if not other.has_final_status and other.platform == platform
            ]
            try:
                future.set_result(job.statuses(handles_here))
            except Exception as error:  # noqa: BLE001 (raised for each of these jobs)
                future.set_exception(error)
        return future.result()


def _raise(error: Exception) -> NoReturn:
    raise error


def collect(home: Path, store: str, *, keep_days: float, dry_run: bool) -> Collected:
    """Delete the layers in a store that no job needs, and unfinished uploads of killed writers.

    Args:
        store: Its URI.
        keep_days: Days after the end of a job for which its package is kept.

    Raises:
        CloudJobError: The store or the records cannot be used.
    """
    opened = open_store(store)
    if not dry_run:
        opened.sweep(_DAY_S)
    return collection.collect(
        opened,
        keep_s=keep_days * _DAY_S,
        ended_at=lambda job: _ended_at(home, job),
        dry_run=dry_run,
    )


def _ended_at(home: Path, job: str) -> str | None:
    """Return when a job ended; empty if it has not ended, None if that is unknown."""
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


def remove_orphans(home: Path) -> list[str]:
    """Remove what killed submits left in the engine and on clusters; return the ids of the jobs."""
    from cloudjob.backends.docker.backend import DockerBackend

    with Records(records_path(home)) as db:
        records = db.list()
    known = {record.job for record in records if _was_sent(record, home)}
    # Without the SDK, no submit of this installation can have started containers.
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
    """Whether the submit of a job has completed or is still running."""
    if record.state != SUBMITTING or record.backend != "docker":
        return True
    return attach(record, home).status().native_state not in GONE
