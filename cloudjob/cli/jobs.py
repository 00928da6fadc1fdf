"""The commands on submitted jobs: one job, several jobs, and leftovers of jobs."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import shutil
import sys
import time
from dataclasses import replace

import cloudjob
from cloudjob.cli import sweeps
from cloudjob.cli.activity import activity, silence_text
from cloudjob.cli.follow import (
    explain_failure,
    failure_hint_text,
    follow_to_end,
    stream,
    warn_of_notifications,
)
from cloudjob.cli.interrupts import print_detached
from cloudjob.cli.messages import (
    print_error,
    print_json,
    print_message,
    print_name,
    print_warning,
)
from cloudjob.cli.options import (
    filter_flags,
    filters_of,
    job_argument,
    json_flag,
    number_list,
    whole_number,
)
from cloudjob.cli.status import headline, print_status, report, status_json
from cloudjob.cli.tables import print_fitting, print_table
from cloudjob.errors import CloudJobError, UsageError
from cloudjob.model import grid
from cloudjob.model.status import JobStatus
from cloudjob.model.text import counted, one_line, size_text
from cloudjob.model.times import local, rfc3339

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import Any

    from cloudjob.model.patterns import Pattern

    # A job of a sweep that was not submitted has only a status.
    _Found = list[cloudjob.Job | JobStatus]
    _Rows = list[tuple[JobStatus, cloudjob.Job | None]]

_NO_JOBS = "no jobs yet; `cloudjob submit SCRIPT` starts one"
# Seconds between two queries of `list --watch`.
_WATCH_S = 2.0
# The files that `diff` names.
_MAX_FILES = 20
# The orders of `list --watch`; the first is that of `list`.
_ORDERS = ("age", "oldest", "state")


def _status(options: argparse.Namespace) -> int:
    sweep = sweeps.sweep_of(options.job)
    if sweep:
        return _sweep_status(sweep, is_json=options.json)
    job = cloudjob.attach(options.job)
    status = job.status()
    latest = cloudjob.Journals() if status.state.is_final else job.latest()
    hang = status.hang or latest.hang_at(time.time())
    slow = None if hang else latest.slow_at(time.time())
    status = replace(status, phases=status.phases or latest.phases, hang=hang, slow=slow)
    if options.json:
        print_json({**status_json(status), "git_commit": job.git_commit})
    else:
        print_status(status, _facts(job, status, latest), has_phases=options.verbose)
    return 0


def _sweep_status(sweep: cloudjob.Sweep, *, is_json: bool) -> int:
    """Print the jobs of a sweep with their values, and how many are in which state."""
    from cloudjob.model import summary

    statuses = sweep.statuses()
    if is_json:
        print_json({"sweep": sweep.id, "jobs": [status_json(status) for status in statuses]})
        return 0
    print_message(f"sweep {sweep.id}: {summary.states(statuses)}")
    rows = [
        (each.job, each.state, grid.text_of(sweep.values(each.job)), summary.duration(each),
         summary.reason(each))
        for each in statuses
    ]  # fmt: skip
    print_table(rows, ("JOB", "STATE", "VALUES", "DURATION", "REASON"), numbers=("DURATION",))
    return 0


def _facts(
    job: cloudjob.Job, status: JobStatus, latest: cloudjob.Journals
) -> list[tuple[str, str]]:
    """Return what the status of a job does not contain, as names and texts."""
    from cloudjob.model import summary

    spec = job.spec()
    return [
        ("hint", failure_hint_text(job, status)),
        ("doing", activity(latest.current_phases, job.nodes, has_output=bool(latest.running))),
        ("silent", silence_text(latest)),
        ("notify", job.notification_failure),
        ("command", summary.command(spec)),
        ("image", str(spec.get("image") or "")),
        ("sweep", grid.text_of(job.sweep_values())),
        ("git commit", job.git_commit),
    ]


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
    shown = cloudjob.LogFilter(
        options.node,
        options.rank,
        pattern,
        options.tail,
        options.stored,
        options.since,
        options.timestamps,
        options.attempt,
    )
    stream(job, sys.stdout.buffer.fileno(), follow=options.follow, shown=shown)
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
    found = job.logs(
        node,
        rank,
        follow=options.follow,
        is_exact=True,
        is_stored=options.stored,
        attempt=options.attempt,
    )
    for line in found:
        sys.stdout.buffer.write(line.data)
        if options.follow:
            sys.stdout.buffer.flush()
    return 0


def _check_numbers(flag: str, text: str, known: int) -> None:
    """Check that a job with ``known`` nodes or ranks has all that are in a list."""
    highest = max(map(int, text.replace("-", ",").split(",")), default=0) if text else 0
    # The number of ranks is 0 until the nodes have reported it.
    if known and highest >= known:
        found = counted(known, flag.removeprefix("--"))
        raise UsageError(f"{flag} {text}: the job has {found}", hint=f"0 to {known - 1}")


def _pattern(text: str) -> Pattern:
    from cloudjob.model.patterns import Pattern

    try:
        return Pattern(text)
    except ValueError as error:
        raise UsageError(
            f"reading --grep {text}: it {error}",
            hint="put a backslash before each of . * + ? ( ) [ ] { } | that is meant literally",
        ) from error


def _wait(options: argparse.Namespace) -> int:
    found = [sweeps.sweep_of(name) or cloudjob.attach(name) for name in options.jobs]
    is_one = len(found) == 1 and isinstance(found[0], cloudjob.Job)
    statuses, code = [], 0
    for job in found:
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


def _list(options: argparse.Namespace) -> int:
    if options.sweep and not options.store:
        options.sweep = cloudjob.attach_sweep(options.sweep).id
    filters = {**filters_of(options), "store": options.store, "sweep": options.sweep}

    def look() -> _Found:
        jobs = cloudjob.jobs(**filters, limit=options.limit, on_progress=print_warning)
        return [*jobs[::-1], *sweeps.unsubmitted(options)] if options.sweep else [*jobs]

    if options.watch:
        return _watch(look, options)
    # With 10,000 jobs, the collector takes a third of the time and finds nothing.
    with _without_collector():
        found = look()
        return _show_list(found, options, is_all=not any(filters.values()))


def _show_list(found: _Found, options: argparse.Namespace, *, is_all: bool) -> int:
    if options.json:
        print(f"[{', '.join(map(_json_of, found))}]")
    elif found and sys.stdout.isatty() and not (options.all or options.limit):
        # The prompt needs a line, too.
        height = shutil.get_terminal_size().lines - 2
        shown = _print_jobs(found, options, height, asks_nodes=True)
        if more := len(found) - shown:
            print_message(f"{more} more; --all shows all, --watch scrolls")
    elif found:
        _print_jobs(found, options, asks_nodes=True)
    else:
        print_message(_NO_JOBS if is_all else "no jobs match")
    return 0


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _json_of(each: cloudjob.Job | JobStatus) -> str:
    return json.dumps(status_json(each)) if isinstance(each, JobStatus) else each.status_json()


def _rows(found: _Found) -> _Rows:
    return [
        (each, None) if isinstance(each, JobStatus) else (each.last_status or each.status(), each)
        for each in found
    ]


def _print_jobs(
    found: _Found,
    options: argparse.Namespace,
    height: int | None = None,
    *,
    asks_nodes: bool = False,
) -> int:
    """Print a table of the jobs that fit into ``height`` lines, and return their number.

    Args:
        asks_nodes: Whether to look for hangs at the ends of the logs of running jobs.
    """
    from cloudjob.model import summary

    sweep = sweeps.sweep_of(options.sweep) if options.sweep else None
    more = [*(["BY"] if options.store else []), *(["VALUES"] if options.sweep else [])]
    headers = ("JOB", "STATE", "BACKEND", "NODES", "RANKS", "AGE", "DURATION", *more, "REASON")
    cells = []
    rows = _rows(found if height is None else found[: max(1, height)])
    hangs = cloudjob.api.running_hangs(rows) if asks_nodes else {}
    for each, job in rows:
        ranks = each.nodes * each.procs_per_node or "?"
        added = [job.submitted_by if job else ""] if options.store else []
        if options.sweep:
            added.append(sweeps.values_text(sweep, each.job, job))
        cells.append(
            (each.job, each.state, each.backend, each.nodes, ranks, summary.age(each),
             summary.duration(each), *added, hangs.get(each.job) or summary.reason(each))
        )  # fmt: skip
    numbers = ("NODES", "RANKS", "AGE", "DURATION")
    if height is not None:
        return print_fitting(cells, headers, numbers=numbers, height=height)
    print_table(cells, headers, numbers=numbers)
    return len(cells)


def _attach(options: argparse.Namespace) -> int:
    from cloudjob.model.status import exit_code

    job = cloudjob.attach(options.job, store=options.store)
    try:
        status = follow_to_end(job, is_json=options.json)
    except KeyboardInterrupt:
        print_detached(job)
        raise
    if options.json:
        print_json(status_json(status))
    return exit_code(status)


def _watch(look: Callable[[], _Found], options: argparse.Namespace) -> int:
    """Print the list again whenever a job has changed, until Ctrl-C or the key q."""
    from cloudjob.cli.keys import Key, Keys, Position

    is_live = sys.stdout.isatty()
    position, found, seen, key = Position(_ORDERS), look(), None, None
    with Keys() as keys:
        while key is not Key.QUIT:
            ordered = _sorted(found, position.order)
            position.limit(len(ordered))
            size = shutil.get_terminal_size()
            height = size.lines - 1 if is_live else None
            visible = ordered[position.first :][:height]
            state = [status for status, _ in _rows(visible)], position.order, len(ordered), height
            shown = len(visible)
            if key or state != seen:
                seen = state
                # On a terminal, the list replaces the previous one.
                sys.stdout.write("\x1b[H\x1b[2J" if is_live else "")
                shown = _print_jobs(visible, options, height) if visible else 0
                if not visible:
                    print("no jobs")
                if is_live:
                    print(position.footer(shown, len(ordered))[: size.columns - 1], end="")
                sys.stdout.flush()
            key = keys.wait(_WATCH_S)
            if key:
                position.apply(key, shown)
            else:
                found = look()
    return 0


def _sorted(found: _Found, order: str) -> _Found:
    if order == "age":
        return found
    if order == "oldest":
        return found[::-1]
    first = {"FAILED": 0, "UNKNOWN": 1, "RUNNING": 2, "PENDING": 3}
    rows = sorted(_rows(found), key=lambda row: first.get(row[0].state.value, 4))
    return [job or status for status, job in rows]


def _cancel(options: argparse.Namespace) -> int:
    filters = filters_of(options)
    is_bulk = options.all or any(filters.values())
    if is_bulk == (options.job is not None):
        raise UsageError("cancel: which job?", hint="cloudjob cancel JOB, or --all, or a filter")
    if is_bulk:
        return _cancel_all(filters, is_urgent=options.now)
    sweep = sweeps.sweep_of(options.job)
    if sweep:
        sweep.cancel(is_urgent=options.now)
        sweeps.follow(sweep, sweeps.StatusPrinter())
        return 0
    job = cloudjob.attach(options.job)
    job.cancel(is_urgent=options.now)
    status = job.wait(record_s=0.0)
    print_message(f"job {job.id}: {status.state}")
    return 0


def _cancel_all(filters: dict[str, Any], *, is_urgent: bool) -> int:
    """Cancel every matching job and wait for all; report failures and continue."""
    found = [job for job in cloudjob.jobs(**filters) if not job.is_over]
    if not any(filters.values()):
        sweeps.give_up(found)
    cancelled, code = [], 0
    for job in found:
        try:
            job.cancel(is_urgent=is_urgent)
            cancelled.append(job)
        except CloudJobError as error:
            print_error(error)
            code = error.exit_code
    for job in cancelled:
        try:
            print_message(f"job {job.id}: {job.wait(record_s=0.0).state}")
        except CloudJobError as error:
            print_error(error)
            code = error.exit_code
    print_message(f"{len(cancelled)} of {counted(len(found), 'job')} cancelled")
    return code


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


def _diff(options: argparse.Namespace) -> int:
    first, second = cloudjob.attach(options.first), cloudjob.attach(options.second)
    rows = first.differences(second)
    if options.json:
        print_json({key: [one, other] for key, one, other in rows})
        return 1 if rows else 0
    for key, one, other in rows:
        lines = _changed_files(first, second) if key == "code.digest" else []
        for line in lines or [f"{key}: {_value_text(one)} -> {_value_text(other)}"]:
            print(one_line(line))
    return 1 if rows else 0


def _value_text(value: Any) -> str:
    """Return a value of a job's description as a user would write it."""
    import json
    import shlex

    if value is None:
        return "(not set)"
    if isinstance(value, list):
        return shlex.join(map(str, value)) or "(none)"
    return value or '""' if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _changed_files(first: cloudjob.Job, second: cloudjob.Job) -> list[str]:
    """Return which files of two packages differ; empty if one of them cannot be read."""
    try:
        one, other = ({entry.name: entry for entry in job.code_files()} for job in (first, second))
    except CloudJobError:
        return []
    changed = [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
    lines = []
    for name in changed[:_MAX_FILES]:
        where = "differs"
        if name not in other:
            where = f"only in {first.id}"
        elif name not in one:
            where = f"only in {second.id}"
        lines.append(f"code: {name} {where}")
    rest = len(changed) - len(lines)
    return [*lines, f"code: {counted(rest, 'more file')}"] if rest else lines


def _events(options: argparse.Namespace) -> int:
    events = cloudjob.attach(options.job).events()
    if options.json:
        print_json([event._asdict() for event in events])
    else:
        print_table([(local(event.at), event.level, event.message) for event in events])
    return 0


_INCOMPLETE = "  (may be incomplete)"


def _outputs(options: argparse.Namespace) -> int:
    from pathlib import Path

    job = cloudjob.attach(options.job)
    found = job.outputs()
    for name, uri in found.refused.items():
        if uri.startswith("pvc:"):
            print_message(f"warning: the output {name} is not read: only pods reach {uri}")
            print_message("hint: start a pod that mounts the claim, then `kubectl cp`")
            continue
        print_message(f"warning: the output {name} is not read: {job.submitted_by} chose {uri}")
        print_message("hint: if you trust that place, copy it with your own tools")
    for note in found.notes:
        print_message(note)
    if not found and not found.notes and not found.refused:
        print_message(f"job {job.id} has saved no outputs")
    elif options.to is None:
        _print_outputs(found)
    else:
        _fetch_outputs(found, Path(options.to))
    return 0


def _print_outputs(found: cloudjob.Outputs) -> None:
    """Print the names with sizes on a terminal; to a file or pipe, only the names."""
    names = [file.name + _INCOMPLETE * file.is_incomplete for file in found]
    if sys.stdout.isatty() and names:
        sizes = [size_text(file.size_bytes) for file in found]
        rows = list(zip(sizes, names, strict=True))
        print_table(rows, ("SIZE", "NAME"), numbers=("SIZE",))
        return
    for name in names:
        print_name(name)


def _fetch_outputs(found: cloudjob.Outputs, folder: Path) -> None:
    from cloudjob.cli.live import Transfers

    is_new = not folder.exists()
    try:
        with Transfers("fetched") as transfers:
            files = found.download(folder, on_progress=transfers.report)
    finally:
        if is_new and folder.is_dir():
            # Neither git nor the package of the next job takes what a job has made.
            with contextlib.suppress(OSError):
                (folder / ".gitignore").write_text("*\n")
    for file in files:
        print_name(str(folder / file.name))
        if file.is_incomplete:
            print_message(f"{file.name} may be incomplete: something was writing to it")


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


def add_status(parser: argparse.ArgumentParser) -> None:
    """Give the command status its options."""
    _takes_one_job(parser, _status)
    text = "also show the phases of the nodes"
    parser.add_argument("-v", "--verbose", action="store_true", help=text)


def add_attach(parser: argparse.ArgumentParser) -> None:
    """Give the command attach its options."""
    parser.set_defaults(run=_attach)
    text = "its id, name or handle, or its URI in its store, such as s3://bucket/jobs/train-2k83"
    parser.add_argument("job", metavar="JOB", help=text)
    text = "the store in which to look for a job that was submitted elsewhere"
    parser.add_argument("--store", metavar="URI", default="", help=text)
    json_flag(parser)


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


def add_wait(parser: argparse.ArgumentParser) -> None:
    """Give the command wait its options."""
    parser.set_defaults(run=_wait)
    text = "its id, its name or its handle; with several, waits for all"
    parser.add_argument("jobs", metavar="JOB", nargs="+", help=text)
    json_flag(parser)


def add_list(parser: argparse.ArgumentParser) -> None:
    """Give the command list its options."""
    parser.set_defaults(run=_list)
    filter_flags(parser)
    text = "the jobs of this sweep, with their values and those that were not submitted"
    parser.add_argument("--sweep", metavar="SWEEP", default="", help=text)
    text = "the jobs in this store, whoever submitted them"
    parser.add_argument("--store", metavar="URI", default="", help=text)
    parser.add_argument("--limit", type=whole_number, metavar="N", help="only the newest N")
    text = "on a terminal, too, show every job and not only those that fit"
    parser.add_argument("--all", action="store_true", help=text)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--watch", action="store_true", help="print it again whenever a job changes")
    json_flag(form)


def add_cancel(parser: argparse.ArgumentParser) -> None:
    """Give the command cancel its options."""
    parser.set_defaults(run=_cancel)
    job_argument(parser, nargs="?")
    filter_flags(parser)
    parser.add_argument("--all", action="store_true", help="cancel every job that has not ended")
    parser.add_argument("--now", action="store_true", help="skip the grace period")


def add_refresh(parser: argparse.ArgumentParser) -> None:
    """Give the command refresh its options."""
    parser.set_defaults(run=_refresh)
    job_argument(parser)
    json_flag(parser)


def add_diff(parser: argparse.ArgumentParser) -> None:
    """Give the command diff its options."""
    parser.set_defaults(run=_diff)
    parser.add_argument("first", metavar="JOB", help="its id, its name or its handle")
    parser.add_argument("second", metavar="OTHER", help="the job to compare it with")
    json_flag(parser)


def add_events(parser: argparse.ArgumentParser) -> None:
    """Give the command events its options."""
    _takes_one_job(parser, _events)


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Give the command outputs its options."""
    parser.set_defaults(run=_outputs)
    job_argument(parser)
    parser.add_argument("--to", metavar="DIR", help="copy them to folders in DIR")


def add_rm(parser: argparse.ArgumentParser) -> None:
    """Give the command rm its options."""
    parser.set_defaults(run=_rm)
    job_argument(parser, nargs="?")
    text = "remove its outputs, too, and a job of another machine that no longer exists"
    parser.add_argument("--force", action="store_true", help=text)
    parser.add_argument(
        "--orphans", action="store_true", help="remove the leftovers of killed submits"
    )


def _takes_one_job(parser: argparse.ArgumentParser, run: Callable[..., int]) -> None:
    parser.set_defaults(run=run)
    job_argument(parser)
    json_flag(parser)
