"""The command stacks: what the ranks of a running job execute right now."""

from __future__ import annotations

import argparse
import time

import cloudjob
from cloudjob.cli.messages import print_json, print_message
from cloudjob.cli.options import job_argument, json_flag, whole_number
from cloudjob.model.text import counted, one_line
from jobentry.contract.journal import ranges

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from cloudjob import JobStacks, StackGroup

_MOST_GROUPS = 12
_COLUMN = 40


def add_stacks(parser: argparse.ArgumentParser) -> None:
    """Give the command stacks its options."""
    parser.set_defaults(run=_stacks)
    job_argument(parser)
    parser.add_argument("--rank", type=whole_number, metavar="R", help="only this rank")
    parser.add_argument(
        "--threads", action="store_true", help="all threads, not only the main one of each process"
    )
    json_flag(parser)


def _stacks(options: argparse.Namespace) -> int:
    job = cloudjob.attach(options.job)
    found = job.stacks(options.rank, with_threads=options.threads)
    if options.json:
        print_json(_plain(found))
    else:
        print("\n".join(_lines(job, found, is_short=options.rank is None)))
    return 0 if any(group.frames for group in found.groups) else 1


def _lines(job: cloudjob.Job, found: JobStacks, *, is_short: bool) -> list[str]:
    at = time.strftime("%H:%M:%S", time.localtime(found.at))
    lines = [f"{job.id}: {_count(found)}, {at}"]
    shown = found.groups[:_MOST_GROUPS] if is_short else found.groups
    for group in shown:
        lines += ["", f"{_who(group)}: {one_line(group.does)}"]
        if group.problem:
            lines.append(f"    no Python stack: {one_line(group.problem)}")
        lines += _calls(group)
    rest = len(found.groups) - len(shown)
    if rest:
        lines += ["", f"{counted(rest, 'other stack')}; --rank R shows all of a rank"]
    lines += ["", *_conclusion(found)] if _conclusion(found) else []
    for node in found.silent:
        print_message(f"node {node} did not answer in time")
    if not found.groups:
        print_message("no rank runs")
    return lines


def _count(found: JobStacks) -> str:
    ranks = {item.rank for item in found.processes}
    nodes = {item.node for item in found.processes}
    return f"{counted(len(ranks), 'rank')} on {counted(len(nodes), 'node')}"


def _who(group: StackGroup) -> str:
    text = ranks_text(group.ranks)
    if len(group.nodes) == 1:
        text += f" on node {group.nodes[0]}"
    if group.command:
        many = len(group.processes)
        which = f"process {group.processes[0]}" if many == 1 else f"{many} processes"
        text += f", {which} ({one_line(group.command)})"
    return text if group.is_main else f"{text}, another thread"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as text: ``rank 3``, ``ranks 0-2,4``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}"


def _calls(group: StackGroup) -> list[str]:
    rows = [
        (f"{one_line(frame.function)}()", f"{_short(frame.file)}:{frame.line}", frame.source)
        for frame in group.frames
    ]
    widths = [min(_COLUMN, max((len(row[n]) for row in rows), default=0)) for n in (0, 1)]
    return [
        f"    {name:<{widths[0]}}  {place:<{widths[1]}}  {one_line(source)}".rstrip()
        for name, place, source in rows
    ]


def _short(file: str) -> str:
    """Return the path of a file without the folder of its packages."""
    for folder in ("site-packages/", "dist-packages/"):
        file = file.rpartition(folder)[2]
    return one_line(file)


def _conclusion(found: JobStacks) -> list[str]:
    if not found.odd_ranks:
        return []
    waiting, odd = ranks_text(found.waiting_ranks), ranks_text(found.odd_ranks)
    one, other = len(found.waiting_ranks) == 1, len(found.odd_ranks) == 1
    return [
        f"{waiting} {'waits' if one else 'wait'} for others; {odd} {'does' if other else 'do'} not."
    ]


def _plain(found: JobStacks) -> dict[str, Any]:
    return {
        "at": found.at,
        "silent_nodes": list(found.silent),
        "waiting_ranks": list(found.waiting_ranks),
        "odd_ranks": list(found.odd_ranks),
        "groups": [
            {
                "ranks": list(group.ranks),
                "nodes": list(group.nodes),
                "processes": list(group.processes),
                "command": group.command,
                "is_main": group.is_main,
                "waits_for_ranks": group.waits_for_ranks,
                "does": group.does,
                "frames": [frame._asdict() for frame in group.frames],
                "problem": group.problem,
            }
            for group in found.groups
        ],
    }
