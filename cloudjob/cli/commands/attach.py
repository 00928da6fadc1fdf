"""The command attach: follows a job that was submitted earlier, here or elsewhere."""

from __future__ import annotations

import argparse

import cloudjob
from cloudjob.cli.follow import follow_to_end
from cloudjob.cli.interrupts import print_detached
from cloudjob.cli.messages import print_json
from cloudjob.cli.options import json_flag
from cloudjob.model.status import exit_code
from cloudjob.model.status import to_json as status_json


def _attach(options: argparse.Namespace) -> int:
    job = cloudjob.attach(options.job, store=options.store)
    try:
        status = follow_to_end(job, is_json=options.json)
    except KeyboardInterrupt:
        print_detached(job)
        raise
    if options.json:
        print_json(status_json(status))
    return exit_code(status)


def add_attach(parser: argparse.ArgumentParser) -> None:
    """Give the command attach its options."""
    parser.set_defaults(run=_attach)
    text = "its id, name or handle, or its URI in its store, such as s3://bucket/jobs/train-2k83"
    parser.add_argument("job", metavar="JOB", help=text)
    text = "the store in which to look for a job that was submitted elsewhere"
    parser.add_argument("--store", metavar="URI", default="", help=text)
    json_flag(parser)
