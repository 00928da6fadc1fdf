"""The log of one job in a temporary database, to scroll and search half a million lines."""

from __future__ import annotations

import math
import re
import sqlite3
import threading
import time
from array import array
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from cloudjob.console.text import coloured_line, displayable_line
from cloudjob.errors import CloudJobError, UsageError
from cloudjob.model import bars
from cloudjob.model.patterns import Pattern
from cloudjob.model.status import Failure
from cloudjob.tracking import Job, training
from cloudjob.tracking.blocks import MAX_CHARS, LineReader, blocks, is_plain
from cloudjob.tracking.journals import Journals
from cloudjob.tracking.log import LogPiece
from cloudjob.tracking.metrics import Column, MetricPoint, MetricReader
from cloudjob.tracking.training import Training
from jobentry.contract import lines

# The card of a job in a notebook needs no emulator.
if TYPE_CHECKING:
    from cloudjob.console.emulated import EmulatedJob

# The log is no longer followed after this many seconds without a request from a page.
_UNWATCHED_S = 60.0
# Seconds before a log that could not be read is read again.
_RETRY_S = 10.0
# The number of blocks that are read at a time, and the time limit of a search for a page.
_STEP_BLOCKS, _SEARCH_S = 64, 0.1
# The number of lines, from the end, that are compared with the failure.
_FAILURE_LINES = 20_000
# The number of lines, from the end, that tell how far a training is.
_TRAINING_LINES = 2000
# The number of lines, from the end, that a pattern is tried on, and of those that are shown.
_TRIAL_LINES, _EXAMPLES = 5000, 5
# The name of a metric that is tried; no key of a printed JSON object has this name.
_TRIED = "NAME\0"
# The names of metrics that are not those of the training data.
_OTHER_SETS = re.compile(r"val|test|eval", re.IGNORECASE)
# The number of selections whose lines are cached.
_MAX_SELECTIONS = 8
# The number of unfinished lines that a page shows below the others.
_MAX_UNFINISHED = 16
# The characters of the mark of a rank, and no character, with which every text begins; all marks.
_MARK = b"[0123456789]+ "
_MARKS = re.compile(rb"^\[\d{1,9}\]\+? ", re.MULTILINE)
# Blocks of whole lines with the marks of their ranks. Lines are numbered from 1; ``first`` is that
# of the block's first line, and ``at`` is in seconds since 1970, 0 if unknown.
_SCHEMA = """
CREATE TABLE blocks (
    first INTEGER PRIMARY KEY, count INTEGER, node INTEGER, at INTEGER, data BLOB
)
"""
_FROM = """
SELECT first, count, node, data FROM blocks WHERE first > :searched AND
(:node IS NULL OR node = :node) ORDER BY first LIMIT :most
"""


class Selection(NamedTuple):
    """Which lines to show.

    Args:
        node: Only the lines of this node; None for all.
        rank: Only the lines of this rank; None for all.
        text: The text, or the regular expression, to search; case is ignored.
        is_expression: Whether it is a regular expression.
        has_others: Whether the other lines are selected, too; the matches are only marked.
    """

    node: int | None = None
    rank: int | None = None
    text: str = ""
    is_expression: bool = False
    has_others: bool = False

    @property
    def visible(self) -> Selection:
        """The lines to show."""
        return Selection(self.node, self.rank) if self.has_others else self

    @property
    def matches(self) -> Selection:
        """The lines that match."""
        return self._replace(has_others=False)

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return where a shown line matches.

        Raises:
            UsageError: The expression cannot be used.
        """
        if not self.text:
            return []
        if self.is_expression:
            return list(_pattern(self.text).spans(text))
        # Some letters get longer when their case is folded, so that places would not fit.
        return [match.span() for match in re.finditer(re.escape(self.text), text, re.IGNORECASE)]


class Match(NamedTuple):
    """A line that matches a search.

    Args:
        row: Its place among the visible lines; 0 if there is none.
        line: Its number, from 1; 0 if there is none.
        place: Its place among the matches, from 1.
        total: The number of matches.
    """

    row: int = 0
    line: int = 0
    place: int = 0
    total: int = 0


class Page(NamedTuple):
    """Some lines of a selection.

    Args:
        selected: The number of selected lines among those searched.
        matches: The number of those that match; None without a search.
        searched: The number of lines searched so far.
        total: The number of all lines.
        unfinished: The number of selected lines that are not finished, such as progress bars.
        is_live: Whether the job may still write lines.
        is_complete: Whether the job has ended and all of its log was read.
        has_metrics: Whether the metrics in all of these lines are known; they take longer.
        error: Why the log cannot be read, or not to its end; empty if it can.
    """

    selected: int = 0
    matches: int | None = None
    searched: int = 0
    total: int = 0
    unfinished: int = 0
    is_live: bool = False
    is_complete: bool = False
    has_metrics: bool = True
    error: str = ""
    rows: Sequence[dict[str, Any]] = ()
    unfinished_rows: Sequence[dict[str, Any]] = ()


class Curve(NamedTuple):
    """The values of one metric of one rank, by step, as they were printed."""

    name: str
    points: Sequence[tuple[float, float]]


class Trial(NamedTuple):
    """What the pattern of a metric finds in the last lines of a log.

    Args:
        searched: The number of lines that were searched.
        values: The number of values.
        examples: The last lines with a value, and the value, the newest first.
    """

    searched: int
    values: int
    examples: Sequence[tuple[str, float]]


class LogTable:
    """The log of a job read so far; a thread continues to read it while a page shows it.

    Args:
        attempt: Only what this attempt has stored, from 1 on.
    """

    def __init__(self, job: Job | EmulatedJob, attempt: int | None = None) -> None:
        self._job = job
        self._attempt = attempt
        self._lock = threading.Lock()
        self._requested_at_s = time.monotonic()
        self._retry_at_s = 0.0
        self._is_reading = self._is_complete = self._is_closed = False
        self._clear()

    def _clear(self) -> None:
        # The journals of the nodes in the log read so far.
        self.journals = Journals()
        # A database without a name is deleted however the console ends.
        self._db = sqlite3.connect("", check_same_thread=False)
        self._db.execute("PRAGMA journal_mode = MEMORY")
        self._db.execute(_SCHEMA)
        self._count = 0
        # The block of the last row: its first line, its node, its time and its lines.
        self._block: tuple[int, int, int, list[bytes]] = (1, 0, 0, [])
        self._error = ""
        # Metric, rank, and whether it was detected -> step, value and time of each point in turn;
        # much smaller than a list of points.
        self._metrics: dict[tuple[str, int | None, bool], array[float]] = {}
        self._has_metrics = True
        # Unfinished lines of ranks, such as progress bars.
        self._open = LineReader()
        # Selection -> the number of lines searched, and the numbers of the lines found.
        self._selected: dict[Selection, tuple[int, array[int]]] = {}

    def keep_reading(self) -> None:
        """Start or continue to read the log, until a minute after the last call."""
        with self._lock:
            self._requested_at_s = time.monotonic()
            is_too_early = self._requested_at_s < self._retry_at_s
            if self._is_reading or self._is_complete or is_too_early or self._is_closed:
                return
            # After a pause, the log is read again from its start.
            self._is_reading = True
            self._db.close()
            self._clear()
        threading.Thread(target=self._read, name=f"log of {self._job.id}", daemon=True).start()

    def page(self, which: Selection, start: int, end: int) -> Page:
        """Return the selected lines from ``start`` to ``end``, and the number of selected lines.

        A search that reaches its time limit continues in the next call.
        """
        self.keep_reading()
        with self._lock:
            if self._is_closed:
                return Page()
            try:
                matches, searched = self._choose(which.matches)
                chosen = matches
                if which.has_others:
                    chosen, of_visible = self._choose(which.visible)
                    searched = min(searched, of_visible)
                visible = range(max(start, 0), min(end, len(chosen)))
                rows = [self._row(chosen[n], which) for n in visible]
                unfinished = self._unfinished(which)
            except UsageError as error:
                return Page(total=self._count, error=error.message)
            return Page(
                selected=len(chosen),
                matches=len(matches) if which.text else None,
                searched=searched,
                total=self._count,
                unfinished=len(unfinished),
                is_live=not (self._attempt or self._job.has_final_status),
                is_complete=self._is_complete,
                has_metrics=self._has_metrics,
                error=self._error,
                rows=rows,
                unfinished_rows=unfinished[:_MAX_UNFINISHED],
            )

    def find(self, failure: Failure, which: Selection) -> tuple[int, int] | None:
        """Return the line of a failure: its place in the selection, and its number.

        This is the last line of the rank, or else of the node, that contains the end of the
        failure's text; without such a line it is the last line. None if there are no lines.
        """
        ends = [line.strip() for line in (failure.message, *failure.last_lines)]
        failure_line = next((line for line in reversed(ends) if line), "")
        of_rank = failure.rank is not None
        source = {"node": None if of_rank else failure.node, "rank": failure.rank}
        with self._lock:
            if self._is_closed:
                return None
            last = 0
            for line, _, text in islice(self._newest_first(**source), _FAILURE_LINES):
                last = last or line
                if failure_line in displayable_line(text.data):
                    break
            else:
                line = last
            if not line:
                return None
            return self._row_of(line, which), line

    def row_of(self, line: int, which: Selection) -> int:
        """Return the place of a line among the visible ones, or that of the next one."""
        with self._lock:
            return 0 if self._is_closed else self._row_of(line, which)

    def _row_of(self, line: int, which: Selection) -> int:
        chosen, _ = self._choose(which.visible, is_whole=True)
        return min(bisect_left(chosen, line), max(0, len(chosen) - 1))

    def match(self, which: Selection, line: int, *, is_forward: bool) -> Match:
        """Return the next match after or before a line; after the last one comes the first.

        Raises:
            UsageError: The expression cannot be used.
        """
        with self._lock:
            if self._is_closed or not which.text:
                return Match()
            chosen, _ = self._choose(which.matches, is_whole=True)
            if not chosen:
                return Match()
            after = bisect_left(chosen, line + 1) if is_forward else bisect_left(chosen, line) - 1
            place = after % len(chosen)
            row = self._row_of(chosen[place], which)
            return Match(row, chosen[place], place + 1, len(chosen))

    def texts(self, which: Selection) -> Iterator[bytes]:
        """Yield the selected lines read so far, each with the mark of its rank, in pieces.

        Raises:
            UsageError: The expression cannot be used.
        """
        searched = 0
        while True:
            values = {"node": which.node, "searched": searched, "most": _STEP_BLOCKS}
            with self._lock:
                blocks_found = [] if self._is_closed else self._db.execute(_FROM, values).fetchall()
            if not blocks_found:
                return
            for first, count, _, data in blocks_found:
                searched = first + count - 1
                texts = data.split(b"\n")
                chosen = (texts[index] for index in _matching(data, which.visible))
                piece = b"".join(bars.last_state(text) + b"\n" for text in chosen)
                if piece:
                    yield piece

    def metrics(self) -> list[MetricPoint]:
        """Return the metrics in the log read so far.

        Raises:
            CloudJobError: The log cannot be read.
        """
        self.keep_reading()
        with self._lock:
            if self._error and not self._metrics:
                raise CloudJobError(self._error)
            return [
                MetricPoint(name, rank, int(step), value, at or None, is_detected=is_detected)
                for (name, rank, is_detected), numbers in self._metrics.items()
                for step, value, at in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
            ]

    def end(self, count: int) -> list[dict[str, Any]]:
        """Return the last lines as rows, with the unfinished line of each rank."""
        whole = self.page(Selection(), 0, 0)
        first = whole.total - count + len(whole.unfinished_rows)
        return [*self.page(Selection(), first, whole.total).rows, *whole.unfinished_rows][-count:]

    def last_lines(self) -> dict[int, str]:
        """Return the last line of each rank that has one among the last lines of the log."""
        self.keep_reading()
        with self._lock:
            if self._is_closed:
                return {}
            newest = islice(self._newest_first(), _TRAINING_LINES)
            pairs = [(line.rank, line.data) for _, _, line in newest]
            open_lines = [(rank, data) for (_, rank), data in self._open.items()]
        line_of: dict[int, str] = {}
        for rank, data in (*open_lines, *pairs):
            text = displayable_line(data)
            if rank is not None and rank not in line_of and text.strip():
                line_of[rank] = _shortened(text)
        return line_of

    def progress(self) -> Training:
        """Return how far the training is, by the last lines of the lowest rank that says so."""
        self.keep_reading()
        last: defaultdict[int, deque[training.Line]] = defaultdict(deque)
        with self._lock:
            if self._is_closed:
                return Training()
            for _, at, line in islice(self._newest_first(), _TRAINING_LINES):
                if line.rank is not None:
                    last[line.rank].appendleft(training.Line(at, displayable_line(line.data)))
            for (_, rank), data in self._open.items():
                if rank is not None:
                    last[rank].append(training.Line(0, displayable_line(data)))
        states = (training.read(last[rank]) for rank in sorted(last))
        return next((each for each in states if each.share is not None), Training())

    def try_pattern(self, pattern: str) -> Trial:
        """Return what the pattern of a metric finds in the last lines.

        Raises:
            UsageError: The pattern cannot be used.
        """
        self.keep_reading()
        reader = MetricReader({_TRIED: pattern})
        searched = total = 0
        examples: list[tuple[str, float]] = []
        with self._lock:
            newest = () if self._is_closed else islice(self._newest_first(), _TRIAL_LINES)
            for _, _, line in newest:
                searched += 1
                if line.rank is None:
                    continue
                points = reader.add(0, b"[0] %s\n" % line.data.rstrip(b"\r\n"))
                values = [point.value for point in points if point.name == _TRIED]
                total += len(values)
                if values and len(examples) < _EXAMPLES:
                    examples.append((_shortened(displayable_line(line.data)), values[-1]))
        return Trial(searched, total, examples)

    def main_curve(self) -> Curve | None:
        """Return the metric of most interest, a loss if there is one; None if there is none."""
        self.keep_reading()
        with self._lock:
            key = min(self._metrics, key=_interest, default=None)
            if key is None:
                return None
            # A rank may have printed one value only.
            numbers = self._metrics[key]
            name, rank, is_detected = key
            title = MetricPoint(name, rank, 0, 0.0, is_detected=is_detected).title
            return Curve(title, list(zip(numbers[::3], numbers[1::3], strict=True)))

    def close(self) -> None:
        """Stop following the log and delete its copy."""
        with self._lock:
            self._is_closed = True
            self._db.close()

    def _newest_first(
        self, node: int | None = None, rank: int | None = None
    ) -> Iterator[tuple[int, int, lines.Line]]:
        """Yield the number, the time and the text of each line of a node or of a rank."""
        stored_blocks = self._db.execute(
            "SELECT first, at, data FROM blocks WHERE :node IS NULL OR node = :node"
            " ORDER BY first DESC",
            {"node": node},
        )
        for first, at, data in stored_blocks:
            texts = data.split(b"\n")[:-1]
            for index in range(len(texts) - 1, -1, -1):
                line = lines.read(texts[index])
                if rank is None or line.rank == rank:
                    yield first + index, at, line

    def _unfinished(self, which: Selection) -> list[dict[str, Any]]:
        """Return the selected lines that are not finished, by node and rank."""
        rows = []
        for (node, rank), data in self._open.items():
            is_selected = which.node in (None, node) and which.rank in (None, rank)
            row = _shown(data, which)
            is_match = which.has_others or not which.text or row["marks"]
            if is_selected and row["text"].strip() and is_match:
                rows.append({"line": None, "at": 0, "node": node, "rank": rank, **row})
        return sorted(rows, key=lambda row: (row["node"], row["rank"] is not None, row["rank"]))

    def _row(self, line: int, which: Selection) -> dict[str, Any]:
        first, node, at, texts = self._block
        if not first <= line < first + len(texts):
            first, node, at, data = self._db.execute(
                "SELECT first, node, at, data FROM blocks WHERE first <= ?"
                " ORDER BY first DESC LIMIT 1",
                (line,),
            ).fetchone()
            texts = data.split(b"\n")[:-1]
            self._block = first, node, at, texts
        rank, data = lines.read(texts[line - first])
        return {"line": line, "at": at, "node": node, "rank": rank, **_shown(data, which)}

    def _choose(self, which: Selection, *, is_whole: bool = False) -> tuple[Sequence[int], int]:
        """Return the numbers of the selected lines so far, and how many lines were searched."""
        if which == Selection():
            return range(1, self._count + 1), self._count
        searched, chosen = self._selected.pop(which, (0, array("L")))
        end_s = time.monotonic() + (math.inf if is_whole else _SEARCH_S)
        values = {"node": which.node, "searched": searched, "most": -1}
        for first, count, _, data in self._db.execute(_FROM, values):
            chosen.extend(first + index for index in _matching(data, which))
            searched = first + count - 1
            if time.monotonic() > end_s:
                break
        else:
            searched = self._count
        while len(self._selected) >= _MAX_SELECTIONS:
            self._selected.pop(next(iter(self._selected)))
        self._selected[which] = (searched, chosen)
        return chosen, searched

    # -- reading ----------------------------------------------------------------------------------

    def _read(self) -> None:
        error, is_complete = "", False
        try:
            is_complete = self._copy()
        except CloudJobError as failure:
            error = failure.message
        except Exception as failure:  # noqa: BLE001 (shown on the page; a full disk, for example)
            error = f"copying the log: {failure!r}"
        with self._lock:
            self._retry_at_s = time.monotonic() + _RETRY_S if error else 0.0
            self._error, self._is_complete, self._is_reading = error, is_complete, False

    def _copy(self) -> bool:
        """Copy the log until its end or until no page shows it; return whether it has ended."""
        try:
            reader = self._job.metric_reader()
        except UsageError as error:
            # The log of a job with a pattern that cannot be used is shown all the same.
            reader = MetricReader({}, detects=True)
            with self._lock:
                self._error = error.message
        try:
            for piece in self._pieces():
                with self._lock:
                    if self._is_closed:
                        return False
                    self._add(piece)
                    self._has_metrics = False
                # This takes far longer, and a page needs the lines first.
                columns = [*chain.from_iterable(reader.columns(piece.node, piece.data))]
                with self._lock:
                    self._add_metrics(columns, piece.at)
                    self._has_metrics = True
                if time.monotonic() > self._requested_at_s + _UNWATCHED_S:
                    return False
            with self._lock:
                self._add_metrics(chain.from_iterable(reader.last_columns()), None)
            return True
        finally:
            with self._lock:
                for (node, rank), data in self._open.items():
                    self._append(node, [(rank, data)])
                self._open.clear()

    def _pieces(self) -> Iterator[LogPiece]:
        if self._attempt is None:
            follow = not self._job.has_final_status
            return self._job.pieces(follow=follow, is_timed=True, on_journal=self.journals.add)
        # Only such jobs have attempts.
        job = cast("Job", self._job)
        return job.pieces(
            follow=False, attempt=self._attempt, is_timed=True, on_journal=self.journals.add
        )

    def _add_metrics(self, columns: Iterable[Column], at: float | None) -> None:
        for first, _, steps, values in columns:
            numbers = self._metrics.setdefault(
                (first.name, first.rank, first.is_detected), array("d")
            )
            numbers.extend(chain.from_iterable(zip(steps, values, repeat(at or 0.0))))

    def _add(self, piece: LogPiece) -> None:
        for block in blocks(piece.data):
            unfinished = self._open.unfinished(piece.node)
            if is_plain(block, unfinished) and (piece.node, None) not in self._open:
                whole = block.replace(b"\r\n", b"\n")
                self._append_block(piece.node, whole, int(piece.at or 0))
            else:
                whole_lines = [*self._open.add(piece.node, block)]
                self._append(piece.node, whole_lines, int(piece.at or 0))

    def _append(
        self, node: int, new_lines: Sequence[tuple[int | None, bytes]], at_s: int = 0
    ) -> None:
        """Append lines of a node, each with its rank."""
        marks = ((b"" if rank is None else b"[%d] " % rank, data) for rank, data in new_lines)
        text = b"".join(mark + data.rstrip(b"\r\n") + b"\n" for mark, data in marks)
        self._append_block(node, text, at_s)

    def _append_block(self, node: int, block: bytes, at_s: int) -> None:
        """Append whole lines of a node, with the marks of their ranks."""
        if self._is_closed or not block:
            return
        count = block.count(b"\n")
        with self._db:
            self._db.execute(
                "INSERT INTO blocks VALUES (?, ?, ?, ?, ?)",
                (self._count + 1, count, node, at_s, block),
            )
        self._count += count


def _interest(key: tuple[str, int | None, bool]) -> tuple[int, bool, int]:
    """Return a value that is smaller for a metric of more interest."""
    name, rank, is_detected = key
    is_loss, is_of_training = "loss" in name.lower(), not _OTHER_SETS.search(name)
    kind = 0 if is_loss and is_of_training else 1 if is_loss else 2
    return kind, is_detected, -1 if rank is None else rank


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}… ({len(text)} characters)"


def _shown(data: bytes, which: Selection) -> dict[str, Any]:
    """Return the text of a line, its colours, and where it matches."""
    text, spans = coloured_line(data)
    text = _shortened(text)
    return {"text": text, "spans": spans, "marks": which.spans(text)}


def _matching(block: bytes, which: Selection) -> Sequence[int]:
    """Return the places in a block of the lines of a selection.

    Raises:
        UsageError: The expression cannot be used.
    """
    mark = b"" if which.rank is None else b"[%d] " % which.rank
    if which.is_expression and which.text:
        return _matching_expression(block, mark, _pattern(which.text))
    text = which.text.encode("utf-8", "surrogatepass").lower()
    block = block.lower()
    if text not in block or mark not in block:
        return []
    of_rank: Iterable[tuple[int, bytes]] = enumerate(block.split(b"\n")[:-1])
    if mark:
        of_rank = ((index, line) for index, line in of_rank if line.startswith(mark))
    matching = [(index, line) for index, line in of_rank if text in line]
    if text[:1] in _MARK:
        # The mark of a line's rank is not searched.
        matching = [
            (index, line) for index, line in matching if not text or text in lines.read(line).data
        ]
    return [index for index, _ in matching]


def _matching_expression(block: bytes, mark: bytes, pattern: Pattern) -> list[int]:
    if mark not in block or not pattern.may_match(block):
        return []
    # The marks of ranks are not searched.
    indices = pattern.matching_lines(_MARKS.sub(b"", block))
    texts = block.split(b"\n")
    return [index for index in indices if texts[index].startswith(mark)]


@lru_cache(_MAX_SELECTIONS)
def _pattern(text: str) -> Pattern:
    try:
        return Pattern(text, ignores_case=True)
    except ValueError as error:
        raise UsageError(f"searching the log for {text}: it {error}") from error
