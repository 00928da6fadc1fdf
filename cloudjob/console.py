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


class Transfer:
    """How the way of some bytes looks to a person: a bar on a terminal, else a line now and then.

    What takes no longer than a second shows nothing.

    Args:
        verb: What is being done, as it is said when it has been done: ``sent``.
        now_s: When it begins, on a clock that only goes forward.
    """

    def __init__(self, verb: str, size_bytes: int, now_s: float, *, is_live: bool) -> None:
        self._verb = verb
        self._size_bytes = size_bytes
        self._begun_s = now_s
        self._is_live = is_live
        self._moved_bytes = 0
        self._next_s = now_s + _QUIET_S
        self._is_open = False

    def move(self, count: int, now_s: float) -> str:
        """Return what to show when ``count`` more bytes have come, or fewer than nothing."""
        self._moved_bytes += count
        if now_s < self._next_s:
            return ""
        self._next_s = now_s + (_FRAME_S if self._is_live else _LINE_S)
        text = self._state(now_s - self._begun_s)
        if not self._is_live:
            return f"{text}\n"
        self._is_open = True
        return f"\r{self._bar()} {text}\x1b[K"

    def end(self, now_s: float) -> str:
        """Return what to show when it has ended, well or not."""
        if not self._is_open:
            return ""
        self._is_open = False
        if self._moved_bytes < self._size_bytes:
            return "\n"
        took_s = now_s - self._begun_s
        rate = _megabytes(int(self._size_bytes / took_s))
        return f"\r{self._verb} {_megabytes(self._size_bytes)} in {took_s:.1f} s ({rate}/s)\x1b[K\n"

    def _state(self, took_s: float) -> str:
        rate = max(self._moved_bytes, 0) / took_s
        text = f"{self._verb} {_megabytes(self._moved_bytes)} of {_megabytes(self._size_bytes)}"
        if not rate:
            return text
        left_s = (self._size_bytes - self._moved_bytes) / rate
        return f"{text}, {_megabytes(int(rate))}/s, {_duration(left_s)} left"

    def _bar(self) -> str:
        share = self._moved_bytes / self._size_bytes if self._size_bytes else 1.0
        filled = round(_BAR_WIDTH * min(max(share, 0.0), 1.0))
        return f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {share:4.0%}"


_QUIET_S = 1.0
_FRAME_S = 0.1
_LINE_S = 10.0
_BAR_WIDTH = 24


def _megabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
    )
