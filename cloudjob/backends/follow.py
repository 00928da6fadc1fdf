"""Follows the logs of several nodes: whole lines, in the order in which they arrive.

Every follower yields each line once and complete. ``Lines`` joins pieces into lines. ``poll`` reads
logs at intervals, for platforms that keep them as files; ``Streams`` reads each log in its own
thread, for platforms that stream them.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path

from cloudjob.errors import Unreachable
from cloudjob.retries import OutageLimit

# The number of a node, and whole lines of its log.
Piece = tuple[int, bytes]
NOTHING_NEW: Piece = (-1, b"")
PIECE_BYTES = 1 << 20
# Size of the beginning and of the end of a log, which show what a node does now.
END_BYTES, END_LINES = 256 * 1024, 500
# A longer line is cut. An entry writes a mebibyte at most, but others may write to a store.
_LONGEST_BYTES = 64 * 1024 * 1024
# Seconds that a reader of streams waits before it gets NOTHING_NEW.
_IDLE_S = 0.1
# Most pieces that wait for the reader: a slow reader must not fill the memory.
_WAITING = 64
_GROWTH = 1.2


class Lines:
    """Joins pieces of one log into whole lines."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Add what was read, and return the lines that are complete now."""
        end = data.rfind(b"\n") + 1
        whole = bytes(self._rest) + data[:end] if end else b""
        if end:
            self._rest.clear()
        self._rest += data[end:]
        return whole + self.finish() if len(self._rest) > _LONGEST_BYTES else whole

    def finish(self) -> bytes:
        """Return the last line of a log that has ended, with a newline added."""
        rest = bytes(self._rest)
        self._rest.clear()
        return rest + b"\n" if rest else b""


def whole_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the pieces of one log as whole lines."""
    lines = Lines()
    for piece in pieces:
        if whole := lines.feed(piece):
            yield whole
    if rest := lines.finish():
        yield rest


def node_logs(folder: Path) -> dict[int, Path]:
    """Return the log of each node in a folder, by the node's number."""
    paths = {path.stem.removeprefix("node-"): path for path in folder.glob("node-*.log")}
    path_of = {int(name): path for name, path in paths.items() if name.isdecimal()}
    return dict(sorted(path_of.items()))


def read_file(path: Path, offset: int = 0) -> Iterator[bytes]:
    """Yield the whole lines of a file from a byte offset on; nothing if there is no file."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        file.seek(offset)
        yield from whole_lines(iter(lambda: file.read(PIECE_BYTES), b""))


def read_ends(path: Path) -> Iterator[bytes]:
    """Yield whole lines from the beginning and from the end of a file; all lines of a short one."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        head = file.read(END_BYTES)
        head = head[: head.rfind(b"\n") + 1]
        yield head
        start = max(len(head), file.seek(0, os.SEEK_END) - END_BYTES)
        file.seek(start)
        tail = file.read()
        # Leave out a line of which only the end was read.
        begin = tail.find(b"\n") + 1 if start > len(head) else 0
        yield tail[begin : tail.rfind(b"\n") + 1]


def poll(
    read_new: Callable[[], Iterable[Piece]],
    has_ended: Callable[[], bool],
    *,
    follow: bool,
    pause_s: tuple[float, float],
    pause: Callable[[float], object] = time.sleep,
) -> Iterator[Piece]:
    """Yield the lines of logs that grow, until the job has ended and nothing more is found.

    With ``follow``, polling continues even if the platform does not answer for some minutes.

    Args:
        read_new: Returns what was written since its last call, in pieces of any size; an empty
            piece means that more data is known to exist.
        follow: Whether to wait for the end of the job; else only existing lines are yielded.
        pause_s: The shortest and the longest wait between two calls of ``read_new``.
    """
    lines: dict[int, Lines] = {}
    shortest_s, longest_s = pause_s
    wait_s = shortest_s
    outage = OutageLimit()
    while True:
        try:
            # Ask first: the next call then finds everything that was written before the end.
            is_last = not follow or has_ended()
            is_new = yield from _new_lines(read_new(), lines)
        except Unreachable as error:
            if not follow:
                raise
            outage.pause(error)
            continue
        outage.reset()
        if is_last and not is_new:
            break
        wait_s = shortest_s if is_new else min(wait_s * _GROWTH, longest_s)
        if not is_new:
            yield NOTHING_NEW
            pause(wait_s)
    for node, rest in sorted(lines.items()):
        if data := rest.finish():
            yield node, data


def _new_lines(pieces: Iterable[Piece], lines: dict[int, Lines]) -> Generator[Piece, None, bool]:
    """Yield the lines that pieces complete; return whether there was any piece."""
    is_new = False
    for node, data in pieces:
        is_new = True
        if whole := lines.setdefault(node, Lines()).feed(data):
            yield node, whole
    return is_new


class Streams:
    """Reads several logs at once, each in a thread of its own."""

    def __init__(self) -> None:
        self._news: queue.Queue[Piece | Exception] = queue.Queue(_WAITING)
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._running = 0

    @property
    def is_stopped(self) -> bool:
        """Whether the reader has stopped."""
        return self._stopped.is_set()

    @property
    def is_taken(self) -> bool:
        """Whether everything that was read has been taken."""
        return self._news.empty()

    @property
    def has_ended(self) -> bool:
        """Whether every thread has ended, and everything was read."""
        with self._lock:
            return not self._running and self.is_taken

    def add(self, read: Callable[[], Iterable[Piece]]) -> None:
        """Start a reader thread; ``next`` raises its exception."""
        with self._lock:
            self._running += 1
        # A silent stream cannot be interrupted; a daemon thread does not delay the process's end.
        threading.Thread(target=self._run, args=(read,), name="log", daemon=True).start()

    def next(self) -> Piece:
        """Return the next piece, or NOTHING_NEW if none arrives within a moment."""
        try:
            news = self._news.get(timeout=_IDLE_S)
        except queue.Empty:
            return NOTHING_NEW
        if isinstance(news, Exception):
            raise news
        return news

    def stop(self) -> None:
        """Ask the threads to end."""
        self._stopped.set()

    def wait(self, seconds: float) -> None:
        """Pause a thread until the time is over or the reader has stopped."""
        self._stopped.wait(seconds)

    def _put(self, news: Piece | Exception) -> bool:
        """Pass a piece to the reader; return False if the reader has stopped."""
        while not self.is_stopped:
            try:
                self._news.put(news, timeout=_IDLE_S)
            except queue.Full:
                continue
            return True
        return False

    def _run(self, read: Callable[[], Iterable[Piece]]) -> None:
        last: Piece | Exception = NOTHING_NEW
        try:
            for piece in read():
                if not self._put(piece):
                    break
        except Exception as error:  # noqa: BLE001 (raised in the thread of the reader)
            last = error
        with self._lock:
            self._running -= 1
        # Make the reader check again whether all threads have ended.
        self._put(last)
