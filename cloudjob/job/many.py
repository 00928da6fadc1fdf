"""Several jobs: which are meant, how two differ, and what all of them have left."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from cloudjob import layers
from cloudjob.backends.base import Backend
from cloudjob.errors import CloudJobError, JobNotFound
from cloudjob.home import records_path, store_uri
from cloudjob.job import leftovers
from cloudjob.job.one import GONE, Job, attach, backend_of
from cloudjob.layers import Collected
from cloudjob.records import SUBMITTING, JobRecord, Records
from cloudjob.status import JobStatus
from cloudjob.store import open_store

_DAY_S = 24 * 3600.0
# How many platforms are asked at once in a list.
_AT_ONCE = 8


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


def find_all(home: Path, which: Filter = Filter()) -> list[tuple[Job, JobStatus]]:  # noqa: B008
    """Return the jobs that were submitted from here and pass, newest first, and where they stand.

    A platform that cannot be asked makes its jobs UNKNOWN, and not the list fail.
    """
    leftovers.sweep(home)
    with Records(records_path(home)) as db:
        records = [record for record in db.list() if which.takes(record)]
    # A job that has ended stands in the records; only the others cost a question each.
    ended = [record for record in records if which.states and _is_out(record, which.states)]
    left_out = {record.job for record in ended}
    backends: dict[str, Backend[Any]] = {}
    jobs = []
    for record in records:
        if record.job not in left_out:
            if record.backend not in backends:
                backends[record.backend] = backend_of(record.backend, home)
            jobs.append(Job(record, backends[record.backend], home))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = list(zip(jobs, pool.map(_status_or_unknown, jobs), strict=True))
    return [
        (job, status)
        for job, status in found
        if not which.states or status.state.value in which.states
    ]


def _is_out(record: JobRecord, states: tuple[str, ...]) -> bool:
    """Whether a job has ended in a state that is not meant."""
    return bool(record.final_json) and record.state not in states


def _status_or_unknown(job: Job) -> JobStatus:
    try:
        return job.status()
    except CloudJobError as error:
        return job.unknown(error.message)


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
