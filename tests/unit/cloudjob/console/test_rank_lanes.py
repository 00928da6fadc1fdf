"""A lane for each rank says whether it waited, worked or did nothing, over time."""

from __future__ import annotations

import pytest

from cloudjob.console.rank_lanes import Lane, lane_of, rank_lanes
from cloudjob.tracking.journals import Journals
from jobentry.contract import journal
from jobentry.contract.journal import RankSample, Sample


def sample(rank: int = 0, waits: int | None = 0, cpu: int = 50, state: str = "S") -> RankSample:
    return RankSample(rank, cpu, 10, 1, state, 1, 0, waits, "train.py:41")


@pytest.mark.parametrize(
    ("item", "lane"),
    [
        (sample(waits=80), Lane.WAITS),
        (sample(waits=40), Lane.PARTLY_WAITS),
        (sample(waits=5), Lane.WORKS),
        (sample(waits=5, cpu=1), Lane.IDLE),
        (sample(waits=None), Lane.UNKNOWN),
        (sample(waits=80, state="T"), Lane.PAUSED),
    ],
)
def test_a_sample_has_a_lane(item, lane):
    assert lane_of(item) is lane


def journals(*rows: tuple[float, tuple[RankSample, ...]]) -> Journals:
    samples = Journals()
    samples.add(0, [journal.dump(Sample(at=at, ranks=ranks)) for at, ranks in rows])
    return samples


def test_equal_neighbours_are_one_bar():
    rows = [(100.0 + 5 * n, (sample(0, 80), sample(1, 2))) for n in range(4)]
    rows.append((120.0, (sample(0, 10), sample(1, 2))))

    chart = rank_lanes(journals(*rows), 90.0)

    assert chart is not None
    bars = {each["name"]: each["data"] for each in chart.option["series"]}
    assert bars == {
        "works": [[0, 25.0, 30.0, 0], [1, 10.0, 30.0, 0]],
        "waits for others": [[0, 10.0, 25.0, 0]],
    }
    assert chart.option["yAxis"]["data"] == ["rank 0", "rank 1"]
    assert chart.note == "In the last minute, rank 1 waited least: 2 % of the time."


def test_no_rank_is_singled_out_where_none_waits_much():
    rows = [(5.0 * n, (sample(0, 20), sample(1, 2))) for n in range(4)]

    chart = rank_lanes(journals(*rows), 0.0)

    assert chart is not None
    assert chart.note == ""


def test_a_rank_that_has_ended_and_a_time_without_samples_have_no_bar():
    rows = [(0.0, (sample(),)), (500.0, (sample(),)), (505.0, (sample(state="E"),))]

    chart = rank_lanes(journals(*rows), 0.0)

    assert chart is not None
    assert [each["data"] for each in chart.option["series"]] == [[[0, 410.0, 500.0, 0]]]


def test_there_is_no_chart_without_samples():
    assert rank_lanes(Journals(), 0.0) is None
