"""The log of a task, followed through a window on its end.

The service shows the last 5 MB of a log and takes no offset. So each look has to find out where
the window lies on what was seen before: by the sizes that come with it, and by the text itself
where bytes that are no UTF-8 have made the sizes useless.
"""

from __future__ import annotations

from typing import NamedTuple

# How much of what was seen is kept, to recognise it: more than a window holds.
_KEPT = 6 * 1024 * 1024
# A window may begin within a character, whose rest then reads as this.
_REPLACED = "�"
_BROKEN = 3
# What is taken for proof that a window continues what was seen, where sizes say nothing.
_PROOF = 64


class Window(NamedTuple):
    """What the service shows of a log.

    Args:
        size_bytes: Of the log's part that ``text`` is.
        full_bytes: Of the whole log.
    """

    text: str
    size_bytes: int
    full_bytes: int

    @property
    def first(self) -> int:
        """Where in the log it begins."""
        return self.full_bytes - self.size_bytes

    @property
    def is_exact(self) -> bool:
        """Whether the bytes of the text are the log's."""
        return len(self.text.encode("utf-8", "surrogatepass")) == self.size_bytes


class Gap(NamedTuple):
    """Between what was seen and the window lies something that nobody has seen.

    Args:
        first: The first byte that is missing.
        last: The byte after the last that is missing; the same when nobody knows.
    """

    first: int
    last: int


class Stitcher:
    """Joins the windows on one log: every line once, in order."""

    def __init__(self) -> None:
        # Bytes of the log up to the end of the last whole line that was given out.
        self._seen_bytes = 0
        # The end of what was given out, in the service's own reading.
        self._tail = ""
        # Whether _tail goes back to the beginning of the log.
        self._is_whole = True

    @property
    def seen_bytes(self) -> int:
        """How many bytes of the log have been given out."""
        return self._seen_bytes

    def add(self, window: Window, *, is_last: bool = False) -> bytes | Gap:
        """Return the whole lines of ``window`` that are new, or what is missing before it.

        Args:
            is_last: Whether the log has ended, so that its last line may lack its newline.
        """
        if window.full_bytes < self._seen_bytes:
            # A node that was given to the job anew begins a log of its own.
            self._seen_bytes, self._tail, self._is_whole = 0, "", True
        if window.first > self._seen_bytes:
            return Gap(self._seen_bytes, window.first)
        begin = self._begin(window)
        if begin is None:
            return Gap(self._seen_bytes, self._seen_bytes)
        return self._take(window, begin, is_last=is_last)

    def give(self, data: bytes, *, is_last: bool = False) -> bytes:
        """Return the whole lines of ``data``, the bytes of the log from ``seen_bytes`` on."""
        end = len(data) if is_last else data.rfind(b"\n") + 1
        new = data[:end]
        self._seen_bytes += len(new)
        self._remember(new.decode("utf-8", "replace"))
        return _ended(new, is_last=is_last)

    def skip(self, window: Window) -> int:
        """Go on with ``window``, and return how many bytes before it nobody will ever see."""
        lost = max(0, window.first - self._seen_bytes)
        self._seen_bytes, self._tail, self._is_whole = window.first, "", False
        return lost

    def _begin(self, window: Window) -> int | None:
        """Return where in the window's text what is new begins, None when nothing tells."""
        if not self._seen_bytes:
            return 0
        growth_bytes = window.full_bytes - self._seen_bytes
        guess = _index_from_end(window.text, growth_bytes)
        if guess is not None and self._fits(window.text, guess):
            return guess
        return self._search(window.text, guess if guess is not None else len(window.text))

    def _fits(self, text: str, begin: int) -> bool:
        """Whether the text before ``begin`` is the end of what was seen."""
        # The window may begin within a character, whose rest is then broken.
        first = 0
        while first < min(_BROKEN, begin) and text[first] == _REPLACED:
            first += 1
        before = text[first:begin]
        if len(before) > len(self._tail):
            return not self._is_whole and before.endswith(self._tail)
        return self._tail.endswith(before)

    def _search(self, text: str, guess: int) -> int | None:
        """Return the place nearest to ``guess`` at which what was seen ends."""
        end = self._tail[-_PROOF:]
        if not end:
            return guess
        best: int | None = None
        at = text.find(end)
        while at >= 0:
            place = at + len(end)
            is_nearer = best is None or abs(place - guess) < abs(best - guess)
            if is_nearer and self._fits(text, place):
                best = place
            at = text.find(end, at + 1)
        return best

    def _take(self, window: Window, begin: int, *, is_last: bool) -> bytes:
        end = len(window.text) if is_last else window.text.rfind("\n") + 1
        if end <= begin:
            return b""
        new, rest = window.text[begin:end], window.text[end:]
        # Counted from the end: what is held back is short, and most likely sound.
        self._seen_bytes = window.full_bytes - len(rest.encode("utf-8", "surrogatepass"))
        self._remember(new)
        return _ended(new.encode("utf-8", "surrogatepass"), is_last=is_last)

    def _remember(self, new: str) -> None:
        tail = self._tail + new
        if len(tail) > _KEPT:
            tail = tail[-_KEPT:]
            self._is_whole = False
        self._tail = tail


def _ended(new: bytes, *, is_last: bool) -> bytes:
    return new + b"\n" if is_last and new and not new.endswith(b"\n") else new


def _index_from_end(text: str, size_bytes: int) -> int | None:
    """Return where in ``text`` its last ``size_bytes`` bytes begin, None within a character."""
    if size_bytes <= 0:
        return len(text) if size_bytes == 0 else None
    # Fast for what is mostly ASCII: no more characters than bytes.
    encoded = text[-size_bytes:].encode("utf-8", "surrogatepass")
    if len(encoded) < size_bytes:
        return None
    tail = encoded[len(encoded) - size_bytes :]
    if tail and tail[0] & 0xC0 == 0x80:
        return None
    return len(text) - len(tail.decode("utf-8", "surrogatepass"))
