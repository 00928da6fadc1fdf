"""The state that the pages of one console share."""

from __future__ import annotations

import threading
from pathlib import Path

from cloudjob.console.emulated import PREFIX, EmulatedJob
from cloudjob.console.job_list import JobList
from cloudjob.console.log_table import LogTable
from cloudjob.console.results import ResultsCache
from cloudjob.tracking import Job, find
from cloudjob.tracking.journals import Journals
from cloudjob.tracking.metrics import MetricPoint

# The number of logs that stay open, and of ended jobs whose journals are cached.
_MAX_LOGS = 16


class Console:
    """The job list and the open logs."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.jobs = JobList(home)
        self.results = ResultsCache()
        # The logs by job and attempt.
        self._logs: dict[tuple[str, int | None], LogTable] = {}
        self._journals: dict[str, Journals] = {}
        self._lock = threading.Lock()

    def job(self, job_id: str) -> Job:
        """Return the job with this id.

        Raises:
            JobNotFound: There is none.
        """
        return find(self.home, job_id)

    def journals(self, job: Job) -> Journals:
        """Return the journals of a job's nodes so far.

        Raises:
            CloudJobError: They cannot be read.
        """
        if not job.has_final_status:
            log = self.log(job.id)
            log.keep_reading()
            return log.journals
        with self._lock:
            journals = self._journals.get(job.id)
        if journals is None:
            journals = job.journals()
            if len(journals.nodes) < job.nodes:
                # Perhaps the store did not answer, so this is not cached; the next request retries.
                return journals
            with self._lock:
                while len(self._journals) >= _MAX_LOGS:
                    self._journals.pop(next(iter(self._journals)))
                self._journals[job.id] = journals
        return journals

    def metrics(self, job: Job) -> list[MetricPoint]:
        """Return the metrics of a job's training so far; a running job's log is read only once.

        Raises:
            CloudJobError: The log or the outputs cannot be read.
        """
        if job.status().state.is_final:
            return job.thinned_metrics()
        return self.log(job.id).metrics() + job.event_metrics()

    def log(self, job_id: str, attempt: int | None = None) -> LogTable:
        """Return the log of a job, or of one of its attempts, from 1 on.

        Raises:
            JobNotFound: There is no such job.
            CloudJobError: The records cannot be read.
        """
        with self._lock:
            log = self._logs.pop((job_id, attempt), None)
            if log is None:
                key = job_id.removeprefix(PREFIX)
                if key != job_id:
                    # A job of the emulator has no attempts, whatever an address says.
                    log = LogTable(EmulatedJob(self.home, key))
                else:
                    log = LogTable(self.job(job_id), attempt)
                while len(self._logs) >= _MAX_LOGS:
                    self._logs.pop(next(iter(self._logs))).close()
            # The most recently requested log is closed last.
            self._logs[job_id, attempt] = log
            return log
