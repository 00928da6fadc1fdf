"""The commands that start a job: submit and cp."""

from __future__ import annotations

import argparse
import os

from cloudjob.cli.follow import ASK, CANCEL, DETACH, Interrupts, attend, exit_code, status_json
from cloudjob.cli.options import given_flags, job_argument, json_flag, spec_flags, state_home
from cloudjob.cli.say import print_json, printable, say, size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.backends.base import Check
    from cloudjob.model.job import JobSpec
    from cloudjob.package import CodePackage
    from cloudjob.package.claims import Kept
    from cloudjob.submission.launcher_choice import Choice

_SHOWN_LEFT_OUT = 5


def _submit(options: argparse.Namespace) -> int:
    from pathlib import Path

    from cloudjob import config

    loaded = config.load(
        given_flags(options), job_file=options.config, cwd=Path.cwd(), environ=os.environ
    )
    if loaded.chosen_source:
        say(loaded.chosen_source)
    return _send(loaded.spec, options)


def _cp(options: argparse.Namespace) -> int:
    from pathlib import Path

    from cloudjob import config
    from cloudjob import jobs as jobs

    job = jobs.find(state_home(), options.job)
    flags = given_flags(options)
    if options.rest is not None:
        flags["args"] = tuple(options.rest)
    made = config.load(
        flags,
        job_file=options.config,
        cwd=Path.cwd(),
        environ=os.environ,
        copied=(f"job {job.id}", job.spec()),
    )
    return _send(made.spec, options)


def _send(spec: JobSpec, options: argparse.Namespace) -> int:
    """Send a job, and stay with it if that is wanted."""
    from cloudjob.model.rules import REMOTE_BACKENDS
    from cloudjob.submission import pipeline

    if options.dry_run or options.show_request:
        return _show(spec, options)
    from cloudjob.cli.progress import Transfers

    # A job elsewhere may be meant to continue, and a job on this machine rarely is.
    usual = ASK if spec.backend in REMOTE_BACKENDS else CANCEL
    interrupts = Interrupts(options.on_interrupt or usual)

    def tell_sent(package: CodePackage, kept: Kept) -> None:
        interrupts.hold()
        transfers.stop()
        _tell_sent(package, kept)

    with Transfers("sent", is_shown=not options.json) as transfers:
        job = pipeline.submit(
            spec,
            state_home(),
            tell=_tell_package,
            tell_sent=tell_sent,
            watch=transfers.watch,
            warn=_tell_check,
        )
    if options.detach:
        interrupts.release()
        if not interrupts.came:
            if options.json:
                print_json(status_json(job.status()))
            else:
                print(job.handle)
            return 0
        interrupts.hold()
    say(f"job {job.id} started ({job.handle})")
    interrupts.give(job)
    status = attend(job, is_json=options.json)
    if options.json:
        print_json(status_json(status))
    return exit_code(status)


def _show(spec: JobSpec, options: argparse.Namespace) -> int:
    """Show what would be sent, and send nothing."""
    from cloudjob.cli import preview
    from cloudjob.submission import pipeline

    # The page shows the head and one worker.
    planned = 0 if options.show_request else None if options.json else 2
    made = pipeline.preview(spec, state_home(), planned_nodes=planned)
    if options.show_request or options.json:
        _tell_launcher(made.choice)
    if options.show_request:
        preview.print_request(made)
    elif options.json:
        preview.print_all(made)
    else:
        preview.print_page(made, spec)
    return 0


def _tell_check(check: Check) -> None:
    say(f"warning: {check.name}: {printable(check.found)}")
    if check.hint:
        say(f"hint: {check.hint}")


def _tell_launcher(choice: Choice | None) -> None:
    if choice:
        say(f"launcher {choice.launcher}: {printable(choice.why)}")


def _tell_package(package: CodePackage, choice: Choice | None) -> None:
    _tell_launcher(choice)
    told = ("secret", "CLOUDJOB_HOME")
    left_out = [item for item in package.left_out if any(word in item.reason for word in told)]
    for path, reason in left_out[:_SHOWN_LEFT_OUT]:
        say(f"left out of the package: {printable(path)}: {reason}")
    if len(left_out) > _SHOWN_LEFT_OUT:
        say(f"… and {len(left_out) - _SHOWN_LEFT_OUT} more; `--dry-run` lists them all")


def _tell_sent(package: CodePackage, kept: Kept) -> None:
    whole = size(sum(layer.size_bytes for layer in kept.layers))
    words = "1 layer new" if kept.sent_layers else "nothing new"
    say(f"sent {size(kept.sent_bytes)} of {whole}, {words}: {package.files} file(s)")


_EXAMPLES = """\
examples:
  cloudjob submit train.py --epochs 3
      run train.py of this folder on this machine, and show its log
  cloudjob submit -n 4 --backend slurm --timeout-min 60 train.py
      run it on four nodes of a Slurm cluster, for an hour at most
  cloudjob submit --config job.yaml --output MODEL= --detach train.py
      take the rest from a job file, save the folder $MODEL, and return at once

Options stand before SCRIPT; every word after it belongs to the script.
"""


def add_submit(parser: argparse.ArgumentParser) -> None:
    """Give the command submit its options."""
    parser.set_defaults(run=_submit)
    parser.add_argument(
        "script", nargs="?", metavar="SCRIPT", help="The program to run: a file of the source."
    )
    _submit_flags(parser)
    parser.usage = "cloudjob submit [OPTIONS] SCRIPT [ARGS]..."
    parser.epilog = _EXAMPLES


def add_cp(parser: argparse.ArgumentParser) -> None:
    """Give the command cp its options."""
    parser.set_defaults(run=_cp, script=None)
    job_argument(parser)
    _submit_flags(parser)
    parser.usage = "cloudjob cp [OPTIONS] JOB [-- ARGS...]"


def _submit_flags(parser: argparse.ArgumentParser) -> None:
    spec_flags(parser)
    group = parser.add_argument_group("what this command does")
    group.add_argument("--detach", action="store_true", help="Print the handle and return.")
    text = "What Ctrl-C does; by default it cancels a job on this machine, and asks about others."
    group.add_argument(
        "--on-interrupt", choices=(CANCEL, DETACH), metavar="WHAT",
        help=f"{text} [one of {CANCEL}, {DETACH}]",
    )  # fmt: skip
    group.add_argument("--dry-run", action="store_true", help="Show the plan, and send nothing.")
    text = "Print the platform's own request, such as YAML for kubectl, and send nothing."
    group.add_argument("--show-request", action="store_true", help=text)
    json_flag(group)
