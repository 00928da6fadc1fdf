"""ECharts options for what the job page draws."""

from __future__ import annotations

from typing import Any

from cloudjob import times
from cloudjob.model.status import JobStatus

# Phase -> colour; what the node half calls its phases.
_COLOURS = {
    "stage": "#94a3b8",
    "bring-up": "#f59e0b",
    "run": "#2563eb",
    "store": "#10b981",
}
_OTHER = "#a78bfa"
_ROW_PX, _FRAME_PX = 30, 70
_MOST_ROWS = 16


def timeline(status: JobStatus, now_s: float) -> dict[str, Any] | None:
    """Return a bar for each phase of each node, in seconds since the submit; None without phases.

    Args:
        now_s: Seconds since 1970, where phases end that have not ended yet.
    """
    if not status.phases:
        return None
    zero = times.seconds_of(status.created_at)
    nodes = sorted({phase.node for phase in status.phases})
    bars: dict[str, list[list[float]]] = {}
    for phase in status.phases:
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
        "legend": {"top": 0, "left": 0, "textStyle": {"color": "#94a3b8"}},
        "tooltip": {":formatter": "console_ui.barText"},
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
