"""The command logs: shows the log of a job, or a part of it."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress

import cloudjob
from cloudjob.cli.endings import warn_of_cut_logs
from cloudjob.cli.follow import stream
from cloudjob.cli.options import job_argument, number_list, whole_number
from cloudjob.errors import CloudJobError, UsageError
from cloudjob.model.text import counted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.model.patterns import Pattern


def _logs(options: argparse.Namespace) -> int:
    job = cloudjob.attach(options.job)
    _check_numbers("--node", options.node, job.nodes)
    _check_numbers("--rank", options.rank, job.ranks)
    if (options.stored or options.attempt is not None) and options.follow:
        flag = "--stored" if options.stored else "--attempt"
        raise UsageError(
            f"logs {flag}: cannot be followed, because nodes store their logs at intervals",
            hint=f"leave out -f or {flag}",
        )
    if options.raw:
        return _raw_logs(job, options)
    pattern = _pattern(options.grep) if options.grep is not None else None
    selection = cloudjob.LogFilter(
        options.node,
        options.rank,
        pattern,
        options.tail,
        options.stored,
        options.since,
        options.timestamps,
        options.attempt,
    )
    stream(job, sys.stdout.buffer.fileno(), follow=options.follow, selection=selection)
    if not options.stored and options.attempt is None:
        # The log is shown, so a platform that does not answer now is no failure.
        with suppress(CloudJobError):
            warn_of_cut_logs(job.status())
    return 0


def _raw_logs(job: cloudjob.Job, options: argparse.Namespace) -> int:
    selects = options.grep is not None or options.tail is not None or options.since
    if not options.rank.isdecimal() or selects or options.timestamps:
        raise UsageError(
            "logs --raw: shows the exact bytes of one rank",
            hint="add --rank R, and leave out --grep, --tail, --since and --timestamps",
        )
    node = int(options.node) if options.node.isdecimal() else None
    rank = int(options.rank)
    pieces = job.logs(
        node,
        rank,
        follow=options.follow,
        is_exact=True,
        is_stored=options.stored,
        attempt=options.attempt,
    )
    for line in pieces:
        sys.stdout.buffer.write(line.data)
        if options.follow:
            sys.stdout.buffer.flush()
    return 0


def _check_numbers(flag: str, text: str, count: int) -> None:
    """Check that a job with ``count`` nodes or ranks has all that are in a list."""
    highest = max(map(int, text.replace("-", ",").split(",")), default=0) if text else 0
    # The number of ranks is 0 until the nodes have reported it.
    if count and highest >= count:
        count_text = counted(count, flag.removeprefix("--"))
        raise UsageError(f"{flag} {text}: the job has {count_text}", hint=f"0 to {count - 1}")


def _pattern(text: str) -> Pattern:
    from cloudjob.model.patterns import Pattern

    try:
        return Pattern(text)
    except ValueError as error:
        raise UsageError(
            f"reading --grep {text}: it {error}",
            hint="put a backslash before each of . * + ? ( ) [ ] { } | that is meant literally",
        ) from error


def add_logs(parser: argparse.ArgumentParser) -> None:
    """Give the command logs its options."""
    parser.set_defaults(run=_logs)
    job_argument(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="continue until the job ends")
    parser.add_argument(
        "--tail", type=whole_number, metavar="N", help="start with the last N lines"
    )
    text = "only lines that match this regular expression"
    parser.add_argument("--grep", metavar="RE", help=text)
    text = "only lines written since then: 10m, 2h, or a date and a time"
    parser.add_argument("--since", metavar="TIME", default="", help=text)
    text = "the local time before each line, to within seconds"
    parser.add_argument("-t", "--timestamps", action="store_true", help=text)
    parser.add_argument(
        "--node", type=number_list, default="", metavar="I", help="only these nodes: 0, or 0,2-3"
    )
    parser.add_argument(
        "--rank", type=number_list, default="", metavar="R", help="only these ranks: 0, or 0,3-5"
    )
    parser.add_argument(
        "--raw", action="store_true", help="the exact bytes of one rank, secrets included"
    )
    text = "read the logs that the nodes have stored, not those of the platform"
    parser.add_argument("--stored", action="store_true", help=text)
    text = "only the log of one attempt of a job with retries, from 1 on, as the nodes stored it"
    parser.add_argument("--attempt", type=whole_number, metavar="N", help=text)
