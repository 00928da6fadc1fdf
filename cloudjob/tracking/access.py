"""The record of a job, with the backend and the store that it names."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from cloudjob.backends.base import Backend
from cloudjob.errors import JobNotFound, RunsElsewhere
from cloudjob.home import records_path, scratch_folders, submits_folder, writing
from cloudjob.home.hosts import this_host
from cloudjob.home.records import SUBMITTING, JobRecord, Records
from cloudjob.store import environment, open_store
from cloudjob.store.base import RETRY_S, ObjectStore
from cloudjob.tracking import descriptions


class JobAccess:
    """A job's record, backend and store, which the parts of a ``Job`` share.

    Args:
        home: The state folder with the records.
        store: The job's store, if it is already open.
    """

    def __init__(
        self, record: JobRecord, backend: Backend[Any], home: Path, store: ObjectStore | None
    ) -> None:
        self.record = record
        self.backend = backend
        self.home = home
        self._store = store

    @property
    def store(self) -> ObjectStore:
        """The store of the job, opened on first use; a list of jobs needs none."""
        if self._store is None:
            self._store = self.open_store(self.record.store)
        return self._store

    def store_with_retries(self, retry_s: float) -> ObjectStore:
        """Return the store of the job, whose requests are retried for at most ``retry_s``."""
        return self._store or self.open_store(self.record.store, retry_s=retry_s)

    def open_store(self, uri: str, *, retry_s: float = RETRY_S) -> ObjectStore:
        """Open a store with the keys in the environment, or else those of the platform."""
        return open_store(uri, environment(self.backend.store()[1]), retry_s=retry_s)

    def submission(self) -> dict[str, Any]:
        """Return the submission as it was recorded; empty if it was not, or is damaged."""
        values: Any = None
        with contextlib.suppress(ValueError):
            values = json.loads(self._submission_json())
        return values if isinstance(values, dict) else {}

    def described(self) -> dict[str, Any]:
        """Return the submitter's description of the job, for people; empty if there is none."""
        values = self.submission().get("spec")
        return values if isinstance(values, dict) else {}

    def spec(self) -> dict[str, Any]:
        """Return what of the description may be acted on; empty if it was not recorded."""
        values = self.described()
        if self.record.is_ours:
            return values
        # The model of job files takes long to import.
        from cloudjob.model import attached

        return dict(attached.split(values).taken)

    def _submission_json(self) -> str:
        """Return the submission in the record; lists leave it out, so it may be read only now."""
        if self.record.spec_json:
            return self.record.spec_json
        if not self.record.is_ours:
            # A list leaves out the long ones.
            description = descriptions.read(self.store, self.record.store, self.record.job)
            return description.spec_json if description else ""
        with contextlib.suppress(JobNotFound), Records(records_path(self.home)) as db:
            record = db.get(self.record.job)
            # If this job has been removed, its id may match the name of another job.
            return record.spec_json if record.job == self.record.job else ""
        return ""

    def is_being_sent(self) -> bool:
        """Whether the submit of this job is running."""
        is_new = self.record.state == SUBMITTING
        with writing("checking whether a submit is running", submits_folder(self.home)):
            return is_new and scratch_folders.is_in_use(submits_folder(self.home), self.record.job)

    def need_here(self, doing: str) -> None:
        """Check that a job that its platform does not have was not submitted on another machine.

        Raises:
            RunsElsewhere: That machine may run the job or its submit.
        """
        job = self.record.job
        if self.record.state == SUBMITTING:
            user = scratch_folders.user_elsewhere(submits_folder(self.home), job)
            if user is not None:
                raise RunsElsewhere(doing, job, user.name)
            return
        host = self.record.submitted_by.rpartition("@")[2]
        # An engine knows only the jobs of its own machine.
        if self.record.backend == "docker" and host not in ("", this_host().name):
            raise RunsElsewhere(doing, job, host)
