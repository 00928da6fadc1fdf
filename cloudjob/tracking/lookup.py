"""Finds a job by its id, name or handle: in the local records, or in its store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cloudjob.backends.base import Backend
from cloudjob.errors import CloudJobError, JobNotFound
from cloudjob.home import records_path
from cloudjob.home.records import JobRecord, Records
from cloudjob.store import environment, open_store
from cloudjob.tracking import descriptions, leftovers
from cloudjob.tracking.job import Job
from cloudjob.tracking.platforms import Sections, backend_of, no_sections, opener


def find(
    home: Path,
    job: str,
    stores: Callable[[], Sequence[str]] = tuple,
    sections: Sections = no_sections,
) -> Job:
    """Return the job with this id, name, id prefix or handle, or with this URI in its store.

    A job that was submitted from another machine, or with another ``home``, is found in its store
    and then added to the records.

    Args:
        stores: Returns the URIs of the stores to search; called for a job not in the records.
        sections: Returns the reader's settings of each backend; called for jobs of others.

    Raises:
        JobNotFound: No job matches.
        StoreError: A store cannot be read.
    """
    leftovers.remove(home)
    name = job.partition("?")[0].rstrip("/").rpartition("/")[2]
    with Records(records_path(home)) as db:
        try:
            return attach(db.get(name), home, sections)
        except JobNotFound:
            uris = stores()
            if not uris:
                raise
        backend = backend_of(job.partition("://")[0].partition("+")[0], home)
        for uri in uris:
            store = open_store(uri, environment(_keys_of(backend)))
            record = descriptions.read(store, uri, name)
            if record is not None:
                db.add(record)
                return attach(record, home, sections)
    raise descriptions.not_found(job, [uri.partition("?")[0] for uri in uris])


def _keys_of(backend: Backend[Any]) -> Mapping[str, str]:
    """Return the credentials of a platform's own store; empty if this machine has none."""
    try:
        return backend.store()[1]
    except CloudJobError:
        return {}


def attach(record: JobRecord, home: Path, sections: Sections = no_sections) -> Job:
    """Return the job of a record; ``sections`` is as for ``find``."""
    trusted, backend = opener(home, sections)(record)
    return Job(trusted, backend, home)
