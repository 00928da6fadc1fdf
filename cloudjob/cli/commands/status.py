"""The command status: shows the state of a job or a sweep, and why it is so."""

from __future__ import annotations

import argparse
import time

import cloudjob
from cloudjob.cli import sweeps
from cloudjob.cli.activity import activity, silence_text, transferred
from cloudjob.cli.endings import hangs, reasons, verdict
from cloudjob.cli.follow import failure_hint_text
from cloudjob.cli.messages import print_json, print_message
from cloudjob.cli.options import job_argument, json_flag
from cloudjob.cli.tables import print_table
from cloudjob.model import grid, summary
from cloudjob.model.status import JobStatus
from cloudjob.model.status import to_json as status_json
from cloudjob.model.text import counted, one_line
from cloudjob.model.times import local, seconds_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from cloudjob.model.status import Phase

# With more nodes, the table of phases shows only node 0 and unfinished phases.
_MAX_NODES = 8


def _status(options: argparse.Namespace) -> int:
    sweep = sweeps.sweep_of(options.job)
    if sweep:
        return _sweep_status(sweep, is_json=options.json)
    job = cloudjob.attach(options.job)
    status = job.status()
    latest = cloudjob.Journals() if status.state.is_final else job.latest()
    hang = status.hang or latest.hang_at(time.time())
    slow = None if hang else latest.slow_at(time.time())
    status = status._replace(phases=status.phases or latest.phases, hang=hang, slow=slow)
    if options.json:
        print_json({**status_json(status), "git_commit": job.git_commit})
    else:
        print_status(status, _facts(job, status, latest), has_phases=options.verbose)
    return 0


def _sweep_status(sweep: cloudjob.Sweep, *, is_json: bool) -> int:
    """Print the jobs of a sweep with their values, and how many are in which state."""
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
    headers = ("JOB", "STATE", "VALUES", "DURATION", "REASON")
    print_table(rows, headers, numbers=("DURATION",), spare=("DURATION",))
    return 0


def _facts(
    job: cloudjob.Job, status: JobStatus, latest: cloudjob.Journals
) -> list[tuple[str, str]]:
    """Return what the status of a job does not contain, as names and texts."""
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


def print_status(
    status: JobStatus, more: Sequence[tuple[str, str]] = (), *, has_phases: bool = False
) -> None:
    """Print the status of a job on stdout: how it ended and why, then what it is.

    Args:
        more: Further facts with their names; those with an empty text are not shown.
        has_phases: Whether to show the phases of the nodes.
    """
    why = reasons(status) or [summary.reason(status)]
    rows = [
        ("job", status.job),
        ("state", verdict(status)),
        *(("" if index else "reason", line) for index, line in enumerate(why)),
        *(("" if index else "hang", line) for index, line in enumerate(hangs(status))),
        *(("log", one_line(text)) for text in summary.cut_logs(status)),
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
    phases = [
        phase for phase in status.phases if not is_short or not phase.node or _is_running(phase)
    ]
    print_table(
        [
            (phase.node, phase.name, local(phase.started_at), _duration_text(phase), _rate(phase))
            for phase in phases
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


def add_status(parser: argparse.ArgumentParser) -> None:
    """Give the command status its options."""
    parser.set_defaults(run=_status)
    job_argument(parser)
    json_flag(parser)
    text = "also show the phases of the nodes"
    parser.add_argument("-v", "--verbose", action="store_true", help=text)
