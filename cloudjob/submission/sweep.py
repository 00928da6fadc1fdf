"""Submits the jobs of a sweep, with an optional limit on jobs at the same time."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cloudjob.errors import SpecError, UsageError
from cloudjob.home import make_home, scratch_folders, submits_folder, sweeps_folder
from cloudjob.model import grid
from cloudjob.model.job import JobSpec, masked
from cloudjob.model.kinds import dotted
from cloudjob.model.progress import OnProgress, Progress
from cloudjob.model.rules import is_remote
from cloudjob.model.status import Absence
from cloudjob.model.times import rfc3339
from cloudjob.model.validation import valid_part
from cloudjob.notify.start import start_of_sweep
from cloudjob.submission import checks, pipeline, preparation
from cloudjob.submission.preparation import SweepMember, Target
from cloudjob.tracking.sweep import OnStatus, Sweep, SweepFile

# Keys that change how a sweep runs, but not its jobs.
_SUBMIT_OPTIONS = ("max_parallel", "max_jobs", "fail_fast")
# Letters of the name in a sweep's id: the ids of its jobs are longer, and host names contain them.
_NAME_LETTERS = 25


def expand(spec: JobSpec) -> list[tuple[Mapping[str, str], JobSpec]]:
    """Return the values and the description of each job of a sweep.

    Raises:
        SpecError: A job is invalid with its values.
    """
    pairs: list[tuple[Mapping[str, str], JobSpec]] = []
    manner = {key: JobSpec.KEYS[key].default for key in _SUBMIT_OPTIONS}
    for values in grid.combinations(spec.sweep):
        changed = {key: _filled(getattr(spec, key), values) for key in grid.FILLED}
        _, wrong = valid_part({"script": spec.script, **changed})
        if wrong:
            raise SpecError(
                [f"{dotted(key)}: {what} ({grid.text_of(values)})" for key, what in wrong]
            )
        one = spec.with_values(**changed, **manner, sweep=MappingProxyType({}))
        pairs.append((values, one))
    return pairs


def _filled(value: Any, values: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        filled = {name: grid.filled(text, values) for name, text in value.items()}
        return MappingProxyType(filled)
    return tuple(grid.filled(text, values) for text in value)


def at_once(spec: JobSpec) -> int:
    """Return how many jobs of a sweep run at the same time; 0 for all."""
    return spec.max_parallel or (0 if is_remote(spec.backend) else 1)


def submit(
    spec: JobSpec,
    home: Path,
    *,
    resume: bool,
    on_progress: OnProgress,
    on_status: OnStatus | None = None,
    on_start: Callable[[Sweep], object] | None = None,
) -> Sweep:
    """Submit the jobs of a sweep; return when the last was submitted or the sweep was cancelled.

    Args:
        resume: Submit the jobs that an interrupted submit of the same sweep did not.
        on_status: Called with a job's status and values whenever its state has changed.
        on_start: Called before the first job is submitted.

    Raises:
        CloudJobError: A job could not be submitted; those before it continue.
    """
    jobs = expand(spec)
    script = checks.check_script(spec)
    on_progress = _report_once(on_progress)
    make_home(home)
    sweep = _find_interrupted(home, _key(spec), resume=resume)
    sweep = sweep or Sweep(preparation.new_id(spec.name[:_NAME_LETTERS]), home)
    with scratch_folders.new(submits_folder(home), sweep.id) as scratch:
        checks.require(checks.script_checks(spec, script), on_progress)
        target = Target.open(spec, home)
        decision = pipeline.decide(spec, script, target, scratch, on_progress)
        digest = decision.package.digest
        file = sweep.read() or SweepFile(
            created_at=rfc3339(time.time()), key=_key(spec), digest=digest,
            submitted=0, jobs=len(jobs), spec=masked(spec),
        )  # fmt: skip
        if file.digest != digest:
            raise UsageError(
                f"resuming the sweep {sweep.id}: the source has changed since it began",
                hint=f"restore the source; or cloudjob cancel {sweep.id}, and submit again",
            )
        sweep.write(replace(file, spec=masked(spec)))
        chosen = {key: getattr(decision.spec, key) for key in ("launcher", "procs_per_node")}
        try:
            start_of_sweep(spec, home, sweep.id)
            if on_start:
                on_start(sweep)
            for number in _numbers_to_submit(sweep, at_once(spec), on_status):
                values, one = jobs[number]
                job = pipeline.submit_member(
                    grid.job_id(sweep.id, number),
                    decision._replace(spec=one.with_values(**chosen)),
                    SweepMember(sweep.id, values),
                    home,
                    on_progress,
                )
                # A cancel while the job was being submitted may not have found it.
                if sweep.is_cancelled:
                    job.cancel()
        finally:
            if not sweep.jobs():
                sweep.forget()
    return sweep


def _numbers_to_submit(sweep: Sweep, limit: int, on_status: OnStatus | None) -> Iterator[int]:
    """Yield the number of each job to submit, as soon as it may start.

    A job counts as submitted when the caller requests the next number.

    Args:
        limit: The number of jobs that run at the same time; 0 for all.
    """
    file = sweep.read()
    assert file is not None
    job_of = {job.id: job for job in sweep.jobs()}
    for number in range(file.submitted, file.jobs):
        job = job_of.get(grid.job_id(sweep.id, number))
        if job and job.status().absence is Absence.INTERRUPTED:
            # The submit of the sweep was killed while it was sending this job.
            job.remove()
            job = None
        if job is None:
            for statuses in sweep.polled(on_status) if 0 < limit < file.jobs else ():
                running = [s for s in statuses if not (s.is_over or s.absence is Absence.WAITS)]
                if sweep.is_cancelled or len(running) < limit:
                    break
            if sweep.is_cancelled:
                return
            yield number
        file = replace(file, submitted=number + 1)
        sweep.write(file)


def _report_once(on_progress: OnProgress) -> OnProgress:
    """Return a function that reports a message only once, although each job of a sweep has it."""
    seen = set()

    def report(progress: Progress) -> None:
        what = progress.kind if progress.kind == "sent" else progress.message
        if not what or what not in seen:
            on_progress(progress)
        seen.add(what)

    return report


def _key(spec: JobSpec) -> str:
    """Return a digest that is equal for sweeps with the same jobs."""
    described = {name: value for name, value in masked(spec).items() if name not in _SUBMIT_OPTIONS}
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode("ascii")).hexdigest()


def _find_interrupted(home: Path, key: str, *, resume: bool) -> Sweep | None:
    """Return the sweep with the same jobs whose submit was interrupted.

    Raises:
        UsageError: There is one, but ``resume`` is not set or it is still being submitted; or
            ``resume`` is set and there is none.
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
