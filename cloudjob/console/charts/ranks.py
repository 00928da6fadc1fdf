"""The grid of ranks: a cell for each, in which those that differ stand out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from cloudjob.console.charts.style import QUIET, Chart, megabytes
from cloudjob.console.rank_states import RankState, rank_states
from cloudjob.model.status import JobStatus
from cloudjob.tracking.journals import Journals, RankPoint
from cloudjob.tracking.metrics import MetricPoint
from jobentry.contract import journal

# The number of cells in a row, the number for many ranks, and how many are more than a few ranks.
_CELLS_IN_ROW, _MANY_CELLS_IN_ROW, _MANY = 16, 32, 128
_CELL_PX, _LEGEND_PX = 26, 84
_STATES = list(RankState)
_STATE_COLOURS = {
    RankState.FAILED_FIRST: "#dc2626",
    RankState.FAILED: "#f87171",
    RankState.LOST: "#a21caf",
    RankState.STOPPED: "#94a3b8",
    RankState.NOT_KNOWN: "#d6d3d1",
    RankState.DEAD: "#64748b",
    RankState.PAUSED: "#a855f7",
    RankState.WAITS_FOR_DISK: "#f59e0b",
    RankState.WAITING: "#93c5fd",
    RankState.RUNNING: "#2563eb",
    RankState.ENDED: "#16a34a",
}
# The border of cells of the same colour, in both schemes.
_BORDER = "rgba(15, 23, 42, 0.35)"
# A note names no more ranks of one state.
_FEW = 8


class _Scale(NamedTuple):
    """How the values of ranks are mapped to colours.

    Args:
        unit: The unit to append to a value in a text.
        least: The smallest difference that gets a strong colour; smaller ones get a weaker colour.
        kind: ``high`` if high values stand out, ``low`` if low values do, ``both`` if values far
            from the median do.
    """

    unit: str
    least: float
    kind: str

    def limits(self, values: Sequence[float]) -> tuple[float, float]:
        """Return the values for the first and the last colour."""
        if self.kind == "high":
            return 0, max(self.least, *values)
        if self.kind == "low":
            return min(max(values) - self.least, *values), max(values)
        middle = median(values)
        span = max(self.least, *(abs(value - middle) for value in values))
        return middle - span, middle + span

    def distance(self, value: float, middle: float) -> float:
        """Return the distance of a value from the median, in the direction of ``kind``."""
        by_kind = {"high": value - middle, "low": middle - value}
        return by_kind.get(self.kind, abs(value - middle))


_SCALES = {
    "silent for (s)": _Scale(" s", 60, "high"),
    "CPU (%)": _Scale(" %", 25, "both"),
    "memory (MB)": _Scale(" MB", 256, "both"),
    "threads": _Scale("", 8, "both"),
    "step": _Scale("", 10, "low"),
}
_USUAL, _FAR = "#bfdbfe", "#dc2626"
_RANGES = {
    "high": [_USUAL, "#60a5fa", "#f59e0b", _FAR],
    "low": [_FAR, "#f59e0b", "#60a5fa", _USUAL],
    "both": ["#6d28d9", "#818cf8", _USUAL, "#f59e0b", _FAR],
}
# The values that the cells of the rank grid can show.
RANK_VALUES = ("state", *_SCALES)


def last_steps(points: Sequence[MetricPoint]) -> dict[int, int]:
    """Return the last step of each rank, by the metrics that it has printed."""
    step_of: dict[int, int] = {}
    for point in points:
        if point.rank is not None:
            step_of[point.rank] = max(point.step, step_of.get(point.rank, point.step))
    return step_of


def rank_grid(
    status: JobStatus, journals: Journals, shows: str, steps: Mapping[int, int] | None = None
) -> Chart | None:
    """Return one cell for each rank, coloured by its last sample while it ran; None without any.

    A rank that has ended has a frame with the colour of its end. The note names the ranks that
    differ from the others.

    Args:
        shows: One of ``RANK_VALUES``.
        steps: The last step of each rank, for ``step``.
    """
    last = {rank: points for rank, points in journals.ranks.items() if points}
    states = rank_states(journals, status)
    if shows == "state":
        values: dict[int, float] = {rank: _STATES.index(state) for rank, state in states.items()}
    else:
        value = _value_of(shows, steps or {})
        value_of = {rank: value(rank, points) for rank, points in last.items()}
        values = {rank: number for rank, number in value_of.items() if number is not None}
    if not values:
        return None
    has_row_for_node = (
        status.nodes > 1
        and 1 < status.procs_per_node <= _MANY_CELLS_IN_ROW
        # Variables can place ranks in another order.
        and all(points[-1].node == rank // status.procs_per_node for rank, points in last.items())
    )
    columns = _CELLS_IN_ROW if max(states) < _MANY else _MANY_CELLS_IN_ROW
    columns = status.procs_per_node if has_row_for_node else columns
    rows = max(states) // columns + 1
    nodes = {"show": True, "axisLine": {"show": False}, "axisTick": {"show": False}}
    rows_axis = {**nodes, "axisLabel": QUIET} if has_row_for_node else {"show": False}
    hidden_axis = {"show": False, "type": "category"}
    option = {
        "animation": False,
        "tooltip": {":formatter": "console_ui.rankText", "confine": True},
        "grid": {
            "left": 64 if has_row_for_node else 0,
            "right": 0,
            "top": 4,
            "height": rows * _CELL_PX,
        },
        "xAxis": {**hidden_axis, "data": list(range(max(columns, _CELLS_IN_ROW)))},
        "yAxis": {
            **hidden_axis,
            **rows_axis,
            "inverse": True,
            "data": [f"node {row}" for row in range(rows)],
        },
        "visualMap": _legend(shows, list(values.values())),
        "series": [
            {
                "type": "heatmap",
                "data": [
                    {
                        **_cell(
                            rank, states[rank], last.get(rank, ()), _frame(shows, states[rank])
                        ),
                        "value": [rank % columns, rank // columns, number],
                    }
                    for rank, number in values.items()
                ],
                "label": {"show": True, ":formatter": "p => p.data.rank", "fontSize": 10},
                "labelLayout": {"hideOverlap": True},
                "emphasis": {"itemStyle": {"shadowBlur": 6}},
            }
        ],
    }
    note = _unusual_states(states) if shows == "state" else _outlier(_SCALES[shows], values)
    return Chart(shows, option, rows * _CELL_PX + _LEGEND_PX, note)


def rank_rows(
    status: JobStatus,
    journals: Journals,
    steps: Mapping[int, int],
    last_lines: Mapping[int, str],
) -> list[dict[str, Any]]:
    """Return a row for each rank, those that failed first."""
    states = rank_states(journals, status)
    points_of = journals.ranks
    rows = []
    for rank in sorted(states, key=lambda rank: (_STATES.index(states[rank]), rank)):
        points = points_of.get(rank)
        sample = _while_running(points).sample if points else None
        rows.append({
            "rank": rank,
            "node": points[-1].node if points else None,
            "state": states[rank].value,
            "silent": sample and sample.quiet_s,
            "cpu": sample and sample.cpu_percent,
            "memory": sample and megabytes(sample.rss_mib),
            "step": steps.get(rank),
            "line": last_lines.get(rank, ""),
        })  # fmt: skip
    return rows


def _value_of(
    shows: str, steps: Mapping[int, int]
) -> Callable[[int, Sequence[RankPoint]], float | None]:
    """Return the function from a rank and its samples to the value of its cell."""
    of_sample: dict[str, Callable[[journal.RankSample], float]] = {
        "silent for (s)": lambda sample: sample.quiet_s,
        "CPU (%)": lambda sample: sample.cpu_percent,
        "memory (MB)": lambda sample: megabytes(sample.rss_mib),
        "threads": lambda sample: sample.threads,
    }
    if shows == "step":
        return lambda rank, _: steps.get(rank)
    return lambda _, points: of_sample[shows](_while_running(points).sample)


def _while_running(points: Sequence[RankPoint]) -> RankPoint:
    # The last sample of a process that has ended shows no usage.
    return next(
        (each for each in reversed(points) if each.sample.state not in journal.ENDS), points[-1]
    )


def _frame(shows: str, state: RankState) -> str:
    """Return the colour around a cell: that of its end, unless the cell itself has it."""
    if shows == "state":
        return _BORDER
    return _STATE_COLOURS[state] if state.has_ended else "transparent"


def _cell(rank: int, state: RankState, points: Sequence[RankPoint], frame: str) -> dict[str, Any]:
    return {
        "rank": rank,
        "node": points[-1].node if points else None,
        "state": state.value,
        "sample": _while_running(points).sample._asdict() if points else None,
        "itemStyle": {"borderColor": frame, "borderWidth": 2},
    }


def _legend(shows: str, values: Sequence[float]) -> dict[str, Any]:
    layout = {"orient": "horizontal", "left": 0, "bottom": 4, "textStyle": QUIET}
    if shows == "state":
        pieces = [
            {
                "value": number,
                "label": f"{_STATES[number].value}: {count}",
                "color": _STATE_COLOURS[_STATES[number]],
            }
            for number, count in sorted(Counter(map(int, values)).items())
        ]
        return {"type": "piecewise", "pieces": pieces, **layout}
    low, high = _SCALES[shows].limits(values)
    colours = _RANGES[_SCALES[shows].kind]
    return {
        "type": "continuous",
        "min": low,
        "max": high,
        "calculable": True,
        # The scale around a small median may begin below 0.
        ":formatter": "v => Math.max(0, Math.round(v))",
        "inRange": {"color": colours},
        **layout,
    }


def _outlier(scale: _Scale, values: Mapping[int, float]) -> str:
    """Return which rank differs most from the others; empty if none does."""
    middle = median(values.values())
    rank = max(values, key=lambda rank: scale.distance(values[rank], middle))
    if scale.distance(values[rank], middle) < scale.least:
        return ""
    outlier, typical = (f"{value:g}{scale.unit}" for value in (values[rank], middle))
    return f"Rank {rank} differs most: {outlier}; the median is {typical}."


def _unusual_states(states: Mapping[int, RankState]) -> str:
    """Return the few ranks whose state differs from most others, the most important first."""
    usual = (RankState.RUNNING, RankState.WAITING, RankState.ENDED, RankState.STOPPED)
    by_state = {
        state: [rank for rank, each in states.items() if each is state]
        for state in _STATES
        if state not in usual
    }
    few = [
        f"{state.value}: rank{'s' if ranks[1:] else ''} {', '.join(map(str, ranks))}"
        for state, ranks in by_state.items()
        if ranks and len(ranks) <= _FEW
    ]
    return "; ".join(few)
