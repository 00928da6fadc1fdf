"""The log of a node: messages of the entry, and the ranks' logs, copied line by line to stdout."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from typing import Callable

from jobentry.contract import lines, masks, messages
from jobentry.secrets import masking

# The interval between two looks at the logs: a hundredth of the time without output, within these
# limits, as a hundred looks a second take almost 1 % of a CPU.
_MIN_POLL_S, _MAX_POLL_S = 0.01, 0.05
# How long an incomplete line (a progress bar) waits for its newline.
PATIENCE_S = 0.3
_PIECE_BYTES = 1 << 20
# A longer line is written in parts, to limit memory.
_MAX_LINE_BYTES = 16 << 20
# Pieces of output that wait in memory, as the disk of their log is full; each has 256 KiB at most.
_MAX_BEYOND = 64

_lock = threading.Lock()
_copy: Callable[[bytes], None] | None = None


def copy_log(add: Callable[[bytes], None] | None) -> None:
    """Pass everything that is logged from now on to ``add`` as well; None stops this."""
    global _copy
    _copy = add


def _copied(data: bytes) -> bytes:
    if _copy is not None:
        try:
            _copy(data)
        except MemoryError:
            copy_log(None)
    return data


def log_message(text: str) -> None:
    """Write a message of the entry, never within a line of a rank.

    Secrets are masked. On a full disk the message is lost, but the job continues.
    """
    with _lock, contextlib.suppress(OSError):
        hidden = masking.hide(text).replace("\n", "\n          ")
        line = f"{messages.MARK}{hidden}\n"
        _copied(line.encode("utf-8", "backslashreplace"))
        sys.stderr.write(line)
        sys.stderr.flush()


def size_text(size_bytes: float) -> str:
    """Return a number of bytes as messages show it."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes:.0f} B"


def write_journal(line: bytes) -> None:
    """Write a marked line of the journal to the log, never within a line of a rank."""
    with _lock, contextlib.suppress(OSError):
        _write(1, _copied(line))


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def pause_s(quiet_s: float) -> float:
    """Return how long to wait before the next look at logs that have not grown for some time."""
    return min(_MAX_POLL_S, max(_MIN_POLL_S, quiet_s / 100))


class Relay:
    """Copies the logs of this node's ranks to ``descriptor``, with a prefix for each rank."""

    def __init__(self, log_dir: str, descriptor: int = 1) -> None:
        # Called before each write.
        self.before_write: Callable[[], object] = lambda: None
        # Called once, when a rank has written something.
        self.on_output: Callable[[], None] | None = None
        self._log_dir = log_dir
        self._descriptor = descriptor
        self._logs: dict[int, _Log] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="relay", daemon=True)
        # How much could not be written since the last piece that could, and why.
        self.missing_bytes, self.reason = 0, ""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, rank: int) -> None:
        """Copy the log of ``rank`` from its beginning."""
        self._logs.setdefault(rank, _Log(rank, os.path.join(self._log_dir, "rank-%d.log" % rank)))

    def pass_on(self, rank: int, data: bytes) -> None:
        """Copy output that could not be written to the log of ``rank``, after that log."""
        self._logs[rank].beyond.append(data)

    def is_behind(self, rank: int) -> bool:
        """Whether much output that is in no log waits for the reader of this one."""
        return len(self._logs[rank].beyond) > _MAX_BEYOND

    def finish(self) -> None:
        """Write the rest of all logs and stop."""
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        grown_s = time.monotonic()
        while not self._ended.is_set():
            if self._copy_output(is_last=False):
                grown_s = time.monotonic()
            else:
                self._ended.wait(pause_s(time.monotonic() - grown_s))
        while self._copy_output(is_last=False):
            pass
        self._copy_output(is_last=True)

    def _copy_output(self, *, is_last: bool) -> bool:
        """Write new output; return whether any log has grown."""
        has_grown = False
        for log in list(self._logs.values()):
            has_grown = log.grow() or has_grown
            if has_grown and self.on_output is not None:
                # Before the output, so that the end of this phase is near the log's beginning.
                self.on_output()
                self.on_output = None
            for piece in log.pieces(is_last):
                self._write(piece)
        return has_grown

    def _write(self, data: bytes) -> None:
        self.before_write()
        with _lock:
            rest = memoryview(_copied(data))
            try:
                if self.missing_bytes:
                    size = size_text(self.missing_bytes)
                    # On a line of its own: the last piece may have been cut.
                    gap = f"\n{messages.MARK}{size} of output are missing here: {self.reason}\n"
                    _write(self._descriptor, gap.encode())
                    self.missing_bytes = 0
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError as error:
                # No reader, or a full disk; the ranks' own logs are not affected.
                self.missing_bytes += len(rest)
                self.reason = error.strerror or str(error)


class _Log:
    """The log of one rank, and the part of it that is not yet written."""

    def __init__(self, rank: int, path: str) -> None:
        self._rank = rank
        self._path = path
        self._file = -1
        # Output that follows the file's, which could not be written.
        self.beyond: deque[bytes] = deque()
        self._waiting = b""
        self._since = 0.0
        # The end of the incomplete line that was written last, in which a secret may begin.
        self._before = b""

    def grow(self) -> bool:
        """Read what was added since the last call; return whether there is anything new."""
        data = self._read()
        if data and not self._waiting:
            self._since = time.monotonic()
        self._waiting += data
        return bool(data)

    def pieces(self, is_last: bool) -> list[bytes]:
        """Return the stream text that can be written now."""
        text, taken = lines.write(self._rank, self._waiting)
        if taken:
            whole, self._waiting = self._waiting[:taken], self._waiting[taken:]
            secrets = masking.find(whole, self._before)
            if secrets:
                text = masks.write(self._rank, whole, secrets)
            self._since, self._before = time.monotonic(), b""
        pieces = [text] if text else []
        if self._waiting and (is_last or self._is_due()):
            pieces.append(self._part())
        return pieces

    def _is_due(self) -> bool:
        """Whether an incomplete line has waited long enough or is too long."""
        return time.monotonic() - self._since >= PATIENCE_S or len(self._waiting) > _MAX_LINE_BYTES

    def _part(self) -> bytes:
        part, self._waiting = self._waiting, b""
        secrets = masking.find(part, self._before, is_part=True)
        kept_bytes = masking.max_secret_bytes()
        self._before = (self._before + part)[-kept_bytes:] if kept_bytes else b""
        return masks.write_part(self._rank, part, secrets)

    def _read(self) -> bytes:
        if self._file < 0:
            try:
                self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return b""
        has_beyond = bool(self.beyond)
        data = os.read(self._file, _PIECE_BYTES)
        return data if data or not has_beyond else self.beyond.popleft()


def last_lines(path: str, count: int = 20, limit_bytes: int = 16384) -> list[str]:
    """Return the last lines of a log as text; for a progress bar, only its last state.

    Secrets are masked.
    """
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            # More than is kept, so that no secret is cut.
            file.seek(max(0, size - limit_bytes - masking.max_secret_bytes()))
            data = masking.hide_bytes(file.read())[-limit_bytes:]
    except OSError:
        return []
    text = data.decode("utf-8", "replace").rstrip("\n")
    tails = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n")]
    return tails[-count:] if text else []
