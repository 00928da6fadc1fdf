"""The command events: shows what the platform recorded about a job."""

from __future__ import annotations

import argparse

import cloudjob
from cloudjob.cli.messages import print_json
from cloudjob.cli.options import job_argument, json_flag
from cloudjob.cli.tables import print_table
from cloudjob.model.times import local


def _events(options: argparse.Namespace) -> int:
    events = cloudjob.attach(options.job).events()
    if options.json:
        print_json([event._asdict() for event in events])
    else:
        print_table([(local(event.at), event.level, event.message) for event in events])
    return 0


def add_events(parser: argparse.ArgumentParser) -> None:
    """Give the command events its options."""
    parser.set_defaults(run=_events)
    job_argument(parser)
    json_flag(parser)
