"""Removes leftovers of jobs in stores, in container engines and on clusters."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from cloudjob.errors import JobNotFound
from cloudjob.home import records_path
from cloudjob.home.records import SUBMITTING, JobRecord, Records
from cloudjob.package import collection
from cloudjob.package.collection import Collected
from cloudjob.store import open_store
from cloudjob.tracking.lookup import attach

_DAY_S = 24 * 3600.0


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
        opened.remove_unfinished(_DAY_S)
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
    return (status.ended_at or status.created_at) if status.is_over else ""


def remove_orphans(home: Path) -> list[str]:
    """Remove leftovers of killed submits in the engine and on clusters; return the jobs' ids."""
    from cloudjob.backends.docker.backend import DockerBackend

    with Records(records_path(home)) as db:
        records = db.list()
    # Without those whose submit has neither completed nor is still running.
    recorded = {
        record.job
        for record in records
        if record.state != SUBMITTING
        or record.backend != "docker"
        or not attach(record, home).status().is_gone
    }
    # Without the SDK, no submit of this installation can have started containers.
    has_docker = find_spec("docker") is not None
    removed = DockerBackend(home, {}).remove_orphans(recorded) if has_docker else []
    return removed + _remove_from_clusters(home, records)


def _remove_from_clusters(home: Path, records: list[JobRecord]) -> list[str]:
    handles = [
        record.handle
        for record in records
        # The handles of others' jobs are not ours to follow.
        if record.is_ours and record.handle.startswith("kubernetes://") and not record.final_json
    ]
    if not handles:
        return []
    from cloudjob.backends.kubernetes.backend import KubernetesBackend

    return KubernetesBackend(home, {}).remove_orphans(handles)
