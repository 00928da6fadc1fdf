"""What the charts of a job are drawn from."""

from __future__ import annotations

from cloudjob.console import charts
from cloudjob.model.status import Phase
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
    option = charts.timeline(STATUS, phases, now_s=110.0)

    assert option is not None
    assert option["yAxis"]["data"] == ["node 0", "node 2"]
    assert {s["name"]: s["data"] for s in option["series"]} == {
        "stage": [[0, 1.0, 3.5]],
        "run": [[1, 4.0, 10.0]],
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


def test_the_silent_rank_and_the_failed_rank_stand_out():
    ranks = recorded(
        Sample(100.0, ranks=(rank(0, 1), rank(1, 90))),
        Sample(100.0, ranks=(rank(33, 2, journal.FAILED),)),
    )
    option = charts.rank_grid(ranks, "silent for (s)")

    assert option is not None
    cells = {cell["rank"]: cell for cell in option["series"][0]["data"]}
    assert [cell["value"] for cell in cells.values()] == [[0, 0, 1], [1, 0, 90], [1, 1, 2]]
    assert (option["visualMap"]["min"], option["visualMap"]["max"]) == (1, 90)
    frames = {number: cell["itemStyle"]["borderColor"] for number, cell in cells.items()}
    assert frames[0] == frames[1] != frames[33]
    assert option["rows"] == 2


def test_a_rank_that_has_ended_shows_what_it_used_while_it_ran():
    journals = recorded(Sample(100.0, ranks=(rank(1, 4),)))
    ended = RankSample(1, 0, 0, 9, journal.ENDED, 0, 0)
    journals.add(0, [journal.dump(Sample(101.0, ranks=(ended,))).rstrip()])
    option = charts.rank_grid(journals, "memory (MiB)")

    assert option is not None
    (cell,) = option["series"][0]["data"]
    assert cell["value"][2] == 100
    assert cell["sample"]["state"] == journal.ENDED


def test_a_metric_has_a_chart_with_a_line_for_each_rank_and_event_file():
    points = [
        MetricPoint("loss", 0, 2, 0.5),
        MetricPoint("loss", 0, 1, 1.0),
        MetricPoint("loss", None, 1, 0.9, source="MODEL/events.out"),
        MetricPoint("lr", 1, 1, 0.1),
    ]
    found = {
        name: {line["name"]: line["data"] for line in option["series"]}
        for name, option in charts.curves(points)
    }

    assert found == {
        "loss": {"rank 0": [(1, 1.0), (2, 0.5)], "MODEL/events.out": [(1, 0.9)]},
        "lr": {"rank 1": [(1, 0.1)]},
    }


def test_without_samples_there_are_no_ranks_and_no_resources():
    assert charts.rank_grid(Journals(), "threads") is None
    assert charts.resources(Journals(), 0.0) == []


def test_resources_have_a_line_for_each_node_and_rank_and_no_chart_without_values():
    journals = recorded(
        Sample(110.0, cpu=(50.0, 10.0, 0.0, 0.0), memory=(512, 1024), ranks=(rank(0, 1),)),
        Sample(111.0, cpu=(20.0, 0.0, 0.0, 0.0), ranks=(rank(1, 1),)),
    )
    found = {
        title: {line["name"]: line["data"] for line in option["series"]}
        for title, option in charts.resources(journals, zero_s=100.0)
    }

    assert found["CPU of the machine, all CPUs (%)"] == {
        "node 0": [(10.0, 60.0)],
        "node 1": [(11.0, 20.0)],
    }
    assert found["Memory (MiB)"] == {"node 0": [(10.0, 512)], "node 1": []}
    assert found["CPU of each rank (% of one CPU)"]["rank 1"] == [(11.0, 10)]
    assert "GPUs and NPUs (%)" not in found


def test_a_long_job_keeps_its_peaks_and_a_large_one_names_what_is_left_out():
    samples = [Sample(float(at), memory=(900 if at == 777 else 1, 1024)) for at in range(1, 5000)]
    many = Sample(1.0, ranks=tuple(rank(number, 1) for number in range(100)))
    journals = Journals()
    journals.add(0, [journal.dump(sample).rstrip() for sample in (many, *samples)])
    found = dict(charts.resources(journals, zero_s=0.0))

    [line] = found["Memory (MiB)"]["series"]
    assert len(line["data"]) <= 500
    assert (777.0, 900) in line["data"]
    assert len(found["CPU of each rank (% of one CPU): the first 64 of 100"]["series"]) == 64
