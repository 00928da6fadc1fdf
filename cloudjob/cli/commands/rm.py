"""The command rm: removes a job, or the leftovers of killed submits."""

from __future__ import annotations

import argparse

import cloudjob
from cloudjob.cli.messages import print_message
from cloudjob.cli.options import job_argument
from cloudjob.errors import UsageError
from cloudjob.model.text import counted


def _rm(options: argparse.Namespace) -> int:
    if options.orphans == (options.job is not None):
        raise UsageError("rm: which job?", hint="cloudjob rm JOB, or cloudjob rm --orphans")
    if options.orphans:
        removed = cloudjob.remove_orphans()
        for name in removed:
            print_message(f"removed the leftovers of {name}")
        print_message(counted(len(removed), "orphan"))
        return 0
    job = cloudjob.attach(options.job)
    job.need_ended("removing")
    if not options.force:
        job.need_here("removing")
        if outputs := job.outputs(is_own=True):
            raise UsageError(
                f"removing {job.id}: it has {counted(len(outputs), 'output file')}",
                hint=f"cloudjob outputs {job.id} --to DIR keeps them; --force removes them too",
            )
    job.remove(is_forced=options.force)
    print_message(f"removed {job.id}")
    return 0


def add_rm(parser: argparse.ArgumentParser) -> None:
    """Give the command rm its options."""
    parser.set_defaults(run=_rm)
    job_argument(parser, nargs="?")
    text = "remove its outputs, too, and a job of another machine that no longer exists"
    parser.add_argument("--force", action="store_true", help=text)
    parser.add_argument(
        "--orphans", action="store_true", help="remove the leftovers of killed submits"
    )
