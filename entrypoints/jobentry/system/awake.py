"""A clock that stands still while this process is suspended or frozen."""

from __future__ import annotations

import math
import threading
import time
from typing import Callable

# The loop of a node reads the clock about twice a second: a longer gap was a suspension.
_LONGEST_GAP_S = 3.0
# Seconds after the end of a suspension in which what was lost meanwhile is noticed.
_RESUME_S = 30.0


class AwakeClock:
    """The time without suspensions, as long as some thread reads it at least every two seconds.

    Args:
        now_s: A monotonic clock that goes on meanwhile.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._read_at_s = math.inf
        self._lost_s = 0.0
        # The last suspension: its length, and when it ended.
        self._gap_s, self._resumed_at_s = 0.0, -math.inf

    def now_s(self) -> float:
        """Return the time."""
        with self._lock:
            now_s = self._now_s()
            gap_s, self._read_at_s = now_s - self._read_at_s, now_s
            if gap_s > _LONGEST_GAP_S:
                self._lost_s += gap_s
                # A machine may be slow for some seconds when it goes on.
                self._gap_s, self._resumed_at_s = max(gap_s, self._recent_gap_s(now_s)), now_s
            return now_s - self._lost_s

    def suspended_s(self) -> float:
        """Return for how long this process was suspended until a moment ago; 0 if it was not."""
        self.now_s()
        return self._recent_gap_s(self._now_s())

    def _recent_gap_s(self, now_s: float) -> float:
        return self._gap_s if now_s - self._resumed_at_s < _RESUME_S else 0.0
