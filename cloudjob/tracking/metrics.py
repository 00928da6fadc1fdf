"""The metrics of a training: from the lines that ranks print, and from TensorBoard's event files.

The log is searched on the reader's machine: a job needs no change, a pattern can be given after the
run, and the nodes have no extra work.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import chain, groupby, islice
from operator import gt, itemgetter, lt
from typing import Any, NamedTuple

from cloudjob.errors import UsageError
from cloudjob.model.kinds import check_pattern
from cloudjob.model.patterns import MAX_STEPS, Pattern
from cloudjob.tracking.blocks import as_utf8, blocks, is_plain, matching_lines
from cloudjob.tracking.detected import Finder, prefilter
from jobentry.contract import journal, lines

# Keys of a printed JSON object that give the step.
_STEPS = ("step", "global_step", "iteration", "iter", "epoch")
# Longer lines are not searched.
_LINE_LIMIT_BYTES = 16 * 1024
# Colours, and movements of the cursor.
_CONTROL = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")
# The mark of a rank, or a whole line of the entry.
_NOT_OF_RANKS = re.compile(rb"^(?:\[\d{1,9}\] |(?!\[\d{1,9}\] ).*\n)", re.MULTILINE)
_MARK = re.compile(rb"^\[(\d{1,9})\] ", re.MULTILINE)
# How a dictionary of Python begins, which cannot be JSON.
_DICTIONARY = "{'"
# A chart shows fewer.
_MOST_POINTS = 50_000
# From this share of lines with metrics on, it is faster to search all lines.
_DENSE = 0.5


class MetricPoint(NamedTuple):
    """One value of a metric.

    Args:
        rank: The rank that printed it; None for a value of an event file.
        step: The printed step; else the number of earlier values of this metric from the same rank.
        at: Seconds since 1970 by the clock of the node, accurate to seconds for a printed value;
            None if unknown.
        source: The output file that contains it; empty for a printed value.
        is_detected: Whether it was found without a pattern, in a line that is no JSON object.
    """

    name: str
    rank: int | None
    step: int
    value: float
    at: float | None = None
    source: str = ""
    is_detected: bool = False

    @property
    def title(self) -> str:
        """The name as people see it, which says whether a pattern stands behind it."""
        return f"{self.name} (detected)" if self.is_detected else self.name


# Faster than its constructor, which counts for millions of points.
_as_point: Callable[[tuple[Any, ...]], MetricPoint] = partial(tuple.__new__, MetricPoint)


class Column(NamedTuple):
    """Values of one metric from one rank, without an object for each.

    Args:
        first: What they have in common; its step and value mean nothing.
        numbers: That of the line of each value.
        steps: While lines are read, None for a value without a step.
    """

    first: MetricPoint
    numbers: list[int]
    steps: list[Any]
    values: list[float]

    @property
    def key(self) -> tuple[str, int | None]:
        """What counts its steps: a detected metric is another curve than a printed one."""
        return self.first.title, self.first.rank

    def point(self, place: int) -> MetricPoint:
        """Return one of the values."""
        head, tail = self.first[:2], self.first[4:]
        return _as_point((*head, self.steps[place], self.values[place], *tail))

    def sort(self) -> None:
        """Put the values in the order of their lines."""
        if any(map(gt, self.numbers, islice(self.numbers, 1, None))):
            rows = zip(self.numbers, self.steps, self.values, strict=True)
            ordered = sorted(rows, key=itemgetter(0))
            self.numbers[:], self.steps[:], self.values[:] = zip(*ordered, strict=True)


class Metrics(tuple[MetricPoint, ...]):
    """The metrics of a training, point by point."""

    __slots__ = ()

    def last(self) -> dict[str, float]:
        """Return the last value of each metric; of several ranks, that of the lowest counts."""
        return last_values(self)

    def columns(self) -> dict[str, list[Any]]:
        """Return the fields of all points by name: ``{"name": ["loss", …], "value": [0.3, …]}``."""
        return {
            name: [point[place] for point in self] for place, name in enumerate(MetricPoint._fields)
        }

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame`` with a row for each point.

        Raises:
            UsageError: pandas is not installed.
        """
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise UsageError(
                f"making a table of metrics: {error}", hint="pip install pandas"
            ) from error
        return pandas.DataFrame(self.columns())


def last_values(points: Iterable[MetricPoint]) -> dict[str, float]:
    """Return the last value of each metric; of several ranks, that of the lowest counts."""
    last: dict[str, tuple[float, float]] = {}
    for point in points:
        rank = math.inf if point.rank is None else point.rank
        if point.name not in last or rank <= last[point.name][0]:
            last[point.name] = rank, point.value
    return {name: value for name, (_, value) in last.items()}


class MetricReader:
    """Finds metrics in the log of a job; ``add`` takes pieces of the log as they arrive.

    Args:
        patterns: A regular expression for each metric: its group ``value``, or else its first
            group, is the value; its group ``step``, if it has one, is the step.
        detects: Whether to find metrics that no pattern names, too.

    Raises:
        UsageError: A pattern is not a regular expression with a group, or they are too large.
    """

    def __init__(self, patterns: Mapping[str, str], *, detects: bool = False) -> None:
        self._patterns = _compiled(patterns)
        self._finder = Finder(self._patterns) if detects else None
        self._filters = [*self._patterns.values(), *([prefilter()] if detects else ())]
        # For each metric and rank, the step of a value without one.
        self._next_steps: dict[tuple[str, int | None], int] = {}
        # The last step that a line of each rank named beside a detected metric.
        self._reached: dict[int, int] = {}
        self._at: dict[int, float] = {}
        # The incomplete last line of each rank, or the last state of its progress bar.
        self._open: dict[tuple[int, int], bytes] = {}
        # Whether most lines of the last block may have had metrics.
        self._is_dense = False

    def add(self, node: int, data: bytes) -> list[MetricPoint]:
        """Return the metrics in whole lines of a node's log, with or without its journal.

        A line of a rank can arrive in several parts: it is searched once it is complete.
        """
        return [point for columns in self.columns(node, data) for point in points_of(columns)]

    def columns(self, node: int, data: bytes) -> Iterator[list[Column]]:
        """Yield what ``add`` returns as columns, which takes a third of the time."""
        for text, recorded in journal.parts(data):
            for block in blocks(text):
                yield self._search(node, block)
            if recorded is not None:
                # Lines of ranks have no times, but the journal lines between them do.
                self._at[node] = journal.time_of(recorded) or self._at.get(node, 0.0)

    def finish(self) -> list[MetricPoint]:
        """Return the metrics in incomplete lines, at the end of the log."""
        return [point for columns in self.last_columns() for point in points_of(columns)]

    def last_columns(self) -> Iterator[list[Column]]:
        """Yield what ``finish`` returns as columns."""
        rest, self._open = self._open, {}
        for (node, rank), data in rest.items():
            yield self._of_whole(node, _whole_lines((rank, data + b"\n")))

    def _search(self, node: int, block: bytes) -> list[Column]:
        """Return the metrics in a block of whole lines."""
        unfinished = [rank for of_node, rank in self._open if of_node == node]
        if is_plain(block, unfinished):
            block = block.replace(b"\r\n", b"\n")
        else:
            block = b"".join(map(_whole_lines, self._completed(node, block)))
        return self._of_whole(node, block)

    def _of_whole(self, node: int, block: bytes) -> list[Column]:
        """Return the metrics in whole lines."""
        if b"\x1b" in block:
            block = _CONTROL.sub(b"", block)
        matching: Sequence[bytes] | None = None
        if not self._is_dense:
            matching = matching_lines(as_utf8(block), self._filters, with_json=True)
        text = block if matching is None else b"".join(matching)
        ranks = [int(rank) for rank in _MARK.findall(text)]
        columns = self._columns(node, ranks, _NOT_OF_RANKS.sub(b"", text))
        count = sum(len(column.values) for column in columns)
        self._is_dense = count > _DENSE * block.count(b"\n")
        return columns

    def _completed(self, node: int, block: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield what is complete now of each line of a rank."""
        for text in block.split(b"\n")[:-1]:
            line = lines.read(text + b"\n")
            if line.rank is not None:
                yield line.rank, self._complete(node, line.rank, line.data)

    def _complete(self, node: int, rank: int, data: bytes) -> bytes:
        """Return the part of a rank's output that is complete now, and keep the rest."""
        text = self._open.pop((node, rank), b"") + data
        if not text.endswith(b"\n"):
            # A carriage return ends a state of a progress bar.
            end = text.rfind(b"\r") + 1
            # A line that is too long is not searched, so its rest is not kept.
            self._open[node, rank] = text[end:][: _LINE_LIMIT_BYTES + 1]
            text = text[:end]
        return text

    def _columns(self, node: int, ranks: Sequence[int], text: bytes) -> list[Column]:
        """Return the metrics in whole lines without marks; ``ranks`` has that of each."""
        texts = text.split(b"\n")[: len(ranks)]
        if max(map(len, texts), default=0) > _LINE_LIMIT_BYTES:
            texts = [line if len(line) <= _LINE_LIMIT_BYTES else b"" for line in texts]
        if len(set(ranks)) <= 1:
            return self._of_rank(node, ranks[0], texts) if ranks else []
        numbers_of = defaultdict[int, list[int]](list)
        for number, rank in enumerate(ranks):
            numbers_of[rank].append(number)
        columns = []
        for rank, numbers in numbers_of.items():
            for column in self._of_rank(node, rank, [texts[number] for number in numbers]):
                column.numbers[:] = [numbers[number] for number in column.numbers]
                columns.append(column)
        return columns

    def _of_rank(self, node: int, rank: int, texts: list[bytes]) -> list[Column]:
        """Return the metrics in lines of one rank."""
        at = self._at.get(node) or None
        columns: dict[tuple[str, bool], Column] = {}
        for name, is_detected, numbers, steps, values in self._found(texts):
            column = columns.get((name, is_detected))
            if column is None:
                first = MetricPoint(name, rank, 0, 0.0, at, "", is_detected)
                column = columns[name, is_detected] = Column(first, [], [], [])
            column.numbers.extend(numbers)
            column.steps.extend(steps)
            column.values.extend(values)
        for column in columns.values():
            column.sort()
            column.steps[:] = _whole(column.steps)
            if not column.first.is_detected:
                self._count(column)
        self._grow(rank, [column for column in columns.values() if column.first.is_detected])
        return list(columns.values())

    def _found(self, texts: list[bytes]) -> Iterator[tuple[str, bool, Any, Any, Any]]:
        """Yield metrics, whether they are detected, and the lines, steps and values of each."""
        whole = as_utf8(b"\n".join(texts))
        for name, pattern in self._patterns.items():
            selected = pattern.values_in_lines(whole)
            if selected is None:
                lines_of = enumerate(texts)
                selected = [(n, each) for n, line in lines_of for each in pattern.values(line)]
            for number, each in selected:
                value = _number(each.text)
                if value is not None:
                    yield name, False, (number,), (_number(each.step),), (value,)
        readable = whole.decode().split("\n")
        for name, rows in _json_values(readable).items():
            yield name, False, *rows
        for group in self._finder.find(readable) if self._finder else ():
            for name, values in group.values:
                yield name, True, group.numbers, group.steps, values

    def _count(self, column: Column) -> None:
        """Give values without a step their number, which counts those with a step, too."""
        key = column.key
        least = self._next_steps.get(key, 0)
        self._next_steps[key] = least + len(column.steps)
        if column.steps.count(None):
            column.steps[:] = [
                number if step is None else step for number, step in enumerate(column.steps, least)
            ]

    def _grow(self, rank: int, columns: list[Column]) -> None:
        """Let the steps of detected metrics grow, as many count theirs anew in each epoch.

        A line without a step, such as a result at the end of an epoch, has the one before it.
        """
        next_steps, reached = self._next_steps, self._reached
        if columns and all(
            None not in column.steps
            and _is_growing(next_steps.get(column.key, 0) - 1, column.steps)
            for column in columns
        ):
            for column in columns:
                next_steps[column.key] = column.steps[-1] + 1
            reached[rank] = max((column.numbers[-1], column.steps[-1]) for column in columns)[1]
            return
        keys = [column.key for column in columns]
        rows = (
            (number, place, at)
            for place, column in enumerate(columns)
            for at, number in enumerate(column.numbers)
        )
        for _, place, at in sorted(rows):
            column = columns[place]
            step, key = column.steps[at], keys[place]
            chosen = max(reached.get(rank, 0) if step is None else step, next_steps.get(key, 0))
            column.steps[at], next_steps[key] = chosen, chosen + 1
            if step is not None:
                reached[rank] = chosen


def points_of(columns: Iterable[Column]) -> list[MetricPoint]:
    """Return the values of columns, in the order of their lines."""
    rows = [
        (number, _as_point((*column.first[:2], step, value, *column.first[4:])))
        for column in columns
        for number, step, value in zip(*column[1:], strict=True)
    ]
    return [point for _, point in sorted(rows, key=itemgetter(0))]


def thinned(columns: Iterable[Column], most: int = _MOST_POINTS) -> list[MetricPoint]:
    """Return about as many points as charts can show, at the same steps for all ranks.

    The last value of each rank is kept, and the lowest and the highest of each metric.
    """
    curves: dict[tuple[object, str], _Curve] = defaultdict(_Curve)
    extremes: dict[tuple[str, Any], tuple[_Curve, _Row]] = {}
    stride, limit, count = 1, most, 0
    for column in columns:
        curve = curves[column.key, column.first.source]
        numbers = [value for value in column.values if math.isfinite(value)]
        for choose in (min, max) if numbers else ():
            place = column.values.index(choose(numbers))
            row = _Row(curve.count + place, 0, column.point(place))
            best = extremes.setdefault((column.first.title, choose), (curve, row))
            extremes[column.first.title, choose] = choose(
                best, (curve, row), key=lambda each: each[1].point.value
            )
        count += curve.add(column, stride)
        if count > limit:
            stride *= 2
            count = sum(each.thin(stride) for each in curves.values())
            limit = max(most, 2 * count)
    for curve, row in extremes.values():
        curve.rows.append(row)
    return [point for curve in curves.values() for point in curve.points()]


class _Row(NamedTuple):
    """A value, its number in its curve, and its number among values of one step in a row."""

    number: int
    repeats: int
    point: MetricPoint

    def mark(self, stride: int) -> tuple[int, int]:
        """Return what the values have in common of which only the first is kept."""
        return self.point.step // stride, self.repeats // stride


class _Curve:
    """Values of one metric from one source: the first of each ``stride`` steps, and the last."""

    def __init__(self) -> None:
        self.rows: list[_Row] = []
        self.count = 0
        self._last: _Row | None = None

    def add(self, column: Column, stride: int) -> int:
        """Add the values of a column; return how many of them are kept."""
        step, repeats, mark = None, 0, None
        kept_before = len(self.rows)
        if self._last:
            step, repeats = self._last.point.step, self._last.repeats
            mark = self._last.mark(stride)
        for place, next_step in enumerate(column.steps):
            repeats = repeats + 1 if next_step == step else 0
            step = next_step
            if mark != (mark := (step // stride, repeats // stride)):
                self.rows.append(_Row(self.count + place, repeats, column.point(place)))
        self.count += len(column.steps)
        self._last = _Row(self.count - 1, repeats, column.point(-1))
        return len(self.rows) - kept_before

    def thin(self, stride: int) -> int:
        """Keep fewer values; return how many."""
        groups = groupby(self.rows, key=lambda row: row.mark(stride))
        self.rows = [next(group) for _, group in groups]
        return len(self.rows)

    def points(self) -> list[MetricPoint]:
        """Return the points in their order."""
        row_of = {row.number: row for row in (*self.rows, self._last) if row}
        return [row_of[number].point for number in sorted(row_of)]


def _is_growing(least: int, steps: list[int]) -> bool:
    return all(map(lt, chain((least,), steps), steps))


def _whole(steps: list[Any]) -> list[int | None]:
    """Return whole numbers for steps; None for what is none."""
    with suppress(TypeError, ValueError, OverflowError):
        if min(steps) > -(2**63) and max(steps) < 2**63:
            return list(map(int, steps))
    return [None if step is None or not abs(step) < 2**63 else int(step) for step in steps]


def _whole_lines(text: tuple[int, bytes]) -> bytes:
    """Return the text of a rank as marked lines, with each state of a progress bar on its own."""
    rank, data = text
    return lines.write(rank, data.replace(b"\r", b"\n"))[0]


def _compiled(patterns: Mapping[str, str]) -> dict[str, Pattern]:
    compiled = dict[str, Pattern]()
    steps = 0
    for name, text in patterns.items():
        try:
            compiled[name] = Pattern(check_pattern(text))
        except ValueError as error:
            raise UsageError(f"reading the pattern of the metric {name}: it {error}") from error
        steps += compiled[name].steps
        if steps > MAX_STEPS:
            raise UsageError(
                f"reading the patterns of {len(patterns)} metrics: they are too large together",
                hint="use fewer or simpler patterns",
            )
    return compiled


def _json_values(texts: list[str]) -> dict[str, tuple[list[int], list[Any], list[float]]]:
    """Return the lines, steps and values of numbers in JSON objects, and empty these lines."""
    numbers = [n for n, text in enumerate(texts) if text[:1] == "{" and text[:2] != _DICTIONARY]
    if not numbers:
        return {}
    # Together they take half the time, but one that cannot be read spoils the others.
    objects = _read_json(f"[{','.join([texts[number] for number in numbers])}]")
    if not isinstance(objects, list) or [*map(type, objects)] != [dict] * len(numbers):
        objects = [_read_json(texts[number]) for number in numbers]
    rows_of = defaultdict[str, tuple[list[int], list[Any], list[float]]](lambda: ([], [], []))
    for number, values in zip(numbers, objects, strict=True):
        steps = [values[key] for key in _STEPS if key in values and _is_number(values[key])]
        step = _number(steps[0]) if steps else None
        for name, value in values.items():
            if name not in _STEPS and _is_number(value):
                texts[number] = ""
                lines_of, steps_of, values_of = rows_of[name]
                lines_of.append(number)
                steps_of.append(step)
                values_of.append(float(value))
    return rows_of


def _read_json(text: str) -> Any:
    """Return a value; an empty object if it cannot be read."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {}


def _is_number(value: Any) -> bool:
    """Whether a value is a number; NaN and infinity count, as a loss may be either."""
    kind = type(value)
    return kind is float or (kind is int and abs(value) < 2**63)


def _number(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (ValueError, OverflowError):
        return None
