"""Selects lines of a job's log: by node, rank, pattern or time, or only the last lines."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple, Protocol

from cloudjob.model import times
from cloudjob.tracking.job import Job
from cloudjob.tracking.log import LogPiece, OnJournal
from cloudjob.tracking.queries import parse_time
from jobentry.contract import env, lines


class LinePattern(Protocol):
    """What chooses lines: a compiled expression of ``cloudjob``, ``re`` or another library."""

    def search(self, line: bytes, /) -> object:
        """Return something true if the line is chosen."""


class LogFilter(NamedTuple):
    """Which lines of a log to show.

    Args:
        nodes: A list such as ``0,2-3``; empty for all nodes.
        ranks: The same for ranks. Lines of the entry belong to no rank.
        pattern: Compiled; it is searched in each line, without its prefix.
        tail: The number of lines to start with, counted from the end; None for all.
        is_stored: Whether to read the logs in the job's store, not those of its platform.
        since: ``2h``, ``3d``, a date, or a date and a time: only lines that were written then or
            later, by the clocks of the nodes and accurate to seconds.
        is_timed: Add times to the pieces.
    """

    nodes: str = ""
    ranks: str = ""
    pattern: LinePattern | None = None
    tail: int | None = None
    is_stored: bool = False
    since: str = ""
    is_timed: bool = False

    def pieces(
        self, job: Job, *, follow: bool, on_journal: OnJournal | None = None
    ) -> Iterator[LogPiece]:
        """Yield the selected lines of a job's log as they arrive.

        Args:
            on_journal: Called with the journal lines of each node, as by ``Job.pieces``.

        Raises:
            UsageError: ``since`` is not a time.
        """
        since = times.seconds_of(parse_time(self.since)) if self.since else 0.0
        is_timed = self.is_timed or bool(since)
        read = partial(job.pieces, is_stored=self.is_stored, is_timed=is_timed)
        node = int(self.nodes) if self.nodes.isdecimal() else None
        skipped: dict[int, int] = {}
        if self.tail is not None and follow:
            # Read the existing lines first: a log that is followed does not mark their end.
            existing = list(read(node, follow=False))
            yield from self._last(_since(since, existing))
            for piece in existing:
                skipped[piece.node] = skipped.get(piece.node, 0) + piece.data.count(b"\n")
        found = _without_first(read(node, follow=follow, on_journal=on_journal), skipped)
        pieces = _since(since, found)
        is_cut = self.tail is not None and not follow
        yield from self._last(pieces) if is_cut else self._select(pieces)

    def _select(self, pieces: Iterable[LogPiece]) -> Iterator[LogPiece]:
        if not (self.nodes or self.ranks or self.pattern):
            yield from pieces
            return
        # A line may arrive in parts, which are selected together.
        parts: dict[tuple[int, int | None], list[bytes]] = {}
        last_at: dict[int, float | None] = {}
        for piece in pieces:
            last_at[piece.node] = piece.at
            shown = b""
            if not self.nodes or env.is_listed(piece.node, self.nodes):
                shown = b"".join(self._selected_lines(piece, parts))
            yield piece._replace(data=shown)
        for (node, _), line in parts.items():
            if self._matches(line):
                yield LogPiece(node, b"".join(line), last_at.get(node))

    def _selected_lines(
        self, piece: LogPiece, parts: dict[tuple[int, int | None], list[bytes]]
    ) -> Iterator[bytes]:
        for text in (line + b"\n" for line in piece.data.split(b"\n")[:-1]):
            rank, data = lines.read(text)
            if self.ranks and (rank is None or not env.is_listed(rank, self.ranks)):
                continue
            line = parts.setdefault((piece.node, rank), [])
            line.append(text)
            # Without a pattern there is no reason to wait for the rest of a line.
            if data.endswith(b"\n") or self.pattern is None:
                del parts[piece.node, rank]
                if self._matches(line):
                    yield from line

    def _matches(self, line: list[bytes]) -> bool:
        whole = b"".join(lines.read(text).data for text in line)
        return self.pattern is None or bool(self.pattern.search(whole.rstrip(b"\n")))

    def _last(self, pieces: Iterable[LogPiece]) -> Iterator[LogPiece]:
        """Yield the last lines; a line that arrived in parts keeps all its parts."""
        assert self.tail is not None
        kept: deque[list[LogPiece]] = deque(maxlen=self.tail)
        unfinished: dict[tuple[int, int | None], list[LogPiece]] = {}
        for piece in self._select(pieces):
            for text in (line + b"\n" for line in piece.data.split(b"\n")[:-1]):
                rank, data = lines.read(text)
                line = unfinished.pop((piece.node, rank), None)
                if line is None:
                    line = []
                    kept.append(line)
                line.append(piece._replace(data=text))
                if not data.endswith(b"\n"):
                    unfinished[piece.node, rank] = line
        for line in kept:
            yield from line


def _since(since: float, pieces: Iterable[LogPiece]) -> Iterator[LogPiece]:
    """Yield pieces, with those before ``since`` emptied; a piece without a time counts as older."""
    for piece in pieces:
        is_older = bool(since) and (piece.at is None or piece.at < since)
        yield piece._replace(data=b"") if is_older else piece


def _without_first(pieces: Iterable[LogPiece], skipped: dict[int, int]) -> Iterator[LogPiece]:
    """Yield pieces without the first lines of each node, as many as ``skipped`` says."""
    for piece in pieces:
        data = piece.data
        while data and skipped.get(piece.node, 0):
            data = data.partition(b"\n")[2]
            skipped[piece.node] -= 1
        yield piece._replace(data=data)
