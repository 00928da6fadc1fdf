"""Retries of requests to a service that does not answer, and notices about the wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from cloudjob import library_log
from cloudjob.errors import BackendError, CloudJobError, Unreachable

if TYPE_CHECKING:
    from tenacity import RetryCallState

# Seconds to wait before the first notice, and between two notices.
FIRST_S, _NEXT_S = 5.0, 5.0

T = TypeVar("T")


class RequestLimits(NamedTuple):
    """The time limits of a request to a service.

    Args:
        total_s: The limit for all attempts together.
        answer_s: The timeout of one response.
        pause_s: The upper limit of the first pause; it grows up to ``longest_pause_s``.
    """

    total_s: float = 60.0
    answer_s: float = 30.0
    pause_s: float = 0.3
    longest_pause_s: float = 5.0


LIMITS = RequestLimits()


def retried(
    request: Callable[[], T],
    pause_s: Callable[[CloudJobError, int], float | None],
    limits: RequestLimits,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Return the result of ``request``; retry while its error may be temporary.

    Each pause is random, so that clients that failed together do not retry together.

    Args:
        pause_s: Takes the error and the number of attempts so far. Returns None if a retry is
            useless, else the seconds that the service asks to wait, 0 if it does not say.

    Raises:
        CloudJobError: The error of the last attempt.
    """
    import tenacity

    began_s, notices = time.monotonic(), WaitNotices()
    growing = tenacity.wait_random_exponential(limits.pause_s, limits.longest_pause_s)

    def error_of(state: RetryCallState) -> BaseException | None:
        return state.outcome.exception() if state.outcome else None

    def requested_s(state: RetryCallState) -> float | None:
        error = error_of(state)
        if not isinstance(error, CloudJobError):
            return None
        return pause_s(error, state.attempt_number)

    return tenacity.Retrying(
        retry=lambda state: requested_s(state) is not None,
        wait=lambda state: requested_s(state) or growing(state),
        stop=tenacity.stop_before_delay(limits.total_s),
        before_sleep=lambda state: notices.report(began_s, str(error_of(state))),
        sleep=sleep,
        reraise=True,
    )(request)


class WaitNotices:
    """Logs what a command is waiting for: the last error of a request that is retried.

    Args:
        clock: A monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s = float("-inf")

    def report(self, since_s: float, message: str, next_step: str = "trying again") -> None:
        """Log ``message`` after a wait of 5 s, and then every 5 s.

        Args:
            since_s: When the wait began, by ``clock``.
            next_step: What cloudjob does next.
        """
        now_s = self._clock()
        if now_s - since_s < FIRST_S or now_s < self._next_s:
            return
        self._next_s = now_s + _NEXT_S
        library_log.warn(f"{message}; {next_step}")


class OutageLimit:
    """Limits how long a command that watches a job waits for a platform that does not answer.

    The default covers a network outage of five minutes; the job continues without the command.
    """

    def __init__(self, limit_s: float = 300.0, pause_s: float = 0.5) -> None:
        self._limit_s = limit_s
        self._pause_s = pause_s
        self._since_s: float | None = None
        self._notices = WaitNotices()

    def reset(self) -> None:
        """Restart the time limit, because the platform has answered."""
        self._since_s = None

    def pause(self, error: BackendError) -> None:
        """Pause before the next request.

        Raises:
            Unreachable: The platform has not answered for too long.
        """
        now_s = time.monotonic()
        if self._since_s is None:
            self._since_s = now_s
        elif now_s - self._since_s > self._limit_s:
            message = f"{error.message}, for {self._limit_s:g} s; the job continues"
            raise Unreachable(message, hint=error.hint) from error
        self._notices.report(self._since_s, f"{error.message}; the job continues")
        time.sleep(self._pause_s)
