"""The command wait: waits for jobs and sweeps."""

from __future__ import annotations

import argparse

import cloudjob
from cloudjob.cli import sweeps
from cloudjob.cli.endings import headline, report
from cloudjob.cli.follow import explain_failure, warn_of_notifications
from cloudjob.cli.messages import print_error, print_json
from cloudjob.cli.options import json_flag
from cloudjob.errors import CloudJobError
from cloudjob.model.status import JobStatus
from cloudjob.model.status import to_json as status_json


def _wait(options: argparse.Namespace) -> int:
    jobs = [sweeps.sweep_of(name) or cloudjob.attach(name) for name in options.jobs]
    is_one = len(jobs) == 1 and isinstance(jobs[0], cloudjob.Job)
    statuses, code = [], 0
    for job in jobs:
        try:
            ended = _ended(job, is_json=options.json)
        except CloudJobError as error:
            if is_one:
                raise
            print_error(error)
            code = code or error.exit_code
            continue
        statuses += ended
        code = code or sweeps.exit_code_of(ended)
    if options.json:
        values = [status_json(status) for status in statuses]
        print_json(values[0] if is_one else values)
    return code


def _ended(job: cloudjob.Job | cloudjob.Sweep, *, is_json: bool) -> list[JobStatus]:
    """Wait for a job or a sweep, and show how it ended."""
    if isinstance(job, cloudjob.Sweep):
        return sweeps.follow(job, sweeps.StatusPrinter())
    from cloudjob.cli.live import waiting

    with waiting(lambda: headline(job.last_status) if job.last_status else f"job {job.id}"):
        status = job.wait()
    if not is_json:
        report(status)
        explain_failure(job, status)
    warn_of_notifications(job)
    return [status]


def add_wait(parser: argparse.ArgumentParser) -> None:
    """Give the command wait its options."""
    parser.set_defaults(run=_wait)
    text = "its id, its name or its handle; with several, waits for all"
    parser.add_argument("jobs", metavar="JOB", nargs="+", help=text)
    json_flag(parser)
