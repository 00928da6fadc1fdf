"""The rows of the jobs page, kept up to date by one thread while a page shows them."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cloudjob.api import backend_settings
from cloudjob.console.text import displayable
from cloudjob.errors import CloudJobError
from cloudjob.home import records_path
from cloudjob.home.records import JobRecord, Records
from cloudjob.model import grid, times
from cloudjob.model.status import JobStatus
from cloudjob.model.summary import reason
from cloudjob.store.parallel import start_call
from cloudjob.tracking import Job, leftovers, running_hangs, with_status
from cloudjob.tracking.lookup import attach

# Longer reasons are cut; the page of the job shows them in full.
_REASON_CHARS = 400
_REFRESH_S = 2.0
# Seconds between two questions whether jobs hang, some of which read the end of a log.
_ASK_S = 60.0
# The rows that are read before all others.
_FIRST_ROWS = 200
# The thread pauses after this many seconds without a request from a page.
_UNWATCHED_S = 15.0

Row = dict[str, Any]


class Changes(NamedTuple):
    """What changed in the list since a version.

    Args:
        version: The version to pass in the next request.
        rows: New and changed rows, newest job first.
        removed: Ids of jobs that are no longer in the list.
        error: Why the list could not be refreshed; empty if it was.
    """

    version: int
    rows: list[Row]
    removed: list[str]
    error: str


class JobList:
    """All jobs that this machine submitted, one row each."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._rows: dict[str, Row] = {}
        # Jobs whose rows show the final status in the records.
        self._ended: set[str] = set()
        self._versions: dict[str, int] = {}
        self._version = 0
        # How jobs hang, by id; what is asked at present; and when to ask again.
        self._hangs: Mapping[str, str] = {}
        self._asked: Future[dict[str, str]] | None = None
        self._next_ask_s = 0.0
        self._error = ""
        self._requested_at_s = 0.0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def changes(self, since: int) -> Changes:
        """Return what changed since a version; 0 for everything."""
        with self._changed:
            self._requested_at_s = time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="job list", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            # The first response waits until the records are read, but not for any platform.
            self._changed.wait_for(lambda: self._version or self._error, _UNWATCHED_S)
            is_new = since > self._version
            rows = [row for job, row in self._rows.items() if is_new or self._versions[job] > since]
            rows.sort(key=lambda row: row["created"], reverse=True)
            removed = [
                job for job, at in self._versions.items() if at > since and job not in self._rows
            ]
            return Changes(self._version, rows, removed, self._error)

    def _run(self) -> None:
        # What fits on a screen comes first, then all jobs, and then what platforms say about them.
        steps = iter([(False, _FIRST_ROWS), (False, -1)])
        while True:
            query_platforms, limit = next(steps, (True, -1))
            with self._changed:
                self._changed.wait_for(
                    lambda: time.monotonic() < self._requested_at_s + _UNWATCHED_S
                )
            try:
                self._refresh(query_platforms=query_platforms, limit=limit)
                error = ""
            except CloudJobError as failure:
                error = failure.message
            except Exception as failure:  # noqa: BLE001 (shown on the page, and the list goes on)
                error = f"refreshing the list of jobs: {failure!r}"
            with self._changed:
                self._error = error
                self._changed.notify_all()
            if query_platforms:
                time.sleep(_REFRESH_S)

    def _refresh(self, *, query_platforms: bool, limit: int) -> None:
        with Records(records_path(self._home)) as db:
            records = db.list(limit=limit)
        active = [record for record in records if not record.final_json]
        rows: dict[str, Row] = {}
        if query_platforms and active:
            leftovers.remove(self._home)
            queried = with_status(self._home, active, backend_settings)
            self._ask([(status, job) for job, status in queried])
            rows = {
                job.id: row_of(status, job.submitted_by, self._hangs.get(job.id, ""))
                for job, status in queried
            }
        fresh = {
            record.job: rows.get(record.job)
            or self._current_row(record)
            or self._row_of_record(record)
            for record in records
        }
        self._ended = {record.job for record in records if record.final_json}
        with self._changed:
            self._version += 1
            for job, row in fresh.items():
                if row != self._rows.get(job):
                    self._versions[job] = self._version
            for job in self._rows.keys() - fresh.keys():
                self._versions[job] = self._version
            self._rows = fresh
            self._changed.notify_all()

    def _ask(self, jobs: Sequence[tuple[JobStatus, Job]]) -> None:
        """Ask the running jobs now and then how they hang, which may take seconds."""
        if self._asked and self._asked.done():
            asked, self._asked = self._asked, None
            self._next_ask_s = time.monotonic() + _ASK_S
            self._hangs = asked.result()
        if not self._asked and time.monotonic() >= self._next_ask_s:
            self._asked = start_call(partial(running_hangs, jobs))

    def _current_row(self, record: JobRecord) -> Row | None:
        """Return the present row of a job, unless the records have a newer, final status."""
        is_older = bool(record.final_json) and record.job not in self._ended
        return None if is_older else self._rows.get(record.job)

    def _row_of_record(self, record: JobRecord) -> Row:
        """Return the row of a job from its record; only a damaged record costs a request."""
        job = attach(record, self._home, backend_settings)
        try:
            status = job.status() if record.final_json else job.unknown("…")
            return row_of(status, job.submitted_by)
        except CloudJobError as error:
            return row_of(job.unknown(error.message), job.submitted_by)


def row_of(status: JobStatus, submitted_by: str = "", hang: str = "") -> Row:
    """Return the row of a job; times are in seconds since 1970, or 0 if not reached yet.

    Args:
        hang: How it hangs; empty if it does not, or nobody knows.
    """
    started = times.seconds_of(status.started_at or "")
    ended = times.seconds_of(status.ended_at or "")
    return {
        "job": status.job,
        "name": status.name,
        "sweep": grid.sweep_of(status.job),
        "backend": status.backend,
        "user": displayable(submitted_by),
        "state": status.state.value,
        "is_final": status.state.is_final,
        "nodes": status.nodes,
        "ranks": status.nodes * status.procs_per_node,
        "created": times.seconds_of(status.created_at),
        "started": started,
        "ended": ended,
        "exit_code": status.exit_code,
        "reason": displayable((hang or reason(status))[:_REASON_CHARS]),
    }
