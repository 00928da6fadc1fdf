"""Follows the logs of a job's tasks until the job has ended and the logs are complete.

The service returns the last 5 MB of a log and takes no offset. So each request must find out where
this window overlaps with the text that was read before: from the sizes in the answer, or from the
text itself if bytes that are not UTF-8 make the sizes useless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any, NamedTuple

from cloudjob.backends import follow as following
from cloudjob.backends.follow import Piece
from cloudjob.backends.modelarts import state
from cloudjob.backends.modelarts.client import ModelArtsClient

_AT_ONCE = 8
# The nodes that one round asks for, each with a request; more nodes take turns.
_PER_POLL = 64
# While nothing is new, the pause between rounds grows up to this factor.
_SLOWEST = 3.0
# Attempts to fill a gap from the exported log.
_GAP_TRIES = 20
# Characters kept of each log (up to a thousand logs) to recognise text that was read before.
_KEPT = 256 * 1024
# A window may begin within a character, the rest of which is then decoded as this.
_REPLACEMENT = "�"
_MAX_BROKEN_CHARS = 3
# Characters that must match to prove that a window continues the log, if sizes do not help.
_PROOF_CHARS = 64


def follow(
    client: ModelArtsClient,
    job: str,
    node: int | None,
    *,
    is_live: bool,
    poll_s: float,
    pause: Callable[[float], object],
) -> Iterator[Piece]:
    """Yield pieces ``(node, whole lines)``; an empty piece means that nothing is new.

    Args:
        is_live: Whether to follow until the job has ended; else existing lines are yielded once.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        tails = _Tails(client, job, node, pool, is_live=is_live)

        def wait(wait_s: float) -> None:
            pause(min(wait_s, 1.0) if tails.is_over else wait_s)

        def read_new() -> Iterator[Piece]:
            if tails.has_news:
                # The service allows only so many requests a minute.
                wait(poll_s)
            yield from tails.poll()

        if is_live:
            pause_s = (poll_s, poll_s * _SLOWEST)
            yield from following.poll(
                read_new, tails.has_ended, follow=True, pause_s=pause_s, pause=wait
            )
        else:
            yield from tails.poll()
        yield from tails.rest()


class _Tails:
    """The logs of all tasks of a job.

    A large job is sampled while it runs: each round asks for the head's log and for some of the
    others in turn. A log that one round leaves out is read in a later one, or after the end.
    """

    def __init__(
        self,
        client: ModelArtsClient,
        job: str,
        node: int | None,
        pool: ThreadPoolExecutor,
        *,
        is_live: bool,
    ) -> None:
        self._client = client
        self._job = job
        self._node = node
        self._pool = pool
        self._is_live = is_live
        self._tails: dict[str, _Tail] = {}
        self._turn = 0
        # How many rounds in a row have found nothing in any log.
        self._quiet = 0
        self.is_over = self.has_news = False

    def has_ended(self) -> bool:
        """Whether the job has ended, and a later round has found nothing."""
        return self.is_over and self._quiet > 0

    def poll(self) -> Iterator[Piece]:
        """Yield the new lines."""
        job = self._client.show(self._job)
        self.is_over = state.status_of(job).state.is_final
        for task in state.tasks(job):
            if self._node in (None, state.node_of(task)):
                self._tails.setdefault(task, _Tail(self._client, self._job, task))
        # The state was read before the logs, so they hold everything written before the end.
        is_done = self.has_ended()
        polled = list(self._tails.values())
        if self._is_live and not self.is_over:
            polled = _sample(polled, self._turn)
        self._turn += 1
        pieces = list(self._pool.map(_Tail.poll, polled, repeat(is_done)))
        is_behind = any(tail.is_behind for tail in self._tails.values())
        self.has_news = any(pieces) or is_behind
        is_quiet = not self.has_news and len(polled) == len(self._tails)
        self._quiet = self._quiet + 1 if is_quiet else 0
        yield from ((tail.node, data) for tail, data in zip(polled, pieces, strict=True) if data)
        if is_behind:
            yield 0, b""

    def rest(self) -> Iterator[Piece]:
        """Yield the rest of each log at the end."""
        yield from ((t.node, data) for t in self._tails.values() if (data := t.rest()))


def _sample(tails: list[_Tail], turn: int) -> list[_Tail]:
    """Return the logs of this round: all if few; else the head's, and others in turn."""
    if len(tails) <= _PER_POLL:
        return tails
    head, others = tails[0], tails[1:]
    first = turn * (_PER_POLL - 1) % len(others)
    return [head, *(others[first:] + others[:first])[: _PER_POLL - 1]]


class _Tail:
    """The log of one task, as far as it was yielded."""

    def __init__(self, client: ModelArtsClient, job: str, task: str) -> None:
        self._client = client
        self._job = job
        self._task = task
        self._stitcher = Stitcher()
        self._window: Window | None = None
        self._gap_tries = 0

    @property
    def node(self) -> int:
        """The node's number."""
        return state.node_of(self._task)

    @property
    def is_behind(self) -> bool:
        """Whether part of the log is known but not yielded yet."""
        return 0 < self._gap_tries < _GAP_TRIES

    def poll(self, is_done: bool) -> bytes:
        """Return the whole lines that are new."""
        preview = self._client.log_preview(self._job, self._task)
        if preview is None:
            return b""
        window = _window(preview)
        added = self._add(window, is_last=is_done)
        # For a thousand nodes, the windows would take 5 GB.
        self._window = window if self._stitcher.seen_bytes < window.full_bytes else None
        return added

    def rest(self) -> bytes:
        """Return the rest at the end: a line without a newline."""
        return self._add(self._window, is_last=True) if self._window else b""

    def _add(self, window: Window, *, is_last: bool) -> bytes:
        added = self._stitcher.add(window, is_last=is_last)
        if added is not None:
            self._gap_tries = 0
            return added
        return self._filled(window, is_last=is_last)

    def _filled(self, window: Window, *, is_last: bool) -> bytes:
        """Return lines older than the window from the exported log."""
        doing = f"reading the exported log of {self._task}"
        url = self._client.log_url(self._job, self._task)
        got = self._client.fetch(url, self._stitcher.seen_bytes, doing) if url else None
        if got:
            self._gap_tries = 0
            return self._stitcher.give(got, is_last=is_last)
        self._gap_tries += 1
        if self._gap_tries < _GAP_TRIES and not is_last:
            return b""
        lost = self._stitcher.skip(window)
        note = f"cloudjob: {lost} bytes of this log are missing: the service does not show them\n"
        return note.encode("ascii")


def _window(preview: dict[str, Any]) -> Window:
    text = str(preview.get("content") or "")
    size_bytes = _size(text)
    current = preview.get("current_size")
    full = preview.get("full_size")
    current = current if isinstance(current, int) else size_bytes
    return Window(text, current, full if isinstance(full, int) and full >= current else current)


# -- a log, assembled from its windows -----------------------------------------------------------


class Window(NamedTuple):
    """The end of a log, as the service returns it.

    Args:
        size_bytes: The size of ``text`` in the log.
        full_bytes: The size of the whole log.
    """

    text: str
    size_bytes: int
    full_bytes: int

    @property
    def first(self) -> int:
        """Its offset in the log."""
        return self.full_bytes - self.size_bytes


class Stitcher:
    """Joins the windows of one log: yields every line once, in order."""

    def __init__(self) -> None:
        # Bytes of the log up to the end of the last line that was yielded.
        self._seen_bytes = 0
        # The end of what was yielded, as the service decodes it.
        self._tail = ""
        # Whether _tail goes back to the beginning of the log.
        self._is_whole = True

    @property
    def seen_bytes(self) -> int:
        """How many bytes of the log have been yielded."""
        return self._seen_bytes

    def add(self, window: Window, *, is_last: bool = False) -> bytes | None:
        """Return the whole lines of ``window`` that are new; None if some before it are missing.

        Args:
            is_last: Whether the log has ended, so that its last line may lack its newline.
        """
        if window.full_bytes < self._seen_bytes:
            # A rescheduled node starts a new log.
            self._seen_bytes, self._tail, self._is_whole = 0, "", True
        if window.first > self._seen_bytes:
            return None
        begin = self._begin(window)
        return None if begin is None else self._take(window, begin, is_last=is_last)

    def give(self, data: bytes, *, is_last: bool = False) -> bytes:
        """Return the whole lines of ``data``, the bytes of the log from ``seen_bytes`` on."""
        end = len(data) if is_last else data.rfind(b"\n") + 1
        new = data[:end]
        self._seen_bytes += len(new)
        self._remember(new.decode("utf-8", "replace"))
        return _ended(new, is_last=is_last)

    def skip(self, window: Window) -> int:
        """Continue at ``window``, and return how many bytes before it are lost."""
        lost = max(0, window.first - self._seen_bytes)
        self._seen_bytes, self._tail, self._is_whole = window.first, "", False
        return lost

    def _begin(self, window: Window) -> int | None:
        """Return where new text begins in the window; None if unknown.

        U+FFFD stands for one to three bytes. Counted as three, the bytes before the place give a
        lower bound of its index, and the bytes after it an upper bound.
        """
        old_bytes = max(0, self._seen_bytes - window.first)
        if not (self._seen_bytes and old_bytes):
            return 0
        text, data = window.text, _encoded(window.text)
        new_bytes = window.full_bytes - self._seen_bytes
        low = len(data[:old_bytes].decode("utf-8", "ignore"))
        high = len(text) - len(data[max(0, len(data) - new_bytes) :].decode("utf-8", "ignore"))
        if _REPLACEMENT not in text[high:] and self._fits(text, high):
            return high
        if _REPLACEMENT not in text[:low] and self._fits(text, low):
            return low
        places = _line_ends(text, low, high)
        return next((place for place in places if self._fits(text, place, _PROOF_CHARS)), None)

    def _fits(self, text: str, place: int, proof: int = 0) -> bool:
        """Whether the text before ``place`` is the end of what was read.

        Args:
            proof: How many characters must be the same.
        """
        # Otherwise the text before it could be only U+FFFD, which is skipped below.
        if self._tail and text[place - 1 : place] != self._tail[-1]:
            return False
        # The window may begin within a character, the rest of which is then invalid.
        first = 0
        while first < min(_MAX_BROKEN_CHARS, place) and text[first] == _REPLACEMENT:
            first += 1
        kept = len(self._tail)
        if place - first > kept:
            return kept >= proof and not self._is_whole and text[place - kept : place] == self._tail
        return place - first >= proof and self._tail.endswith(text[first:place])

    def _take(self, window: Window, begin: int, *, is_last: bool) -> bytes:
        """Return the new whole lines, as far as their size in bytes is known.

        U+FFFD may stand for one byte or for three. Lines without it can be counted; lines with it
        only if the held-back text has none, otherwise they wait.
        """
        text = window.text
        end = len(text) if is_last else text.rfind("\n") + 1
        if _REPLACEMENT in text[begin:end] and _REPLACEMENT in text[end:]:
            end = text.rfind("\n", 0, text.index(_REPLACEMENT, begin)) + 1
        if end <= begin:
            return b""
        new = text[begin:end]
        if _REPLACEMENT in new:
            self._seen_bytes = window.full_bytes - _size(text[end:])
        else:
            self._seen_bytes += _size(new)
        self._remember(new)
        return _ended(_encoded(new), is_last=is_last)

    def _remember(self, new: str) -> None:
        tail = self._tail + new
        if len(tail) > _KEPT:
            tail = tail[-_KEPT:]
            self._is_whole = False
        self._tail = tail


def _ended(new: bytes, *, is_last: bool) -> bytes:
    return new + b"\n" if is_last and new and not new.endswith(b"\n") else new


def _line_ends(text: str, low: int, high: int) -> Iterator[int]:
    """Yield the index after each newline from ``low`` to ``high``, both included."""
    place = text.find("\n", max(0, low - 1)) + 1
    while 0 < place <= high:
        yield place
        place = text.find("\n", place) + 1


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _size(text: str) -> int:
    return len(_encoded(text))
