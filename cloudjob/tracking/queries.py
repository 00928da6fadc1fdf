"""Selects jobs, and requests the statuses of many jobs in parallel."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from cloudjob.backends.native import NativeStatus
from cloudjob.errors import CloudJobError, Unreachable, UsageError
from cloudjob.home import records_path
from cloudjob.home.records import JobRecord, Records
from cloudjob.model import grid, times
from cloudjob.model.progress import OnProgress, Progress, log_warnings
from cloudjob.model.rules import BACKENDS
from cloudjob.model.status import JobState, JobStatus
from cloudjob.model.text import nearest
from cloudjob.store import open_store
from cloudjob.store.parallel import call_each_in_time
from cloudjob.tracking import descriptions, leftovers
from cloudjob.tracking.job import Job
from cloudjob.tracking.platforms import Sections, no_sections, opener

# The number of parallel status requests of a list, and its time limit.
_AT_ONCE = 8
_LIST_S = 20.0
# The running jobs that a list asks how they hang, all at the same time.
_MAX_ASKED = 16
# Descriptions in a store of which a list says why they cannot be read.
_SHOWN_PROBLEMS = 10


class JobFilter(NamedTuple):
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
        """Whether a job's record matches all filters except ``states``, which need the platform."""
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
) -> JobFilter:
    """Return the filter for values as users type them.

    Args:
        since: ``2h``, ``3d``, a date, or a date and a time.

    Raises:
        UsageError: A backend or state does not exist, or ``since`` is not a time.
    """
    states = tuple(text.upper() for text in state)
    known_states = tuple(each.value for each in JobState)
    for key, values, allowed in (("backend", backend, BACKENDS), ("state", states, known_states)):
        for value in values:
            if value not in allowed:
                raise UsageError(
                    f"reading the filter {key} {value}: no such {key}{nearest(value, allowed)}",
                    hint=f"one of {', '.join(allowed)}",
                )
    earliest = times.parse(since) if since else ""
    return JobFilter(tuple(backend), tuple(name), states, earliest, sweep)


def find_all(
    home: Path,
    which: JobFilter = JobFilter(),  # noqa: B008 (a value)
    *,
    limit: int | None = None,
    store: str = "",
    sections: Sections = no_sections,
    on_progress: OnProgress = log_warnings,
) -> list[Job]:
    """Return the matching jobs in the records, newest first; ``last_status`` of each is set.

    A job is UNKNOWN if its platform cannot be reached or does not answer in time.

    Args:
        limit: Return at most this many jobs.
        store: The URI of a store whose jobs are returned instead, from any submitter.
        sections: Returns the reader's settings of each backend; called for jobs of others.
        on_progress: Called with a warning for each description in the store that cannot be read.
    """
    leftovers.remove(home)
    records = [each for each in _records(home, store, on_progress) if which.matches(each)]
    # The records contain the state of each job that has ended; every other job costs a request.
    if which.states:
        # With a state filter, a job that does not match makes room for an older one.
        selected = [
            record for record in records if not record.final_json or record.state in which.states
        ]
    else:
        selected = records[:limit]
    jobs = jobs_of(home, selected, sections)
    # Threads and a query for each of thousands of jobs that have ended would take a second.
    statuses_of([job for job in jobs if not job.has_final_status])
    matching = [job for job in jobs if not which.states or _state(job) in which.states]
    return matching[:limit]


def with_status(
    home: Path, records: Sequence[JobRecord], sections: Sections = no_sections
) -> list[tuple[Job, JobStatus]]:
    """Return the jobs of these records with their status, UNKNOWN as for ``find_all``."""
    jobs = jobs_of(home, records, sections)
    return list(zip(jobs, statuses_of(jobs), strict=True))


def statuses_of(jobs: list[Job]) -> list[JobStatus]:
    """Return the status of each job, UNKNOWN as for ``find_all``."""
    ask = _Platforms(jobs).status
    results = call_each_in_time(ask, jobs, limit_s=_LIST_S, at_once=_AT_ONCE)
    late = f"no answer within {_LIST_S:g} s"
    return [
        result.result() if result.done() else job.unknown(late)
        for job, result in zip(jobs, results, strict=True)
    ]


def running_hangs(rows: Sequence[tuple[JobStatus, Job | None]]) -> dict[str, str]:
    """Return how running jobs hang, by id: of the first few that run, as each is asked."""
    running = [job for status, job in rows if job and status.state is JobState.RUNNING]
    chosen = running[:_MAX_ASKED]
    answers = call_each_in_time(_hang_of, chosen, limit_s=_LIST_S, at_once=_MAX_ASKED)
    texts = [answer.result() if answer.done() else "" for answer in answers]
    return {job.id: text for job, text in zip(chosen, texts, strict=True) if text}


def _hang_of(job: Job) -> str:
    try:
        hang = job.latest().hang_at(time.time())
    except (CloudJobError, OSError):
        # The row already says that the platform does not answer, or the next status does.
        return ""
    return f"hangs: {hang.message}" if hang else ""


def jobs_of(
    home: Path, records: Sequence[JobRecord], sections: Sections = no_sections
) -> list[Job]:
    """Return the jobs of these records; those on one platform share its backend."""
    opened = map(opener(home, sections), records)
    return [Job(record, backend, home) for record, backend in opened]


def _records(home: Path, store: str, on_progress: OnProgress) -> list[JobRecord]:
    """Return the records of this machine, or of all jobs in a store, newest first."""
    with Records(records_path(home)) as db:
        local = db.list()
    if not store:
        return local
    record_of = {record.job: record for record in local}
    listed = descriptions.read_all(open_store(store), store)
    problems, more = listed.problems[:_SHOWN_PROBLEMS], len(listed.problems) - _SHOWN_PROBLEMS
    for problem in problems:
        on_progress(Progress("warning", problem))
    if more > 0:
        on_progress(Progress("warning", f"{more} more descriptions cannot be read"))
    records = (record_of.get(record.job, record) for record in listed.records)
    return sorted(records, key=lambda record: record.created_at, reverse=True)


def _state(job: Job) -> str:
    return job.last_status.state.value if job.last_status else ""


class _Platforms:
    """Requests the statuses of jobs from their platforms.

    A platform that can list its jobs gets one request for all of them; a platform that does not
    answer gets no further requests.
    """

    def __init__(self, jobs: list[Job]) -> None:
        self._handles: defaultdict[str, list[str]] = defaultdict(list)
        for job in jobs:
            if not job.has_final_status:
                self._handles[job.platform].append(job.handle)
        self._silent: dict[str, str] = {}
        self._lists: dict[str, Future[Mapping[str, NativeStatus | None]]] = {}
        self._lock = threading.Lock()

    def status(self, job: Job) -> JobStatus:
        """Return the status of one job."""
        if job.platform in self._silent:
            return job.unknown(self._silent[job.platform])
        try:
            status_of = {} if job.has_final_status or not job.handle else self._list(job)
            if job.handle in status_of:
                return job.status_in_list(status_of[job.handle])
            return job.status()
        except CloudJobError as error:
            if isinstance(error, Unreachable):
                self._silent[job.platform] = error.message
            return job.unknown(error.message)

    def _list(self, job: Job) -> Mapping[str, NativeStatus | None]:
        """Return the statuses of all jobs on the platform of one, which are requested only once."""
        with self._lock:
            is_first = job.platform not in self._lists
            result = self._lists.setdefault(job.platform, Future())
        if is_first:
            try:
                result.set_result(job.statuses(self._handles[job.platform]))
            except Exception as error:  # noqa: BLE001 (raised for each of these jobs)
                result.set_exception(error)
        return result.result()
