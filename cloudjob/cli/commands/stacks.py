"""The command stacks: what the ranks of a running job execute right now."""

from __future__ import annotations

import argparse

import cloudjob
from cloudjob.cli.messages import print_json, print_message
from cloudjob.cli.options import job_argument, json_flag, whole_number
from cloudjob.model.text import counted, one_line, short_path
from cloudjob.model.times import local, rfc3339

TYPE_CHECKING = False
if TYPE_CHECKING:
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
    parser.add_argument(
        "--native",
        action="store_true",
        help="also calls of C and C++ code, approximately; stops running threads for a moment",
    )
    json_flag(parser)


def _stacks(options: argparse.Namespace) -> int:
    job = cloudjob.attach(options.job)
    if job.is_asked_through_store:
        print_message("asking through the store of the job: an answer takes 10 to 30 seconds")
    answer = job.stacks(options.rank, with_threads=options.threads, with_native=options.native)
    if options.json:
        print_json(_plain(answer))
    else:
        print("\n".join(_lines(job, answer, is_short=options.rank is None)))
    return 0 if any(group.frames or group.native for group in answer.groups) else 1


def _lines(job: cloudjob.Job, answer: JobStacks, *, is_short: bool) -> list[str]:
    at = local(rfc3339(answer.at))
    lines = [f"{job.id}: {_count(answer)}, {at}"]
    groups = answer.groups[:_MOST_GROUPS] if is_short else answer.groups
    for group in groups:
        lines += ["", f"{one_line(group.who)}: {one_line(group.does)}"]
        if group.problem and not group.native:
            lines.append(f"    no Python stack: {one_line(group.problem)}")
        lines += _native_calls(group) + _calls(group)
    rest = len(answer.groups) - len(groups)
    if rest:
        lines += ["", f"{counted(rest, 'other stack')}; --rank R shows all of a rank"]
    lines += ["", answer.conclusion] if answer.conclusion else []
    for node in answer.silent:
        print_message(f"node {node} did not answer in time")
    if not answer.groups:
        print_message("no rank runs")
    return lines


def _count(answer: JobStacks) -> str:
    ranks = {item.rank for item in answer.processes}
    nodes = {item.node for item in answer.processes}
    return f"{counted(len(ranks), 'rank')} on {counted(len(nodes), 'node')}"


def _calls(group: StackGroup) -> list[str]:
    rows = [
        (
            f"{one_line(frame.function)}()",
            f"{one_line(short_path(frame.file))}:{frame.line}",
            frame.source,
        )
        for frame in group.frames
    ]
    widths = [min(_COLUMN, max((len(row[n]) for row in rows), default=0)) for n in (0, 1)]
    return [
        f"    {name:<{widths[0]}}  {place:<{widths[1]}}  {one_line(source)}".rstrip()
        for name, place, source in rows
    ]


def _native_calls(group: StackGroup) -> list[str]:
    rows = [(call.function or "?", call.library) for call in group.native]
    width = min(_COLUMN, max((len(one_line(function)) for function, _ in rows), default=0))
    return [f"    {one_line(function):<{width}}  {one_line(library)}" for function, library in rows]


def _plain(answer: JobStacks) -> dict[str, Any]:
    return {
        "at": answer.at,
        "silent_nodes": list(answer.silent),
        "waiting_ranks": list(answer.waiting_ranks),
        "odd_ranks": list(answer.odd_ranks),
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
                "native": [call._asdict() for call in group.native],
                "problem": group.problem,
            }
            for group in answer.groups
        ],
    }
