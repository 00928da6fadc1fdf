"""Submits, follows and cancels the jobs of a sweep."""

from __future__ import annotations

import argparse
import contextlib
import shlex

import cloudjob
from cloudjob.cli.endings import report
from cloudjob.cli.follow import warn_of_notifications
from cloudjob.cli.interrupts import interrupts_of
from cloudjob.cli.messages import print_json, print_message
from cloudjob.errors import CloudJobError, JobNotFound, UsageError
from cloudjob.model import grid, summary
from cloudjob.model.status import Absence
from cloudjob.model.status import to_json as status_json
from cloudjob.model.text import counted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cloudjob import JobSpec, JobStatus, Sweep

# The exit code of a submit that was cancelled before its first job.
_INTERRUPTED = 130


def send(spec: JobSpec, options: argparse.Namespace) -> int:
    """Submit the jobs of a sweep, and follow them unless ``--detach`` is given."""
    from cloudjob.submission.sweep import at_once, expand

    jobs = expand(spec)
    limit = at_once(spec)
    most = f"at most {limit} at the same time" if 0 < limit < len(jobs) else "all at the same time"
    size = f"{counted(len(jobs), 'job')}, {most}"
    if options.dry_run or options.show_request:
        from cloudjob.cli import preview

        # The page shows the first job.
        first, last = (shlex.join([one.script, *one.args]) for _, one in (jobs[0], jobs[-1]))
        rows = [("sweep", size), ("first job", first), ("last job", last), ("", "")]
        preview.show(jobs[0][1], options, rows)
        return 0
    if options.detach and 0 < limit < len(jobs):
        raise UsageError(
            f"submit --detach: {most}, so the submit has to wait for them",
            hint=f"--max-parallel {len(jobs)} submits all at once; or leave --detach out",
        )
    printer = StatusPrinter()
    sweep = _submit_sweep(spec, options, printer, size)
    if options.detach:
        described = [status_json(status) for status in sweep.statuses()] if options.json else []
        if options.json:
            print_json({"sweep": sweep.id, "jobs": described})
        else:
            print(sweep.id)
        return 0
    statuses = follow(sweep, printer)
    if options.json:
        print_json({"sweep": sweep.id, "jobs": [status_json(status) for status in statuses]})
    return exit_code_of(statuses)


def _submit_sweep(
    spec: JobSpec, options: argparse.Namespace, printer: StatusPrinter, size: str
) -> Sweep:
    from cloudjob.cli.live import Transfers

    interrupts = interrupts_of(spec, options)
    started: list[Sweep] = []

    def start(sweep: Sweep) -> None:
        print_message(f"sweep {sweep.id}: {size}")
        started.append(sweep)
        interrupts.hold()
        interrupts.set_job(sweep)

    try:
        with Transfers("sent", is_shown=not options.json) as transfers:
            return cloudjob.sweep(
                spec,
                resume=options.resume,
                on_progress=transfers.report,
                on_status=printer,
                on_start=start,
            )
    except CloudJobError:
        if started and started[0].jobs():
            print_message(f"the jobs of {started[0].id} that were submitted continue")
            print_message("hint: the same command with --resume submits the others")
        raise


class StatusPrinter:
    """Prints when a job of a sweep has started and how it ended."""

    def __init__(self) -> None:
        self._started: set[str] = set()

    def __call__(self, status: JobStatus, values: Mapping[str, str]) -> None:
        """Print the new status of a job."""
        if status.absence in (Absence.NEVER_SUBMITTED, Absence.WAITS):
            return
        if status.job not in self._started:
            self._started.add(status.job)
            print_message(f"job {status.job} started: {grid.text_of(values)}")
        if status.state.is_final:
            report(status)
        elif status.state is cloudjob.JobState.UNKNOWN:
            print_message(f"job {status.job}: UNKNOWN: {status.native_state}")


def follow(sweep: Sweep, printer: StatusPrinter) -> list[JobStatus]:
    """Wait until every job of a sweep has ended, show how each ended, and return the statuses."""
    statuses = sweep.wait(on_status=printer)
    warn_of_notifications(sweep)
    for job in sweep.jobs():
        warn_of_notifications(job)
    print_message(f"sweep {sweep.id}: {summary.states(statuses)}")
    return statuses


def exit_code_of(statuses: Sequence[JobStatus]) -> int:
    """Return the exit code of the first job that did not succeed, by number; 0 if there is none."""
    from cloudjob.model.status import exit_code

    codes = [exit_code(status) for status in statuses]
    return next((code for code in codes if code), 0 if statuses else _INTERRUPTED)


def sweep_of(name: str) -> Sweep | None:
    """Return the sweep with this id; None if the name is not the id of a sweep."""
    with contextlib.suppress(JobNotFound):
        sweep = cloudjob.attach_sweep(name)
        return sweep if sweep.id == name else None
    return None


def give_up(jobs: Sequence[cloudjob.Job]) -> None:
    """Submit no further jobs of the sweeps that these jobs belong to."""
    for name in {job.sweep for job in jobs} - {""}:
        cloudjob.attach_sweep(name).give_up()


def unsubmitted(options: argparse.Namespace) -> list[JobStatus]:
    """Return the unsubmitted jobs of a sweep that match the filters of a list."""
    sweep = sweep_of(options.sweep)
    others = (options.backend, options.name, options.since, options.store, options.limit)
    if sweep is None or any(others):
        return []
    states = [state.upper() for state in options.state]
    return [each for each in sweep.unsubmitted() if not states or each.state.value in states]
