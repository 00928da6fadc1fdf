"""Line charts: many lines with many points, as few as a page can show."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from itertools import pairwise
from math import fsum, inf, isfinite, nan
from statistics import median
from typing import Any, NamedTuple

from cloudjob.console.charts.style import (
    FAILED,
    FONT,
    GRID_LINES,
    PALETTE,
    QUIET,
    Chart,
    Lines,
    Points,
    wheel_zoom,
)

_LINES_PX = 230
_MAX_LINES = 64
# More lines than this are drawn as their mean, minimum and maximum.
_FEW = 8
# More points would be closer than pixels, and a page receives all points every few seconds.
_MAX_POINTS = 500
# The places at which the mean of many lines is drawn.
_MAX_PLACES = 250
# A limit is drawn from this share of it on: an axis up to a limit far above hides the lines.
_NEAR = 0.25
# Numbers that are too long for an axis have exponents.
_VALUES = {":formatter": "console_ui.number", **QUIET}
_MEAN, _RANGE = "mean", "minimum to maximum"


class Shows(Enum):
    """How the lines of a chart are drawn, in the words of a page."""

    DEFAULT = "automatic"
    EACH = "each line"
    RANGE = "mean and range"


class View(NamedTuple):
    """What users choose about line charts.

    Args:
        by_time: Whether the x axis is the time and not the step.
        is_logarithmic: Whether the y axis is.
        smoothing: The weight of earlier values, from 0 to below 1.
    """

    by_time: bool = False
    is_logarithmic: bool = False
    smoothing: float = 0.0
    shows: Shows = Shows.DEFAULT


class Group(NamedTuple):
    """Charts with the same x axis.

    Args:
        charts: Title -> lines.
        x: What the x axis shows: its name and further options of its axis.
        y: Further options of the y axes by title.
        is_aligned: Whether points may be moved so that all lines have points at the same places.
        failed_at: Where on the x axis the job failed; None if it did not, or nobody knows.
        limits: The values that lines cannot exceed, by title.
    """

    charts: Mapping[str, Lines]
    x_name: str
    x: Mapping[str, Any] = {}
    y: Mapping[str, Mapping[str, Any]] = {}
    is_aligned: bool = False
    failed_at: float | None = None
    limits: Mapping[str, float] = {}


def line_charts(group: Group, view: View = View()) -> list[Chart]:  # noqa: B008 (it is frozen)
    """Return a chart for each title that has points."""
    positions = [
        x for lines in group.charts.values() for points in lines.values() for x, _ in points
    ]
    if not positions:
        return []
    ends = [*positions, *([] if group.failed_at is None else [group.failed_at])]
    limits = {"min": min(ends), "max": max(ends)}
    return [
        _chart(title, lines, group, limits, view)
        for title, lines in group.charts.items()
        if any(lines.values())
    ]


def _chart(
    title: str, lines: Lines, group: Group, limits: Mapping[str, float], view: View
) -> Chart:
    chosen = _most_different(lines)
    chosen = _aligned(chosen) if group.is_aligned else chosen
    if view.smoothing:
        chosen = _smoothed(chosen, view.smoothing)
    chosen = _at_equal_places(chosen)
    limit = group.limits.get(title, 0.0)
    note = [_last_text(lines), f"limit {_number(limit)}" if limit else "", _left_out(lines)]
    if view.is_logarithmic:
        note += [_without_logarithm(lines)]
        chosen = {
            name: [(x, value) for x, value in points if value > 0 or not isfinite(value)]
            for name, points in chosen.items()
        }
    option = _option(chosen, _draws_range(lines, view))
    option["xAxis"].update({**limits, **group.x})
    option["yAxis"].update({**group.y.get(title, {}), "type": _scale(view)})
    if view.is_logarithmic:
        option["yAxis"].pop("minInterval", None)
        # By itself, a logarithmic axis begins and ends with a power of ten.
        heights = [value for points in chosen.values() for _, value in points if isfinite(value)]
        option["yAxis"].update(
            {"min": min(heights, default=None), "max": max(heights, default=None)}
        )
    highest = max(value for points in lines.values() for _, value in points)
    is_near = limit and highest >= _NEAR * limit
    if is_near:
        option["yAxis"]["max"] = limit
    marks = [] if group.failed_at is None else [_mark({"xAxis": group.failed_at}, "failed")]
    marks += [_mark({"yAxis": limit}, "limit")] if is_near else []
    if marks:
        option["series"][0]["markLine"] = {"silent": True, "symbol": "none", "data": marks}
    return Chart(
        title, option, _LINES_PX, "; ".join(filter(None, note)), x_name=group.x_name, lines=chosen
    )


def _scale(view: View) -> str:
    return "log" if view.is_logarithmic else "value"


def _draws_range(lines: Lines, view: View) -> bool:
    return view.shows is Shows.RANGE or (view.shows is Shows.DEFAULT and len(lines) > _FEW)


# -- texts -----------------------------------------------------------------------------------------


def _last_text(lines: Lines) -> str:
    """Return the last value, or the mean of the last values of several lines and their range."""
    last = [points[-1][1] for points in lines.values() if points]
    low, high = _number(min(last)), _number(max(last))
    if low == high:
        return f"last {low}"
    return f"last {_number(_mean(last))} on average, {low} to {high}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"


def _left_out(lines: Lines) -> str:
    is_short = len(lines) > _MAX_LINES
    return f"the {_MAX_LINES} of {len(lines)} that differ most" if is_short else ""


def _without_logarithm(lines: Lines) -> str:
    has_some = any(value <= 0 for points in lines.values() for _, value in points)
    return "values of 0 and below have no logarithm" if has_some else ""


# -- fewer lines and points ------------------------------------------------------------------------


def _most_different(lines: Lines) -> Lines:
    """Return the lines whose means are farthest from the median, if there are too many."""
    if len(lines) <= _MAX_LINES:
        return lines
    means = {name: _mean(map(_height, points)) for name, points in lines.items() if points}
    middle = median(means.values())
    # If means differ equally, the first lines are chosen.
    chosen = sorted(means, key=lambda name: -abs(means[name] - middle))[:_MAX_LINES]
    return {name: lines[name] for name in means if name in chosen}


def _aligned(lines: Lines) -> Lines:
    """Return lines whose points are at the places of the longest line, so that a tooltip has all.

    Nodes measure at their own times: a point is moved by at most half the time between two.
    """
    longest = max(lines.values(), key=len, default=())
    places = [x for x, _ in longest]
    if len(places) < 2 or all([x for x, _ in points] == places for points in lines.values()):
        return lines
    gaps = [after - before for before, after in pairwise(places)]
    return {name: _snapped(points, places, median(gaps) / 2) for name, points in lines.items()}


def _snapped(points: Points, places: Sequence[float], most: float) -> Points:
    moved: dict[float, float] = {}
    for x, value in points:
        after = bisect_left(places, x)
        near = min(places[max(0, after - 1) : after + 1], key=lambda place: abs(place - x))
        moved[near if abs(near - x) <= most else x] = value
    return sorted(moved.items())


def _at_equal_places(lines: Lines) -> Lines:
    """Return lines with few points, all at the same places, so that a tooltip shows each line.

    Of each group of places, those remain at which a line is farthest below and above its mean.
    """
    places = sorted({x for points in lines.values() for x, _ in points})
    size = -(-2 * len(places) // _MAX_POINTS)
    if size <= 2:
        return lines
    means = {name: _mean(map(_height, points)) for name, points in lines.items() if points}
    lowest: dict[float, float] = {}
    highest: dict[float, float] = {}
    for name, points in lines.items():
        for x, value in points:
            distance = value - means[name]
            lowest[x] = min(distance, lowest.get(x, distance))
            highest[x] = max(distance, highest.get(x, distance))
    kept: set[float] = set()
    for at in range(0, len(places), size):
        part = places[at : at + size]
        kept.update((min(part, key=lowest.__getitem__), max(part, key=highest.__getitem__)))
    return {name: [each for each in points if each[0] in kept] for name, points in lines.items()}


def _height(point: tuple[float, float]) -> float:
    return point[1]


def _smoothed(lines: Lines, weight: float) -> Lines:
    """Return smooth lines, each point of which depends on the same stretch of the x axis.

    All points count: the extremes that are drawn of many do not have the mean of all.
    """
    stretch_of = {name: _stretch([x for x, _ in points]) for name, points in lines.items()}
    whole = _stretch([x for points in lines.values() for x, _ in points]) or 1.0
    smoothed: dict[str, Points] = {}
    for name, points in lines.items():
        drawn = _MAX_POINTS * stretch_of[name] / whole
        smoothed[name] = _smooth(points, weight ** min(1.0, drawn / max(1, len(points))))
    return smoothed


def _stretch(places: Sequence[float]) -> float:
    return max(places, default=0.0) - min(places, default=0.0)


def _smooth(points: Points, weight: float) -> Points:
    """Return points that follow the earlier ones; the first ones are not drawn towards 0."""
    mean = mass = 0.0
    smoothed = []
    for x, value in points:
        if isfinite(value):
            mass = weight * mass + 1
            # Written so, equal values have exactly their value.
            mean += (value - mean) / mass
        smoothed.append((x, mean if isfinite(value) else value))
    return smoothed


# -- options ---------------------------------------------------------------------------------------


def _option(lines: Lines, draws_range: bool) -> dict[str, Any]:
    slider = {"type": "slider", "xAxisIndex": 0, "height": 12, "bottom": 4, "showDetail": False}
    each = [
        {
            "type": "line",
            "name": name,
            "showSymbol": not draws_range and _has_lone_point(points),
            "data": points,
            # Lines that are not drawn are in the tooltip.
            **({"lineStyle": {"opacity": 0}, "silent": True} if draws_range else {}),
        }
        for name, points in lines.items()
    ]
    legend: dict[str, Any] = {"type": "scroll", "top": 0, "icon": "roundRect", "textStyle": QUIET}
    return {
        "animation": False,
        "color": PALETTE,
        "textStyle": FONT,
        "grid": {"left": 56, "right": 16, "top": 30, "bottom": 42},
        "legend": {**legend, "data": [_MEAN, _RANGE] if draws_range else [*lines]},
        "tooltip": {"trigger": "axis", "confine": True, ":formatter": "console_ui.lineText"},
        "dataZoom": [wheel_zoom(), {**slider, "showDataShadow": False, "brushSelect": False}],
        "xAxis": {"type": "value", "splitLine": {"show": False}, "axisLabel": QUIET},
        "yAxis": {"type": "value", "axisLabel": _VALUES, "splitLine": GRID_LINES},
        "series": [*(_range_series(lines) if draws_range else ()), *each],
    }


def _has_lone_point(points: Points) -> bool:
    """Whether a point has no neighbour that a line could join it with, as after a NaN."""
    are_finite = [isfinite(value) for _, value in points]
    neighbours = zip([False, *are_finite], are_finite, [*are_finite[1:], False], strict=False)
    return len(points) < 3 or (False, True, False) in neighbours


def _range_series(lines: Lines) -> list[dict[str, Any]]:
    """Return the mean of the lines, and the area from their minimum to their maximum."""
    places = list(_places(lines.values()))
    hidden = {"type": "line", "showSymbol": False, "silent": True, "lineStyle": {"opacity": 0}}
    pale = {"color": PALETTE[0], "opacity": 0.3}
    stacked = {**hidden, "stack": "range", "stackStrategy": "all"}
    return [
        {"type": "line", "id": "mean", "name": _MEAN, "showSymbol": len(places) < 3, "z": 3,
         "data": [(x, _mean(values)) for x, values in places]},
        {**stacked, "id": "low", "name": _RANGE, "data": [(x, min(values)) for x, values in places],
         "itemStyle": pale},
        {**stacked, "id": "span", "name": _RANGE, "itemStyle": pale,
         "areaStyle": {"color": PALETTE[0], "opacity": 0.2},
         "data": [(x, max(values) - min(values)) for x, values in places]},
    ]  # fmt: skip


def _places(lines: Iterable[Points]) -> Iterable[tuple[float, list[float]]]:
    """Yield groups of values: their mean place, and the values of all lines there."""
    points = sorted(point for line in lines for point in line)
    count = len({x for x, _ in points})
    width = (points[-1][0] - points[0][0]) / _MAX_PLACES if count > _MAX_PLACES else 0.0
    group: list[tuple[float, float]] = []
    for point in points:
        if group and point[0] - group[0][0] > width:
            yield _mean(x for x, _ in group), [value for _, value in group]
            group = []
        group.append(point)
    if group:
        yield _mean(x for x, _ in group), [value for _, value in group]


def _mean(values: Iterable[float]) -> float:
    """Return the mean, also of numbers whose sum is too large for a number."""
    numbers = list(values)
    if inf in numbers and -inf in numbers:
        return nan
    return fsum(number / len(numbers) for number in numbers)


def _mark(place: Mapping[str, float], text: str) -> dict[str, Any]:
    """Return a line across a chart."""
    return {
        **place,
        "lineStyle": {"color": FAILED, "type": "solid", "width": 2},
        "label": {
            "formatter": text,
            ":color": "console_ui.colour('FAILED')",
            "position": "insideEndTop",
        },
    }
