"""Shows text that changes in place on a terminal: the bar of a transfer, and lines below a log."""

from __future__ import annotations

import contextlib
import os
import threading
import time

from cloudjob.cli import messages
from cloudjob.cli.messages import print_message, print_progress
from cloudjob.model.text import size_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import Progress as Bar

    from cloudjob import Progress

# Seconds between two updates: of lines, of a bar, and of messages about a transfer in a file.
_LINES_S, _BAR_S, _MESSAGE_S = 0.5, 0.1, 10.0
# Seconds between two states of what a command waits for.
_WAIT_S = 1.0
# Shorter transfers are not shown.
_QUIET_S = 1.0
# The least columns of a terminal on which a bar shows the speed and the time left.
_WIDE = 60


def is_terminal(descriptor: int) -> bool:
    """Whether a descriptor is a terminal on which lines can change in place."""
    return os.isatty(descriptor) and os.environ.get("TERM") not in ("dumb", "unknown")


def _console(descriptor: int) -> Console:
    from rich.console import Console

    class Terminal(Console):
        def show_cursor(self, show: bool = True) -> bool:
            # A killed command would leave the cursor hidden.
            return False

    # Bytes of a log that are not UTF-8 are written to the terminal unchanged.
    file = os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape", closefd=False)
    return Terminal(file=file, highlight=False)


# ---- lines below a log ---------------------------------------------------------------------------


class LiveLines:
    """Writes text to terminals and files, and keeps live lines below it.

    Messages on stderr, including those of other threads, appear above the live lines.

    Args:
        descriptor: The terminal that shows the live lines; None if there is none.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._live: Live | None = None
        self._next_s = 0.0

    def __enter__(self) -> LiveLines:
        if self._descriptor is not None:
            # Removes the lines until the next ``show``.
            messages.before_message = lambda: self.show([]) if self._live else None
        return self

    def __exit__(self, *_: object) -> None:
        messages.before_message = messages.do_nothing
        # The terminal may be closed.
        with contextlib.suppress(OSError):
            if self._live:
                self._live.stop()

    def write(self, descriptor: int, data: bytes) -> None:
        """Write whole lines; the live lines stay below them.

        Raises:
            OSError: The reader has closed the descriptor.
        """
        if not (data and self._live and os.isatty(descriptor)):
            write_all(descriptor, data)
            return
        from rich.segment import Segment, Segments

        raw = Segments([Segment(data.decode("utf-8", "surrogateescape"))])
        self._live.console.print(raw, end="", soft_wrap=True)

    @property
    def is_due(self) -> bool:
        """Whether the shown lines are old enough to be replaced."""
        return time.monotonic() >= self._next_s

    def show(self, lines: Sequence[bytes]) -> None:
        """Replace the live lines by these, which may contain colours."""
        self._next_s = time.monotonic() + _LINES_S
        if self._descriptor is None or not (lines or self._live):
            return
        with contextlib.suppress(OSError):
            if self._live is None:
                from rich.live import Live

                self._live = Live(
                    console=_console(self._descriptor), auto_refresh=False, transient=True,
                    redirect_stdout=False, redirect_stderr=False,
                )  # fmt: skip
                self._live.start()
            self._live.update(self._fitting(lines), refresh=True)

    def _fitting(self, lines: Sequence[bytes]) -> Group:
        """Return at most half a terminal of lines, each to be cut to the terminal's width."""
        from rich.console import Group
        from rich.text import Text

        assert self._live
        most = max(1, self._live.console.height // 2)
        texts = [Text.from_ansi(line.decode("utf-8", "replace").expandtabs()) for line in lines]
        if len(lines) > most:
            texts[most:] = [Text(f"… {len(lines) - most} more")]
        for text in texts:
            text.no_wrap, text.overflow = True, "ellipsis"
        # The empty line puts the cursor below the lines, so that an echoed ^C is not part of them.
        return Group(*texts, "")


@contextlib.contextmanager
def waiting(line: Callable[[], str]) -> Iterator[None]:
    """Show a line on the terminal of stderr while the caller waits, as it is every second."""
    if not is_terminal(2):
        yield
        return
    has_ended = threading.Event()
    with LiveLines(2) as lines:

        def show() -> None:
            while not has_ended.wait(_WAIT_S):
                lines.show([line().encode()])

        thread = threading.Thread(target=show, daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            thread.join()


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of ``data``, in as many steps as the descriptor needs.

    Raises:
        OSError: It cannot be written.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


# ---- transfers -----------------------------------------------------------------------------------


class Transfers:
    """Shows transfers, one after the other; any thread may report their progress.

    Args:
        verb: The participle for the bytes, such as ``sent``.
        is_shown: False for a command with ``--json``.
    """

    def __init__(self, verb: str, *, is_shown: bool = True) -> None:
        self._verb = verb
        self._is_shown = is_shown
        self._is_live = is_terminal(2)
        self._lock = threading.RLock()
        self._bar: Bar | None = None
        self._started_s = self._next_s = 0.0

    def __enter__(self) -> Transfers:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start a transfer, which shows nothing at first."""
        self.stop()
        self._started_s = time.monotonic()
        self._next_s = self._started_s + _QUIET_S

    def report(self, progress: Progress) -> None:
        """Show a report of the API: a message as a line, bytes as a transfer."""
        if not progress.message:
            if not progress.done_bytes:
                self.start()
            self.update(progress.done_bytes, progress.total_bytes)
            return
        self.stop()
        print_progress(progress)

    def update(self, done_bytes: int, total_bytes: int) -> None:
        """Show the progress of the transfer.

        Args:
            total_bytes: 0 if unknown.
        """
        with self._lock:
            now_s = time.monotonic()
            is_done = 0 < total_bytes <= done_bytes
            if is_done:
                self.stop()
            if not self._is_shown or now_s < self._next_s or is_done:
                return
            self._next_s = now_s + (_BAR_S if self._is_live else _MESSAGE_S)
            if self._is_live:
                try:
                    self._show_bar(done_bytes, total_bytes)
                except OSError:
                    self._is_shown = False
            else:
                rate = int(done_bytes / (now_s - self._started_s))
                of = f" of {size_text(total_bytes)}" if total_bytes else ""
                print_message(f"{self._verb} {size_text(done_bytes)}{of}, {size_text(rate)}/s")

    def stop(self) -> None:
        """Remove the bar, so that later messages appear in its place."""
        with self._lock:
            bar, self._bar = self._bar, None
            if bar is not None:
                # The terminal may be closed; the transfer continues.
                with contextlib.suppress(OSError):
                    bar.stop()

    def _show_bar(self, done_bytes: int, total_bytes: int) -> None:
        if self._bar is None:
            self._bar = _bar()
            self._bar.add_task(self._verb, start=True)
            self._bar.start()
        (task,) = self._bar.task_ids
        self._bar.update(task, completed=done_bytes, total=total_bytes or None)


def _bar() -> Bar:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = _console(2)
    columns = [TextColumn("{task.description}"), BarColumn(bar_width=None), DownloadColumn()]
    if console.width >= _WIDE:
        columns += [TransferSpeedColumn(), TimeRemainingColumn()]
    return Progress(*columns, console=console, transient=True, expand=True)
