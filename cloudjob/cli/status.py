"""Prints the status of a job: its facts, how it ended, and the phases of its nodes."""

from __future__ import annotations

import time

from cloudjob.cli.messages import print_message
from cloudjob.cli.tables import print_table
from cloudjob.model import summary
from cloudjob.model.status import to_json as status_json
from cloudjob.model.text import counted, one_line, size_text
from cloudjob.model.times import local, seconds_between, seconds_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.model.status import Failure, JobStatus, Phase

__all__ = ["print_status", "report", "status_json", "transferred"]

# With more nodes, the table of phases shows only node 0 and unfinished phases.
_MAX_NODES = 8


def report(status: JobStatus) -> None:
    """Print how a job ended: which rank of which node failed, and why."""
    took = None
    if status.started_at and status.ended_at:
        took = seconds_between(status.started_at, status.ended_at)
    how_long = "" if took is None else f" in {took:.1f} s"
    print_message(f"job {status.job}: {status.state}{how_long}")
    failure = status.failure
    if failure is None:
        return
    if failure.message:
        print_message(f"  {_place(failure)}{one_line(failure.message)}{_code(failure)}")
    if failure.host and failure.host not in failure.message and failure.message:
        print_message(f"  host {one_line(failure.host)}")
    for line in failure.last_lines:
        print_message(f"  | {one_line(line)}")


def _place(failure: Failure) -> str:
    place = summary.place(failure)
    return f"{place}: " if place else ""


def _code(failure: Failure) -> str:
    """Return the exit code as text; empty if the message names it."""
    text = f"exit code {failure.exit_code}"
    is_redundant = failure.exit_code is None or failure.message.endswith(text)
    return "" if is_redundant else f" [{text}]"


def print_status(status: JobStatus, *, commit: str = "", silence: str = "") -> None:
    """Print the status of a job, one line for each fact.

    Args:
        commit: The git commit of its source as text; empty if unknown.
        silence: Which rank has been silent for how long; empty if none has.
    """
    rows: list[tuple[str, object]] = [
        ("job", status.job),
        ("state", status.state),
        ("backend", f"{status.backend} ({status.native_state})"),
        ("size", f"{counted(status.nodes, 'node')} with {_ranks(status.procs_per_node)}"),
        ("created", local(status.created_at)),
        ("started", local(status.started_at or "-")),
        ("ended", local(status.ended_at or "-")),
    ]
    if commit:
        rows.append(("git commit", commit))
    if status.exit_code is not None:
        rows.append(("exit code", status.exit_code))
    if status.cause:
        rows.append(("cause", status.cause))
    if silence:
        rows.append(("silent", silence))
    print_table(rows)
    if status.phases:
        _print_phases(status)
    if status.failure:
        report(status)


def _ranks(procs_per_node: int) -> str:
    return f"{counted(procs_per_node, 'rank')} each" if procs_per_node else "a rank for each device"


def _print_phases(status: JobStatus) -> None:
    """Print the phases of the nodes, with the rates of transfers."""
    print()
    is_short = status.nodes > _MAX_NODES
    shown = [
        phase for phase in status.phases if not is_short or not phase.node or _is_running(phase)
    ]
    print_table(
        [
            (phase.node, phase.name, local(phase.started_at), _duration_text(phase), _rate(phase))
            for phase in shown
        ],
        ("NODE", "PHASE", "STARTED", "TOOK", ""),
        numbers=("NODE", "TOOK"),
    )


def _is_running(phase: Phase) -> bool:
    return phase.ended_at is None


def _seconds(phase: Phase) -> float:
    ended_s = seconds_of(phase.ended_at) if phase.ended_at else time.time()
    return max(0.0, ended_s - seconds_of(phase.started_at))


def _duration_text(phase: Phase) -> str:
    return f"{_seconds(phase):.1f} s" + (" so far" if _is_running(phase) else "")


def _rate(phase: Phase) -> str:
    if not phase.done_bytes:
        return ""
    total_bytes = phase.total_bytes if _is_running(phase) else 0
    return transferred(
        phase.done_bytes, total_bytes, phase.done_bytes / max(0.001, _seconds(phase))
    )


def transferred(done_bytes: int, total_bytes: int, rate: float) -> str:
    """Return how much of a transfer is done, its rate, and how long the rest will take.

    Args:
        total_bytes: 0 if it is unknown or nothing is left.
    """
    if total_bytes <= done_bytes or not rate:
        return f"{size_text(done_bytes)}, {size_text(int(rate))}/s"
    left = summary.span((total_bytes - done_bytes) / rate)
    done = f"{size_text(done_bytes)} of {size_text(total_bytes)}"
    return f"{done}, {size_text(int(rate))}/s, {left} left"
