"""Submits the jobs of a sweep, at most some at the same time, and follows them as one.

A sweep's file below ``$CLOUDJOB_HOME`` holds how many of its jobs were submitted, so that it can be
resumed after its submit was killed. While the submit runs, it holds a lock with the sweep's id.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from cloudjob.errors import CloudJobError, JobNotFound, SpecError, UsageError
from cloudjob.home import (
    locks,
    make_home,
    private_folder,
    records_path,
    submits_folder,
    sweeps_folder,
    writing,
)
from cloudjob.home.records import SUBMITTING, Records
from cloudjob.model import grid
from cloudjob.model.job import JobSpec, masked
from cloudjob.model.progress import OnProgress, Progress
from cloudjob.model.rules import AUTO_RANKS, REMOTE_BACKENDS
from cloudjob.model.status import Failure, JobState, JobStatus
from cloudjob.model.validation import dotted, valid_part
from cloudjob.submission import pipeline
from cloudjob.submission.pipeline import Member
from cloudjob.times import rfc3339
from cloudjob.tracking import GONE, Job, jobs_of, statuses_of

# Seconds between two requests for the status of the jobs, which grow from the first to the others.
_FIRST_S, _LOCAL_S, _REMOTE_S, _GROWTH = 0.05, 0.5, 5.0, 1.2
# Seconds to wait for the record of a job that has ended while its store does not answer.
_RECORD_S = 10.0
# Keys that change how a sweep runs, but not its jobs.
_MANNER = ("max_parallel", "max_jobs", "fail_fast")
# Letters of the name in a sweep's id: those of its jobs are longer, and parts of host names.
_NAME_LETTERS = 25
NEVER = "never submitted"
WAITS = "waits for other jobs of the sweep"

# Called with a job's status and its values.
OnStatus = Callable[[JobStatus, Mapping[str, str]], object]


def expand(spec: JobSpec) -> list[tuple[Mapping[str, str], JobSpec]]:
    """Return the values and the description of each job of a sweep.

    Raises:
        SpecError: A job is invalid with its values.
    """
    found: list[tuple[Mapping[str, str], JobSpec]] = []
    fields = JobSpec.model_fields
    manner = {key: fields[key].default for key in _MANNER}
    for values in grid.combinations(spec.sweep):
        changed = {key: _filled(getattr(spec, key), values) for key in grid.FILLED}
        _, wrong = valid_part({"script": spec.script, **changed})
        if wrong:
            raise SpecError([f"{dotted(key)}: {what} ({text_of(values)})" for key, what in wrong])
        one = spec.model_copy(update={**changed, **manner, "sweep": MappingProxyType({})})
        found.append((values, one))
    return found


def _filled(value: Any, values: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        filled = {name: grid.filled(text, values) for name, text in value.items()}
        return MappingProxyType(filled)
    return tuple(grid.filled(text, values) for text in value)


def text_of(values: Mapping[str, str]) -> str:
    """Return the values of a job in one line: ``lr=0.1 seed=2``."""
    return " ".join(f"{name}={value}" for name, value in values.items())


def at_once(spec: JobSpec) -> int:
    """Return how many jobs of a sweep run at the same time; 0 for all."""
    return spec.max_parallel or (0 if spec.backend in REMOTE_BACKENDS else 1)


@dataclass(frozen=True, slots=True)
class _File:
    """What is known about a sweep on the machine that submits it.

    Args:
        key: The digest of its description: the same for the same command.
        digest: The digest of its package.
        submitted: How many jobs were submitted, from the first on.
        jobs: How many jobs it has.
        spec: Its description, secrets masked.
    """

    created_at: str
    key: str
    digest: str
    submitted: int
    jobs: int
    spec: dict[str, Any]


class Ranked(NamedTuple):
    """A job of a sweep with its last value of a metric; None if it has none."""

    job: Job
    values: dict[str, str]
    value: float | None


class Sweep:
    """The jobs of a sweep: of a new one, or of one that was submitted earlier.

    Its id and the number of a job, from 0 on, are that job's id.
    """

    def __init__(self, sweep: str, home: Path) -> None:
        self.id = sweep
        self._home = home
        self._jobs: dict[int, Job] = {}
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
            return locks.is_in_use(submits_folder(self._home), self.id)

    def jobs(self) -> list[Job]:
        """Return the jobs that were submitted, in the order of their numbers."""
        with Records(records_path(self._home)) as db:
            records = [each for each in db.list() if grid.sweep_of(each.job) == self.id]
        new = [each for each in records if _number(each.job) not in self._jobs]
        found = dict(self._jobs)
        for record, job in zip(new, jobs_of(self._home, new), strict=True):
            found[_number(record.job)] = job
            # While a job is being sent, its record may change.
            if record.state != SUBMITTING:
                self._jobs[_number(record.job)] = job
        known = {_number(record.job) for record in records}
        return [job for number, job in sorted(found.items()) if number in known]

    def statuses(self) -> list[JobStatus]:
        """Return the status of each job in order, those that were not submitted included."""
        # Before the jobs, so that one that is submitted meanwhile is among them.
        waiting = self.unsubmitted()
        found = statuses_of(self.jobs())
        known = {status.job for status in found}
        return found + [status for status in waiting if status.job not in known]

    def unsubmitted(self) -> list[JobStatus]:
        """Return the jobs that were not submitted: they wait, or never will be."""
        state = JobState.PENDING if self.is_being_submitted else JobState.UNKNOWN
        state = JobState.CANCELLED if self.is_cancelled else state
        file = self.read()
        if file is None:
            return []
        known = {job.id for job in self.jobs()}
        ids = (grid.job_id(self.id, number) for number in range(file.submitted, file.jobs))
        return [_unsent(job, file, state) for job in ids if job not in known]

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
        for statuses in self._polled(on_status):
            if all(map(_is_over, statuses)):
                return statuses
        raise AssertionError("polling never ends")

    def _wait_for_room(self, limit: int, on_status: OnStatus | None) -> None:
        """Wait until fewer than ``limit`` jobs have not ended, or the sweep is cancelled."""
        for statuses in self._polled(on_status):
            begun = [each for each in statuses if each.native_state != WAITS]
            if self.is_cancelled or sum(not _is_over(each) for each in begun) < limit:
                return

    def _polled(self, on_status: OnStatus | None) -> Iterator[list[JobStatus]]:
        """Yield the statuses of the jobs, again and again."""
        file = self.read()
        is_fail_fast = file is not None and file.spec.get("fail_fast") == "true"
        longest_s = _REMOTE_S if file and file.spec["backend"] in REMOTE_BACKENDS else _LOCAL_S
        pause_s = _FIRST_S
        while True:
            statuses = self._settled(self.statuses())
            has_failed = any(each.state is JobState.FAILED for each in statuses)
            if is_fail_fast and has_failed and not self.is_cancelled:
                self.cancel()
            for status in statuses:
                shown = self._shown.get(status.job)
                if shown is None or shown.state is not status.state:
                    self._shown[status.job] = status
                    if on_status:
                        on_status(status, self.values(status.job))
            yield statuses
            time.sleep(pause_s)
            pause_s = min(_GROWTH * pause_s, longest_s)

    def _settled(self, statuses: Sequence[JobStatus]) -> list[JobStatus]:
        """Return the statuses with the records of jobs that have ended since the last time."""
        jobs = {job.id: job for job in self._jobs.values()}
        found = []
        for status in statuses:
            shown = self._shown.get(status.job)
            is_new = shown is None or not shown.state.is_final
            if status.state.is_final and is_new and status.job in jobs:
                with suppress(CloudJobError):
                    status = jobs[status.job].wait(record_s=_RECORD_S)
            found.append(status)
        return found

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
            # A full disk must not keep the jobs that run from being cancelled.
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

        If several ranks print it, that of the lowest rank counts; jobs without a finite value are
        the last.

        Args:
            patterns: Regular expressions by metric, besides those of the jobs.

        Raises:
            UsageError: No job has the metric.
        """
        found: list[Ranked] = []
        known: set[str] = set()
        for job in self.jobs():
            points = job.training_metrics(patterns)
            known.update(point.name for point in points)
            own = [point for point in points if point.name == metric]
            first = min((math.inf if p.rank is None else p.rank for p in own), default=0)
            last = [p.value for p in own if (math.inf if p.rank is None else p.rank) == first][-1:]
            found.append(Ranked(job, job.sweep_values(), last[0] if last else None))
        if metric not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise UsageError(
                f"ranking the jobs of {self.id}: none has printed the metric {metric!r}",
                hint=f"metrics of its jobs: {listed}; --metric 'NAME=REGEX' finds others",
            )
        sign = -1 if maximize else 1

        def order(each: Ranked) -> tuple[bool, float]:
            is_missing = each.value is None or not math.isfinite(each.value)
            return is_missing, 0.0 if is_missing or each.value is None else sign * each.value

        return sorted(found, key=order)

    def rest(self, limit: int, on_status: OnStatus | None) -> Iterator[int]:
        """Yield the number of each job to submit, as soon as it may begin.

        A job counts as submitted when the next number is asked for.

        Args:
            limit: How many jobs run at the same time; 0 for all.
        """
        file = self.read()
        assert file is not None
        known = {job.id: job for job in self.jobs()}
        for number in range(file.submitted, file.jobs):
            job = known.get(grid.job_id(self.id, number))
            if job and job.status().native_state == GONE[0]:
                # The submit of the sweep was killed while it was sending this job.
                job.remove()
                job = None
            if job is None:
                if 0 < limit < file.jobs:
                    self._wait_for_room(limit, on_status)
                if self.is_cancelled:
                    return
                yield number
            file = replace(file, submitted=number + 1)
            self.write(file)

    def read(self) -> _File | None:
        """Return the sweep's file; None on a machine that has not submitted it."""
        with writing("reading the sweep", self._path):
            try:
                return _File(**json.loads(self._path.read_bytes()))
            except FileNotFoundError:
                return None
            except (ValueError, TypeError) as error:
                raise UsageError(
                    f"reading the sweep {self.id}: {self._path} is damaged: {error}",
                    hint="remove that file; the jobs that were submitted are in `cloudjob list`",
                ) from error

    def write(self, file: _File) -> None:
        """Replace its file."""
        new = self._path.with_suffix(".new")
        with writing("recording the sweep", new):
            private_folder(new.parent)
            new.touch(mode=0o600)
            new.write_text(json.dumps(asdict(file)), encoding="ascii")
            new.replace(self._path)

    def forget(self) -> None:
        """Remove the file of the sweep."""
        self._path.unlink(missing_ok=True)
        self._mark.unlink(missing_ok=True)


def _unsent(job: str, file: _File, state: JobState) -> JobStatus:
    """Return the status of a job that was not submitted."""
    ranks = file.spec["procs_per_node"]
    return JobStatus(
        job=job,
        name=file.spec["name"],
        backend=file.spec["backend"],
        state=state,
        native_state=WAITS if state is JobState.PENDING else NEVER,
        nodes=file.spec["nodes"],
        procs_per_node=ranks if isinstance(ranks, int) else AUTO_RANKS,
        created_at=file.created_at,
        cause="cancelled" if state is JobState.CANCELLED else None,
        failure=Failure(message=NEVER) if state is JobState.CANCELLED else None,
    )


def _number(job: str) -> int:
    return int(job.rpartition("-")[2])


def _is_over(status: JobStatus) -> bool:
    """Whether a job will never change again."""
    return status.state.is_final or status.native_state in (NEVER, *GONE)


def attach(home: Path, name: str) -> Sweep:
    """Return the sweep with this id, or that of the newest job with this name.

    Raises:
        JobNotFound: There is none.
    """
    sweep = Sweep(name, home)
    if grid.sweep_of(grid.job_id(name, 0)) and (sweep.read() or sweep.jobs()):
        return sweep
    with Records(records_path(home)) as db:
        found = grid.sweep_of(db.get(name).job)
    if not found:
        raise JobNotFound(f"finding the sweep {name!r}: that job is of no sweep")
    return Sweep(found, home)


def submit(
    spec: JobSpec,
    home: Path,
    *,
    resume: bool,
    on_progress: OnProgress,
    on_status: OnStatus | None = None,
    on_start: Callable[[Sweep], object] | None = None,
) -> Sweep:
    """Submit the jobs of a sweep, and return when the last was submitted or it was cancelled.

    Args:
        resume: Submit the jobs that an interrupted submit of the same sweep did not.
        on_status: Called with a job's status and values whenever its state has changed.
        on_start: Called before the first job is submitted.

    Raises:
        CloudJobError: A job could not be submitted; those before it continue.
    """
    jobs = expand(spec)
    on_progress = _once(on_progress)
    make_home(home)
    sweep = _find_interrupted(home, _key(spec), resume=resume)
    sweep = sweep or Sweep(pipeline.new_id(spec.name[:_NAME_LETTERS]), home)
    with locks.scratch(submits_folder(home), sweep.id) as scratch:
        ready, package = pipeline.make_ready(spec, home, scratch, on_progress)
        file = sweep.read() or _File(
            created_at=rfc3339(time.time()), key=_key(spec), digest=package.digest,
            submitted=0, jobs=len(jobs), spec=masked(spec),
        )  # fmt: skip
        if file.digest != package.digest:
            raise UsageError(
                f"resuming the sweep {sweep.id}: the source has changed since it began",
                hint=f"restore the source; or cloudjob cancel {sweep.id}, and submit again",
            )
        sweep.write(replace(file, spec=masked(spec)))
        chosen = {"launcher": ready.launcher, "procs_per_node": ready.procs_per_node}
        try:
            if on_start:
                on_start(sweep)
            for number in sweep.rest(at_once(spec), on_status):
                values, one = jobs[number]
                member = Member(
                    job=grid.job_id(sweep.id, number),
                    sweep=sweep.id,
                    values=values,
                    package=package,
                )
                job = pipeline.submit(
                    one.model_copy(update=chosen), home, member=member, on_progress=on_progress
                )
                # A cancel in the meantime may not have found this job.
                if sweep.is_cancelled:
                    job.cancel()
        finally:
            if not sweep.jobs():
                sweep.forget()
    return sweep


def _once(on_progress: OnProgress) -> OnProgress:
    """Return a function that passes each message on once, although each job of a sweep has it."""
    seen = set()

    def report(progress: Progress) -> None:
        what = progress.kind if progress.kind == "sent" else progress.message
        if not what or what not in seen:
            on_progress(progress)
        seen.add(what)

    return report


def _key(spec: JobSpec) -> str:
    """Return what is the same for sweeps with the same jobs."""
    described = {name: value for name, value in masked(spec).items() if name not in _MANNER}
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode("ascii")).hexdigest()


def _find_interrupted(home: Path, key: str, *, resume: bool) -> Sweep | None:
    """Return the sweep with the same jobs whose submit was interrupted.

    Raises:
        UsageError: There is one, but it is not to be resumed or is still being submitted; or there
            is none to resume.
    """
    for path in sorted(sweeps_folder(home).glob("*.json")):
        sweep = Sweep(path.stem, home)
        file = sweep.read()
        if file is None or file.key != key or file.submitted >= file.jobs or sweep.is_cancelled:
            continue
        if sweep.is_being_submitted:
            raise UsageError(
                f"submitting the sweep: another process is submitting the same jobs as {sweep.id}",
                hint=f"cloudjob wait {sweep.id}, or cloudjob cancel {sweep.id}",
            )
        if not sweep.jobs():
            sweep.forget()
        elif resume:
            return sweep
        else:
            raise UsageError(
                f"submitting the sweep: {sweep.id} has the same jobs, and its submit was "
                f"interrupted after {file.submitted} of {file.jobs}",
                hint=f"--resume submits the others, cloudjob cancel {sweep.id} gives them up",
            )
    if resume:
        raise UsageError(
            "resuming a sweep: no interrupted one has the same jobs",
            hint="submit it without --resume",
        )
    return None
