"""Telling of a service that keeps us waiting: a command that waits says for what."""

from __future__ import annotations

import time
from collections.abc import Callable

# So long may a wait be before a word, and so long between two words.
FIRST_S, _NEXT_S = 5.0, 15.0


class Waits:
    """Logs, as ``cloudjob``, what came back from a service that is asked again.

    Args:
        clock: Seconds on a clock that only goes forward.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s = float("-inf")

    def tell(self, since_s: float, found: str, then: str = "trying again") -> None:
        """Say what was found by a request that has been tried since then, if that is long ago.

        Args:
            then: What we do now.
        """
        now_s = self._clock()
        if now_s - since_s < FIRST_S or now_s < self._next_s:
            return
        self._next_s = now_s + _NEXT_S
        # Costs milliseconds, which only those pay who wait.
        import logging

        logging.getLogger("cloudjob").warning("%s; %s", found, then)
