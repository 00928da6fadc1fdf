"""The log of a job: from its platform, or from the chunks that its nodes have stored."""

from __future__ import annotations

import contextlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from cloudjob.backends.follow import Piece, whole_lines
from cloudjob.errors import (
    BackendError,
    ObjectMissing,
    StoreError,
    Unreachable,
    UnreadableObject,
    UsageError,
)
from cloudjob.store.base import RETRY_S, ObjectStore
from cloudjob.store.files import logged_if_unreadable
from cloudjob.store.parallel import call_with_timeout
from cloudjob.tracking.access import JobAccess
from jobentry.contract import journal, lines, masks, stored_log
from jobentry.contract.paths import JobPaths
from jobentry.contract.stored_log import Chunk

# Seconds that a log waits for the store while the platform may still have the job.
_STORE_S = 5.0
_FROM_STORE = b"cloudjob: the platform has no log of this node; this one is from the job's store\n"
UNREAD = (
    b"cloudjob: the platform does not answer for the rest of this node's log; what follows is from"
    b" the job's store\n"
)
_LOST = (
    b"cloudjob: a part of this log is missing: it was not stored, or is older than what is kept\n"
)
# The key by which lines of a node's log are counted: the rank, or the whole line of the entry.
_LINE_KEY = re.compile(rb"^(?:\[\d+\]\+? |jobentry.*\n)", re.MULTILINE)

# Called with the number of a node and lines of its journal.
OnJournal = Callable[[int, list[bytes]], object]


class LogLine(NamedTuple):
    """One line of a job's log; ``str`` returns it as ``cloudjob logs`` shows it.

    Args:
        rank: The rank that wrote it, None for a line of the entry.
        data: The bytes, with their newline if they have one.
    """

    node: int
    rank: int | None
    data: bytes

    @property
    def text(self) -> str:
        """The line without its newline; bytes that are not UTF-8 are escaped."""
        return self.data.decode("utf-8", "backslashreplace").rstrip("\n")

    def __str__(self) -> str:
        return self.text if self.rank is None else f"[{self.rank}] {self.text}"


class LogPiece(NamedTuple):
    """Whole lines of one node, with the prefixes that the entry wrote.

    Args:
        at: When the node wrote the lines, by its clock and accurate to seconds, in seconds since
            1970; None if unknown.
    """

    node: int
    data: bytes
    at: float | None = None


def pieces(
    log_pieces: Iterable[Piece],
    *,
    is_exact: bool = False,
    is_timed: bool = False,
    on_journal: OnJournal | None = None,
) -> Iterator[LogPiece]:
    """Yield a log without the lines of journals.

    Args:
        is_exact: Show secrets; else they are ``***``.
        is_timed: Add times to the pieces, which makes them smaller.
        on_journal: Called with the journal lines of each node.
    """
    splitters: defaultdict[int, masks.Splitter] = defaultdict(masks.Splitter)
    written_at: dict[int, float] = {}
    for node, data in log_pieces:
        split = journal.split if is_exact else splitters[node].split
        for at, part in journal.by_time(data) if is_timed else ((0.0, data),):
            text, recorded = split(part)
            if recorded and on_journal is not None:
                on_journal(node, recorded)
            written_at[node] = at or written_at.get(node, 0.0)
            yield LogPiece(node, text, written_at[node] or None)


def lines_of(log_pieces: Iterable[LogPiece]) -> Iterator[LogLine]:
    """Yield the lines of a log."""
    for piece in log_pieces:
        for text in piece.data.split(b"\n")[:-1]:
            line = lines.read(text + b"\n")
            yield LogLine(piece.node, line.rank, line.data)


def read(access: JobAccess, node: int | None, *, follow: bool) -> Iterator[Piece]:
    """Yield the log of one node or of all nodes.

    Parts that the platform does not have or cannot return are read from the store.

    Raises:
        BackendError: The platform does not answer, so that the end of the log may be missing.
    """
    record = access.record
    if not record.handle:
        return
    nodes = _nodes(access, node)
    counts: defaultdict[int, Counter[bytes]] = defaultdict(Counter)
    # The logs of the process backend are local files, so their lines need not be counted.
    is_counted = record.backend != "process"
    failure: BackendError | None = None
    try:
        for index, data in access.backend.logs(record.handle, node, follow=follow):
            if data:
                counts[index].update(_LINE_KEY.findall(data) if is_counted else ())
            yield index, data
    except BackendError as error:
        failure = error
    is_unread = isinstance(failure, Unreachable)
    unread = nodes if is_unread else nodes - counts.keys()
    # Where the platform has lost the job, only the store still has its log.
    limit_s = RETRY_S if failure is not None and not is_unread else _STORE_S
    chunks: list[Chunk] = []
    with contextlib.suppress(StoreError, TimeoutError):
        if unread:
            chunks = call_with_timeout(limit_s, lambda: _chunks(access.store, record.job, unread))
    for index, stored in groupby(chunks, lambda chunk: chunk.node):
        texts = (data for _, data in _read_chunks(access.store, record.job, tuple(stored)))
        rest = (text for data in texts if (text := _without(data, counts[index])))
        notice = UNREAD if is_unread else _FROM_STORE
        yield from ((index, text) for text in _after(notice, rest))
    if failure is not None and (is_unread or not chunks):
        raise failure


def read_stored(access: JobAccess, node: int | None, attempt: int | None = None) -> Iterator[Piece]:
    """Yield the stored log of one node or of all nodes.

    Args:
        attempt: The number of an attempt, from 1 on; None for all.

    Raises:
        UsageError: No log is stored, or the job had no such attempt.
        StoreError: The store cannot be read.
    """
    job = access.record.job
    chunks = _chunks(access.store, job, _nodes(access, None))
    if attempt is not None and chunks:
        chunks = of_attempt(chunks, attempt)
    chunks = [chunk for chunk in chunks if node in (None, chunk.node)]
    if not chunks:
        raise UsageError(
            f"reading the stored log of {job}: its nodes have stored none",
            hint="leave out --stored; the log may still be on the platform",
        )
    yield from _read_chunks(access.store, job, chunks)


def _nodes(access: JobAccess, node: int | None) -> set[int]:
    return {*range(access.record.nodes)} if node is None else {node}


def _chunks(store: ObjectStore, job: str, nodes: Collection[int]) -> list[Chunk]:
    """Return the stored chunks of the logs of nodes, in the order of the logs."""
    folder = JobPaths(job).records
    keys = store.list(folder + stored_log.PREFIX)
    chunks = (stored_log.read_name(key.removeprefix(folder)) for key in keys)
    return sorted(chunk for chunk in chunks if chunk and chunk.node in nodes)


def of_attempt(chunks: Collection[Chunk], attempt: int) -> list[Chunk]:
    """Return the chunks of one attempt of a job.

    Each node notes only when its own entry started, by its own clock, so the starts of the node
    with the most attempts count, and each log belongs to the nearest of them.

    Raises:
        UsageError: The job had no such attempt.
    """
    starts: defaultdict[int, list[int]] = defaultdict(list)
    for chunk in sorted(chunks):
        if chunk.attempt_ms not in starts[chunk.node]:
            starts[chunk.node].append(chunk.attempt_ms)
    begun = max(starts.values(), key=len)
    if not 1 <= attempt <= len(begun):
        raise UsageError(
            f"reading the log of attempt {attempt}: the nodes have stored logs of {len(begun)}",
            hint=f"--attempt 1 to {len(begun)}; without it, you get all of them",
        )
    start = begun[attempt - 1]
    return [
        chunk
        for chunk in chunks
        if min(begun, key=lambda each: abs(each - chunk.attempt_ms)) == start
    ]


def _read_chunks(store: ObjectStore, job: str, chunks: Collection[Chunk]) -> Iterator[Piece]:
    """Yield the whole lines of the logs, node by node, attempt by attempt."""
    for (node, _), group in groupby(chunks, lambda chunk: chunk[:2]):
        for data in whole_lines(_unpacked(store, JobPaths(job).records, group)):
            yield node, data


def _unpacked(store: ObjectStore, folder: str, chunks: Iterator[Chunk]) -> Iterator[bytes]:
    number = 0
    for chunk in chunks:
        if chunk.number != number:
            yield _LOST
        number = chunk.number + 1
        try:
            limit_bytes = stored_log.CHUNK_LIMIT_BYTES
            with logged_if_unreadable():
                data = store.get_bytes(folder + chunk.name, limit_bytes=limit_bytes)
        except (ObjectMissing, UnreadableObject):
            # The node has deleted the chunk since the list was read, or did not write this one.
            yield _LOST
            continue
        yield from stored_log.unpack(data)


def _after(notice: bytes, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the pieces, the first preceded by a notice; nothing if there are no pieces."""
    for piece in pieces:
        yield notice + piece
        notice = b""


def _without(data: bytes, counts: Counter[bytes]) -> bytes:
    """Return whole lines without those already shown, and reduce the number of lines to skip."""
    if not +counts:
        return data
    kept = []
    for line in (text + b"\n" for text in data.split(b"\n")[:-1]):
        match = _LINE_KEY.match(line)
        key = match[0] if match else b""
        if counts[key] > 0:
            counts[key] -= 1
        else:
            kept.append(line)
    return b"".join(kept)
