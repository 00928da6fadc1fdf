"""The command list: shows the jobs that were submitted, once or whenever one changes."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import shutil
import sys

import cloudjob
from cloudjob.cli import sweeps
from cloudjob.cli.messages import print_message, print_progress
from cloudjob.cli.options import filter_flags, filters_of, json_flag, whole_number
from cloudjob.cli.tables import print_fitting, print_table
from cloudjob.model import grid, summary
from cloudjob.model.status import JobStatus
from cloudjob.model.status import to_json as status_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    # A job of a sweep that was not submitted has only a status.
    _Statuses = list[cloudjob.Job | JobStatus]
    _Rows = list[tuple[JobStatus, cloudjob.Job | None]]

_NO_JOBS = "no jobs yet; `cloudjob submit SCRIPT` starts one"
# Seconds between two queries of `list --watch`.
_WATCH_S = 2.0
# The columns that a narrow terminal does not show.
_SPARE = ("RANKS", "NODES", "BACKEND", "DURATION", "AGE", "VALUES", "BY")
# The orders of `list --watch`; the first is that of `list`.
_ORDERS = ("age", "oldest", "state")


def _list(options: argparse.Namespace) -> int:
    if options.sweep and not options.store:
        options.sweep = cloudjob.attach_sweep(options.sweep).id
    filters = {**filters_of(options), "store": options.store, "sweep": options.sweep}

    def look() -> _Statuses:
        jobs = cloudjob.jobs(**filters, limit=options.limit, on_progress=print_progress)
        return [*jobs[::-1], *sweeps.unsubmitted(options)] if options.sweep else [*jobs]

    if options.watch:
        return _watch(look, options)
    # With 10,000 jobs, the collector takes a third of the time and finds nothing.
    with _without_collector():
        statuses = look()
        return _show_list(statuses, options, is_all=not any(filters.values()))


def _show_list(statuses: _Statuses, options: argparse.Namespace, *, is_all: bool) -> int:
    if options.json:
        print(f"[{', '.join(map(_json_of, statuses))}]")
    elif statuses and sys.stdout.isatty() and not (options.all or options.limit):
        # The prompt needs a line, too.
        height = shutil.get_terminal_size().lines - 2
        printed = _print_jobs(statuses, options, height, asks_nodes=True)
        if more := len(statuses) - printed:
            print_message(f"{more} more; --all or --watch shows them")
    elif statuses:
        _print_jobs(statuses, options, asks_nodes=True)
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


def _rows(statuses: _Statuses) -> _Rows:
    return [
        (each, None) if isinstance(each, JobStatus) else (each.last_status or each.status(), each)
        for each in statuses
    ]


def _print_jobs(
    statuses: _Statuses,
    options: argparse.Namespace,
    height: int | None = None,
    *,
    asks_nodes: bool = False,
) -> int:
    """Print a table of the jobs that fit into ``height`` lines, and return their number.

    Args:
        asks_nodes: Whether to look for hangs at the ends of the logs of running jobs.
    """
    sweep = sweeps.sweep_of(options.sweep) if options.sweep else None
    more = [*(["BY"] if options.store else []), *(["VALUES"] if options.sweep else [])]
    headers = ("JOB", "STATE", "BACKEND", "NODES", "RANKS", "AGE", "DURATION", *more, "REASON")
    cells = []
    rows = _rows(statuses if height is None else statuses[: max(1, height)])
    hangs = cloudjob.api.running_hangs(rows) if asks_nodes else {}
    for each, job in rows:
        ranks = each.nodes * each.procs_per_node or "?"
        added = [job.submitted_by if job else ""] if options.store else []
        if options.sweep:
            # The sweep has the values of unsubmitted jobs.
            values = job.sweep_values() if job else sweep.values(each.job) if sweep else {}
            added.append(grid.text_of(values))
        cells.append(
            (each.job, each.state, each.backend, each.nodes, ranks, summary.age(each),
             summary.duration(each), *added, hangs.get(each.job) or summary.reason(each))
        )  # fmt: skip
    numbers = ("NODES", "RANKS", "AGE", "DURATION")
    if height is not None:
        return print_fitting(cells, headers, numbers=numbers, spare=_SPARE, height=height)
    print_table(cells, headers, numbers=numbers)
    return len(cells)


def _watch(look: Callable[[], _Statuses], options: argparse.Namespace) -> int:
    """Print the list again whenever a job has changed, until Ctrl-C or the key q."""
    from cloudjob.cli.keys import KeyPress, KeyReader, Position

    is_live = sys.stdout.isatty()
    position, statuses, seen, key = Position(_ORDERS), look(), None, None
    with KeyReader() as keys:
        while key is not KeyPress.QUIT:
            ordered = _sorted(statuses, position.order)
            position.limit(len(ordered))
            size = shutil.get_terminal_size()
            height = size.lines - 1 if is_live else None
            visible = ordered[position.first :][:height]
            state = [status for status, _ in _rows(visible)], position.order, len(ordered), height
            printed = len(visible)
            if key or state != seen:
                seen = state
                # On a terminal, the list replaces the previous one.
                sys.stdout.write("\x1b[H\x1b[2J" if is_live else "")
                printed = _print_jobs(visible, options, height) if visible else 0
                if not visible:
                    print("no jobs")
                if is_live:
                    print(position.footer(printed, len(ordered))[: size.columns - 1], end="")
                sys.stdout.flush()
            key = keys.wait(_WATCH_S)
            if key:
                position.apply(key, printed)
            else:
                statuses = look()
    return 0


def _sorted(statuses: _Statuses, order: str) -> _Statuses:
    if order == "age":
        return statuses
    if order == "oldest":
        return statuses[::-1]
    first = {"FAILED": 0, "UNKNOWN": 1, "RUNNING": 2, "PENDING": 3}
    rows = sorted(_rows(statuses), key=lambda row: first.get(row[0].state.value, 4))
    return [job or status for status, job in rows]


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
