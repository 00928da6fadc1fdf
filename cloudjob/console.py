"""How a job's log looks to a person: marks, whole lines, progress bars in their place. No I/O."""

from __future__ import annotations

from jobentry.contract import lines

# Counting marks beats looking at each line as long as the ranks are few.
_FEW = 16


class Screen:
    """Turns the marked stream of all nodes into what is shown.

    Args:
        is_live: Whether a part of a line may be shown before the rest has come, to be gone over
            when it has: on a terminal, but not in a file.
        rank: Show only this rank.
    """

    def __init__(self, *, is_live: bool, rank: int | None = None) -> None:
        self._is_live = is_live
        self._rank = rank
        self._parts: dict[int, bytes] = {}
        self._open: int | None = None
        self._known: set[int] = set()

    def show(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the ranks' text and our own words in ``data``, which holds whole lines."""
        if self._rank is None and not self._parts and self._is_plain(data):
            return self._close_open() + data, b""
        ranks: list[bytes] = []
        words: list[bytes] = []
        for text in data.split(b"\n")[:-1]:
            line = lines.read(text + b"\n")
            if line.rank is not None:
                self._known.add(line.rank)
            if line.rank is None:
                if self._rank is None:
                    words.append(line.data)
            elif self._rank in (None, line.rank):
                ranks.append(self._line(line.rank, line.data))
        return b"".join(ranks), b"".join(words)

    def finish(self) -> bytes:
        """Return what is still open when the stream has ended."""
        if self._is_live:
            return self._close_open()
        rest = b"".join(b"[%d] %s\n" % (rank, part) for rank, part in sorted(self._parts.items()))
        self._parts.clear()
        return rest

    def _is_plain(self, data: bytes) -> bool:
        """Whether ``data`` holds nothing but whole lines of ranks that were seen before."""
        if len(self._known) > _FEW:
            return False
        marks = [b"[%d] " % rank for rank in self._known]
        begun = any(data.startswith(mark) for mark in marks)
        return begun + sum(data.count(b"\n" + mark) for mark in marks) == data.count(b"\n")

    def _line(self, rank: int, data: bytes) -> bytes:
        if data.endswith(b"\n"):
            before = self._parts.pop(rank, b"")
            if self._is_live and self._open == rank:
                # The part is on the screen already: only what is new follows it.
                self._open = None
                return self._over(rank, before, data)
            return self._close_open() + b"[%d] %s" % (rank, before + data)
        before = self._parts.get(rank, b"")
        self._parts[rank] = before + data
        if not self._is_live:
            return b""
        if self._open == rank:
            return self._over(rank, before, data)
        opened = self._close_open() + b"[%d] %s" % (rank, _last_state(before + data))
        self._open = rank
        return opened

    def _over(self, rank: int, before: bytes, data: bytes) -> bytes:
        """Go on in the line on the screen; after a carriage return the mark stands there again."""
        body = data.rstrip(b"\r\n") if data.endswith(b"\n") else data
        end = data[len(body) :]
        if b"\r" not in body.rstrip(b"\r") and not before.endswith(b"\r"):
            return body + end
        return b"\r[%d] %s%s" % (rank, _last_state(body), end)

    def _close_open(self) -> bytes:
        if self._open is None:
            return b""
        # Another rank's line begins: this one may not be cut, so it is ended here.
        self._open = None
        return b"\n"


def _last_state(text: bytes) -> bytes:
    """Return what a terminal would show of a line with carriage returns."""
    return text.rstrip(b"\r").rpartition(b"\r")[2]
