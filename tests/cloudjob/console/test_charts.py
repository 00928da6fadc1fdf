"""What the charts of a job are drawn from."""

from __future__ import annotations

from cloudjob.console import charts
from cloudjob.model.status import JobState, JobStatus, Phase


def status(*phases: Phase) -> JobStatus:
    return JobStatus(
        job="train-1",
        name="train",
        backend="process",
        state=JobState.RUNNING,
        native_state="running",
        nodes=2,
        procs_per_node=1,
        created_at="1970-01-01T00:01:40.000Z",
        phases=phases,
    )


def test_a_bar_lasts_from_its_start_to_its_end_in_seconds_since_the_submit():
    option = charts.timeline(
        status(
            Phase(
                node=0,
                name="stage",
                started_at="1970-01-01T00:01:41.000Z",
                ended_at="1970-01-01T00:01:43.500Z",
            ),
            Phase(node=2, name="run", started_at="1970-01-01T00:01:44.000Z"),
        ),
        now_s=110.0,
    )

    assert option is not None
    assert option["yAxis"]["data"] == ["node 0", "node 2"]
    assert {s["name"]: s["data"] for s in option["series"]} == {
        "stage": [[0, 1.0, 3.5]],
        "run": [[1, 4.0, 10.0]],
    }


def test_without_phases_there_is_no_timeline():
    assert charts.timeline(status(), now_s=110.0) is None
