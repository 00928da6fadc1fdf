"""Turns a job's marked log into text to show: marks, whole lines, progress bars. No I/O."""

from __future__ import annotations

import re

from cloudjob.model import bars
from jobentry.contract import lines

# Up to this number of ranks, counting marks is faster than checking each line.
_FEW = 16
# The most bytes that are kept of an unfinished line.
_MAX_BYTES = 1024 * 1024


class Screen:
    """Turns the marked stream of all nodes into whole lines, each with the mark of its rank.

    A line with carriage returns, such as a progress bar, is shown in its last state only; nested
    bars, which overwrite each other, are shown in the last state of all of them.

    Args:
        is_live: Whether the ranks' text goes to a terminal and not to a file: then all control
            sequences except colours are removed.
        are_messages_live: Whether messages of the entry go to a terminal.
    """

    def __init__(self, *, is_live: bool, are_messages_live: bool = True) -> None:
        self._is_live = is_live
        self._are_messages_live = are_messages_live
        self._parts: dict[int, bytes] = {}
        self._open: int | None = None
        self._known: set[int] = set()

    @property
    def has_parts(self) -> bool:
        """Whether any rank has written an unfinished line."""
        return bool(self._parts)

    @property
    def bars(self) -> dict[int, bytes]:
        """The unfinished line of each rank, such as the state of its progress bar."""
        state_of = {rank: bars.last_state(part) for rank, part in sorted(self._parts.items())}
        safe = {rank: _safe(text.rstrip(b"\r\n")) for rank, text in state_of.items()}
        return {rank: text for rank, text in safe.items() if text.strip()}

    def show(self, data: bytes, start: bytes = b"") -> tuple[bytes, bytes]:
        """Return the ranks' text and the messages of the entry from whole lines of the stream.

        Args:
            start: Written at the start of each line, such as its time.
        """
        if not (self._parts or start) and self._is_plain(data):
            return self._close_open() + data, b""
        ranks: list[bytes] = []
        messages: list[bytes] = []
        for text in data.split(b"\n")[:-1]:
            line = lines.read(text + b"\n")
            if line.rank is None:
                message = _safe(line.data) if self._are_messages_live else line.data
                messages.append(start + message)
            else:
                self._known.add(line.rank)
                ranks.append(self._line(line.rank, line.data, start))
        return b"".join(ranks), b"".join(messages)

    def finish(self, start: bytes = b"") -> bytes:
        """Return the unfinished lines at the end of the stream."""
        rest = [self._close_open()]
        for rank, part in sorted(self._parts.items()):
            text = bars.last_state(part).rstrip(b"\r\n")
            # A bar that has erased itself is not shown.
            if text.strip() or not part.endswith((b"\r", b"\n")):
                rest.append(self._marked(rank, text, start) + b"\n")
        self._parts.clear()
        return b"".join(rest)

    def _is_plain(self, data: bytes) -> bool:
        """Whether ``data`` contains only whole lines of ranks that were seen before."""
        if len(self._known) > _FEW or b"\r" in data:
            return False
        if self._is_live and _NOT_PLAIN.search(data):
            return False
        marks = [b"[%d] " % rank for rank in self._known]
        starts_marked = any(data.startswith(mark) for mark in marks)
        return starts_marked + sum(data.count(b"\n" + mark) for mark in marks) == data.count(b"\n")

    def _line(self, rank: int, data: bytes, start: bytes) -> bytes:
        is_whole = data.endswith(b"\n")
        if self._open == rank:
            # The rest of a long line whose beginning was written before.
            self._open = None if is_whole else rank
            return data
        before = self._parts.pop(rank, b"")
        above = b""
        if before.endswith(b"\n"):
            if not data.startswith(b"\r"):
                above = self._close_open() + self._marked(rank, bars.last_state(before), start)
            before = b""
        text = bars.reduced(before + data)
        if is_whole and not bars.is_overwritten(text):
            text = bars.last_state(text)
            return above + self._close_open() + self._marked(rank, text, start)
        return above + self._kept(rank, text, start)

    def _kept(self, rank: int, text: bytes, start: bytes) -> bytes:
        """Keep text that may be overwritten; return it if it is too long to keep."""
        if len(text) < _MAX_BYTES:
            self._parts[rank] = text
            return b""
        text = bars.last_state(text)
        if self._is_live:
            # Live lines follow below, so the text must end with a newline.
            return self._marked(rank, text, start) + b"\n"
        opened = self._close_open() + self._marked(rank, text, start)
        self._open = rank
        return opened

    def _marked(self, rank: int, text: bytes, start: bytes) -> bytes:
        return b"%s[%d] %s" % (start, rank, _safe(text) if self._is_live else text)

    def _close_open(self) -> bytes:
        if self._open is None:
            return b""
        # A line of another rank ends the open one early.
        self._open = None
        return b"\n"


# ---- text that is safe for a terminal ------------------------------------------------------------

# Any control character but the end of a line and a tab, and anything that is not ASCII.
_NOT_PLAIN = re.compile(rb"[^\t\n\x20-\x7e]")
_COLOUR = r"\x1b\[[0-9;:]{0,40}m"
# Other sequences, as far as they can be distinguished from text; and single characters that control
# a terminal or the direction of text. Characters from U+DC80 on are bytes that are not UTF-8.
_CONTROL = re.compile(
    rf"({_COLOUR})"
    r"|\x1b\[[0-?]*[ -/]*[@-~]?"
    r"|\x1b[]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?"
    r"|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\udc80-\udc9f]"
)
_RESET = "\x1b[0m"


def _safe(data: bytes) -> bytes:
    """Return a line that is safe for a terminal: only text and colours, reset at its end."""
    if not _NOT_PLAIN.search(data):
        return data
    text = data.decode("utf-8", "surrogateescape")
    text = _CONTROL.sub(lambda control: control[1] or "", text)
    if "\x1b" in text:
        body = text.rstrip("\n")
        text = body + _RESET + text[len(body) :]
    return text.encode("utf-8", "surrogateescape")
