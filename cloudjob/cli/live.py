"""Lines at the bottom of a terminal that change in place, below the text of a job."""

from __future__ import annotations

import contextlib
import os
import threading
import time

from cloudjob.cli import messages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

# Seconds between two states of the lines.
_FRAME_S = 0.5


def is_terminal(descriptor: int) -> bool:
    """Whether lines can change in place there."""
    return os.isatty(descriptor) and os.environ.get("TERM") not in ("dumb", "unknown")


class LiveLines:
    """Writes text to terminals and files, and keeps live lines below it.

    Messages on stderr appear above the lines, also those of other threads.

    Args:
        descriptor: The terminal that has the lines; None if there is none.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        # A signal may arrive while its thread writes.
        self._lock = threading.RLock()
        self._drawn = b""
        self._height = 0
        self._next_s = 0.0
        self._console: Console | None = None

    def __enter__(self) -> LiveLines:
        if self._descriptor is not None:
            messages.before_message = self.erase
        return self

    def __exit__(self, *_: object) -> None:
        messages.before_message = messages.do_nothing
        self.erase()

    def write(self, descriptor: int, data: bytes) -> None:
        """Write whole lines; the live lines stay below them.

        Raises:
            OSError: Nobody reads them any more.
        """
        if not data:
            return
        if self._descriptor is None or not os.isatty(descriptor):
            write_all(descriptor, data)
            return
        with self._lock:
            # All in one write where possible, so that nothing flickers.
            drawn, erased = self._drawn, self._erased()
            if descriptor == self._descriptor:
                write_all(descriptor, erased + data + drawn)
            else:
                write_all(self._descriptor, erased)
                write_all(descriptor, data)
                write_all(self._descriptor, drawn)
            self._height = drawn.count(b"\n")

    @property
    def is_due(self) -> bool:
        """Whether the last state has been shown long enough to replace it."""
        return time.monotonic() >= self._next_s

    def show(self, lines: Sequence[bytes]) -> None:
        """Show these lines, which may contain colours, instead of those before."""
        self._next_s = time.monotonic() + _FRAME_S
        if self._descriptor is None or not (lines or self._height):
            return
        with self._lock, contextlib.suppress(OSError):
            self._drawn = self._rendered(lines)
            write_all(self._descriptor, self._erased() + self._drawn)
            self._height = self._drawn.count(b"\n")

    def erase(self) -> None:
        """Remove the lines until the next ``write`` or ``show``."""
        if self._descriptor is not None and self._height:
            # A terminal may be closed.
            with self._lock, contextlib.suppress(OSError):
                write_all(self._descriptor, self._erased())

    def _erased(self) -> bytes:
        """Return what removes the lines, and note that they are gone."""
        height, self._height = self._height, 0
        # The cursor may stand behind an echoed ^C.
        return b"\r\x1b[%dA\x1b[J" % height if height else b""

    def _rendered(self, lines: Sequence[bytes]) -> bytes:
        """Return as many lines as fit the terminal's height, each cut to its width."""
        if not lines:
            return b""
        from rich.console import Console
        from rich.text import Text

        if self._console is None:
            self._console = Console(stderr=self._descriptor == 2, highlight=False)
        most = max(1, self._console.height // 2)
        with self._console.capture() as capture:
            for line in lines[:most]:
                text = Text.from_ansi(line.decode("utf-8", "replace").expandtabs())
                self._console.print(text, no_wrap=True, overflow="ellipsis", soft_wrap=False)
            if len(lines) > most:
                self._console.print(f"… {len(lines) - most} more")
        return capture.get().encode("utf-8", "replace")


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of ``data``, however much fits at a time.

    Raises:
        OSError: It cannot be written.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
