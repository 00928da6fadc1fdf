"""The command cancel: cancels one job, a sweep, or all jobs that match."""

from __future__ import annotations

import argparse

import cloudjob
from cloudjob.cli import sweeps
from cloudjob.cli.messages import print_error, print_message
from cloudjob.cli.options import filter_flags, filters_of, job_argument
from cloudjob.errors import CloudJobError, UsageError
from cloudjob.model.text import counted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def _cancel(options: argparse.Namespace) -> int:
    filters = filters_of(options)
    is_bulk = options.all or any(filters.values())
    if is_bulk == (options.job is not None):
        raise UsageError("cancel: which job?", hint="cloudjob cancel JOB, or --all, or a filter")
    if is_bulk:
        return _cancel_all(filters, is_urgent=options.now)
    sweep = sweeps.sweep_of(options.job)
    if sweep:
        sweep.cancel(is_urgent=options.now)
        sweeps.follow(sweep, sweeps.StatusPrinter())
        return 0
    job = cloudjob.attach(options.job)
    job.cancel(is_urgent=options.now)
    status = job.wait(record_s=0.0)
    print_message(f"job {job.id}: {status.state}")
    return 0


def _cancel_all(filters: dict[str, Any], *, is_urgent: bool) -> int:
    """Cancel every matching job and wait for all; report failures and continue."""
    unended = [job for job in cloudjob.jobs(**filters) if not job.is_over]
    if not any(filters.values()):
        sweeps.give_up(unended)
    cancelled, code = [], 0
    for job in unended:
        try:
            job.cancel(is_urgent=is_urgent)
            cancelled.append(job)
        except CloudJobError as error:
            print_error(error)
            code = error.exit_code
    for job in cancelled:
        try:
            print_message(f"job {job.id}: {job.wait(record_s=0.0).state}")
        except CloudJobError as error:
            print_error(error)
            code = error.exit_code
    print_message(f"{len(cancelled)} of {counted(len(unended), 'job')} cancelled")
    return code


def add_cancel(parser: argparse.ArgumentParser) -> None:
    """Give the command cancel its options."""
    parser.set_defaults(run=_cancel)
    job_argument(parser, nargs="?")
    filter_flags(parser)
    parser.add_argument("--all", action="store_true", help="cancel every job that has not ended")
    parser.add_argument("--now", action="store_true", help="skip the grace period")
