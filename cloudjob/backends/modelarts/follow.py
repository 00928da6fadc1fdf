"""Follows the logs of all tasks of a job until it has ended, and then to their very end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any

from cloudjob.backends.modelarts import state
from cloudjob.backends.modelarts.client import Client
from cloudjob.backends.modelarts.logs import Gap, Stitcher, Window

_AT_ONCE = 8
# How many nodes a look at a running job asks for, each with a request: of more they take turns.
_A_LOOK = 64
# Nothing new comes rarely: then the looks become rarer, too.
_SLOWER, _SLOWEST = 1.5, 3.0
# After its end a log may still grow for a moment; so often it must be the same to be complete.
_SAME = 2
# How often a gap is looked for in the exported log before it is given up.
_GAP_TRIES = 20


def follow(
    client: Client,
    job: str,
    node: int | None,
    *,
    is_live: bool,
    poll_s: float,
    pause: Callable[[float], object],
) -> Iterator[tuple[int, bytes]]:
    """Yield pieces ``(node, whole lines)``; an empty piece means that nothing is new.

    A large job is sampled while it runs: each look asks for the head and for some of the others in
    their turn. What a look leaves out comes with a later one, at last with those after the end.

    Args:
        is_live: Whether to stay until the job has ended; else what is there now is given once.
    """
    tails: dict[str, _Tail] = {}
    wait_s, same, turn = poll_s, 0, 0
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        while True:
            shown = client.show(job)
            is_over = state.status_of(shown).state.is_final
            for task in state.tasks(shown):
                if node in (None, state.node_of(task)):
                    tails.setdefault(task, _Tail(client, job, task))
            # The state is from before the look: what was written before the end is in it.
            is_done = is_over and same > 0
            asked = list(tails.values())
            if is_live and not is_over:
                asked = _sample(asked, turn)
            turn += 1
            found = pool.map(_Tail.look, asked, repeat(is_done))
            new = [(tail.node, data) for tail, data in zip(asked, found, strict=True)]
            yield from ((index, data) for index, data in new if data)
            has_new = any(data for _, data in new)
            is_open = any(tail.is_behind for tail in tails.values())
            same = 0 if has_new or is_open or len(asked) < len(tails) else same + 1
            if not is_live or (is_over and same >= _SAME):
                break
            wait_s = poll_s if has_new or is_over else min(wait_s * _SLOWER, poll_s * _SLOWEST)
            if not has_new:
                yield 0, b""
            pause(min(wait_s, 1.0) if is_over else wait_s)
        yield from ((tail.node, data) for tail in tails.values() if (data := tail.rest()))


def _sample(tails: list[_Tail], turn: int) -> list[_Tail]:
    """Return those that this look asks: all of few; of many the head, and others in their turn."""
    if len(tails) <= _A_LOOK:
        return tails
    head, others = tails[0], tails[1:]
    first = turn * (_A_LOOK - 1) % len(others)
    return [head, *(others[first:] + others[:first])[: _A_LOOK - 1]]


class _Tail:
    """The log of one task, as far as it was given out."""

    def __init__(self, client: Client, job: str, task: str) -> None:
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
        """Whether something is known to be there that has not been given out."""
        return 0 < self._gap_tries < _GAP_TRIES

    def look(self, is_done: bool) -> bytes:
        """Return the whole lines that are new."""
        found = self._client.log_preview(self._job, self._task)
        if found is None:
            return b""
        window = _window(found)
        added = self._add(window, is_last=is_done)
        # Of a thousand nodes it would be 5 GB.
        self._window = window if self._stitcher.seen_bytes < window.full_bytes else None
        return added

    def rest(self) -> bytes:
        """Return what is left when nobody looks again: a line that has no end."""
        return self._add(self._window, is_last=True) if self._window else b""

    def _add(self, window: Window, *, is_last: bool) -> bytes:
        added = self._stitcher.add(window, is_last=is_last)
        if isinstance(added, bytes):
            self._gap_tries = 0
            return added
        return self._filled(added, window, is_last=is_last)

    def _filled(self, gap: Gap, window: Window, *, is_last: bool) -> bytes:
        """Return what the window does not show any more, from the log as it is exported."""
        doing = f"reading the exported log of {self._task}"
        url = self._client.log_url(self._job, self._task)
        got = self._client.fetch(url, gap.first, doing) if url else None
        if got:
            self._gap_tries = 0
            return self._stitcher.give(got, is_last=is_last)
        self._gap_tries += 1
        if self._gap_tries < _GAP_TRIES and not is_last:
            return b""
        lost = self._stitcher.skip(window)
        note = f"cloudjob: {lost} bytes of this log are lost: the service does not show them\n"
        return note.encode("ascii")


def _window(found: dict[str, Any]) -> Window:
    text = str(found.get("content") or "")
    size_bytes = len(text.encode("utf-8", "surrogatepass"))
    current = found.get("current_size")
    full = found.get("full_size")
    current = current if isinstance(current, int) else size_bytes
    return Window(text, current, full if isinstance(full, int) and full >= current else current)
