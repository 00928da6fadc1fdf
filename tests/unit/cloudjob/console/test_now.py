"""Tests of what the page of a running job shows."""

from __future__ import annotations

from typing import Any

import pytest

from cloudjob.console.log_table import Curve
from cloudjob.console.now import SPARK_BOX, Now, now, spark_path
from cloudjob.tracking.journals import Journals
from cloudjob.tracking.training import Count, Training
from jobentry.contract import journal
from jobentry.contract.journal import Device, RankSample, Sample


def shown(
    training: Training | None = None,
    *samples: Sample,
    curve: Curve | None = None,
    rows: tuple[dict[str, Any], ...] = (),
    **more: Any,
) -> Now:
    journals = Journals()
    for node, sample in enumerate(samples):
        journals.add(node, [journal.dump(sample).rstrip()])
    return now(journals, training or Training(), curve, rows, **more)


def test_progress_time_left_and_speed_are_those_of_the_training():
    training = Training(Count(2, 10), Count(1340, 2000), 0.167, 1234.5, rate="11.0 it/s")

    assert shown(training).facts == [
        ("Progress", "epoch 2 of 10, step 1,340 of 2,000"),
        ("Time left", "about 21 min"),
        ("Speed", "11.0 it/s"),
    ]


@pytest.mark.parametrize(
    ("left_s", "text"), [(0.4, "0 s"), (42.4, "42 s"), (119, "1 min 59 s"), (7290, "2 h 02 min")]
)
def test_a_long_estimate_has_no_seconds(left_s: float, text: str):
    assert shown(Training(left_s=left_s)).facts == [("Time left", f"about {text}")]


def test_the_time_left_of_one_epoch_is_called_so():
    training = Training(None, Count(1, 2), 0.5, 30, is_left_in_epoch=True)

    assert shown(training).facts[1:] == [("Left in this epoch", "about 30 s")]


def test_the_last_value_of_the_main_metric_has_a_small_curve():
    state = shown(curve=Curve("loss", [(0, 4.0), (1, 0.123456), (2, 2.0)]))

    assert state.facts == [("Step", "2"), ("loss", "2")]
    assert state.spark == "M0.0,1.0 L160.0,39.0 L320.0,20.6"


@pytest.mark.parametrize("values", [[], [1.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_one_number_is_no_curve(values: list[float]):
    assert spark_path(values) == ""


@pytest.mark.parametrize("values", [[-1e308, 1.7e308], [0.0, 1e-320], [1e308, 1e308]])
def test_a_curve_of_any_finite_numbers_can_be_drawn(values: list[float]):
    points = [point.split(",") for point in spark_path(values).removeprefix("M").split(" L")]

    assert [x for x, _ in points] == ["0.0", "320.0"]
    assert all(0 <= float(y) <= SPARK_BOX[1] for _, y in points)


def test_a_long_curve_ends_with_its_last_value():
    path = spark_path([0.0] * 100_000 + [1.0])

    assert path.count(",") <= 160
    assert path.endswith(" L320.0,1.0")


def test_resources_are_a_range_over_the_nodes():
    devices = (Device("gpu", 0, 20.0), Device("gpu", 1, 40.0))
    samples = (
        Sample(1.0, cpu=(90.0, 5.0, 0.0, 0.0), cpus=8, memory=(100.0, 1000.0), devices=devices),
        Sample(1.0, cpu=(10.0, 1.0, 0.0, 0.0), cpus=8, memory=(1000.0, 2000.0)),
    )

    assert shown(None, *samples).facts == [
        ("CPU of the machines", "11 to 95 %"),
        ("Memory of the fullest node", "1.0 GB of 2.1 GB"),
        ("GPUs and NPUs", "30 % on average"),
    ]


def test_the_nodes_of_one_machine_have_its_cpu_and_its_memory():
    cpu = (80.0, 15.0, 0.0, 0.0)
    samples = [Sample(1.0, cpu=cpu, cpus=8, memory=(used, 2000.0)) for used in (1000, 1001)]

    assert shown(None, *samples, has_shared_memory=True).facts == [
        ("CPU of the machine", "95 %"),
        ("Memory of the machine", "1.0 GB of 2.1 GB"),
    ]


@pytest.mark.parametrize(("quiet_s", "texts"), [(9, []), (725, [("Silent for", "12 min 05 s")])])
def test_a_silence_is_shown_once_it_is_long(quiet_s: int, texts: list[tuple[str, str]]):
    sample = Sample(1.0, ranks=(RankSample(0, 0, 0, quiet_s, "S", 1, 0),))

    assert shown(None, sample).facts == texts


def test_what_a_job_waits_for_is_shown():
    assert shown(wait="Priority\x1b[31m").facts == [("Waits", "Priority")]


def test_the_last_lines_have_the_marks_of_their_ranks():
    rows = ({"rank": None, "text": "jobentry: starts"}, {"rank": 3, "text": "loss 1"})

    assert shown(rows=rows).lines == ["jobentry: starts", "[3] loss 1"]
