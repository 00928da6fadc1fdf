"""Shows how far a transfer is, on stderr: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import contextlib
import os
import threading
import time

from cloudjob.cli.messages import print_message, size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from cloudjob import Progress

# A transfer that takes no longer shows nothing.
_QUIET_S = 1.0
# Seconds between two updates: of a bar, and of lines in a file.
_FRAME_S, _LINE_S = 0.1, 10.0
# Columns of a terminal that has room for the speed and the time left.
_WIDE = 60


class Transfers:
    """Shows transfers, one after the other. Any thread may report to it.

    Args:
        verb: What has been done to the bytes: ``sent``.
        is_shown: False for a command with ``--json``.
    """

    def __init__(self, verb: str, *, is_shown: bool = True) -> None:
        self._verb = verb
        self._is_shown = is_shown
        self._is_live = os.isatty(2) and os.environ.get("TERM") != "dumb"
        self._lock = threading.Lock()
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
        print_message(f"{'warning: ' * (progress.kind == 'warning')}{progress.message}")
        if progress.hint:
            print_message(f"hint: {progress.hint}")

    def update(self, done_bytes: int, total_bytes: int) -> None:
        """Show how far the transfer is.

        Args:
            total_bytes: 0 if unknown.
        """
        with self._lock:
            now_s = time.monotonic()
            is_done = 0 < total_bytes <= done_bytes
            if is_done:
                self._remove_bar()
            if not self._is_shown or now_s < self._next_s or is_done:
                return
            self._next_s = now_s + (_FRAME_S if self._is_live else _LINE_S)
            if self._is_live:
                try:
                    self._show_bar(done_bytes, total_bytes)
                except OSError:
                    self._is_shown = False
            else:
                rate = int(done_bytes / (now_s - self._started_s))
                of = f" of {size(total_bytes)}" if total_bytes else ""
                print_message(f"{self._verb} {size(done_bytes)}{of}, {size(rate)}/s")

    def stop(self) -> None:
        """Remove the bar, so that later messages appear in its place."""
        with self._lock:
            self._remove_bar()

    def _remove_bar(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            # A terminal may be closed; the transfer goes on.
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
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    class Screen(Console):
        def show_cursor(self, show: bool = True) -> bool:
            # A command that is killed could not show a hidden cursor again.
            return False

    console = Screen(stderr=True)
    columns = [TextColumn("{task.description}"), BarColumn(bar_width=None), DownloadColumn()]
    if console.width >= _WIDE:
        columns += [TransferSpeedColumn(), TimeRemainingColumn()]
    return Progress(*columns, console=console, transient=True, expand=True)
