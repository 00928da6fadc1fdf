"""The command profile: where a rank of a running job spends its time."""

from __future__ import annotations

import argparse

import cloudjob
from cloudjob.cli.messages import print_message, print_name
from cloudjob.cli.options import job_argument, whole_number
from cloudjob.errors import UsageError
from cloudjob.model.text import one_line, short_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob import JobProfile

_SECONDS = 30
_MOST_FUNCTIONS = 5


def add_profile(parser: argparse.ArgumentParser) -> None:
    """Give the command profile its options."""
    parser.set_defaults(run=_profile)
    job_argument(parser)
    parser.add_argument(
        "--rank", type=whole_number, default=0, metavar="R", help="the rank (default: 0)"
    )
    parser.add_argument(
        "--seconds",
        type=whole_number,
        default=_SECONDS,
        metavar="S",
        help=f"for how long to look at it (default: {_SECONDS})",
    )
    parser.add_argument(
        "-o",
        metavar="FILE",
        dest="to",
        default="",
        help="the HTML file to write (default: JOB-rank-R.html)",
    )


def _profile(options: argparse.Namespace) -> int:
    from pathlib import Path

    job = cloudjob.attach(options.job)
    print_message(f"looking at rank {options.rank} of {job.id} for {options.seconds} s")
    profile = job.profile(options.rank, seconds=options.seconds)
    path = Path(options.to or f"{job.id}-rank-{options.rank}.html")
    try:
        path.write_text(profile.html(), "utf-8", "backslashreplace")
    except OSError as error:
        raise UsageError(f"writing the profile: {path}: {error.strerror}") from error
    for line in _summary(profile):
        print_message(line)
    print_name(str(path))
    return 0


def _summary(profile: JobProfile) -> list[str]:
    """Return what the rank does most, as lines."""
    waits = (f"{name} {100 * share:.0f} %" for name, share in profile.waits.items())
    functions = [
        f"  {100 * share:3.0f} %  {one_line(call.function)}() "
        f"at {one_line(short_path(call.file))}:{call.line}"
        for call, share in profile.functions[:_MOST_FUNCTIONS]
    ]
    return [", ".join(waits), *functions, *profile.notes]
