"""The log of one job in a file with an index, so that half a million lines scroll and search."""

from __future__ import annotations

import math
import os
import tempfile
import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from cloudjob.console.emulated import EmulatedJob
from cloudjob.console.pages import words
from cloudjob.errors import CloudJobError
from cloudjob.model import bars
from cloudjob.model.status import Failure
from cloudjob.tracking import Job
from cloudjob.tracking.job import LogPiece
from cloudjob.tracking.journals import Journals
from cloudjob.tracking.metrics import MetricPoint
from jobentry.contract import lines

# A longer line is shown cut.
LONGEST_CHARS = 4000
# The log is no longer followed when no page has asked for this long.
_UNWATCHED_S = 60.0
# Seconds before a log that could not be read is read again.
_RETRY_S = 10.0
_ENTRY = -1
# How much is searched at a time, and for how long a page waits for a search to go on.
_CHUNK_BYTES, _CHUNK_LINES = 1024 * 1024, 50_000
_SEARCH_S = 0.1
# How many lines from the end are compared with the failure.
_FAILURE_LINES = 20_000


class Selection(NamedTuple):
    """Which lines to show.

    Args:
        node: Only those of this node; None for all.
        rank: Only those of this rank; None for all.
        text: Only those that contain this text, whatever its case.
    """

    node: int | None = None
    rank: int | None = None
    text: str = ""


class Page(NamedTuple):
    """Some lines of a selection.

    Args:
        selected: The number of lines of the selection, as far as they were looked for.
        searched: The number of lines that were looked at.
        total: The number of all lines.
        is_complete: Whether the job has ended and all of its log was read.
        error: Why the log cannot be read, or not to its end; empty if it can.
    """

    selected: int = 0
    searched: int = 0
    total: int = 0
    is_complete: bool = False
    error: str = ""
    rows: Sequence[dict[str, Any]] = ()


def printable(line: bytes) -> str:
    """Return what a terminal would show of a line last, without what controls a terminal."""
    shown = bars.last_state(line).rstrip(b"\r\n")
    return words.text(shown.decode("utf-8", "replace"))


class LogFile:
    """The log of a job as far as it was read; a thread continues while a page shows it.

    Args:
        folder: Where the temporary file is made, readable by this user only.

    Raises:
        CloudJobError: The file cannot be made.
    """

    def __init__(self, job: Job | EmulatedJob, folder: str) -> None:
        self._job = job
        # What the nodes recorded, as far as the log was read.
        self.journals = Journals()
        # Unlinked at once, so that nothing is left whatever ends the console.
        try:
            self._file = tempfile.TemporaryFile(buffering=0, dir=folder)  # noqa: SIM115
        except OSError as error:
            raise CloudJobError(
                f"making a file for the log of {job.id}: {folder}: {error.strerror}"
            ) from error
        self._ends = array("Q", [0])
        self._nodes = array("i")
        self._ranks = array("i")
        # When it was written, in seconds since 1970, as far as its node's journal tells; 0 if not.
        self._times = array("Q")
        # Metric and rank -> steps and values, in turn: many times smaller than points.
        self._metrics: dict[tuple[str, int | None], array[float]] = {}
        # Lines of ranks that have not ended, such as progress bars.
        self._open: dict[tuple[int, int], bytes] = {}
        self._lock = threading.Lock()
        self._selected: dict[Selection, tuple[int, array[int]]] = {}
        self._asked_s = time.monotonic()
        self._retry_at_s = 0.0
        self._is_reading = False
        self._error = ""
        self._is_complete = False

    def read_on(self) -> None:
        """Start or continue to read the log, until a minute after the last call."""
        with self._lock:
            self._asked_s = time.monotonic()
            is_too_early = self._asked_s < self._retry_at_s
            if self._is_reading or self._is_complete or is_too_early or self._file.closed:
                return
            # A log that was not followed for a while is read again from its start.
            self._is_reading, self._error = True, ""
            self._ends, self._times = array("Q", [0]), array("Q")
            self._nodes, self._ranks = array("i"), array("i")
            self._open.clear()
            self._selected.clear()
            self._metrics.clear()
            self.journals = Journals()
            self._file.truncate(0)
        threading.Thread(target=self._read, name=f"log of {self._job.id}", daemon=True).start()

    def page(self, which: Selection, start: int, end: int) -> Page:
        """Return lines ``start`` to ``end`` of those selected, and how many there are.

        The next call continues a long search.
        """
        self.read_on()
        with self._lock:
            if self._file.closed:
                return Page()
            chosen, searched = self._choose(which)
            shown = range(max(start, 0), min(end, len(chosen)))
            rows = [self._row(chosen[n]) for n in shown]
            total, error = len(self._ranks), self._error
            return Page(len(chosen), searched, total, self._is_complete, error, rows)

    def find(self, failure: Failure, which: Selection) -> tuple[int, int] | None:
        """Return the line of a failure: its place among those selected, and its number.

        It is the last line of the rank, or else of the node, with the end of what the failure
        shows, or without such a line the last one. None if there are no lines.
        """
        with self._lock:
            if self._file.closed or not self._ranks:
                return None
            source = Selection(None if failure.rank is not None else failure.node, failure.rank)
            candidates, _ = self._choose(source, is_whole=True)
            if not candidates:
                return None
            ends = [line.strip() for line in (failure.message, *failure.last_lines)]
            wanted = next((line for line in reversed(ends) if line), "")
            last = range(len(candidates) - 1, max(-1, len(candidates) - _FAILURE_LINES), -1)
            fits = (candidates[n] for n in last if wanted in printable(self._text(candidates[n])))
            index = next(fits, candidates[-1])
            chosen, _ = self._choose(which, is_whole=True)
            return min(bisect_left(chosen, index), max(0, len(chosen) - 1)), index + 1

    def metrics(self) -> list[MetricPoint]:
        """Return the metrics in the log as far as it was read.

        Raises:
            CloudJobError: The log cannot be read.
        """
        self.read_on()
        with self._lock:
            if self._error and not self._metrics:
                raise CloudJobError(self._error)
            return [
                MetricPoint(name, rank, int(step), value)
                for (name, rank), numbers in self._metrics.items()
                for step, value in zip(numbers[::2], numbers[1::2], strict=True)
            ]

    def close(self) -> None:
        """Delete the file; the log is no longer followed."""
        with self._lock:
            self._file.close()

    def _row(self, index: int) -> dict[str, Any]:
        text = printable(self._text(index))
        if len(text) > LONGEST_CHARS:
            text = f"{text[:LONGEST_CHARS]}… ({len(text)} characters)"
        rank = self._ranks[index]
        return {
            "line": index + 1,
            "at": self._times[index],
            "node": self._nodes[index],
            "rank": None if rank == _ENTRY else rank,
            "text": text,
        }

    def _text(self, index: int) -> bytes:
        start, end = self._ends[index], self._ends[index + 1]
        return os.pread(self._file.fileno(), end - start, start).rstrip(b"\r\n")

    # -- selecting --------------------------------------------------------------------------------

    def _choose(self, which: Selection, *, is_whole: bool = False) -> tuple[Sequence[int], int]:
        """Return the indexes of the selected lines so far, and how many lines were looked at."""
        count = len(self._ranks)
        if which == Selection():
            return range(count), count
        known, found = self._selected.pop(which, (0, array("L")))
        end_s = time.monotonic() + (math.inf if is_whole else _SEARCH_S)
        while known < count:
            fits, known = self._looked_at(which.text, known)
            found.extend(index for index in fits if self._is_of(which, index))
            if time.monotonic() > end_s:
                break
        while len(self._selected) > 8:
            self._selected.pop(next(iter(self._selected)))
        self._selected[which] = (known, found)
        return found, known

    def _is_of(self, which: Selection, index: int) -> bool:
        is_rank = which.rank is None or which.rank == self._ranks[index]
        return is_rank and (which.node is None or which.node == self._nodes[index])

    def _looked_at(self, text: str, first: int) -> tuple[Iterable[int], int]:
        """Return the next lines from ``first`` on with the text, and the first not looked at."""
        count = len(self._ranks)
        if not text:
            after = min(first + _CHUNK_LINES, count)
            return range(first, after), after
        start = self._ends[first]
        after = min(max(bisect_right(self._ends, start + _CHUNK_BYTES), first + 1), count)
        # A regular expression that ignores case is ten times slower than a copy in lower case.
        chunk = os.pread(self._file.fileno(), self._ends[after] - start, start).lower()
        return self._hits(chunk, text.encode().lower(), start), after

    def _hits(self, chunk: bytes, wanted: bytes, start: int) -> Iterator[int]:
        """Yield the lines of a chunk that contain a text, each once."""
        at = chunk.find(wanted)
        while at >= 0:
            index = bisect_right(self._ends, start + at) - 1
            yield index
            at = chunk.find(wanted, self._ends[index + 1] - start)

    # -- reading ----------------------------------------------------------------------------------

    def _read(self) -> None:
        error, is_complete = "", False
        try:
            is_complete = self._copy()
        except CloudJobError as failure:
            error = failure.message
        except Exception as failure:  # noqa: BLE001 (shown on the page; a full disk, for example)
            error = f"keeping the log: {getattr(failure, 'strerror', None) or failure!r}"
        with self._lock:
            self._retry_at_s = time.monotonic() + _RETRY_S if error else 0.0
            self._error, self._is_complete, self._is_reading = error, is_complete, False

    def _copy(self) -> bool:
        """Copy the log until it ends or no page shows it; return whether it has ended."""
        reader = self._job.metric_reader()
        try:
            for piece in self._job.pieces(
                follow=not self._job.has_final_status,
                is_timed=True,
                on_journal=self.journals.add,
            ):
                with self._lock:
                    if self._file.closed:
                        return False
                    self._add(piece)
                    self._keep(reader.add(piece.node, piece.data))
                if time.monotonic() > self._asked_s + _UNWATCHED_S:
                    return False
            return True
        finally:
            with self._lock:
                for (node, rank), data in sorted(self._open.items()):
                    self._append(node, [(rank, data)])
                self._open.clear()

    def _keep(self, points: Iterable[MetricPoint]) -> None:
        for point in points:
            numbers = self._metrics.setdefault((point.name, point.rank), array("d"))
            numbers.extend((point.step, point.value))

    def _add(self, piece: LogPiece) -> None:
        node, found = piece.node, []
        for text in piece.data.split(b"\n")[:-1]:
            line = lines.read(text + b"\n")
            rank = _ENTRY if line.rank is None else line.rank
            before = self._open.pop((node, rank), b"")
            if before.endswith(b"\n"):
                if not line.data.startswith(b"\r"):
                    found.append((rank, before))
                before = b""
            whole = before + line.data
            if whole.endswith(b"\n") and not bars.is_drawn_over(whole):
                found.append((rank, whole))
            else:
                # A progress bar overwrites itself; only what it shows last is kept.
                self._open[node, rank] = bars.reduced(whole)[-LONGEST_CHARS:]
        self._append(node, found, int(piece.at or 0))

    def _append(self, node: int, found: Sequence[tuple[int, bytes]], at_s: int = 0) -> None:
        """Append lines of a node, each with its rank."""
        if self._file.closed:
            return
        end = self._ends[-1]
        left = memoryview(b"".join(data for _, data in found))
        while left:
            written = os.pwrite(self._file.fileno(), left, end)
            end, left = end + written, left[written:]
        for rank, data in found:
            self._ends.append(self._ends[-1] + len(data))
            self._nodes.append(node)
            self._ranks.append(rank)
            self._times.append(at_s)
