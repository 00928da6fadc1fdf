"""The log of a task, followed through a window on its end.

The service shows the last 5 MB of a log and takes no offset. So each look has to find out where
the window lies on what was seen before: by the sizes that come with it, and by the text itself
where bytes that are no UTF-8 have made the sizes useless.
"""

from __future__ import annotations

from typing import NamedTuple

# How many characters of what was seen are kept to recognise it, of each of a thousand logs.
_KEPT = 256 * 1024
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
        ahead_bytes = self._seen_bytes - window.first
        guesses = [
            _index_of(window.text, ahead_bytes),
            _index_from_end(window.text, window.full_bytes - self._seen_bytes),
        ]
        for guess in guesses:
            if guess is not None and self._fits(window.text, guess):
                return guess
        return self._search(window.text, ahead_bytes)

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

    def _search(self, text: str, ahead_bytes: int) -> int | None:
        """Return the place at which what was seen ends: the likeliest by the number of bytes."""
        end = self._tail[-_PROOF:]
        if not end:
            return None
        best: int | None = None
        nearest_bytes = 0
        at = text.find(end)
        while at >= 0:
            place = at + len(end)
            away_bytes = abs(_size(text[:place]) - ahead_bytes)
            if (best is None or away_bytes < nearest_bytes) and self._fits(text, place):
                best, nearest_bytes = place, away_bytes
            at = text.find(end, at + 1)
        return best

    def _take(self, window: Window, begin: int, *, is_last: bool) -> bytes:
        """Give out the new whole lines, as far as one can say how many bytes of the log they are.

        U+FFFD may stand for one byte or for three. Lines without it can be counted, and lines with
        it, too, while what is held back has none; else they wait until it has.
        """
        text = window.text
        end = len(text) if is_last else text.rfind("\n") + 1
        if _REPLACED in text[begin:end] and _REPLACED in text[end:]:
            end = text.rfind("\n", 0, text.index(_REPLACED, begin)) + 1
        if end <= begin:
            return b""
        new = text[begin:end]
        if _REPLACED in new:
            self._seen_bytes = window.full_bytes - _size(text[end:])
        else:
            self._seen_bytes += _size(new)
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


def _index_of(text: str, size_bytes: int) -> int | None:
    """Return how many characters the first bytes are, None where one cannot count them."""
    part = text[:size_bytes]
    if _REPLACED in part:
        # It may lie behind the place that is looked for; a character has four bytes at most.
        part = part[: part.index(_REPLACED)]
    encoded = part.encode("utf-8", "surrogatepass")
    if len(encoded) < size_bytes:
        return None
    return _characters(encoded[:size_bytes])


def _index_from_end(text: str, size_bytes: int) -> int | None:
    """Return where the last bytes begin, None where one cannot count them."""
    part = text[-size_bytes:] if size_bytes else ""
    part = part[part.rfind(_REPLACED) + 1 :]
    encoded = part.encode("utf-8", "surrogatepass")
    if len(encoded) < size_bytes:
        return None
    count = _characters(encoded[len(encoded) - size_bytes :])
    return None if count is None else len(text) - count


def _characters(data: bytes) -> int | None:
    """Return how many characters these bytes are, None when one of them is cut."""
    try:
        return len(data.decode("utf-8", "surrogatepass"))
    except UnicodeDecodeError:
        return None


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
