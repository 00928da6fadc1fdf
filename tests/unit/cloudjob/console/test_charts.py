"""Tests of the data from which the charts of a job are drawn."""

from __future__ import annotations

from math import inf, isnan, nan
from typing import Any

import pytest

from cloudjob.console import charts
from cloudjob.console.pages.chart_table import as_csv
from cloudjob.model.status import Attempt, Cause, Failure, JobState, JobStatus, Phase
from cloudjob.model.times import rfc3339
from cloudjob.tracking.journals import Journals
from cloudjob.tracking.metrics import MetricPoint
from jobentry.contract import journal
from jobentry.contract.journal import RankSample, Sample
from tests.support.statuses import status_of

STATUS = status_of(created_at="1970-01-01T00:01:40.000Z")


def test_a_bar_lasts_from_its_start_to_its_end_in_seconds_since_the_submit():
    phases = (
        Phase(
            node=0,
            name="stage",
            started_at="1970-01-01T00:01:41.000Z",
            ended_at="1970-01-01T00:01:43.500Z",
        ),
        Phase(node=2, name="run", started_at="1970-01-01T00:01:44.000Z"),
    )
    chart = charts.timeline(STATUS, phases, now_s=110.0)

    assert chart is not None
    option = chart.option
    assert option["yAxis"]["data"] == ["node 0", "node 2"]
    assert {s["name"]: s["data"] for s in option["series"]} == {
        "stage": [[0, 1.0, 3.5, 0]],
        "run": [[1, 4.0, 10.0, 0]],
    }


def phase(node: int, name: str, start_s: int, end_s: int | None) -> Phase:
    """Return a phase by its seconds since the submit."""
    moments = [
        None if at is None else f"1970-01-01T00:{(100 + at) // 60:02d}:{(100 + at) % 60:02d}.000Z"
        for at in (start_s, end_s)
    ]
    assert moments[0]
    return Phase(node=node, name=name, started_at=moments[0], ended_at=moments[1])


def bars(status: JobStatus, *phases: Phase) -> dict[str, list[list[float]]]:
    chart = charts.timeline(status, phases, now_s=1000.0)
    assert chart is not None
    return {series["name"]: series["data"] for series in chart.option["series"]}


def test_a_phase_within_another_is_drawn_inside_its_bar_and_after_it():
    bars_drawn = bars(STATUS, phase(0, "first output", 5, 7), phase(0, "run", 4, 20))

    assert list(bars_drawn.items()) == [
        ("run", [[0, 4.0, 20.0, 0]]),
        ("waiting for output", [[0, 5.0, 7.0, 1]]),
    ]


@pytest.mark.parametrize(("node", "marks"), [(1, [[1, 8.0, 8.0, 0]]), (None, None)])
def test_a_failed_job_has_a_mark_where_it_failed_and_open_phases_end_with_it(
    node: int | None, marks: list[list[float]] | None
):
    status = status_of(
        created_at=STATUS.created_at,
        started_at="1970-01-01T00:01:43.000Z",
        ended_at="1970-01-01T00:01:50.000Z",
        state=JobState.FAILED,
        failure=Failure(node=node),
    )
    phases = (phase(0, "run", 4, None), phase(1, "run", 4, 8), phase(1, "outputs", 8, 9))
    bars_drawn = bars(status, *phases)

    assert bars_drawn["queued"] == [[0, 0.0, 3.0, 0], [1, 0.0, 3.0, 0]]
    assert bars_drawn["run"] == [[0, 4.0, 10.0, 0], [1, 4.0, 8.0, 0]]
    assert bars_drawn["failed"] == (marks or [[0, 10.0, 10.0, 0], [1, 8.0, 8.0, 0]])


def test_the_attempts_before_the_last_one_are_a_bar():
    status = status_of(
        created_at=STATUS.created_at,
        started_at="1970-01-01T00:01:41.000Z",
        attempt=Attempt(number=2, most=3),
    )

    assert bars(status, phase(0, "run", 9, 12)) == {
        "queued": [[0, 0.0, 1.0, 0]],
        "earlier attempts": [[0, 1.0, 9.0, 0]],
        "run": [[0, 9.0, 12.0, 0]],
    }


def test_without_phases_there_is_no_timeline():
    assert charts.timeline(STATUS, (), now_s=110.0) is None


def recorded(*samples: Sample) -> Journals:
    """Return journals in which each node has one of these samples."""
    journals = Journals()
    for node, sample in enumerate(samples):
        journals.add(node, [journal.dump(sample).rstrip()])
    return journals


def rank(number: int, quiet_s: int, state: str = "S") -> RankSample:
    return RankSample(number, 10 * number, 100, quiet_s, state, 1, 0)


def cells(chart: charts.Chart | None) -> dict[int, dict[str, Any]]:
    """Return the cells of a rank grid by rank."""
    assert chart is not None
    return {cell["rank"]: cell for cell in chart.option["series"][0]["data"]}


def test_the_silent_rank_and_the_failed_rank_stand_out():
    ranks = recorded(
        Sample(100.0, ranks=(rank(0, 1), rank(1, 90))),
        Sample(100.0, ranks=(rank(33, 2, journal.State.FAILED.value),)),
    )
    chart = charts.rank_grid(STATUS, ranks, "silent for (s)")

    cell_of = cells(chart)
    assert [cell["value"] for cell in cell_of.values()] == [[0, 0, 1], [1, 0, 90], [1, 2, 2]]
    frames = {number: cell["itemStyle"]["borderColor"] for number, cell in cell_of.items()}
    assert frames[0] == frames[1] != frames[33]
    assert chart is not None
    assert chart.note == "Rank 1 differs most: 90 s; the median is 2 s."
    by_state = charts.rank_grid(STATUS, ranks, "state")
    assert by_state is not None
    assert [p["label"] for p in by_state.option["visualMap"]["pieces"]] == [
        "failed: 1",
        "waiting: 2",
    ]
    assert by_state.note == "failed: rank 33"
    # A border separates cells of the same colour.
    assert len({cell["itemStyle"]["borderColor"] for cell in cells(by_state).values()}) == 1


def states(*samples: Sample, **status: Any) -> dict[int, str]:
    """Return the states of the ranks of a job that has ended."""
    ended = status_of(procs_per_node=2, **{"state": JobState.FAILED, **status})
    chart = charts.rank_grid(ended, recorded(*samples), "state")
    return {number: cell["state"] for number, cell in cells(chart).items()}


NODES = (
    Sample(
        100.0,
        ranks=(rank(0, 1, journal.State.STOPPED.value), rank(1, 1, journal.State.FAILED.value)),
    ),
    Sample(
        100.0, ranks=(rank(2, 1, journal.State.LOST.value), rank(3, 1, journal.State.ENDED.value))
    ),
)


def test_ranks_that_failed_were_stopped_were_lost_and_ended_well_differ():
    state_of = states(*NODES, failure=Failure(rank=2, message="killed"))
    assert list(state_of.values()) == [
        "stopped by cloudjob",
        "failed",
        "failed first",
        "ended well",
    ]

    state_of = states(*NODES, state=JobState.CANCELLED, failure=Failure(rank=None))
    assert list(state_of.values()) == ["stopped by cloudjob", "failed", "lost", "ended well"]


def test_the_rank_that_failed_first_is_named_first():
    ended = status_of(procs_per_node=2, state=JobState.FAILED, failure=Failure(rank=2))
    chart = charts.rank_grid(ended, recorded(*NODES), "state")

    assert chart is not None
    assert chart.note == "failed first: rank 2; failed: rank 1"
    labels = [piece["label"] for piece in chart.option["visualMap"]["pieces"]]
    assert labels == ["failed first: 1", "failed: 1", "stopped by cloudjob: 1", "ended well: 1"]


def test_how_a_rank_ended_is_not_guessed():
    ran = Sample(100.0, ranks=(rank(0, 1, "R"), rank(1, 1)))

    assert states(ran) == dict.fromkeys(range(4), "not known")
    assert states(ran, state=JobState.SUCCEEDED) == dict.fromkeys(range(4), "ended well")
    lost = states(ran, cause=Cause.PLATFORM, failure=Failure(node=0, message="lost"))
    assert list(lost.values()) == ["lost", "lost", "not known", "not known"]
    lost = states(ran, cause=Cause.PLATFORM, failure=Failure(node=1, message="lost"))
    assert set(lost.values()) == {"not known"}


@pytest.mark.parametrize(
    ("shows", "values", "limits", "note"),
    [
        # The scale spans at least a difference that matters, so small ones have faint colours.
        ("silent for (s)", (1, 3, 2), (0, 60), ""),
        ("silent for (s)", (1, 300, 2), (0, 300), "Rank 1 differs most: 300 s"),
        ("CPU (%)", (98, 100, 99), (74, 124), ""),
        ("CPU (%)", (98, 5, 99), (5, 191), "Rank 1 differs most: 5 %"),
        ("CPU (%)", (3, 100, 2), (-94, 100), "Rank 1 differs most: 100 %"),
        ("step", (1000, 1001, 999), (991, 1001), ""),
        ("step", (1000, 700, 999), (700, 1000), "Rank 1 differs most: 700"),
    ],
)
def test_a_rank_is_marked_only_if_it_differs_enough(
    shows: str, values: tuple[int, ...], limits: tuple[int, int], note: str
):
    ranks = tuple(
        RankSample(number, value, 100, value, "R", 1, 0) for number, value in enumerate(values)
    )
    chart = charts.rank_grid(
        STATUS, recorded(Sample(100.0, ranks=ranks)), shows, dict(enumerate(values))
    )

    assert chart is not None
    legend = chart.option["visualMap"]
    assert (legend["min"], legend["max"]) == limits
    assert chart.note.partition(";")[0] == note


def test_the_step_of_a_rank_is_the_last_that_it_printed():
    points = [MetricPoint("loss", 0, step, 0.5) for step in (1, 2, 3)]
    points += [MetricPoint("lr", 1, 7, 0.5), MetricPoint("loss", None, 99, 0.5, source="events")]
    steps = charts.last_steps(points)

    assert steps == {0: 3, 1: 7}
    ranks = recorded(Sample(100.0, ranks=(rank(0, 1), rank(1, 1), rank(2, 1))))
    assert set(cells(charts.rank_grid(STATUS, ranks, "step", steps))) == {0, 1}
    assert charts.rank_grid(STATUS, ranks, "step", {}) is None


def test_a_rank_that_has_ended_shows_what_it_used_while_it_ran():
    journals = recorded(Sample(100.0, ranks=(rank(1, 4),)))
    ended = RankSample(1, 0, 0, 9, journal.State.ENDED.value, 0, 0)
    journals.add(0, [journal.dump(Sample(101.0, ranks=(ended,))).rstrip()])
    cell = cells(charts.rank_grid(STATUS, journals, "memory (MB)"))[1]

    assert cell["value"][2] == 104.9
    assert cell["state"] == "ended well"
    [memory] = [
        each for each in charts.resources(journals, STATUS) if "of each rank (MB)" in each.title
    ]
    assert memory.option["series"][0]["data"] == [(0.0, 104.9)]


def test_a_metric_has_a_chart_with_a_line_for_each_rank_and_event_file():
    points = [
        MetricPoint("loss", 0, 2, 0.5),
        MetricPoint("loss", 0, 1, 1.0),
        MetricPoint("loss", None, 1, 0.9, source="MODEL/events.out"),
        MetricPoint("lr", 1, 1, 0.1),
    ]
    lines_of = {
        chart.title: {line["name"]: line["data"] for line in chart.option["series"]}
        for chart in charts.curves(points)
    }

    assert lines_of == {
        "loss": {"rank 0": [(1, 1.0), (2, 0.5)], "MODEL/events.out": [(1, 0.9)]},
        "lr": {"rank 1": [(1, 0.1)]},
    }


def test_without_samples_there_are_no_ranks_and_no_resources():
    assert charts.rank_grid(STATUS, Journals(), "threads") is None
    assert charts.resources(Journals(), STATUS) == []


def test_resources_have_a_line_for_each_node_and_rank_and_no_chart_without_values():
    journals = recorded(
        Sample(110.0, cpu=(50.0, 10.0, 0.0, 0.0), memory=(512, 1024), ranks=(rank(0, 1),)),
        Sample(111.0, cpu=(20.0, 0.0, 0.0, 0.0), ranks=(rank(1, 1),)),
    )
    drawn = charts.resources(journals, STATUS)
    lines_of = {
        chart.title: {line["name"]: line["data"] for line in chart.option["series"]}
        for chart in drawn
    }

    assert lines_of["CPU of the machine, all CPUs (%)"] == {
        "node 0": [(10.0, 60.0)],
        "node 1": [(11.0, 20.0)],
    }
    assert lines_of["Memory of the machine (MB)"] == {"node 0": [(10.0, 536.9)], "node 1": []}
    assert lines_of["CPU of each rank (% of one CPU)"]["rank 1"] == [(11.0, 10)]
    assert "GPUs and NPUs (%)" not in lines_of
    # All charts have the same time axis, so that they can be zoomed together.
    axes = {(chart.option["xAxis"]["min"], chart.option["xAxis"]["max"]) for chart in drawn}
    assert axes == {(10.0, 11.0)}


def test_a_long_job_keeps_its_peaks_and_a_large_one_names_what_is_left_out():
    samples = [Sample(float(at), memory=(900 if at == 777 else 1, 1024)) for at in range(1, 5000)]
    all_ranks = Sample(1.0, ranks=tuple(rank(number, 1) for number in range(100)))
    journals = Journals()
    journals.add(0, [journal.dump(sample).rstrip() for sample in (all_ranks, *samples)])
    chart_of = {
        chart.title: chart
        for chart in charts.resources(journals, status_of(created_at=rfc3339(0.0)))
    }

    [line] = chart_of["Memory of the machine (MB)"].option["series"]
    assert len(line["data"]) <= 500
    assert (777.0, 943.7) in line["data"]
    ranks = chart_of["CPU of each rank (% of one CPU)"]
    assert ranks.note.endswith("; the 64 of 100 that differ most")
    names = [*ranks.lines]
    assert len(names) == 64
    assert (names[0], names[-1], "rank 50" in names) == ("rank 0", "rank 99", False)


def test_all_ranks_of_a_long_job_have_points_at_the_same_steps_with_the_peaks_of_each():
    points = [
        MetricPoint("loss", rank, step, 100.0 * rank - (9 if (rank, step) == (0, 777) else 0))
        for rank in range(3)
        for step in range(5000)
    ]
    [chart] = charts.curves(points)
    lines = {line["name"]: dict(line["data"]) for line in chart.option["series"]}

    assert len({tuple(line) for line in lines.values()}) == 1
    assert len(lines["rank 1"]) <= 500
    assert lines["rank 0"][777] == -9
    assert (chart.option["xAxis"]["minInterval"], chart.option["yAxis"]["minInterval"]) == (1, 1)


def losses(*ranks: dict[int, float], at_s: float = 0.0) -> list[MetricPoint]:
    """Return the values of a metric by step, for each rank."""
    return [
        MetricPoint("loss", rank, step, value, at_s + step)
        for rank, values in enumerate(ranks)
        for step, value in values.items()
    ]


def series(chart: charts.Chart) -> dict[str, list[tuple[float, float]]]:
    """Return the data of a chart's series by id, else by name."""
    return {each.get("id", each["name"]): each["data"] for each in chart.option["series"]}


def test_above_eight_lines_their_mean_and_range_are_drawn_and_each_is_in_the_tooltip():
    ranks = [{0: float(rank), 1: float(rank)} for rank in range(9)]
    [chart] = charts.curves(losses(*ranks))
    drawn = series(chart)

    assert drawn["mean"] == [(0, 4), (1, 4)]
    assert (drawn["low"], drawn["span"]) == ([(0, 0), (1, 0)], [(0, 8), (1, 8)])
    assert drawn["rank 3"] == [(0, 3), (1, 3)]
    assert chart.option["legend"]["data"] == ["mean", "minimum to maximum"]
    assert chart.note == "last 4 on average, 0 to 8"


@pytest.mark.parametrize(
    ("shows", "count", "draws_range"),
    [
        (charts.Shows.DEFAULT, 8, False),
        (charts.Shows.EACH, 9, False),
        (charts.Shows.RANGE, 2, True),
    ],
)
def test_users_choose_between_each_line_and_the_range(
    shows: charts.Shows, count: int, draws_range: bool
):
    points = losses(*({0: float(rank)} for rank in range(count)))
    [chart] = charts.curves(points, view=charts.View(shows=shows))

    assert ("mean" in series(chart)) is draws_range


def test_the_range_of_lines_at_different_places_is_that_of_each_short_part():
    ranks = [{step: float(rank) for step in range(rank, 4000, 2)} for rank in range(9)]
    [chart] = charts.curves(losses(*ranks))
    drawn = series(chart)

    assert 100 < len(drawn["mean"]) <= 251
    assert {value for _, value in drawn["span"][1:-1]} == {8.0}


@pytest.mark.parametrize("weight", [0.222, 0.9])
def test_a_smooth_line_of_equal_values_is_straight_and_goes_on_after_a_nan(weight: float):
    values = dict.fromkeys(range(300), 0.0001) | {150: nan}
    [chart] = charts.curves(losses(values), view=charts.View(smoothing=weight))

    smoothed = [value for _, value in chart.option["series"][0]["data"]]
    assert {value for value in smoothed if not isnan(value)} == {1e-4}
    assert [step for step, value in enumerate(smoothed) if isnan(value)] == [150]


@pytest.mark.parametrize(
    ("values", "has_symbols"),
    [([1, nan, 2, 3], True), ([1, 2, nan, 3, nan], True), ([1, 2, nan, 3, 4], False)],
)
def test_a_value_between_two_that_are_none_is_drawn(values: list[float], has_symbols: bool):
    [chart] = charts.curves(losses(dict(enumerate(values))))

    assert chart.option["series"][0]["showSymbol"] is has_symbols


def test_a_metric_may_be_infinite_in_both_directions():
    points = [MetricPoint("loss", rank, 0, value) for rank, value in enumerate((inf, -inf))]
    [chart] = charts.curves(points)
    [longer] = charts.curves(losses(dict(enumerate([inf, -inf, 1.0] * 500))))

    assert chart.note == "last nan on average, -inf to inf"
    assert longer.note == "last 1"


def test_a_smooth_line_follows_the_earlier_values():
    [chart] = charts.curves(losses({0: 1.0, 1: 3.0, 2: 3.0}), view=charts.View(smoothing=0.5))

    assert series(chart)["rank 0"] == [
        (0, 1.0),
        (1, pytest.approx(3.5 / 1.5)),
        (2, pytest.approx(4.75 / 1.75)),
    ]
    assert chart.note == "last 3"


def test_values_without_a_logarithm_are_left_out_and_named():
    points = losses({0: 0.0, 1: 2.0, 2: inf, 3: -inf, 4: 4.0})
    [chart] = charts.curves(points, view=charts.View(is_logarithmic=True))

    axis = chart.option["yAxis"]
    assert (axis["type"], axis["min"], axis["max"]) == ("log", 2.0, 4.0)
    assert series(chart)["rank 0"] == [(1, 2.0), (2, inf), (3, -inf), (4, 4.0)]
    assert "values of 0 and below have no logarithm" in chart.note


def test_metrics_are_drawn_by_the_time_since_the_submit():
    points = [*losses({5: 1.0, 7: 2.0}, at_s=100.0), MetricPoint("loss", 1, 6, 3.0)]
    [chart] = charts.curves(points, STATUS, charts.View(by_time=True))

    assert series(chart) == {"rank 0": [(5.0, 1.0), (7.0, 2.0)]}
    assert chart.x_name == "seconds"


def test_values_that_have_the_same_time_are_spread_until_the_next_one():
    points = [MetricPoint("loss", 0, n, float(n), 100.0 + 4 * (n // 2)) for n in range(4)]
    [chart] = charts.curves(points, STATUS, charts.View(by_time=True))

    assert series(chart) == {"rank 0": [(0.0, 0.0), (2.0, 1.0), (4.0, 2.0), (4.0, 3.0)]}


FAILED = status_of(
    created_at=STATUS.created_at,
    state=JobState.FAILED,
    ended_at=rfc3339(130.0),
    failure=Failure(node=0, rank=1),
)


def marks(chart: charts.Chart) -> dict[str, float]:
    """Return where lines cross the chart, by their texts."""
    data = chart.option["series"][0].get("markLine", {}).get("data", ())
    return {each["label"]["formatter"]: each.get("xAxis", each.get("yAxis")) for each in data}


@pytest.mark.parametrize(("by_time", "at"), [(False, 6), (True, 30.0)])
def test_a_failure_is_marked_at_the_last_step_of_its_rank_or_at_its_time(by_time: bool, at: float):
    points = losses({5: 1.0, 9: 1.0}, {5: 1.0, 6: 1.0}, at_s=100.0)
    [chart] = charts.curves(points, FAILED, charts.View(by_time=by_time))

    assert marks(chart) == {"failed": at}
    assert chart.option["xAxis"]["max"] == max(at, 9)


def test_a_table_has_the_rank_that_failed_first_its_node_and_the_last_line_of_each():
    rows = charts.rank_rows(FAILED, recorded(*NODES), {0: 7}, {1: "bye"})

    assert (rows[0]["rank"], rows[0]["state"], rows[0]["line"]) == (1, "failed first", "bye")
    assert {row["rank"]: row["step"] for row in rows}[0] == 7


def test_the_cells_of_a_node_with_several_ranks_are_in_its_row():
    status = status_of(procs_per_node=2)
    chart = charts.rank_grid(status, recorded(Sample(1.0, ranks=(rank(0, 1),))), "threads")

    assert chart
    assert chart.option["yAxis"]["data"] == ["node 0"]
    # Few cells are as wide as those of many ranks.
    assert len(chart.option["xAxis"]["data"]) == 16


def test_a_failure_is_marked_in_the_resources():
    journals = recorded(Sample(110.0, memory=(512, 1024)))
    [chart] = charts.resources(journals, FAILED)

    assert marks(chart) == {"failed": 30.0, "limit": 1073.7}


def test_a_last_value_has_the_digits_of_its_limit():
    memory = Sample(110.0, memory=(24_000, 24_107))
    [chart] = charts.resources(recorded(memory), STATUS)

    assert chart.note == "last 25,166; limit 25,278"


@pytest.mark.parametrize(("used", "drawn"), [(512, {"limit": 1073.7}), (8, {})])
def test_the_limit_of_the_memory_is_drawn_if_it_is_near(used: int, drawn: dict[str, float]):
    status = status_of(backend="docker", created_at=STATUS.created_at)
    [chart] = charts.resources(recorded(Sample(110.0, memory=(used, 1024))), status)

    assert (chart.title, marks(chart)) == ("Memory (MB)", drawn)
    assert chart.note.endswith("; limit 1,074")


@pytest.mark.parametrize("status", [None, STATUS])
def test_without_a_failure_there_is_no_mark(status: JobStatus | None):
    [chart] = charts.curves(losses({5: 1.0}), status)

    assert "markLine" not in chart.option["series"][0]


def test_nodes_that_measure_at_different_times_have_points_at_the_same_places():
    journals = Journals()
    for node, shift_s in enumerate((0.0, 1.5)):
        samples = (Sample(100.0 + 4 * n + shift_s, memory=(node, 9)) for n in range(9))
        journals.add(node, [journal.dump(sample).rstrip() for sample in samples])
    [chart] = charts.resources(journals, STATUS)

    places = {tuple(x for x, _ in line) for line in chart.lines.values()}
    assert places == {tuple(4.0 * n for n in range(9))}


def test_a_smoothed_curve_of_many_values_is_near_their_mean():
    """The lowest and highest values of a curve, which are drawn, are not those of the most steps.

    TensorBoard smooths what is left after it has left out points (tensorflow/tensorboard#1518).
    """
    points = losses({step: 1.0 if step % 100 else 11.0 for step in range(20_000)})
    [chart] = charts.curves(points, view=charts.View(smoothing=0.9))

    values = [value for _, value in series(chart)["rank 0"][100:]]
    assert (min(values), max(values)) == (pytest.approx(1.1, abs=0.3), pytest.approx(1.1, abs=0.3))


def test_a_curve_of_few_values_is_smoothed_no_more_beside_one_of_many():
    """As of a job that prints its loss every 200 steps, and another that does so at each step."""
    few = losses({step: float(step) for step in range(0, 20_000, 200)})
    many = [MetricPoint("loss", None, step, 1.0, source="other") for step in range(20_000)]
    [alone] = charts.curves(few, view=charts.View(smoothing=0.9))
    [beside] = charts.curves([*few, *many], view=charts.View(smoothing=0.9))

    last, expected = (series(chart)["rank 0"][-1] for chart in (beside, alone))
    assert last[1] == pytest.approx(expected[1], rel=0.05)


def test_the_values_of_a_chart_are_saved_as_a_table_without_formulas():
    points = [*losses({0: 1.0, 2: 0.5}), MetricPoint("loss", None, 1, 0.7, source=" =1+1,x")]
    [chart] = charts.curves(points)

    lines = as_csv(chart).splitlines()
    assert lines == ['step,"\' =1+1,x",rank 0', "0,,1.0", "1,0.7,", "2,,0.5"]


def test_the_times_of_a_table_have_no_more_digits_than_those_of_a_job():
    points = losses({0: 1.0}, at_s=100.1)
    [chart] = charts.curves(points, STATUS, charts.View(by_time=True))

    assert as_csv(chart).splitlines() == ["seconds,rank 0", "0.1,1.0"]


@pytest.mark.parametrize(("ranks", "steps"), [(3, 3000), (100, 2)])
def test_numbers_whose_sum_is_too_large_have_curves(ranks: int, steps: int):
    """As of a training that diverges."""
    [chart] = charts.curves(losses(*[dict.fromkeys(range(steps), 1.7e308)] * ranks))

    assert chart.lines
    assert chart.note.startswith("last 1.7e+308")
