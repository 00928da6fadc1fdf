"""Keys that a user presses while a view on a terminal is shown, to scroll it and to sort it."""

from __future__ import annotations

import os
import select
import sys
import time
from enum import Enum

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# The most bytes of one key.
_ESCAPE_BYTES = 16


class KeyPress(Enum):
    """What a key does."""

    UP = "up"
    DOWN = "down"
    PAGE_UP = "page up"
    PAGE_DOWN = "page down"
    SORT = "sort"
    QUIT = "quit"


# The bytes of each key; terminals send the arrows in either of two forms.
_KEYS = {
    b"k": KeyPress.UP,
    b"\x1b[A": KeyPress.UP,
    b"\x1bOA": KeyPress.UP,
    b"j": KeyPress.DOWN,
    b"\x1b[B": KeyPress.DOWN,
    b"\x1bOB": KeyPress.DOWN,
    b"b": KeyPress.PAGE_UP,
    b"\x1b[5~": KeyPress.PAGE_UP,
    b" ": KeyPress.PAGE_DOWN,
    b"\x1b[6~": KeyPress.PAGE_DOWN,
    b"s": KeyPress.SORT,
    b"q": KeyPress.QUIT,
}


class KeyReader:
    """Reads keys from the terminal on stdin; without one, every wait takes its full time."""

    def __init__(self) -> None:
        self._saved: list[object] | None = None

    def __enter__(self) -> KeyReader:
        if sys.stdin is not None and os.isatty(0):
            import termios
            import tty

            self._saved = termios.tcgetattr(0)
            tty.setcbreak(0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._saved is not None:
            import termios

            termios.tcsetattr(0, termios.TCSADRAIN, self._saved)  # type: ignore[arg-type]

    def wait(self, seconds: float) -> KeyPress | None:
        """Return the next key that has a meaning; None if there was none in time."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            if self._saved is None:
                time.sleep(left_s)
            elif select.select([0], [], [], left_s)[0]:
                data = os.read(0, _ESCAPE_BYTES)
                if not data:  # the terminal is closed
                    return KeyPress.QUIT
                if data in _KEYS:
                    return _KEYS[data]
        return None


class Position:
    """Which rows of a longer view are shown, and how they are sorted.

    Args:
        orders: The names of the orders; the first one applies at the start.
    """

    def __init__(self, orders: Sequence[str]) -> None:
        self._orders = tuple(orders)
        self.first = 0
        self.order = self._orders[0]

    def apply(self, key: KeyPress, page_rows: int) -> None:
        """Move or sort as a key says.

        Args:
            page_rows: The number of rows that are shown.
        """
        page = max(1, page_rows)
        steps = {
            KeyPress.UP: -1,
            KeyPress.DOWN: 1,
            KeyPress.PAGE_UP: -page,
            KeyPress.PAGE_DOWN: page,
        }
        if key is KeyPress.SORT:
            self.order = self._orders[(self._orders.index(self.order) + 1) % len(self._orders)]
            self.first = 0
        self.first = max(0, self.first + steps.get(key, 0))

    def limit(self, rows: int) -> None:
        """Keep at least one of ``rows`` shown."""
        self.first = min(self.first, max(0, rows - 1))

    def footer(self, page_rows: int, rows: int) -> str:
        """Return how many rows are not shown, and which keys show them."""
        below = rows - self.first - page_rows
        hidden = [f"{self.first} above"] if self.first else []
        hidden += [f"{below} more"] if below > 0 else []
        keys = f"q:quit  s:sort  j/k:scroll  by {self.order}"
        return f"{', '.join(hidden)}  {keys}" if hidden else keys
