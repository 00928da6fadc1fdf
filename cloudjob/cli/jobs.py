"""The commands on jobs that were submitted: one, several, and what they have left."""

from __future__ import annotations

import argparse
import sys

from cloudjob.cli.filters import filter_flags, filter_of
from cloudjob.cli.follow import exit_code, print_status, report, status_json, stream
from cloudjob.cli.options import job_argument, json_flag, state_home, whole_number
from cloudjob.cli.say import print_json, print_name, printable, say, tell_error
from cloudjob.cli.tables import print_table
from cloudjob.errors import CloudJobError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cloudjob.jobs import Filter, Job


def _status(options: argparse.Namespace) -> int:
    from cloudjob import jobs as jobs

    status = jobs.find(state_home(), options.job).status()
    if options.json:
        print_json(status_json(status))
    else:
        print_status(status)
    return 0


def _logs(options: argparse.Namespace) -> int:
    from cloudjob import jobs as jobs

    job = jobs.find(state_home(), options.job)
    _check_range("--node", options.node, job.nodes)
    _check_range("--rank", options.rank, job.ranks)
    if options.raw:
        if options.rank is None:
            raise UsageError("logs --raw: of which rank?", hint="add --rank R")
        for line in job.lines(options.node, options.rank, follow=options.follow):
            sys.stdout.buffer.write(line.data)
            if options.follow:
                sys.stdout.buffer.flush()
        return 0
    stream(job, sys.stdout.buffer.fileno(), follow=options.follow, options=options)
    return 0


def _check_range(flag: str, number: int | None, count: int) -> None:
    if number is not None and number >= count:
        raise UsageError(f"{flag} {number}: the job has {count}", hint=f"0 to {count - 1}")


def _wait(options: argparse.Namespace) -> int:
    from cloudjob import jobs as jobs

    status = jobs.find(state_home(), options.job).wait()
    if options.json:
        print_json(status_json(status))
    else:
        report(status)
    return exit_code(status)


def _list(options: argparse.Namespace) -> int:
    from cloudjob import jobs as jobs

    found = jobs.find_all(state_home(), filter_of(options), limit=options.limit)
    statuses = [status for _, status in found]
    if options.json:
        print_json([status_json(status) for status in statuses])
        return 0
    if not statuses:
        is_all = filter_of(options) == jobs.Filter()
        say("no jobs yet; `cloudjob submit SCRIPT` starts one" if is_all else "no such jobs")
        return 0
    print_table(
        [(each.job, each.state, each.backend, each.nodes, each.created_at) for each in statuses],
        ("JOB", "STATE", "BACKEND", "NODES", "CREATED"),
        numbers=("NODES",),
    )
    return 0


def _cancel(options: argparse.Namespace) -> int:
    from cloudjob import jobs as jobs

    which = filter_of(options)
    is_bulk = options.all or which != jobs.Filter()
    if is_bulk == (options.job is not None):
        raise UsageError("cancel: which job?", hint="cloudjob cancel JOB, or --all, or a filter")
    if is_bulk:
        return _cancel_all(which, is_urgent=options.now)
    job = jobs.find(state_home(), options.job)
    job.cancel(is_urgent=options.now)
    status = job.wait(record_s=0.0)
    say(f"job {job.id}: {status.state}")
    return 0


def _cancel_all(which: Filter, *, is_urgent: bool) -> int:
    """Cancel every job that matches and wait for all; failures are reported and stop nothing."""
    from cloudjob import jobs as jobs

    found = [
        job
        for job, status in jobs.find_all(state_home(), which)
        if not status.state.is_final and status.native_state not in jobs.GONE
    ]
    asked, code = [], 0
    for job in found:
        try:
            job.cancel(is_urgent=is_urgent)
            asked.append(job)
        except CloudJobError as error:
            tell_error(error)
            code = error.exit_code
    for job in asked:
        try:
            say(f"job {job.id}: {job.wait(record_s=0.0).state}")
        except CloudJobError as error:
            tell_error(error)
            code = error.exit_code
    say(f"{len(asked)} of {len(found)} job(s) cancelled")
    return code


def _diff(options: argparse.Namespace) -> int:
    from cloudjob import jobs as jobs

    rows = jobs.differences(
        *(jobs.find(state_home(), job) for job in (options.first, options.second))
    )
    if options.json:
        print_json({key: [first, second] for key, first, second in rows})
    else:
        for key, first, second in rows:
            print(f"{printable(key)}: {printable(str(first))} -> {printable(str(second))}")
    return 1 if rows else 0


def _events(options: argparse.Namespace) -> int:
    from cloudjob import jobs as jobs

    events = jobs.find(state_home(), options.job).events()
    if options.json:
        print_json([event._asdict() for event in events])
    else:
        print_table([(event.at, event.level, event.message) for event in events])
    return 0


def _metrics(options: argparse.Namespace) -> int:
    from cloudjob import jobs as jobs

    metrics = jobs.find(state_home(), options.job).metrics()
    if options.json:
        print_json([metric._asdict() for metric in metrics])
        return 0
    rows = []
    for metric in metrics:
        known = [value for value in metric.values if value is not None]
        shown = (known[-1], sum(known) / len(known), max(known)) if known else ()
        numbers = [f"{value:.1f}" for value in shown] or ["-", "", ""]
        rows.append((metric.node, metric.name, *numbers))
    headers = ("NODE", "METRIC", "LAST", "MEAN", "MOST")
    print_table(rows, headers, numbers=("NODE", "LAST", "MEAN", "MOST"))
    return 0


_INCOMPLETE = "  (may be incomplete)"


def _outputs(options: argparse.Namespace) -> int:
    from pathlib import Path

    from cloudjob import jobs as jobs

    job = jobs.find(state_home(), options.job)
    found = job.outputs()
    if not found:
        say(f"job {job.id} has left no outputs")
    elif options.to is None:
        for file in found:
            print_name(file.name + _INCOMPLETE * file.is_incomplete)
    else:
        _fetch_outputs(job, Path(options.to), sum(file.size_bytes for file in found))
    return 0


def _fetch_outputs(job: Job, folder: Path, size_bytes: int) -> None:
    from cloudjob.cli.progress import Transfers

    with Transfers("fetched") as transfers:
        files = job.fetch_outputs(folder, on_progress=transfers.watch(size_bytes))
    for file in files:
        print_name(str(folder / file.name))
        if file.is_incomplete:
            say(f"{file.name} may be incomplete: something was writing to it")


def _rm(options: argparse.Namespace) -> int:
    from cloudjob import jobs as jobs

    if options.orphans == (options.job is not None):
        raise UsageError("rm: of which job?", hint="cloudjob rm JOB, or cloudjob rm --orphans")
    if options.orphans:
        removed = jobs.sweep(state_home())
        for name in removed:
            say(f"removed what {name} had left")
        say(f"{len(removed)} orphan(s)")
        return 0
    job = jobs.find(state_home(), options.job)
    if job.status().state in ("PENDING", "RUNNING"):
        raise UsageError(f"removing {job.id}: it has not ended", hint=f"cloudjob cancel {job.id}")
    outputs = job.outputs(is_own=True)
    if outputs and not options.force:
        raise UsageError(
            f"removing {job.id}: it has {len(outputs)} output file(s)",
            hint=f"cloudjob outputs {job.id} --to DIR keeps them; --force removes them too",
        )
    job.remove()
    say(f"removed {job.id}")
    return 0


def add_status(parser: argparse.ArgumentParser) -> None:
    """Give the command status its options."""
    _asks_one_job(parser, _status)


def add_logs(parser: argparse.ArgumentParser) -> None:
    """Give the command logs its options."""
    parser.set_defaults(run=_logs)
    job_argument(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="until the job has ended")
    parser.add_argument("--node", type=whole_number, metavar="I", help="only this node's")
    parser.add_argument("--rank", type=whole_number, metavar="R", help="only this rank's")
    parser.add_argument("--raw", action="store_true", help="the rank's bytes, without marks")


def add_wait(parser: argparse.ArgumentParser) -> None:
    """Give the command wait its options."""
    _asks_one_job(parser, _wait)


def add_list(parser: argparse.ArgumentParser) -> None:
    """Give the command list its options."""
    parser.set_defaults(run=_list)
    filter_flags(parser)
    parser.add_argument("--limit", type=whole_number, metavar="N", help="only the newest N")
    json_flag(parser)


def add_cancel(parser: argparse.ArgumentParser) -> None:
    """Give the command cancel its options."""
    parser.set_defaults(run=_cancel)
    job_argument(parser, nargs="?")
    filter_flags(parser)
    parser.add_argument("--all", action="store_true", help="every job that has not ended")
    parser.add_argument("--now", action="store_true", help="without the grace period")


def add_diff(parser: argparse.ArgumentParser) -> None:
    """Give the command diff its options."""
    parser.set_defaults(run=_diff)
    parser.add_argument("first", metavar="JOB", help="its id, its name or its handle")
    parser.add_argument("second", metavar="OTHER", help="the other one")
    json_flag(parser)


def add_events(parser: argparse.ArgumentParser) -> None:
    """Give the command events its options."""
    _asks_one_job(parser, _events)


def add_metrics(parser: argparse.ArgumentParser) -> None:
    """Give the command metrics its options."""
    _asks_one_job(parser, _metrics)


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Give the command outputs its options."""
    parser.set_defaults(run=_outputs)
    job_argument(parser)
    parser.add_argument("--to", metavar="DIR", help="copy them below DIR")


def add_rm(parser: argparse.ArgumentParser) -> None:
    """Give the command rm its options."""
    parser.set_defaults(run=_rm)
    job_argument(parser, nargs="?")
    parser.add_argument("--force", action="store_true", help="its outputs too")
    parser.add_argument("--orphans", action="store_true", help="what killed submits have left")


def _asks_one_job(parser: argparse.ArgumentParser, run: Callable[..., int]) -> None:
    parser.set_defaults(run=run)
    job_argument(parser)
    json_flag(parser)
