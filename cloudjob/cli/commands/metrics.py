"""The command metrics: the metrics of a training, and the resources that its nodes have used."""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import cloudjob
from cloudjob.cli import sweeps
from cloudjob.cli.messages import print_json, print_message
from cloudjob.cli.options import job_argument, json_flag
from cloudjob.cli.tables import print_table
from cloudjob.errors import UsageError
from cloudjob.model import grid
from cloudjob.model.text import csv_cell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob import Job, Metric
    from cloudjob.api import Column


def add_metrics(parser: argparse.ArgumentParser) -> None:
    """Give the command metrics its options."""
    parser.set_defaults(run=_metrics)
    job_argument(parser)
    parser.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="NAME=REGEX",
        help="also find this metric in what ranks printed",
    )
    parser.add_argument("--resources", action="store_true", help="show what each node used instead")
    best = parser.add_mutually_exclusive_group()
    text = "show the jobs of a sweep by their last value of this metric, the {} first"
    best.add_argument("--minimize", metavar="NAME", help=text.format("lowest"))
    best.add_argument("--maximize", metavar="NAME", help=text.format("highest"))
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print every value as CSV")
    json_flag(form)


def _metrics(options: argparse.Namespace) -> int:
    if options.minimize or options.maximize:
        _show_ranking(options)
        return 0
    if sweeps.sweep_of(options.job):
        raise UsageError(
            f"showing the metrics of {options.job}: it is a sweep",
            hint="--minimize NAME or --maximize NAME ranks its jobs",
        )
    job = cloudjob.attach(options.job)
    if options.resources:
        _show_resources(job, options)
        return 0
    patterns = _patterns(options.metric)
    if options.json:
        # JSON has no numbers for NaN and infinity.
        points = job.metric_points(patterns)
        print_json(
            [{**p._asdict(), "value": p.value if math.isfinite(p.value) else None} for p in points]
        )
    elif options.csv:
        _print_csv(cloudjob.MetricPoint._fields, job.metric_points(patterns))
    elif not _show_columns(chain.from_iterable(job.metric_columns(patterns))):
        print_message(f"job {job.id} has printed no metrics")
        print_message(
            "hint: cloudjob metrics --metric 'fit=fit ([0-9.]+)' JOB; --resources shows the nodes"
        )
    return 0


def _print_csv(headers: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    writer = csv.writer(sys.stdout)
    writer.writerow(headers)
    for row in rows:
        writer.writerow(csv_cell(cell) if isinstance(cell, str) else cell for cell in row)


def _patterns(texts: list[str]) -> dict[str, str]:
    from cloudjob.model.kinds import check_pattern

    pattern_of = {}
    for text in texts:
        name, equals, pattern = text.partition("=")
        if not (name and equals):
            raise UsageError(f"reading --metric {text}: no '='", hint="give NAME=REGEX")
        try:
            pattern_of[name] = check_pattern(pattern)
        except ValueError as error:
            raise UsageError(f"reading --metric {name}: it {error}") from error
    return pattern_of


@dataclass
class _Series:
    """What the table shows of one metric from one source."""

    values: int = 0
    step: int = 0
    last: float = math.nan
    low: float = math.nan
    high: float = math.nan

    def add(self, column: Column) -> None:
        self.values += len(column.values)
        self.step, self.last = column.steps[-1], column.values[-1]
        numbers = [value for value in (self.low, self.high, *column.values) if value == value]
        if numbers:
            self.low, self.high = min(numbers), max(numbers)


def _show_columns(columns: Iterable[Column]) -> bool:
    """Print a table of all metrics; return whether there are any."""
    series_of: dict[tuple[str, int, str], _Series] = {}
    for column in columns:
        point = column.first
        place = point.source if point.rank is None else f"rank {point.rank}"
        rank = -1 if point.rank is None else point.rank
        series_of.setdefault((point.title, rank, place), _Series()).add(column)
    # Lines of ranks arrive in any order.
    titles = list(dict.fromkeys(title for title, *_ in series_of))
    rows = [
        (
            title,
            place,
            each.values,
            each.step,
            *(f"{n:.6g}" for n in (each.last, each.low, each.high)),
        )
        for (title, _, place), each in sorted(
            series_of.items(), key=lambda item: (titles.index(item[0][0]), *item[0][1:])
        )
    ]
    headers = ("METRIC", "SOURCE", "VALUES", "STEP", "LAST", "MIN", "MAX")
    if rows:
        print_table(rows, headers, numbers=headers[2:], spare=("VALUES", "MIN", "MAX"))
    return bool(rows)


def _show_ranking(options: argparse.Namespace) -> None:
    if options.csv or options.resources:
        raise UsageError("metrics: --minimize and --maximize print a table or --json")
    sweep, name = cloudjob.attach_sweep(options.job), options.minimize or options.maximize
    ranking = sweep.ranking(
        name, maximize=bool(options.maximize), patterns=_patterns(options.metric)
    )
    if options.json:
        rows = [
            {"job": job.id, "values": job.sweep_values(), "value": value if value is not None
             and math.isfinite(value) else None}
            for job, _, value in ranking
        ]  # fmt: skip
        print_json(rows)
        return
    lines = [
        (
            "-" if value is None else f"{value:.6g}",
            job.id,
            job.status().state,
            grid.text_of(job.sweep_values()),
        )
        for job, _, value in ranking
    ]
    print_table(lines, (name, "JOB", "STATE", "VALUES"), numbers=(name,))


# ---- resources -----------------------------------------------------------------------------------


def _show_resources(job: Job, options: argparse.Namespace) -> None:
    metrics = job.resources()
    if options.json:
        print_json([metric._asdict() for metric in metrics])
        return
    if options.csv:
        rows = (
            (metric.node, metric.name, *item)
            for metric in metrics
            for item in enumerate(metric.values)
        )
        _print_csv(("node", "name", "number", "value"), rows)
        return
    table = [(metric.node, metric.name, *_summary(metric)) for metric in metrics]
    headers = ("NODE", "METRIC", "LAST", "MEAN", "MAX")
    print_table(table, headers, numbers=("NODE", "LAST", "MEAN", "MAX"))


def _summary(metric: Metric) -> list[str]:
    numbers = [value for value in metric.values if value is not None]
    values = (numbers[-1], sum(numbers) / len(numbers), max(numbers)) if numbers else ()
    return [f"{value:.1f}" for value in values] or ["-", "", ""]
