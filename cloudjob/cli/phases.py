"""The phases of a job's nodes on the terminal."""

from __future__ import annotations

import time

from cloudjob import times
from cloudjob.cli.say import size
from cloudjob.cli.tables import print_table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.model.status import JobStatus, Phase

# With more nodes, the table has node 0 and the phases that still last.
_MOST_NODES = 8


def print_phases(status: JobStatus) -> None:
    """Print the phases of the nodes, with the rates of transfers."""
    print()
    is_short = status.nodes > _MOST_NODES
    shown = [phase for phase in status.phases if not is_short or not phase.node or _lasts(phase)]
    print_table(
        [(phase.node, phase.name, phase.started_at, _took(phase), _rate(phase)) for phase in shown],
        ("NODE", "PHASE", "STARTED", "TOOK", ""),
        numbers=("NODE", "TOOK"),
    )


def _lasts(phase: Phase) -> bool:
    return phase.ended_at is None


def _seconds(phase: Phase) -> float:
    ended_s = times.seconds_of(phase.ended_at) if phase.ended_at else time.time()
    return max(0.0, ended_s - times.seconds_of(phase.started_at))


def _took(phase: Phase) -> str:
    return f"{_seconds(phase):.1f} s" + (" so far" if _lasts(phase) else "")


def _rate(phase: Phase) -> str:
    """Return how much of a transfer is done, its rate, and how long the rest will take."""
    if not phase.done_bytes:
        return ""
    rate = phase.done_bytes / max(0.001, _seconds(phase))
    text = size(phase.done_bytes)
    if _lasts(phase) and phase.total_bytes > phase.done_bytes:
        left_s = (phase.total_bytes - phase.done_bytes) / rate
        return (
            f"{text} of {size(phase.total_bytes)}, {size(int(rate))}/s, about {left_s:.0f} s left"
        )
    return f"{text}, {size(int(rate))}/s"
