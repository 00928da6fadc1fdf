"""The command refresh: gives the nodes of a job fresh keys of its store."""

from __future__ import annotations

import argparse

import cloudjob
from cloudjob.cli.messages import print_json, print_message
from cloudjob.cli.options import job_argument, json_flag
from cloudjob.model.times import local, rfc3339


def _refresh(options: argparse.Namespace) -> int:
    job = cloudjob.attach(options.job)
    end_at = job.refresh_keys()
    if options.json:
        print_json({"job": job.id, "keys_expire_at": rfc3339(end_at) or None})
        return 0
    text = f"job {job.id}: its nodes now have your current keys of the store"
    if end_at:
        text += f", which expire at {local(rfc3339(end_at))}"
    print_message(text)
    return 0


def add_refresh(parser: argparse.ArgumentParser) -> None:
    """Give the command refresh its options."""
    parser.set_defaults(run=_refresh)
    job_argument(parser)
    json_flag(parser)
