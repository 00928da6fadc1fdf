"""Turns a job's marked log into what is shown: marks, whole lines, progress bars. No I/O."""

from __future__ import annotations

import re

from jobentry.contract import lines

# Counting marks beats looking at each line as long as the ranks are few.
_FEW = 16
# The most that is kept of a line that has not ended: in a file what is longer is written at once,
# and a terminal needs only what it shows.
_LONGEST_BYTES, _LONGEST_SHOWN_BYTES = 1024 * 1024, 16 * 1024


class Screen:
    """Turns the marked stream of all nodes into what is shown.

    Args:
        is_live: Whether the ranks' text goes to a terminal and not to a file: then a part of a line
            is shown before the rest has come, and only colours may control the terminal.
        is_live_words: Whether our own text goes to a terminal.
    """

    def __init__(self, *, is_live: bool, is_live_words: bool = True) -> None:
        self._is_live = is_live
        self._is_live_words = is_live_words
        self._parts: dict[int, bytes] = {}
        self._open: int | None = None
        self._known: set[int] = set()

    def show(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the ranks' text and our own text in ``data``, which holds whole lines."""
        if not self._parts and self._is_plain(data):
            return self._close_open() + data, b""
        ranks: list[bytes] = []
        words: list[bytes] = []
        for text in data.split(b"\n")[:-1]:
            line = lines.read(text + b"\n")
            if line.rank is None:
                words.append(_safe(line.data) if self._is_live_words else line.data)
            else:
                self._known.add(line.rank)
                show = self._live_line if self._is_live else self._line
                ranks.append(show(line.rank, line.data))
        return b"".join(ranks), b"".join(words)

    def finish(self) -> bytes:
        """Return what is still open when the stream has ended."""
        if self._is_live:
            return self._close_open()
        rest = self._close_open()
        rest += b"".join(b"[%d] %s\n" % (rank, part) for rank, part in sorted(self._parts.items()))
        self._parts.clear()
        return rest

    def _is_plain(self, data: bytes) -> bool:
        """Whether ``data`` holds nothing but whole lines of ranks that were seen before."""
        if len(self._known) > _FEW or (self._is_live and _NOT_PLAIN.search(data)):
            return False
        marks = [b"[%d] " % rank for rank in self._known]
        begun = any(data.startswith(mark) for mark in marks)
        return begun + sum(data.count(b"\n" + mark) for mark in marks) == data.count(b"\n")

    # -- in a file --------------------------------------------------------------------------------

    def _line(self, rank: int, data: bytes) -> bytes:
        is_whole = data.endswith(b"\n")
        if self._open == rank:
            # A long line, of which the beginning was written: the rest follows.
            self._open = None if is_whole else rank
            return data
        text = self._parts.pop(rank, b"") + data
        if is_whole:
            return self._close_open() + b"[%d] %s" % (rank, text)
        if len(text) < _LONGEST_BYTES:
            self._parts[rank] = text
            return b""
        opened = self._close_open() + b"[%d] %s" % (rank, text)
        self._open = rank
        return opened

    # -- on a terminal ----------------------------------------------------------------------------

    def _live_line(self, rank: int, data: bytes) -> bytes:
        is_whole = data.endswith(b"\n")
        before = self._parts.pop(rank, b"")
        shown = _shown(before + data)
        if self._open != rank:
            opened = self._close_open() + b"[%d] %s" % (rank, _safe(shown))
        elif b"\r" in data.rstrip(b"\r\n") or before.endswith(b"\r"):
            # The carriage return takes the mark with it.
            opened = b"\r[%d] %s" % (rank, _safe(shown))
        else:
            opened = _safe(data.rstrip(b"\r\n"))
        if is_whole:
            self._open = None
            return opened + b"\n"
        self._open = rank
        self._parts[rank] = shown[-_LONGEST_SHOWN_BYTES:] + b"\r" * data.endswith(b"\r")
        return opened

    def _close_open(self) -> bytes:
        if self._open is None:
            return b""
        # A line of another rank begins, and ends this one early.
        self._open = None
        return b"\n"


def _shown(text: bytes) -> bytes:
    """Return what a terminal would show of a line with carriage returns."""
    return text.rstrip(b"\r\n").rpartition(b"\r")[2]


# ---- what may reach a terminal -------------------------------------------------------------------

# Any control character but the end of a line and a tab, and anything that is not ASCII.
_NOT_PLAIN = re.compile(rb"[^\t\n\x20-\x7e]")
_COLOUR = r"\x1b\[[0-9;:]{0,40}m"
# Other sequences, as far as they can be told from text; and what controls a terminal or the order
# of the letters by itself. The characters from U+DC80 on are bytes that are not UTF-8.
_CONTROL = re.compile(
    rf"({_COLOUR})"
    r"|\x1b\[[0-?]*[ -/]*[@-~]?"
    r"|\x1b[]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?"
    r"|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\udc80-\udc9f]"
)
_RESET = "\x1b[0m"


def _safe(data: bytes) -> bytes:
    """Return a line as a terminal may have it: text and colours, which end with the line."""
    if not _NOT_PLAIN.search(data):
        return data
    text = data.decode("utf-8", "surrogateescape")
    text = _CONTROL.sub(lambda found: found[1] or "", text)
    if "\x1b" in text:
        body = text.rstrip("\n")
        text = body + _RESET + text[len(body) :]
    return text.encode("utf-8", "surrogateescape")
