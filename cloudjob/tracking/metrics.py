"""The metrics of a training: from the lines that ranks print, and from TensorBoard's event files.

The log is searched on the reader's machine: a job needs no change, a pattern can be given after the
run, and the nodes have no extra work.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from operator import itemgetter
from typing import Any, NamedTuple

from cloudjob.errors import UsageError
from cloudjob.model.patterns import MAX_STEPS, Pattern, Value
from cloudjob.tracking.blocks import blocks, is_plain, is_utf8, matching_lines
from cloudjob.tracking.detected import MOST_CHARACTERS, Finder, NamedValue, prefilter
from jobentry.contract import journal, lines

# Keys of a printed JSON object that give the step.
_STEPS = ("step", "global_step", "iteration", "iter", "epoch")
# Longer lines are not searched.
_LINE_LIMIT_BYTES = 16 * 1024
# The mark of a rank, or a whole line of the entry.
_NOT_OF_RANKS = re.compile(rb"^(?:\[\d{1,9}\] |(?!\[\d{1,9}\] ).*\n)", re.MULTILINE)
_MARK = re.compile(rb"^\[(\d{1,9})\] ", re.MULTILINE)
# How a dictionary of Python begins, which cannot be JSON.
_DICTIONARY = "{'"
_JSON_BLANKS = " \t\n\r"
_read_json = json.JSONDecoder().raw_decode
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
        self._next_steps: dict[tuple[str, int], int] = {}
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
        points: list[MetricPoint] = []
        for text, recorded in journal.parts(data):
            for block in blocks(text):
                points += self._search(node, block)
            if recorded is not None:
                # Lines of ranks have no times, but the journal lines between them do.
                self._at[node] = journal.time_of(recorded) or self._at.get(node, 0.0)
        return points

    def _search(self, node: int, block: bytes) -> Iterator[MetricPoint]:
        """Yield the metrics in a block; one without parts of lines is searched as a whole."""
        unfinished = [rank for of_node, rank in self._open if of_node == node]
        matching: Sequence[bytes] | None = None
        if is_plain(block, unfinished):
            points = self._points_in_lines(node, block) if self._is_dense else None
            if points is None:
                matching = matching_lines(block, self._filters, with_json=True)
            count = len(matching or ()) if points is None else len(points)
            self._is_dense = count > _DENSE * block.count(b"\n")
            if points is not None:
                yield from points
                return
        for text in (
            (line + b"\n" for line in block.split(b"\n")[:-1]) if matching is None else matching
        ):
            line = lines.read(text)
            if line.rank is not None:
                complete = self._complete(node, line.rank, line.data)
                yield from self._points(node, line.rank, complete)

    def _points_in_lines(self, node: int, block: bytes) -> list[MetricPoint] | None:
        """Return the metrics in a block of whole lines; None if each is searched on its own."""
        text = _NOT_OF_RANKS.sub(b"", block)
        longest = max(map(len, text.split(b"\n")))
        if not is_utf8(text) or longest > MOST_CHARACTERS:
            return None
        values: list[tuple[int, NamedValue]] = []
        for name, pattern in self._patterns.items():
            selected = pattern.values_in_lines(text)
            if selected is None:
                return None
            values += ((number, item) for number, each in selected for item in _value(name, each))
        values += self._unnamed(text.decode())
        # Those of a line stay in this order.
        values.sort(key=itemgetter(0))
        ranks = [int(rank) for rank in _MARK.findall(block)]
        return self._points_of(node, ((ranks[number], item) for number, item in values))

    def finish(self) -> list[MetricPoint]:
        """Return the metrics in incomplete lines, at the end of the log."""
        rest, self._open = self._open, {}
        return [
            point for (node, rank), data in rest.items() for point in self._points(node, rank, data)
        ]

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

    def _points(self, node: int, rank: int, data: bytes) -> list[MetricPoint]:
        parts = (
            text for text in re.split(rb"[\r\n]+", data) if text and len(text) <= _LINE_LIMIT_BYTES
        )
        return self._points_of(
            node, ((rank, item) for text in parts for item in self._values(text))
        )

    def _points_of(self, node: int, values: Iterable[tuple[int, NamedValue]]) -> list[MetricPoint]:
        """Return the points of values, each given with its rank; in one loop, as they are many.

        The step of a detected value grows with each value, as many count theirs anew in each epoch.
        A line without a step, such as a result at the end of an epoch, has the one before it.
        """
        at = self._at.get(node) or None
        next_steps, reached = self._next_steps, self._reached
        points = []
        for rank, (name, value, printed, is_detected) in values:
            least = next_steps.get((name, rank), 0)
            step = None if printed is None or not abs(printed) < 2**63 else int(printed)
            if is_detected:
                is_printed = step is not None
                step = max(reached.get(rank, 0) if step is None else step, least)
                next_steps[name, rank] = step + 1
                if is_printed:
                    reached[rank] = step
            else:
                # Values with a step are counted, too, as not every line may have one.
                next_steps[name, rank] = least + 1
                step = least if step is None else step
            points.append(_as_point((name, rank, step, value, at, "", is_detected)))
        return points

    def _values(self, text: bytes) -> Iterator[NamedValue]:
        """Yield the metrics of a line."""
        for name, pattern in self._patterns.items():
            for match in pattern.values(text):
                yield from _value(name, match)
        yield from (item for _, item in self._unnamed(text.decode("utf-8", "replace")))

    def _unnamed(self, text: str) -> Iterator[tuple[int, NamedValue]]:
        """Yield the metrics in lines that need no pattern, each with the number of its line."""
        lines_of_text = text.split("\n")
        for number, line in enumerate(lines_of_text):
            if line[:1] == "{" and line[:2] != _DICTIONARY and (values := _json_values(line)):
                yield from ((number, value) for value in values)
                lines_of_text[number] = ""
        if self._finder is not None:
            yield from self._finder.find(lines_of_text)


def _compiled(patterns: Mapping[str, str]) -> dict[str, Pattern]:
    from cloudjob.model.kinds import check_pattern

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


def _value(name: str, selected: Value) -> Iterator[NamedValue]:
    value = _number(selected.text)
    if value is not None:
        yield NamedValue(name, value, _number(selected.step))


def _json_values(text: str) -> list[NamedValue]:
    """Return the numbers of a printed JSON object."""
    try:
        values, end = _read_json(text)
    except (ValueError, RecursionError):
        return []
    if text[end:].strip(_JSON_BLANKS):
        return []
    step = next((_number(values[key]) for key in _STEPS if _is_number(values.get(key))), None)
    return [
        NamedValue(name, float(value), step)
        for name, value in values.items()
        if name not in _STEPS and _is_number(value)
    ]


def _is_number(value: Any) -> bool:
    """Whether a value is a number; NaN and infinity count, as a loss may be either."""
    kind = type(value)
    return kind is float or (kind is int and abs(value) < 2**63)


def _number(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (ValueError, OverflowError):
        return None
