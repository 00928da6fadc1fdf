"""The table of `cloudjob metrics`."""

from __future__ import annotations

import math
import sys
import tracemalloc

import pytest

from cloudjob.cli.commands import metrics
from cloudjob.tracking.metrics import Column, MetricPoint


def column(point: MetricPoint) -> Column:
    """A column of one value."""
    return Column(point, [0], [point.step], [point.value])


def test_millions_of_values_are_summarised_while_they_are_read(capsys: pytest.CaptureFixture[str]):
    points = (MetricPoint("loss", 0, step, float(step % 7)) for step in range(100_000))
    columns = map(column, points)
    tracemalloc.start()
    try:
        assert metrics._show_columns(columns)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak_bytes < 1_000_000
    row = ["loss", "rank", "0", "100000", "99999", "4", "0", "6"]
    assert capsys.readouterr().out.split()[-len(row) :] == row


def test_a_value_that_is_no_number_does_not_hide_the_lowest_and_the_highest(
    capsys: pytest.CaptureFixture[str],
):
    values = (math.nan, 2.0, 1.0, math.nan)

    assert metrics._show_columns(
        column(MetricPoint("loss", 0, *each)) for each in enumerate(values)
    )

    assert capsys.readouterr().out.split()[-3:] == ["nan", "1", "2"]


def test_each_metric_has_its_ranks_in_their_order(capsys: pytest.CaptureFixture[str]):
    names = (("loss", 10), ("acc", 10), ("loss", 9), ("loss", None), ("acc", 0))

    assert metrics._show_columns(column(MetricPoint(name, rank, 0, 1.0)) for name, rank in names)

    _, *rows = capsys.readouterr().out.splitlines()
    texts = [" ".join(row.split()[:-5]) for row in rows]
    assert texts == ["loss", "loss rank 9", "loss rank 10", "acc rank 0", "acc rank 10"]


def test_a_job_without_metrics_has_no_table(capsys: pytest.CaptureFixture[str]):
    assert not metrics._show_columns([])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "cell"),
    [("\ud800x", "\\ud800x"), ("\x1b]0;evil\x07", "\\x1b]0;evil\\x07"), (" =1+1", "' =1+1")],
)
def test_a_name_in_csv_is_neither_invalid_nor_a_formula_nor_a_terminal_sequence(
    capfdbinary: pytest.CaptureFixture[bytes], name: str, cell: str
):
    point = MetricPoint(name, 0, 1, 0.5)
    metrics._print_csv(point._fields, [point])
    sys.stdout.flush()

    header, row = capfdbinary.readouterr().out.decode().splitlines()
    assert (header.split(",")[0], row) == ("name", f"{cell},0,1,0.5,,,False")
