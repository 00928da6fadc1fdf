"""ECharts options for what the job page draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cloudjob import times
from cloudjob.console.pages import words
from cloudjob.model.status import JobStatus, Phase
from cloudjob.tracking.journals import Journals, RankPoint
from cloudjob.tracking.metrics import MetricPoint
from jobentry.contract import journal

# Phase -> colour; what the node half calls its phases.
_COLOURS = {
    "stage": "#94a3b8",
    "package": "#a78bfa",
    "inputs": "#f472b6",
    "start ranks": "#fb923c",
    "first output": "#22d3ee",
    "bring-up": "#f59e0b",
    "run": "#2563eb",
    "store": "#10b981",
}
_OTHER = "#84cc16"
_ROW_PX, _FRAME_PX = 30, 70
_MOST_ROWS = 16


def timeline(status: JobStatus, phases: Sequence[Phase], now_s: float) -> dict[str, Any] | None:
    """Return a bar for each phase of each node, in seconds since the submit; None without phases.

    Args:
        now_s: Seconds since 1970, where phases end that have not ended yet.
    """
    if not phases:
        return None
    zero = times.seconds_of(status.created_at)
    nodes = sorted({phase.node for phase in phases})
    bars: dict[str, list[list[float]]] = {}
    for phase in phases:
        start = times.seconds_of(phase.started_at) - zero
        end = (times.seconds_of(phase.ended_at) if phase.ended_at else now_s) - zero
        bars.setdefault(phase.name, []).append([nodes.index(phase.node), start, end])
    is_long = len(nodes) > _MOST_ROWS
    zoom = [{"type": "inside", "xAxisIndex": 0}]
    if is_long:
        zoom.append(
            {"type": "slider", "yAxisIndex": 0, "startValue": 0, "endValue": _MOST_ROWS - 1}
        )
    return {
        "textStyle": {"fontFamily": "inherit"},
        "grid": {"left": 64, "right": 44 if is_long else 16, "top": 34, "bottom": 28},
        "legend": {"type": "scroll", "top": 0, "left": 0, "textStyle": {"color": "#94a3b8"}},
        "tooltip": {":formatter": "console_ui.barText", "confine": True},
        "xAxis": {
            "type": "value",
            "min": 0,
            "axisLabel": {":formatter": "v => `${v} s`", "color": "#94a3b8"},
            "splitLine": {"lineStyle": {"opacity": 0.3}},
        },
        "yAxis": {
            "type": "category",
            "inverse": True,
            "data": [f"node {node}" for node in nodes],
            "axisLabel": {"color": "#94a3b8"},
        },
        "dataZoom": zoom,
        "series": [
            {
                "type": "custom",
                "name": name,
                "itemStyle": {"color": _COLOURS.get(name, _OTHER)},
                "data": values,
                "encode": {"x": [1, 2], "y": 0},
                ":renderItem": "console_ui.bar",
            }
            for name, values in bars.items()
        ],
    }


def height_px(option: dict[str, Any]) -> int:
    """Return the height in pixels of a timeline."""
    return _FRAME_PX + _ROW_PX * min(len(option["yAxis"]["data"]), _MOST_ROWS)


# -- ranks -----------------------------------------------------------------------------------------

# What the cells of the rank grid show -> the value of a rank's last sample.
RANK_VALUES: Mapping[str, Callable[[RankPoint], float]] = {
    "silent for (s)": lambda point: point.sample.quiet_s,
    "CPU (%)": lambda point: point.sample.cpu_percent,
    "memory (MiB)": lambda point: point.sample.rss_mib,
    "threads": lambda point: point.sample.threads,
}
_CELLS_IN_ROW = 32
_CELL_PX, _CELL_WIDTH_PX = 26, 36
# The state of a rank that has ended -> the colour of its frame.
_ENDS = {journal.FAILED: "#dc2626", journal.ENDED: "#15803d"}


def rank_grid(journals: Journals, shows: str) -> dict[str, Any] | None:
    """Return one cell for each rank, coloured by its last sample while it ran; None without any.

    A rank that has ended has a frame: green, or red if it failed.
    """
    last = {rank: points for rank, points in journals.ranks.items() if points}
    if not last:
        return None
    cells = [_cell(rank, points, RANK_VALUES[shows]) for rank, points in last.items()]
    values = [cell["value"][2] for cell in cells]
    columns = min(_CELLS_IN_ROW, max(last) + 1)
    rows = max(last) // _CELLS_IN_ROW + 1
    hidden = {"show": False, "type": "category"}
    return {
        "animation": False,
        "tooltip": {":formatter": "console_ui.rankText"},
        "grid": {
            "left": 8,
            "top": 8,
            "width": columns * _CELL_WIDTH_PX,
            "height": rows * _CELL_PX,
        },
        "xAxis": {**hidden, "data": list(range(columns))},
        "yAxis": {**hidden, "data": list(range(rows)), "inverse": True},
        "visualMap": {
            "min": min(values),
            "max": max(*values, min(values) + 1),
            "calculable": True,
            "orient": "horizontal",
            "left": 8,
            "bottom": 0,
            "textStyle": {"color": "#94a3b8"},
            "inRange": {"color": ["#bfdbfe", "#2563eb", "#7c3aed", "#dc2626"]},
        },
        "series": [
            {
                "type": "heatmap",
                "data": cells,
                "label": {"show": True, ":formatter": "p => p.data.rank", "fontSize": 10},
            }
        ],
        "rows": rows,
    }


def _cell(
    rank: int, points: Sequence[RankPoint], value: Callable[[RankPoint], float]
) -> dict[str, Any]:
    last = points[-1]
    # A process that has ended uses nothing.
    running = next((point for point in reversed(points) if point.sample.state not in _ENDS), last)
    return {
        "value": [rank % _CELLS_IN_ROW, rank // _CELLS_IN_ROW, value(running)],
        "rank": rank,
        "node": last.node,
        "sample": {**running.sample._asdict(), "state": last.sample.state},
        "itemStyle": {
            "borderColor": _ENDS.get(last.sample.state, "transparent"),
            "borderWidth": 2,
        },
    }


def grid_height_px(option: dict[str, Any]) -> int:
    """Return the height in pixels of a rank grid."""
    return 90 + _CELL_PX * int(option["rows"])


# -- resources -------------------------------------------------------------------------------------

_MOST_LINES = 64
# More would be closer together than pixels, and a page of a long job gets them every few seconds.
_MOST_POINTS = 500
Line = tuple[str, list[tuple[float, float]]]


def resources(journals: Journals, zero_s: float) -> list[tuple[str, dict[str, Any]]]:
    """Return the title and option of each chart of what nodes and ranks used.

    Args:
        zero_s: Seconds since 1970 at which the time axis begins.
    """
    samples = journals.resources

    def nodes(value: Callable[[Any], float | None]) -> list[Line]:
        found = []
        for node, each in samples.items():
            points = [(s.at - zero_s, v) for s in each if (v := value(s)) is not None]
            found.append((f"node {node}", points))
        return found

    def ranks(value: Callable[[RankPoint], float]) -> list[Line]:
        return [
            (f"rank {rank}", [(point.at - zero_s, value(point)) for point in points])
            for rank, points in journals.ranks.items()
        ]

    devices = [
        (
            f"node {node} {device.kind} {device.number}",
            [
                (s.at - zero_s, d.utilisation_percent)
                for s in each
                for d in s.devices
                if d.number == device.number and d.utilisation_percent is not None
            ],
        )
        for node, each in samples.items()
        for device in (each[-1].devices if each else ())
    ]
    charts = (
        ("CPU of the machine, all CPUs (%)", nodes(lambda s: sum(s.cpu[:2]) if s.cpu else None)),
        ("Memory (MiB)", nodes(lambda s: s.memory[0] if s.memory else None)),
        ("GPUs and NPUs (%)", devices),
        ("CPU of each rank (% of one CPU)", ranks(lambda point: point.sample.cpu_percent)),
        ("Memory of each rank (MiB)", ranks(lambda point: point.sample.rss_mib)),
        (
            "Network, received and sent (KiB/s)",
            nodes(lambda s: sum(s.network) if s.network else None),
        ),
        ("Disk, read and written (KiB/s)", nodes(lambda s: sum(s.disk) if s.disk else None)),
    )
    return [
        (_title(title, len(lines)), _lines(lines[:_MOST_LINES]))
        for title, lines in charts
        if any(points for _, points in lines)
    ]


def _title(title: str, count: int) -> str:
    return title if count <= _MOST_LINES else f"{title}: the first {_MOST_LINES} of {count}"


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the highest of every few points, because peaks matter most."""
    step = -(-len(points) // _MOST_POINTS) or 1
    parts = (points[at : at + step] for at in range(0, len(points), step))
    return [max(part, key=lambda point: point[1]) for part in parts]


def _lines(lines: Sequence[Line]) -> dict[str, Any]:
    return {
        "animation": False,
        "textStyle": {"fontFamily": "inherit"},
        "grid": {"left": 56, "right": 16, "top": 30, "bottom": 24},
        "legend": {"type": "scroll", "top": 0, "textStyle": {"color": "#94a3b8"}},
        "tooltip": {"trigger": "axis", "confine": True},
        "dataZoom": [{"type": "inside"}],
        "xAxis": {
            "type": "value",
            "min": "dataMin",
            "axisLabel": {":formatter": "v => `${Math.round(v)} s`", "color": "#94a3b8"},
            "splitLine": {"show": False},
        },
        "yAxis": {
            "type": "value",
            "axisLabel": {"color": "#94a3b8"},
            "splitLine": {"lineStyle": {"opacity": 0.3}},
        },
        "series": [
            {"type": "line", "name": name, "showSymbol": len(points) < 3, "data": _thinned(points)}
            for name, points in lines
        ],
    }


# -- metrics ---------------------------------------------------------------------------------------


def curves(points: Sequence[MetricPoint]) -> list[tuple[str, dict[str, Any]]]:
    """Return the name and option of a chart for each metric, with a line for each rank or file."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for point in points:
        line = words.text(point.source) or f"rank {point.rank}"
        found.setdefault(point.name, {}).setdefault(line, []).append((point.step, point.value))
    charts = []
    for name, by_line in found.items():
        option = _lines([(line, sorted(values)) for line, values in by_line.items()][:_MOST_LINES])
        option["xAxis"]["axisLabel"] = {"color": "#94a3b8"}
        option["yAxis"]["scale"] = True
        charts.append((name, option))
    return charts
