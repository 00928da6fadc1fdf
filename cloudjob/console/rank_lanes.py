"""A lane for each rank: whether it waited for others, worked or did nothing, over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

from cloudjob.console.charts import Chart
from cloudjob.console.charts.style import Bars, bars_option
from cloudjob.tracking.journals import Journals, RankPoint
from jobentry.contract import journal

TITLE = "over time"
_LANE_PX, _FRAME_PX = 24, 74
_MAX_LANES = 24
# More bars would be narrower than a pixel, and a page receives all of them every few seconds.
_MAX_BARS_OF_RANK = 400
# A rank that uses less of a CPU than this, and does not wait for others, does nothing.
_BUSY_PERCENT = 5
_MOSTLY, _PARTLY = 66, 33
# A longer time without a sample is a gap.
_GAP_S = 90.0


class Lane(Enum):
    """What a rank did for a while."""

    WORKS = "works"
    PARTLY_WAITS = "works and waits for others"
    WAITS = "waits for others"
    IDLE = "does nothing"
    PAUSED = "paused"
    UNKNOWN = "not known whether it waits"


_COLOURS = {
    Lane.WORKS: "#2563eb",
    Lane.PARTLY_WAITS: "#7dd3fc",
    Lane.WAITS: "#f59e0b",
    Lane.IDLE: "#cbd5e1",
    Lane.PAUSED: "#a855f7",
    Lane.UNKNOWN: "#64748b",
}
_PAUSED = (journal.State.PAUSED, journal.State.TRACED, journal.State.ZOMBIE)


class _Bar(NamedTuple):
    lane: Lane
    start_s: float
    end_s: float


def rank_lanes(journals: Journals, zero_s: float) -> Chart | None:
    """Return a lane for each rank; None without samples.

    Args:
        zero_s: Seconds since 1970 at which the time axis begins.
    """
    ranks = {rank: points for rank, points in journals.ranks.items() if len(points) > 1}
    if not ranks:
        return None
    rows = {rank: row for row, rank in enumerate(ranks)}
    data: dict[Lane, Bars] = {lane: [] for lane in Lane}
    for rank, points in ranks.items():
        for bar in _bars(points, zero_s):
            data[bar.lane].append([rows[rank], bar.start_s, bar.end_s, 0])
    kinds = [(lane.value, _COLOURS[lane], bars) for lane, bars in data.items() if bars]
    option = bars_option([f"rank {rank}" for rank in ranks], kinds, _MAX_LANES)
    return Chart(TITLE, option, _height_px(len(ranks)), _note(journals))


def lane_of(sample: journal.RankSample) -> Lane:
    """Return what a rank did before a sample."""
    if journal.state_of(sample.state) in _PAUSED:
        return Lane.PAUSED
    if sample.waits_percent is None:
        return Lane.UNKNOWN
    if sample.waits_percent >= _MOSTLY:
        return Lane.WAITS
    if sample.waits_percent >= _PARTLY:
        return Lane.PARTLY_WAITS
    return Lane.WORKS if sample.cpu_percent >= _BUSY_PERCENT else Lane.IDLE


def _bars(points: Sequence[RankPoint], zero_s: float) -> list[_Bar]:
    """Return what a rank did, equal neighbours as one bar, and only the last if there are many."""
    bars: list[_Bar] = []
    for bar in _steps(points, zero_s):
        last = bars[-1] if bars else None
        if last is not None and last.lane is bar.lane and last.end_s == bar.start_s:
            bars[-1] = last._replace(end_s=bar.end_s)
        else:
            bars.append(bar)
    return bars[-_MAX_BARS_OF_RANK:]


def _steps(points: Sequence[RankPoint], zero_s: float) -> Iterator[_Bar]:
    """Yield what a rank did before each sample but the first, while it ran."""
    for before, point in pairwise(points):
        start, end = before.at - zero_s, point.at - zero_s
        if point.sample.state not in journal.ENDS and end > start:
            yield _Bar(lane_of(point.sample), max(start, end - _GAP_S), end)


def _height_px(lanes: int) -> int:
    return _FRAME_PX + _LANE_PX * min(lanes, _MAX_LANES)


def _note(journals: Journals) -> str:
    """Return which rank waits least, if that tells anything."""
    shares = {rank: journals.waits_percent(rank) for rank in journals.ranks}
    known_shares = {rank: share for rank, share in shares.items() if share is not None}
    if len(known_shares) < 2 or max(known_shares.values()) < _PARTLY:
        return ""
    rank = min(known_shares, key=lambda each: (known_shares[each], each))
    return f"In the last minute, rank {rank} waited least: {known_shares[rank]:.0f} % of the time."
