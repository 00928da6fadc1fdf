"""The command top: the resources that the nodes and ranks of a job use right now."""

from __future__ import annotations

import argparse
import sys
from math import inf

import cloudjob
from cloudjob.cli.activity import STATES
from cloudjob.cli.messages import print_message
from cloudjob.cli.options import job_argument
from cloudjob.cli.tables import new_table, without_spare
from cloudjob.errors import CloudJobError
from cloudjob.model import summary
from cloudjob.model.text import counted, one_line, size_text
from jobentry.contract.journal import state_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from threading import Thread
    from typing import Any

    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

    from cloudjob.cli.keys import Position
    from cloudjob.model.status import JobStatus
    from jobentry.contract.journal import RankSample, Sample

_NODE_HEADERS = (
    "NODE", "PHASE", "CPU", "MEMORY", "SPACE", "WAITS", "NETWORK", "DISK", "DEVICES",
)  # fmt: skip
_RANK_HEADERS = (
    "RANK", "NODE", "STATE", "SILENT", "CPU", "WAITS", "MEMORY", "THREADS", "CHILDREN", "PLACE",
)  # fmt: skip
# The columns that a narrow terminal does not show.
_SPARE = ("DEVICES", "DISK", "CHILDREN", "THREADS", "NETWORK", "SPACE", "WAITS", "PHASE", "PLACE")
# Where no line is folded.
_PIPE_WIDTH = 1000
_REFRESH_S = 1.0
# Seconds between two polls of the job's status.
_STATUS_S = 3.0
_MIB = 1024 * 1024
# A value is marked from these percentages on: memory and disk space, and waiting.
_NEARLY_FULL, _HIGH_PRESSURE = 95.0, 50.0
# A screen has no room for more ranks; those that have been silent the longest come first.
_MAX_RANKS = 40
# The orders of the ranks on a screen: their names, and the keys that sort them.
_ORDERS: dict[str, Callable[[int, RankSample], Any]] = {
    "silence": lambda rank, sample: (-sample.quiet_s, rank),
    "rank": lambda rank, _: rank,
    "CPU": lambda rank, sample: (-sample.cpu_percent, rank),
    "memory": lambda rank, sample: (-sample.rss_mib, rank),
    # The one for which the others wait comes first.
    "waits": lambda rank, sample: (
        inf if sample.waits_percent is None else sample.waits_percent,
        rank,
    ),
}


def _top(options: argparse.Namespace) -> int:
    job = cloudjob.attach(options.job)
    status = job.status()
    if options.once or status.state.is_final or not sys.stdout.isatty():
        _print(_page(job, status, job.journals()))
        return 0
    _follow(job, status)
    return 0


def _follow(job: cloudjob.Job, status: JobStatus) -> None:
    """Show the page until the job has ended, or until Ctrl-C."""
    import time

    from rich.console import Console
    from rich.live import Live

    from cloudjob.cli.keys import KeyPress, KeyReader, Position

    journals = cloudjob.Journals()
    reader = _reader(job, journals)
    polled_at_s = time.monotonic()
    console, position = Console(highlight=False), Position(tuple(_ORDERS))
    with KeyReader() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while not status.state.is_final:
            page = _page(job, status, journals, position.order)
            live.update(_window(console, page, position), refresh=True)
            key = keys.wait(_REFRESH_S)
            if key is KeyPress.QUIT:
                return
            if key:
                position.apply(key, console.height // 2)
            if time.monotonic() > polled_at_s + _STATUS_S:
                status, polled_at_s = job.status(), time.monotonic()
    reader.join(_STATUS_S)
    _print(_page(job, status, journals))


def _print(page: Group) -> None:
    from rich.console import Console

    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    Console(highlight=False, width=width).print(page)


def _window(console: Console, page: Group, position: Position) -> Group:
    """Return the lines of a page that fit on the terminal, below its first line."""
    from rich.console import Group
    from rich.segment import Segments
    from rich.text import Text

    head, *lines = console.render_lines(page, pad=False, new_lines=True)
    position.limit(len(lines))
    visible = lines[position.first :][: max(1, console.height - 2)]
    footer = Text(position.footer(len(visible), len(lines)), no_wrap=True, overflow="ellipsis")
    return Group(Segments([part for line in (head, *visible) for part in line]), footer)


def _reader(job: cloudjob.Job, journals: cloudjob.Journals) -> Thread:
    from threading import Thread

    def read() -> None:
        try:
            for _ in job.pieces(follow=True, on_journal=journals.add):
                pass
        except CloudJobError as error:
            print_message(f"reading the log: {error.message}")

    thread = Thread(target=read, daemon=True)
    thread.start()
    return thread


def _page(
    job: cloudjob.Job, status: JobStatus, journals: cloudjob.Journals, order: str = ""
) -> Group:
    from rich.console import Group
    from rich.text import Text

    ranks = counted(job.ranks, "rank") if job.ranks else "ranks"
    facts = (job.id, str(status.state), summary.duration(status), counted(job.nodes, "node"), ranks)
    head = Text("  ".join(one_line(fact) for fact in facts if fact), "bold")
    if not journals.resources:
        return Group(head, Text("The nodes have not recorded what they use yet."))
    return Group(head, Text(), _nodes(journals), Text(), *_ranks(journals, order))


def _nodes(journals: cloudjob.Journals) -> Table:
    phases = {phase.node: phase.name for phase in journals.phases if phase.ended_at is None}
    rows = [
        (str(node), one_line(phases.get(node, "")), *_node_cells(samples[-1]))
        for node, samples in journals.resources.items()
    ]
    return _table(_NODE_HEADERS, rows)


def _table(headers: Sequence[str], rows: Sequence[Sequence[Text | str]]) -> Table:
    headers, rows = without_spare(headers, rows, _SPARE)
    table = new_table(headers, numbers=[name for name in headers if name != "PLACE"])
    for row in rows:
        table.add_row(*row)
    return table


def _node_cells(sample: Sample) -> Sequence[Text | str]:
    pressure = max(sample.pressure) if sample.pressure else None
    busy = [d.utilisation_percent for d in sample.devices if d.utilisation_percent is not None]
    used, space = sample.space or (0.0, 0.0)
    return (
        _percent(sum(sample.cpu[:2]) if sample.cpu else None),
        _memory(sample),
        _percent(100 * used / space if space else None, _NEARLY_FULL),
        _percent(pressure, _HIGH_PRESSURE),
        f"{size_text(int(sum(sample.network) * 1024))}/s" if sample.network else "",
        f"{size_text(int(sum(sample.disk) * 1024))}/s" if sample.disk else "",
        " ".join(f"{value:.0f}%" for value in busy),
    )


def _memory(sample: Sample) -> Text | str:
    """Return the memory in use, its limit, and the number of processes killed for lack of it."""
    if not sample.memory:
        return ""
    used, limit = sample.memory
    killed = f", {sample.oom_kills} killed" if sample.oom_kills else ""
    text = f"{size_text(int(used * _MIB))} of {size_text(int(limit * _MIB))}{killed}"
    return _marked(text, sample.oom_kills > 0 or 100 * used >= _NEARLY_FULL * limit)


def _percent(value: float | None, limit: float = inf) -> Text | str:
    """Return a percentage, marked if it reaches the limit."""
    return "" if value is None else _marked(f"{value:.0f}%", value >= limit)


def _marked(text: str, is_bad: bool) -> Text | str:
    from rich.text import Text

    return Text(text, "bold red") if is_bad else text


def _ranks(journals: cloudjob.Journals, order: str = "") -> Sequence[Table | str]:
    """Return the table of the ranks, by number unless ``order`` is one of ``_ORDERS``."""
    last = {rank: points[-1] for rank, points in journals.ranks.items() if points}
    by_silence = sorted(last, key=lambda rank: last[rank].sample.quiet_s, reverse=True)
    by_order = _ORDERS.get(order)
    ranks = sorted(by_silence[:_MAX_RANKS])
    if by_order:
        ranks = sorted(last, key=lambda rank: by_order(rank, last[rank].sample))[:_MAX_RANKS]
    rows = []
    for rank in ranks:
        sample = last[rank].sample
        state = state_of(sample.state)
        cells = (
            str(rank),
            str(last[rank].node),
            _marked(
                STATES.get(sample.state, one_line(sample.state)),
                state is not None and state.is_trouble,
            ),
            summary.span(sample.quiet_s),
            f"{sample.cpu_percent}%",
            _percent(journals.waits_percent(rank)),
            size_text(sample.rss_mib * _MIB),
            str(sample.threads),
            str(sample.children),
            one_line(sample.place),
        )
        rows.append(cells)
    table = _table(_RANK_HEADERS, rows)
    left_out = len(last) - len(ranks)
    later = "" if by_order else " wrote something later"
    return (table, f"{counted(left_out, 'more rank')}{later}") if left_out else (table,)


def add_top(parser: argparse.ArgumentParser) -> None:
    """Give the command top its options."""
    parser.set_defaults(run=_top)
    job_argument(parser)
    parser.add_argument("--once", action="store_true", help="print it once, as in a pipe")
