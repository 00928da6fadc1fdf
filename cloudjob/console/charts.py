"""The charts of the job page and of the report, as options of ECharts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from statistics import fmean, median
from typing import Any, NamedTuple

from cloudjob.console.rank_states import RankState, rank_states
from cloudjob.console.text import displayable
from cloudjob.model import times
from cloudjob.model.status import JobState, JobStatus, Phase
from cloudjob.tracking.journals import Journals, RankPoint
from cloudjob.tracking.metrics import MetricPoint
from jobentry.contract import journal
from jobentry.contract.journal import Device

_QUIET = {"color": "#94a3b8"}
# Colours of lines that are visible on white and on black.
_PALETTE = [
    *("#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#a855f7"),
    *("#06b6d4", "#ec4899", "#84cc16", "#64748b"),
]
# Not "inherit", because ECharts cannot measure the width of its text.
_FONT = {"fontFamily": "Roboto, system-ui, sans-serif"}
# The same look on white and on black.
_GRID_LINES = {"lineStyle": {"opacity": 0.3, **_QUIET}}


class Chart(NamedTuple):
    """One chart.

    Args:
        title: Identifies the chart while the job runs.
        option: The ECharts option; the value of a key that begins with a colon is JavaScript.
        note: An explanation of the chart; may be empty.
    """

    title: str
    option: dict[str, Any]
    height_px: int
    note: str = ""


# -- timeline --------------------------------------------------------------------------------------

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
# What else a timeline shows, with its colour: the time before a job's nodes start, and a failure.
_QUEUED, _FAILED = ("queued", "#cbd5e1"), ("failed", "#dc2626")
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
            first[span.node] = min(span.start, first.get(span.node, queued_s))
        ends = [min(queued_s, first[node]) for node in nodes]
        queued = [[row, 0.0, end, 0] for row, end in enumerate(ends) if end > 0]
        bars.update({_QUEUED[0]: queued} if queued else {})
    nested = _nested(spans)
    for span in sorted(spans, key=nested.__contains__):
        bar = [rows[span.node], span.start, span.end, int(span in nested)]
        bars.setdefault(span.name, []).append(bar)
    failures = _failures(status, spans, rows)
    bars.update({_FAILED[0]: failures} if failures else {})
    colours = dict((*_COLOURS.items(), _QUEUED, _FAILED))
    zoom: list[dict[str, Any]] = [_wheel_zoom()]
    if len(nodes) > _MAX_ROWS:
        zoom.append({"type": "slider", "yAxisIndex": 0, "endValue": _MAX_ROWS - 1})
    option = {
        "textStyle": _FONT,
        "grid": {
            "left": 64,
            "right": 44 if len(nodes) > _MAX_ROWS else 16,
            "top": 34,
            "bottom": 28,
        },
        "legend": {"type": "scroll", "top": 0, "left": 0, "textStyle": _QUIET},
        "tooltip": {":formatter": "console_ui.barText", "confine": True},
        "xAxis": {
            "type": "value",
            "min": 0,
            "axisLabel": {":formatter": "v => `${+v.toFixed(3)} s`", "hideOverlap": True, **_QUIET},
            "splitLine": _GRID_LINES,
        },
        "yAxis": {
            "type": "category",
            "inverse": True,
            "data": [f"node {node}" for node in nodes],
            "axisLabel": _QUIET,
        },
        "dataZoom": zoom,
        "series": [
            {
                "type": "custom",
                "name": _LABELS.get(name, name),
                "itemStyle": {"color": colours.get(name, _OTHER)},
                "data": values,
                "encode": {"x": [1, 2], "y": 0},
                ":renderItem": "console_ui.bar",
            }
            for name, values in bars.items()
        ],
    }
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


def _wheel_zoom() -> dict[str, Any]:
    # The wheel alone scrolls the page.
    return {"type": "inside", "xAxisIndex": 0, "zoomOnMouseWheel": "ctrl"}


# -- ranks -----------------------------------------------------------------------------------------

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
    found: dict[int, int] = {}
    for point in points:
        if point.rank is not None:
            found[point.rank] = max(point.step, found.get(point.rank, point.step))
    return found


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
        shown = {rank: value(rank, points) for rank, points in last.items()}
        values = {rank: number for rank, number in shown.items() if number is not None}
    if not values:
        return None
    columns = _CELLS_IN_ROW if max(states) < _MANY else _MANY_CELLS_IN_ROW
    rows = max(states) // columns + 1
    hidden_axis = {"show": False, "type": "category"}
    option = {
        "animation": False,
        "tooltip": {":formatter": "console_ui.rankText", "confine": True},
        "grid": {"left": 0, "right": 0, "top": 4, "height": rows * _CELL_PX},
        "xAxis": {**hidden_axis, "data": list(range(columns))},
        "yAxis": {**hidden_axis, "data": list(range(rows)), "inverse": True},
        "visualMap": _legend(shows, list(values.values())),
        "series": [
            {
                "type": "heatmap",
                "data": [
                    {
                        **_cell(rank, states[rank], last.get(rank, ())),
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


def _mb(mib: float) -> float:
    """Return megabytes, which all charts show, from the mebibytes of journals."""
    return round(mib * 1.048576, 1)


def _value_of(
    shows: str, steps: Mapping[int, int]
) -> Callable[[int, Sequence[RankPoint]], float | None]:
    """Return the function from a rank and its samples to the value of its cell."""
    of_sample: dict[str, Callable[[journal.RankSample], float]] = {
        "silent for (s)": lambda sample: sample.quiet_s,
        "CPU (%)": lambda sample: sample.cpu_percent,
        "memory (MB)": lambda sample: _mb(sample.rss_mib),
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


def _cell(rank: int, state: RankState, points: Sequence[RankPoint]) -> dict[str, Any]:
    frame = _STATE_COLOURS[state] if state.has_ended else "transparent"
    return {
        "rank": rank,
        "node": points[-1].node if points else None,
        "state": state.value,
        "sample": _while_running(points).sample._asdict() if points else None,
        "itemStyle": {"borderColor": frame, "borderWidth": 2},
    }


def _legend(shows: str, values: Sequence[float]) -> dict[str, Any]:
    layout = {"orient": "horizontal", "left": 0, "bottom": 4, "textStyle": _QUIET}
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


# -- lines -----------------------------------------------------------------------------------------

_LINES_PX = 230
_MAX_LINES = 64
# More points would be closer than pixels, and a page receives all points every few seconds.
_MAX_POINTS = 500
Points = Sequence[tuple[float, float]]
# The name of a line -> its points.
Lines = Mapping[str, Points]


class _DevicePoint(NamedTuple):
    at: float
    device: Device


def resources(journals: Journals, zero_s: float) -> list[Chart]:
    """Return a chart for each resource that nodes and ranks used, all with the same time axis.

    Args:
        zero_s: Seconds since 1970 at which the time axis begins.
    """
    nodes = {f"node {node}": each for node, each in journals.resources.items()}
    ranks = {f"rank {rank}": points for rank, points in journals.ranks.items()}
    devices: dict[str, list[_DevicePoint]] = {}
    for node, samples in nodes.items():
        for sample in samples:
            for device in sample.devices:
                name = f"{node} {device.kind} {device.number}"
                devices.setdefault(name, []).append(_DevicePoint(sample.at, device))
    table: tuple[tuple[str, Mapping[str, Sequence[Any]], Callable[[Any], float | None]], ...] = (
        ("CPU of the machine, all CPUs (%)", nodes, lambda s: sum(s.cpu[:2]) if s.cpu else None),
        ("Memory (MB)", nodes, lambda s: _mb(s.memory[0]) if s.memory else None),
        ("Disk space used (%)", nodes, _space_percent),
        ("GPUs and NPUs (%)", devices, lambda point: point.device.utilisation_percent),
        ("CPU of each rank (% of one CPU)", ranks, lambda point: point.sample.cpu_percent),
        ("Memory of each rank (MB)", ranks, lambda point: _mb(point.sample.rss_mib)),
        ("Network, received and sent (MB/s)", nodes, lambda s: _mb_s(s.network)),
        ("Disk, read and written (MB/s)", nodes, lambda s: _mb_s(s.disk)),
    )
    found = {
        title: {
            name: [(item.at - zero_s, v) for item in items if (v := value(item)) is not None]
            for name, items in source.items()
        }
        for title, source, value in table
    }
    label = {":formatter": "v => `${Math.round(v)} s`", "hideOverlap": True, **_QUIET}
    # Rounded labels that are closer than 1 s, or at an end that is no integer, would be the same.
    ends = {"showMinLabel": False, "showMaxLabel": False}
    return _line_charts(found, xAxis={"minInterval": 1, "axisLabel": {**label, **ends}})


def _space_percent(sample: journal.Sample) -> float | None:
    return 100 * sample.space[0] / sample.space[1] if sample.space else None


def _mb_s(kib_s: Sequence[float]) -> float | None:
    return _mb(sum(kib_s) / 1024) if kib_s else None


def curves(points: Sequence[MetricPoint]) -> list[Chart]:
    """Return a chart for each metric, with a line for each rank or event file, by step."""
    return _by_step(_lines_of(points))


def compared_curves(jobs: Mapping[str, Sequence[MetricPoint]]) -> list[Chart]:
    """Return a chart for each metric, with a line for each job: its lowest rank or event file."""
    found: dict[str, dict[str, Points]] = {}
    for job, points in jobs.items():
        for metric, lines in _lines_of(points).items():
            found.setdefault(metric, {})[job] = next(iter(lines.values()))
    return _by_step(found)


def _lines_of(points: Sequence[MetricPoint]) -> dict[str, dict[str, Points]]:
    """Return the lines of each metric."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for point in sorted(points, key=lambda point: -1 if point.rank is None else point.rank):
        line = displayable(point.source) or f"rank {point.rank}"
        found.setdefault(point.title, {}).setdefault(line, []).append((point.step, point.value))
    return {
        name: {line: sorted(values) for line, values in lines.items()}
        for name, lines in found.items()
    }


def _by_step(found: Mapping[str, Lines]) -> list[Chart]:
    shown = {title: _at_equal_steps(_most_different(lines)) for title, lines in found.items()}
    charts = _line_charts(shown, xAxis={"axisLabel": _QUIET}, yAxis={"scale": True})
    for chart in charts:
        lines = found[chart.title]
        points = [point for each in lines.values() for point in each]
        for place, axis in enumerate(("xAxis", "yAxis")):
            if all(float(point[place]).is_integer() for point in points):
                chart.option[axis]["minInterval"] = 1
    return [chart._replace(note=_left_out(found[chart.title])) for chart in charts]


def _line_charts(found: Mapping[str, Lines], **axes: Mapping[str, Any]) -> list[Chart]:
    """Return a chart for each title that has points; all have the same x axis."""
    positions = [x for lines in found.values() for points in lines.values() for x, _ in points]
    if not positions:
        return []
    limits = {"min": min(positions), "max": max(positions)}
    charts = []
    for title, lines in found.items():
        if any(lines.values()):
            option = _line_option(_most_different(lines))
            option["xAxis"].update({**limits, **axes.get("xAxis", {})})
            option["yAxis"].update(axes.get("yAxis", {}))
            charts.append(Chart(title, option, _LINES_PX, _left_out(lines)))
    return charts


def _left_out(lines: Lines) -> str:
    is_short = len(lines) > _MAX_LINES
    return f"the {_MAX_LINES} of {len(lines)} that differ most" if is_short else ""


def _at_equal_steps(lines: Lines) -> Lines:
    """Return lines with few points, all at the same steps, so that a tooltip shows each line.

    Of each group of steps, those remain at which a line is farthest below and above its mean.
    """
    steps = sorted({step for points in lines.values() for step, _ in points})
    size = -(-2 * len(steps) // _MAX_POINTS)
    if size <= 2:
        return lines
    means = {name: fmean(map(_height, points)) for name, points in lines.items() if points}
    lowest: dict[float, float] = {}
    highest: dict[float, float] = {}
    for name, points in lines.items():
        for step, value in points:
            distance = value - means[name]
            lowest[step] = min(distance, lowest.get(step, distance))
            highest[step] = max(distance, highest.get(step, distance))
    kept: set[float] = set()
    for at in range(0, len(steps), size):
        part = steps[at : at + size]
        kept.update((min(part, key=lowest.__getitem__), max(part, key=highest.__getitem__)))
    return {name: [each for each in points if each[0] in kept] for name, points in lines.items()}


def _most_different(lines: Lines) -> Lines:
    """Return the lines whose means are farthest from the median, if there are too many."""
    if len(lines) <= _MAX_LINES:
        return lines
    means = {name: fmean(map(_height, points)) for name, points in lines.items() if points}
    middle = median(means.values())
    # If means differ equally, the first lines are chosen.
    chosen = sorted(means, key=lambda name: -abs(means[name] - middle))[:_MAX_LINES]
    return {name: lines[name] for name in means if name in chosen}


def _line_option(lines: Lines) -> dict[str, Any]:
    slider = {"type": "slider", "xAxisIndex": 0, "height": 12, "bottom": 4, "showDetail": False}
    return {
        "animation": False,
        "color": _PALETTE,
        "textStyle": _FONT,
        "grid": {"left": 56, "right": 16, "top": 30, "bottom": 42},
        "legend": {"type": "scroll", "top": 0, "textStyle": _QUIET},
        "tooltip": {"trigger": "axis", "confine": True},
        "dataZoom": [_wheel_zoom(), {**slider, "showDataShadow": False, "brushSelect": False}],
        "xAxis": {"type": "value", "splitLine": {"show": False}},
        "yAxis": {"type": "value", "axisLabel": _QUIET, "splitLine": _GRID_LINES},
        "series": [
            {"type": "line", "name": name, "showSymbol": len(points) < 3, "data": _thinned(points)}
            for name, points in lines.items()
        ],
    }


def _thinned(points: Points) -> list[tuple[float, float]]:
    """Return the lowest and the highest point of each group of points, to keep the peaks."""
    step = -(-2 * len(points) // _MAX_POINTS)
    if step <= 2:
        return list(points)
    parts = (points[at : at + step] for at in range(0, len(points), step))
    ends = (sorted({min(part, key=_height), max(part, key=_height)}) for part in parts)
    return list(chain.from_iterable(ends))


def _height(point: tuple[float, float]) -> float:
    return point[1]
