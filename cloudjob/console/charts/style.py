"""What all charts have in common: the value, colours, the zoom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Points = Sequence[tuple[float, float]]
# The row of each bar, its start, its end, and whether it is drawn within another one.
Bars = list[list[float]]
# The name of a line -> its points.
Lines = Mapping[str, Points]

# Texts have the colour of the style sheet, which depends on the scheme: none is legible in both.
QUIET = {":color": "console_ui.colour('quiet')"}
# Colours of lines that are visible on white and on black.
PALETTE = [
    *("#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#a855f7"),
    *("#06b6d4", "#ec4899", "#84cc16", "#64748b"),
]
# Not "inherit", because ECharts cannot measure the width of its text.
FONT = {"fontFamily": "Roboto, system-ui, sans-serif"}
# The same look on white and on black.
GRID_LINES = {"lineStyle": {"opacity": 0.3, "color": "#94a3b8"}}


# The colour of what has failed.
FAILED = "#dc2626"
# An axis of seconds. Labels closer than 1 s, or at an end that is no integer, would repeat.
ELAPSED: Mapping[str, Any] = {
    "minInterval": 1,
    "axisLabel": {
        ":formatter": "console_ui.elapsed",
        "hideOverlap": True,
        "showMinLabel": False,
        "showMaxLabel": False,
        **QUIET,
    },
}
# The axis of bars, which may be much shorter than 1 s.
_ELAPSED_FROM_0: Mapping[str, Any] = {
    "type": "value",
    "min": 0,
    "axisLabel": {":formatter": "console_ui.elapsed", "hideOverlap": True, **QUIET},
    "splitLine": GRID_LINES,
}


class Chart(NamedTuple):
    """One chart.

    Args:
        title: Identifies the chart while the job runs.
        option: The ECharts option; the value of a key that begins with a colon is JavaScript.
        note: An explanation of the chart; may be empty.
        x_name: What the x axis of a line chart shows.
        lines: The lines of a line chart as they are drawn, for a table.
    """

    title: str
    option: dict[str, Any]
    height_px: int
    note: str = ""
    x_name: str = ""
    lines: Mapping[str, Points] = {}


def wheel_zoom() -> dict[str, Any]:
    """Return a zoom by Ctrl and the wheel."""
    # The wheel alone scrolls the page.
    return {"type": "inside", "xAxisIndex": 0, "zoomOnMouseWheel": "ctrl"}


def bars_option(
    rows: Sequence[str], kinds: Sequence[tuple[str, str, Bars]], most_rows: int
) -> dict[str, Any]:
    """Return the option of a chart of bars over time.

    Args:
        rows: The names of its rows.
        kinds: The name, the colour and the bars of each kind.
        most_rows: How many rows are visible; a slider shows others.
    """
    has_more = len(rows) > most_rows
    slider = {"type": "slider", "yAxisIndex": 0, "endValue": most_rows - 1}
    return {
        "animation": False,
        "textStyle": FONT,
        "grid": {"left": 64, "right": 44 if has_more else 16, "top": 34, "bottom": 28},
        "legend": {"type": "scroll", "top": 0, "left": 0, "textStyle": QUIET},
        "tooltip": {":formatter": "console_ui.barText", "confine": True},
        "xAxis": _ELAPSED_FROM_0,
        "yAxis": {"type": "category", "inverse": True, "data": rows, "axisLabel": QUIET},
        # A bar that begins before the zoom is drawn from its edge.
        "dataZoom": [{**wheel_zoom(), "filterMode": "none"}, *([slider] if has_more else [])],
        "series": [
            {
                "type": "custom",
                "name": name,
                "itemStyle": {"color": colour},
                "data": bars,
                "encode": {"x": [1, 2], "y": 0},
                ":renderItem": "console_ui.bar",
            }
            for name, colour, bars in kinds
        ],
    }


def megabytes(mib: float) -> float:
    """Return megabytes, which all charts show, from the mebibytes of journals."""
    return round(mib * 1.048576, 1)
