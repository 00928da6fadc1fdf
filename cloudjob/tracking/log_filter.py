"""Selects lines of a job's log: by node, rank, pattern or time, or only the last lines."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from typing import NamedTuple, Protocol

from cloudjob.model import times
from cloudjob.model.patterns import Pattern
from cloudjob.tracking.blocks import (
    PART_MARK,
    blocks,
    has_parts,
    is_plain,
    matching_lines,
    without_overwritten,
)
from cloudjob.tracking.job import Job
from cloudjob.tracking.log import LogPiece, OnJournal
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
        tail: The number of lines to start with, counted from the end; None for all. States of
            progress bars that are overwritten are left out.
        is_stored: Whether to read the logs in the job's store, not those of its platform.
        since: ``2h``, ``3d``, a date, or a date and a time: only lines that were written then or
            later, by the clocks of the nodes and accurate to seconds.
        is_timed: Add times to the pieces.
        attempt: Only the log of one attempt, from 1 on; None for all.
    """

    nodes: str = ""
    ranks: str = ""
    pattern: LinePattern | None = None
    tail: int | None = None
    is_stored: bool = False
    since: str = ""
    is_timed: bool = False
    attempt: int | None = None

    def pieces(
        self, job: Job, *, follow: bool, on_journal: OnJournal | None = None
    ) -> Iterator[LogPiece]:
        """Yield the selected lines of a job's log as they arrive.

        Args:
            on_journal: Called with the journal lines of each node, as by ``Job.pieces``.

        Raises:
            UsageError: ``since`` is not a time.
        """
        since = times.seconds_of(times.parse(self.since)) if self.since else 0.0
        is_timed = self.is_timed or bool(since)
        read = partial(
            job.pieces, is_stored=self.is_stored, attempt=self.attempt, is_timed=is_timed
        )
        node = int(self.nodes) if self.nodes.isdecimal() else None
        skipped: dict[int, int] = {}
        if self.tail is not None and follow:
            # Read the existing lines first: a log that is followed does not mark their end.
            existing = _counted(read(node, follow=False), skipped)
            yield from self._last(_since(since, existing))
        pieces_read = _without_first(read(node, follow=follow, on_journal=on_journal), skipped)
        pieces = _since(since, pieces_read)
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
            selected: list[bytes] = []
            if not self.nodes or env.is_listed(piece.node, self.nodes):
                for block in blocks(piece.data):
                    for text in self._candidates(piece.node, block, parts):
                        selected += self._selected_line(piece.node, text, parts)
            yield piece._replace(data=b"".join(selected))
        for (node, _), line in parts.items():
            if self._matches(line):
                yield LogPiece(node, b"".join(line), last_at.get(node))

    def _candidates(
        self, node: int, block: bytes, parts: Collection[tuple[int, int | None]]
    ) -> Iterable[bytes]:
        """Return the lines of a block that may be selected."""
        if isinstance(self.pattern, Pattern):
            unfinished = [rank for of_node, rank in parts if of_node == node and rank is not None]
            matching = (
                matching_lines(block, (self.pattern,)) if is_plain(block, unfinished) else None
            )
            if matching is not None:
                return matching
        return (line + b"\n" for line in block.split(b"\n")[:-1])

    def _selected_line(
        self, node: int, text: bytes, parts: dict[tuple[int, int | None], list[bytes]]
    ) -> Iterator[bytes]:
        """Yield a line with its earlier parts if it is selected and complete."""
        rank, data = lines.read(text)
        if not self.ranks or (rank is not None and env.is_listed(rank, self.ranks)):
            line = parts.setdefault((node, rank), [])
            line.append(text)
            # Without a pattern there is no reason to wait for the rest of a line.
            if data.endswith(b"\n") or self.pattern is None:
                del parts[node, rank]
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
        for piece in _Ending(self.tail).of(self._select(pieces)):
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


# The parts of each line that is not finished, by node and rank.
_Parts = dict[tuple[int, "int | None"], list[LogPiece]]


class _Ending:
    """The blocks at the end of a log that contain at least a number of lines.

    Args:
        lines: The number of lines.
    """

    def __init__(self, lines: int) -> None:
        self._lines = lines
        # Parts of lines that are not finished where the blocks begin, and where the second begins.
        self._parts: _Parts = {}
        self._next_parts: _Parts | None = None
        # Each block with the least number of lines that end in it.
        self._blocks: deque[tuple[LogPiece, int]] = deque()

    def of(self, pieces: Iterable[LogPiece]) -> Iterator[LogPiece]:
        """Yield the unfinished parts, then the blocks."""
        count = 0
        for piece in pieces:
            for block in map(without_overwritten, blocks(piece.data)):
                least = max(0, block.count(b"\n") - block.count(PART_MARK))
                self._blocks.append((piece._replace(data=block), least))
                count += least
                while self._blocks and self._is_spare(count):
                    count -= self._leave_out()
        for parts in self._parts.values():
            yield from parts
        for block_of_node, _ in self._blocks:
            yield block_of_node

    def _is_spare(self, count: int) -> bool:
        """Whether enough lines begin after the first block."""
        piece, least = self._blocks[0]
        if self._next_parts is None:
            self._next_parts = self._after(piece)
        # The lines that are not finished there end later, but began before.
        return count - least >= self._lines + len(self._next_parts)

    def _leave_out(self) -> int:
        """Leave out the first block but the parts of unfinished lines; return its lines."""
        _, least = self._blocks.popleft()
        assert self._next_parts is not None
        self._parts, self._next_parts = self._next_parts, None
        return least

    def _after(self, piece: LogPiece) -> _Parts:
        """Return the parts of lines that are not finished after the first block."""
        unfinished = [rank for node, rank in self._parts if node == piece.node and rank is not None]
        if not has_parts(piece.data, unfinished):
            return self._parts
        parts = {key: list(line) for key, line in self._parts.items()}
        for text in (line + b"\n" for line in piece.data.split(b"\n")[:-1]):
            rank, data = lines.read(text)
            if data.endswith(b"\n"):
                parts.pop((piece.node, rank), None)
            else:
                parts.setdefault((piece.node, rank), []).append(piece._replace(data=text))
        return parts


def _counted(pieces: Iterable[LogPiece], counts: dict[int, int]) -> Iterator[LogPiece]:
    """Yield pieces, and count the lines of each node."""
    for piece in pieces:
        counts[piece.node] = counts.get(piece.node, 0) + piece.data.count(b"\n")
        yield piece


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
