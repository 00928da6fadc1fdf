"""Handles the jobs of a sweep together: statuses, waiting, cancelling and ranking.

A sweep's file below ``$CLOUDJOB_HOME`` stores how many of its jobs were submitted, so that the
sweep can be resumed if its submit is killed. The running submit holds a lock with the sweep's id.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from cloudjob.errors import CloudJobError, JobNotFound, UsageError
from cloudjob.home import (
    private_folder,
    records_path,
    scratch_folders,
    submits_folder,
    sweeps_folder,
    writing,
)
from cloudjob.home.records import SUBMITTING, Records
from cloudjob.model import grid
from cloudjob.model.rules import AUTO_RANKS, is_remote
from cloudjob.model.status import Absence, Cause, Failure, JobState, JobStatus
from cloudjob.notify import message, start
from cloudjob.tracking.job import Job
from cloudjob.tracking.metrics import last_values
from cloudjob.tracking.queries import jobs_of, statuses_of

# Seconds between two polls of the statuses: the first value, the limits for jobs on this machine
# and elsewhere, and the factor of growth.
_FIRST_S, _LOCAL_S, _REMOTE_S, _GROWTH = 0.05, 0.5, 5.0, 1.2
# Seconds to wait for the record of a job that has ended while its store does not answer.
_RECORD_S = 10.0
# Called with a job's status and its values.
OnStatus = Callable[[JobStatus, Mapping[str, str]], object]


@dataclass(frozen=True, slots=True)
class SweepFile:
    """The state of a sweep on the machine that submits it.

    Args:
        key: The digest of its description, which is equal for equal commands.
        digest: The digest of its package.
        submitted: The number of jobs submitted so far, starting with the first.
        jobs: The number of jobs.
        spec: Its description, with secrets masked.
    """

    created_at: str
    key: str
    digest: str
    submitted: int
    jobs: int
    spec: dict[str, Any]


class Ranked(NamedTuple):
    """A job of a sweep with its values, and its last value of a metric; None if it has none."""

    job: Job
    values: dict[str, int | float | str]
    value: float | None


class Sweep:
    """The jobs of a new or earlier sweep.

    A job's id consists of the sweep's id and the number of the job, counted from 0.
    """

    def __init__(self, sweep: str, home: Path) -> None:
        self.id = sweep
        self._home = home
        self._jobs: dict[str, Job] = {}
        self._shown: dict[str, JobStatus] = {}
        self._path = sweeps_folder(home) / f"{sweep}.json"
        self._mark = self._path.with_suffix(".cancelled")

    def __repr__(self) -> str:
        return f"<Sweep {self.id}>"

    @property
    def is_cancelled(self) -> bool:
        """Whether it was cancelled, so that no further job is submitted."""
        return self._mark.exists()

    @property
    def is_being_submitted(self) -> bool:
        """Whether a process on this machine is submitting its jobs."""
        with writing("checking whether a submit is running", submits_folder(self._home)):
            return scratch_folders.is_in_use(submits_folder(self._home), self.id)

    def jobs(self) -> list[Job]:
        """Return the jobs that were submitted, in the order of their numbers."""
        with Records(records_path(self._home)) as db:
            records = [each for each in db.list() if grid.sweep_of(each.job) == self.id]
        new = [each for each in records if each.job not in self._jobs]
        job_of = {**self._jobs, **{job.id: job for job in jobs_of(self._home, new)}}
        # While a job is being sent, its record may change.
        self._jobs = {each.job: job_of[each.job] for each in records if each.state != SUBMITTING}
        return sorted((job_of[each.job] for each in records), key=lambda job: _number(job.id))

    def statuses(self) -> list[JobStatus]:
        """Return the status of each job in order, including those that were not submitted."""
        # Before the jobs, so that a job that is submitted in between is not missing.
        waiting = self.unsubmitted()
        statuses = statuses_of(self.jobs())
        names = {status.job for status in statuses}
        return statuses + [status for status in waiting if status.job not in names]

    def unsubmitted(self) -> list[JobStatus]:
        """Return the statuses of jobs that were not submitted: they wait, or never will be."""
        state = JobState.PENDING if self.is_being_submitted else JobState.UNKNOWN
        state = JobState.CANCELLED if self.is_cancelled else state
        file = self.read()
        if file is None:
            return []
        submitted = {job.id for job in self.jobs()}
        ids = (grid.job_id(self.id, number) for number in range(file.submitted, file.jobs))
        return [_unsent(job, file, state) for job in ids if job not in submitted]

    def values(self, job: str) -> dict[str, str]:
        """Return the values of the job with this id, whether or not it was submitted."""
        file = self.read()
        if file is None:
            return next((each.sweep_values() for each in self.jobs() if each.id == job), {})
        return next(islice(grid.combinations(file.spec["sweep"]), _number(job), None), {})

    def wait(self, *, on_status: OnStatus | None = None) -> list[JobStatus]:
        """Wait until every job has ended, or can never be submitted; return their statuses.

        Args:
            on_status: Called with a job's status and values whenever its state has changed.
        """
        for statuses in self.polled(on_status):
            if all(each.is_over for each in statuses):
                return statuses
        raise AssertionError("polling does not end by itself")

    def polled(self, on_status: OnStatus | None) -> Iterator[list[JobStatus]]:
        """Poll the jobs and yield their statuses each time.

        A sweep with ``fail_fast`` is cancelled as soon as one of its jobs has failed.
        """
        file = self.read()
        # Earlier versions recorded the flag as text.
        is_fail_fast = file is not None and file.spec.get("fail_fast") in (True, "true")
        longest_s = _REMOTE_S if file and is_remote(file.spec["backend"]) else _LOCAL_S
        pause_s = _FIRST_S
        while True:
            statuses = self._settled(self.statuses())
            has_failed = any(each.state is JobState.FAILED for each in statuses)
            if is_fail_fast and has_failed and not self.is_cancelled:
                self.cancel()
            for status in statuses:
                last = self._shown.get(status.job)
                if last is None or last.state is not status.state:
                    self._shown[status.job] = status
                    if on_status:
                        on_status(status, self.values(status.job))
            yield statuses
            # Stop polling when only another machine knows how the remaining jobs continue.
            for status in statuses:
                if not status.is_over and status.job in self._jobs:
                    self._jobs[status.job].need_here("waiting for")
            time.sleep(pause_s)
            pause_s = min(_GROWTH * pause_s, longest_s)

    def _settled(self, statuses: Sequence[JobStatus]) -> list[JobStatus]:
        """Return the statuses, with the records of jobs that have ended since the last call."""
        settled = []
        for status in statuses:
            last = self._shown.get(status.job)
            is_new = last is None or not last.state.is_final
            if status.state.is_final and is_new and status.job in self._jobs:
                with suppress(CloudJobError):
                    status = self._jobs[status.job].wait(record_s=_RECORD_S)
            settled.append(status)
        return settled

    def give_up(self) -> None:
        """Submit no further job; those that were submitted continue."""
        if self._path.exists():
            with writing("cancelling the sweep", self._mark):
                self._mark.touch(mode=0o600)

    def cancel(self, *, is_urgent: bool = False) -> None:
        """Submit no further job, and cancel those that have not ended."""
        errors: list[CloudJobError] = []
        try:
            self.give_up()
        except CloudJobError as error:
            # A full disk must not prevent the cancellation of running jobs.
            errors.append(error)
        for job in self.jobs():
            try:
                if not (job.has_final_status or job.is_over):
                    job.cancel(is_urgent=is_urgent)
            except CloudJobError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def ranking(
        self,
        metric: str,
        *,
        maximize: bool = False,
        patterns: Mapping[str, str] | None = None,
    ) -> list[Ranked]:
        """Return the jobs by their last value of a metric, the best first.

        If several ranks print the metric, the value of the lowest rank counts; jobs without a
        finite value come last.

        Args:
            patterns: Regular expressions by metric, besides those of the jobs.

        Raises:
            UsageError: No job has the metric.
        """
        ranked: list[Ranked] = []
        metrics: set[str] = set()
        for job in self.jobs():
            values = last_values(job.metric_points(patterns))
            metrics |= values.keys()
            numbers = {name: _number_or_text(text) for name, text in job.sweep_values().items()}
            ranked.append(Ranked(job, numbers, values.get(metric)))
        if metric not in metrics:
            listed = ", ".join(sorted(metrics)) or "none"
            raise UsageError(
                f"ranking the jobs of {self.id}: none has printed the metric {metric!r}",
                hint=f"metrics of its jobs: {listed}; --metric 'NAME=REGEX' finds others",
            )
        last, sign = math.inf, -1 if maximize else 1
        return sorted(
            ranked,
            key=lambda each: (
                last if each.value is None or not math.isfinite(each.value) else sign * each.value
            ),
        )

    def read(self) -> SweepFile | None:
        """Return the sweep's file; None if the sweep was not submitted from this machine."""
        with writing("reading the sweep", self._path):
            try:
                return SweepFile(**json.loads(self._path.read_bytes()))
            except FileNotFoundError:
                return None
            except (ValueError, TypeError) as error:
                raise UsageError(
                    f"reading the sweep {self.id}: {self._path} is damaged: {error}",
                    hint="remove that file; the jobs that were submitted are in `cloudjob list`",
                ) from error

    def write(self, file: SweepFile) -> None:
        """Replace the sweep's file."""
        new = self._path.with_suffix(".new")
        with writing("recording the sweep", new):
            private_folder(new.parent)
            new.touch(mode=0o600)
            new.write_text(json.dumps(asdict(file)), encoding="ascii")
            new.replace(self._path)

    def settle_notifications(self) -> str:
        """Send the notification of the sweep's end if it is due; return why that failed, else "".

        This waits a few seconds for the sweep's notifier, and sends it itself if it was killed.
        """
        file = self.read() if start.path_of(self._home, self.id).exists() else None
        statuses = self.statuses() if file else []
        if file is None or not statuses or not all(each.is_over for each in statuses):
            return ""
        return start.settle(self._home, message.of_sweep(self.id, statuses, self.values), file.spec)

    @property
    def notification_failure(self) -> str:
        """Why the notification of the sweep was not sent; empty if it was or may still be."""
        return start.failure(self._home, self.id)

    def forget(self) -> None:
        """Remove the files of the sweep."""
        start.forget(self._home, self.id)
        self._path.unlink(missing_ok=True)
        self._mark.unlink(missing_ok=True)


def _unsent(job: str, file: SweepFile, state: JobState) -> JobStatus:
    """Return the status of a job that was not submitted."""
    ranks = file.spec["procs_per_node"]
    is_cancelled = state is JobState.CANCELLED
    absence = Absence.WAITS if state is JobState.PENDING else Absence.NEVER_SUBMITTED
    return JobStatus(
        job=job,
        name=file.spec["name"],
        backend=file.spec["backend"],
        state=state,
        native_state=absence.value,
        nodes=file.spec["nodes"],
        procs_per_node=ranks if isinstance(ranks, int) else AUTO_RANKS,
        created_at=file.created_at,
        cause=Cause.CANCELLED if is_cancelled else None,
        failure=Failure(message=absence.value) if is_cancelled else None,
        absence=absence,
    )


def _number_or_text(text: str) -> int | float | str:
    """Return the number that a value of a sweep is, or else its text."""
    # Python reads 1_000 as a number.
    for number in () if "_" in text else (int, float):
        with suppress(ValueError):
            return number(text)
    return text


def _number(job: str) -> int:
    return int(job.rpartition("-")[2])


def attach(home: Path, name: str) -> Sweep:
    """Return the sweep with this id, or that of the newest job with this name.

    Raises:
        JobNotFound: There is none.
    """
    sweep = Sweep(name, home)
    if grid.sweep_of(grid.job_id(name, 0)) and (sweep.read() or sweep.jobs()):
        return sweep
    with Records(records_path(home)) as db:
        sweep_id = grid.sweep_of(db.get(name).job)
    if not sweep_id:
        raise JobNotFound(f"finding the sweep {name!r}: that job does not belong to a sweep")
    return Sweep(sweep_id, home)
