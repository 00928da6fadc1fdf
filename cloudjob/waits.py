"""Waiting for a service that does not answer, and reporting what a command is waiting for."""

from __future__ import annotations

import time
from collections.abc import Callable

from cloudjob.errors import Unreachable

# Seconds to wait before the first notice, and between two notices.
FIRST_S, _NEXT_S = 5.0, 5.0


class Waits:
    """Logs, as ``cloudjob``, what a service that is asked again has answered.

    Args:
        clock: Seconds on a clock that only goes forward.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s = float("-inf")

    def tell(self, since_s: float, found: str, then: str = "trying again") -> None:
        """Log ``found`` if the request has been tried since ``since_s`` for long enough.

        Args:
            then: What cloudjob does now.
        """
        now_s = self._clock()
        if now_s - since_s < FIRST_S or now_s < self._next_s:
            return
        self._next_s = now_s + _NEXT_S
        # The import takes milliseconds, so only a command that waits makes it.
        import logging

        logging.getLogger("cloudjob").warning("%s; %s", found, then)


class Patience:
    """Bears a platform that does not answer for a while, by default for as long as a network stall.

    For commands that watch a job: the job goes on without them, so they need not give up at once.
    """

    def __init__(self, limit_s: float = 300.0, pause_s: float = 0.5) -> None:
        self._limit_s = limit_s
        self._pause_s = pause_s
        self._since_s: float | None = None
        self._waits = Waits()

    def renew(self) -> None:
        """Note that the platform has answered."""
        self._since_s = None

    def bear(self, error: Unreachable) -> None:
        """Wait a moment before the next request.

        Raises:
            Unreachable: The platform has not answered for too long.
        """
        now_s = time.monotonic()
        if self._since_s is None:
            self._since_s = now_s
        elif now_s - self._since_s > self._limit_s:
            message = f"{error.message}, for {self._limit_s:g} s; the job goes on"
            raise Unreachable(message, hint=error.hint) from error
        self._waits.tell(self._since_s, f"{error.message}; the job goes on")
        time.sleep(self._pause_s)
