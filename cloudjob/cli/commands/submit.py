"""The commands that start a job: submit and cp."""

from __future__ import annotations

import argparse

import cloudjob
from cloudjob.cli.interrupts import CANCEL, DETACH, Interrupts, interrupts_of
from cloudjob.cli.messages import print_json, print_message
from cloudjob.cli.options import given_flags, job_argument, json_flag, spec_flags
from cloudjob.errors import UsageError


def _submit(options: argparse.Namespace) -> int:
    spec = cloudjob.job_spec(
        job_file=options.config,
        on_progress=lambda progress: print_message(progress.message),
        **given_flags(options),
    )
    _warn_of_late_options(spec, options)
    return _run_job(spec, options)


def _warn_of_late_options(spec: cloudjob.JobSpec, options: argparse.Namespace) -> None:
    """Warn of options of submit that follow the script and are not used by the script."""
    if options.is_marked or not options.rest:
        return
    from itertools import takewhile

    from cloudjob.submission import checks

    flags = takewhile(lambda argument: argument != "--", options.rest)
    names = dict.fromkeys(argument.partition("=")[0] for argument in flags)
    late = [name for name in names if name in options.flags]
    unknown = [name for name in late if not checks.is_mentioned(spec, name)]
    if unknown:
        listed = ", ".join(unknown)
        print_message(
            f"warning: {spec.script} gets {listed}, which it does not mention",
            f"put options of submit before {spec.script}, or `--` if they are for the script",
        )


def _cp(options: argparse.Namespace) -> int:
    job = cloudjob.attach(options.job)
    flags = given_flags(options)
    if options.rest is not None:
        flags["args"] = tuple(options.rest)

    def report(progress: cloudjob.Progress) -> None:
        print_message(progress.message, "" if options.dry_run else progress.hint)

    spec = cloudjob.job_spec(job_file=options.config, copy_of=job, on_progress=report, **flags)
    if options.dry_run:
        for key, value in job.copied_spec().left_out.items():
            print_message(f"left out: {key}: {value}")
    return _run_job(spec, options)


def _run_job(spec: cloudjob.JobSpec, options: argparse.Namespace) -> int:
    """Send a job, and follow it unless ``--detach`` is given."""
    if spec.sweep:
        from cloudjob.cli import sweeps

        return sweeps.send(spec, options)
    if options.resume:
        raise UsageError("submit --resume: the job is not a sweep", hint="--sweep NAME=VALUES")
    if options.dry_run or options.show_request:
        from cloudjob.cli import preview

        preview.show(spec, options)
        return 0
    interrupts = interrupts_of(spec, options)
    job = _submit_with_progress(spec, interrupts, is_json=options.json)
    if options.detach:
        interrupts.release()
        if not interrupts.was_interrupted:
            if options.json:
                _print_status(job.status())
            else:
                print(job.handle)
            return 0
        interrupts.hold()
    from cloudjob.cli.follow import follow_to_end
    from cloudjob.model.status import exit_code

    print_message(f"job {job.id} started ({job.handle})")
    interrupts.set_job(job)
    status = follow_to_end(job, is_json=options.json)
    if options.json:
        _print_status(status)
    return exit_code(status)


def _print_status(status: cloudjob.JobStatus) -> None:
    from cloudjob.model.status import to_json

    print_json(to_json(status))


def _submit_with_progress(
    spec: cloudjob.JobSpec, interrupts: Interrupts, *, is_json: bool
) -> cloudjob.Job:
    from cloudjob.cli.live import Transfers

    def report(progress: cloudjob.Progress) -> None:
        if progress.kind == "sent":
            interrupts.hold()
        transfers.report(progress)

    with Transfers("sent", is_shown=not is_json) as transfers:
        return cloudjob.submit(spec, on_progress=report)


_EXAMPLES = """\
examples:
  cloudjob submit train.py --epochs 3
      run train.py of this folder on this machine, and show its log
  cloudjob submit -n 4 --backend slurm --timeout-min 60 train.py
      run it on four nodes of a Slurm cluster, for an hour at most
  cloudjob submit --config job.yaml --output MODEL= --detach train.py
      take the rest from a job file, save the folder $MODEL, and return at once
  cloudjob submit --sweep lr=0.1,0.01 --sweep seed=1..3 train.py {lr} {seed}
      run six jobs, one for each combination of the values

Options stand before SCRIPT; every word after it belongs to the script.
"""


def add_submit(parser: argparse.ArgumentParser) -> None:
    """Give the command submit its options."""
    parser.set_defaults(run=_submit)
    parser.add_argument(
        "script", nargs="?", metavar="SCRIPT", help="The program to run: a file of the source."
    )
    _submit_flags(parser)
    actions = parser._option_string_actions
    parser.set_defaults(flags=actions.keys() - {"-h", "--help"})
    parser.usage = "cloudjob submit [OPTIONS] SCRIPT [ARGS]..."
    parser.epilog = _EXAMPLES


def add_cp(parser: argparse.ArgumentParser) -> None:
    """Give the command cp its options."""
    parser.set_defaults(run=_cp, script=None)
    job_argument(parser)
    _submit_flags(parser, has_defaults=False)
    parser.usage = "cloudjob cp [OPTIONS] JOB [-- ARGS...]"
    parser.epilog = "The values of JOB are the defaults of all options and of ARGS."


def _submit_flags(parser: argparse.ArgumentParser, *, has_defaults: bool = True) -> None:
    spec_flags(parser, has_defaults=has_defaults)
    group = parser.add_argument_group("this command")
    group.add_argument("--detach", action="store_true", help="Print the handle and return.")
    text = "What Ctrl-C does; by default it cancels a job on this machine, and asks about others."
    group.add_argument(
        "--on-interrupt", choices=(CANCEL, DETACH), metavar="WHAT",
        help=f"{text} [one of {CANCEL}, {DETACH}]",
    )  # fmt: skip
    text = "Submit the jobs that an interrupted submit of the same sweep did not."
    group.add_argument("--resume", action="store_true", help=text)
    group.add_argument("--dry-run", action="store_true", help="Show the plan, and send nothing.")
    text = "Print the platform's own request, such as YAML for kubectl, and send nothing."
    group.add_argument("--show-request", action="store_true", help=text)
    json_flag(group)
