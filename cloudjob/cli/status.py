"""Prints the status of a job: its facts, how it ended, and the phases of its nodes."""

from __future__ import annotations

import time

from cloudjob.cli.messages import print_message
from cloudjob.cli.tables import print_table
from cloudjob.model import summary
from cloudjob.model.status import Cause
from cloudjob.model.status import to_json as status_json
from cloudjob.model.text import counted, one_line, size_text
from cloudjob.model.times import local, seconds_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from cloudjob.model.status import Failure, JobStatus, Phase

__all__ = ["headline", "print_status", "report", "status_json", "transferred"]

# With more nodes, the table of phases shows only node 0 and unfinished phases.
_MAX_NODES = 8
# Lines of the stacks of a crash; the thread that crashed comes first.
_MAX_STACK_LINES = 15


def report(status: JobStatus) -> None:
    """Print how a job ended on stderr: which rank of which node failed, and why."""
    print_message(headline(status))
    for line in _reason(status):
        print_message(f"  {one_line(line)}")


def headline(status: JobStatus) -> str:
    """Return the state of a job, and for how long it has run or ran."""
    return f"job {status.job}: {_verdict(status)}"


def _verdict(status: JobStatus) -> str:
    took = summary.duration(status)
    ended = "in" if status.state.is_final else "for"
    return f"{status.state} {ended} {took}" if took else str(status.state)


def _reason(status: JobStatus) -> list[str]:
    """Return which rank of which node failed, and why, with its stacks and last lines."""
    failure = status.failure
    if failure is None:
        return []
    lines = [f"{_place(failure)}{failure.message}{_code(failure)}"] if failure.message else []
    if failure.host and failure.host not in failure.message and failure.message:
        lines.append(f"host {failure.host}")
    stacks = failure.stack_lines[:_MAX_STACK_LINES]
    if len(failure.stack_lines) > len(stacks):
        stacks = (*stacks, "… `status --json` has the stacks of all threads")
    return [*lines, *stacks, *(f"| {line}" for line in failure.last_lines)]


def _hang(status: JobStatus) -> list[str]:
    """Return how a job hangs, or hung, unless its failure already says so."""
    is_known = status.hang is None or status.cause is Cause.HANG
    return [] if is_known or status.hang is None else [status.hang.message, *status.hang.details]


def _place(failure: Failure) -> str:
    place = summary.place(failure)
    return f"{place}: " if place else ""


def _code(failure: Failure) -> str:
    """Return the exit code as text; empty if the message names it."""
    text = f"exit code {failure.exit_code}"
    is_redundant = failure.exit_code is None or failure.message.endswith(text)
    return "" if is_redundant else f" [{text}]"


def print_status(
    status: JobStatus, more: Sequence[tuple[str, str]] = (), *, has_phases: bool = False
) -> None:
    """Print the status of a job on stdout: how it ended and why, then what it is.

    Args:
        more: Further facts with their names; those with an empty text are not shown.
        has_phases: Whether to show the phases of the nodes.
    """
    reasons = _reason(status) or [summary.reason(status)]
    rows = [
        ("job", status.job),
        ("state", _verdict(status)),
        *(("" if index else "reason", line) for index, line in enumerate(reasons)),
        *(("" if index else "hang", line) for index, line in enumerate(_hang(status))),
        ("slow", status.slow.message if status.slow else ""),
        ("waits", summary.wait(status)),
        *more,
        ("attempt", summary.attempt(status)),
        ("exit code", "" if status.exit_code is None else str(status.exit_code)),
        ("cause", status.cause or ""),
        ("backend", f"{status.backend} ({_native(status)})"),
        ("size", f"{counted(status.nodes, 'node')} with {_ranks(status.procs_per_node)}"),
        ("created", local(status.created_at)),
        ("started", local(status.started_at or "")),
        ("ended", local(status.ended_at or "")),
    ]
    print_table([row for row in rows if row[1]])
    if has_phases and status.phases:
        _print_phases(status)


def _native(status: JobStatus) -> str:
    """Return the platform's own word, without the reason that ``waits`` shows."""
    wait = status.wait.message if status.wait else ""
    return status.native_state.removesuffix(f" ({wait})")


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
    return summary.span(_seconds(phase)) + (" so far" if _is_running(phase) else "")


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
