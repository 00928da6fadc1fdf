"""The timeline: what each node did when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cloudjob.console.charts.style import FAILED, Chart, bars_option
from cloudjob.model import times
from cloudjob.model.status import JobState, JobStatus, Phase

# Phase -> colour. The entry on the nodes chooses the names of phases.
_COLOURS = {
    "stage": "#94a3b8",
    "package": "#a78bfa",
    "inputs": "#f472b6",
    "start ranks": "#ea580c",
    "first output": "#22d3ee",
    "bring-up": "#facc15",
    "run": "#2563eb",
    "prepare outputs": "#92400e",
    "outputs": "#10b981",
    "store": "#10b981",
}
_OTHER = "#84cc16"
_LABELS = {"first output": "waiting for output"}
# What else a timeline shows, with its colour: the time before a job's nodes start, the attempts
# before the last one, and a failure.
_QUEUED, _FAILED = ("queued", "#cbd5e1"), ("failed", FAILED)
_EARLIER = ("earlier attempts", "#fdba74")
_ROW_PX, _FRAME_PX = 30, 70
_MAX_ROWS = 16


def timeline(status: JobStatus, phases: Sequence[Phase], now_s: float) -> Chart | None:
    """Return a bar for each phase of each node, in seconds since the submit; None without phases.

    Args:
        now_s: The end to draw for unfinished phases of a running job, in seconds since 1970.
    """
    if not phases:
        return None
    zero = times.seconds_of(status.created_at)
    if status.ended_at:
        now_s = times.seconds_of(status.ended_at)
    spans = [_span(phase, zero, now_s) for phase in phases]
    nodes = sorted({span.node for span in spans})
    rows = {node: row for row, node in enumerate(nodes)}
    # Name -> [row, start, end, whether the bar is drawn within another one].
    bars: dict[str, list[list[float]]] = {}
    if status.started_at:
        queued_s = times.seconds_of(status.started_at) - zero
        first: dict[int, float] = {}
        for span in spans:
            first[span.node] = min(span.start, first.get(span.node, span.start))
        ends = [min(queued_s, first[node]) for node in nodes]
        queued = [[row, 0.0, end, 0] for row, end in enumerate(ends) if end > 0]
        bars.update({_QUEUED[0]: queued} if queued else {})
        if status.attempt and status.attempt.number > 1:
            # Only the phases of the last attempt are recorded.
            bars[_EARLIER[0]] = [[row, ends[row], first[node], 0] for row, node in enumerate(nodes)]
    nested = _nested(spans)
    for span in sorted(spans, key=nested.__contains__):
        bar = [rows[span.node], span.start, span.end, int(span in nested)]
        bars.setdefault(span.name, []).append(bar)
    failures = _failures(status, spans, rows)
    bars.update({_FAILED[0]: failures} if failures else {})
    colours = dict((*_COLOURS.items(), _QUEUED, _EARLIER, _FAILED))
    kinds = [
        (_LABELS.get(name, name), colours.get(name, _OTHER), values)
        for name, values in bars.items()
    ]
    option = bars_option([f"node {node}" for node in nodes], kinds, _MAX_ROWS)
    return Chart("Timeline", option, _FRAME_PX + _ROW_PX * min(len(nodes), _MAX_ROWS))


class _Span(NamedTuple):
    """A phase, in seconds since the submit."""

    node: int
    name: str
    start: float
    end: float

    def is_within(self, other: _Span) -> bool:
        """Whether it is a part of another phase of the same node."""
        is_covered = other.start <= self.start and self.end <= other.end
        return is_covered and self[2:] != other[2:]


def _nested(spans: Sequence[_Span]) -> set[_Span]:
    """Return the phases that are a part of another one of their node."""
    by_node: dict[int, list[_Span]] = {}
    for span in spans:
        by_node.setdefault(span.node, []).append(span)
    return {
        span
        for of_node in by_node.values()
        for span in of_node
        if any(map(span.is_within, of_node))
    }


def _span(phase: Phase, zero_s: float, now_s: float) -> _Span:
    end_s = times.seconds_of(phase.ended_at) if phase.ended_at else now_s
    start = times.seconds_of(phase.started_at) - zero_s
    return _Span(phase.node, phase.name, start, max(start, end_s - zero_s))


def _failures(
    status: JobStatus, spans: Sequence[_Span], rows: Mapping[int, int]
) -> list[list[float]]:
    """Return where to mark a failure: at the end of the run, or of what came before it.

    The mark is on the node that failed, or on each one if no node is to blame.
    """
    if status.state is not JobState.FAILED:
        return []
    blamed = status.failure.node if status.failure else None
    ends: dict[int, tuple[bool, float]] = {}
    for span in spans:
        if blamed in (span.node, None) or blamed not in rows:
            end = (span.name == "run", span.end)
            ends[span.node] = max(end, ends.get(span.node, end))
    return [[rows[node], end, end, 0] for node, (_, end) in sorted(ends.items())]
