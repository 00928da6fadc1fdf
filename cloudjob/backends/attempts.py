"""Whether a job that has failed is tried again, and why, or why not.

``kind_of`` finds the kind of a failure, and ``decide`` says what follows from it and from the
attempts before. Values only, no I/O; standard library only, as the controller of the process
backend imports it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from jobentry.contract import exits
from jobentry.contract.exits import Cause, Failure, Outcome
from jobentry.contract.retry_kinds import DEFAULT, NEVER, Kind

# The most attempts of a job whose attempts are preempted, as these do not count.
MOST_ATTEMPTS = 100
# After so many attempts in a row that came no further than those before, there is no other.
NO_PROGRESS = 3
# The longest pause between two attempts.
MAX_PAUSE_S = 600.0


# Another attempt at these differs from the last one only if something has changed meanwhile.
_REPEATED_ALIKE = (Kind.USER, Kind.CRASH, Kind.ENTRY)

_DISK = re.compile(r"No space left on device|[Dd]isk quota exceeded|disk is full", re.ASCII)
_NETWORK = re.compile(
    r"Connection (?:reset|refused|timed out|aborted|closed)|Network is unreachable|No route to host"
    r"|[Nn]ame or service not known|Temporary failure in name resolution|[Bb]roken pipe"
    r"|ncclRemoteError|ncclSystemError|[Ss]ocket ?[Tt]ime(?:d )?out",
    re.ASCII,
)
# The same in messages of the entry.
_UNREACHABLE = re.compile(
    r"gave up after|does not answer|no answer|have not come up|and then hung", re.ASCII
)
# Characters of the texts of a failure that are searched.
_TEXT_LIMIT = 64 * 1024


class AttemptProgress(NamedTuple):
    """How far an attempt came.

    Args:
        step: The highest step that a rank has printed; -1 if none has.
        lines: The number of lines that its ranks have printed.
    """

    step: int = -1
    lines: int = 0

    def is_beyond(self, other: AttemptProgress) -> bool:
        """Whether it came further; lines count only where no rank prints steps."""
        if self.step >= 0 or other.step >= 0:
            return self.step > other.step
        return self.lines > other.lines


class FailedAttempt(NamedTuple):
    """An attempt that has failed."""

    kind: Kind
    failure: Failure = Failure()
    progress: AttemptProgress = AttemptProgress()

    @property
    def is_counted(self) -> bool:
        """Whether it counts: a preemption is not the job's fault."""
        return self.kind is not Kind.PREEMPTED


class Rules(NamedTuple):
    """What a user has chosen.

    Args:
        max_retries: How many times a failed job is started again; preemptions do not count.
        on: The kinds of failures after which it is.
        backoff_s: The pause before the second attempt, which doubles each time.
    """

    max_retries: int
    on: tuple[str, ...] = DEFAULT
    backoff_s: float = 0.0


class Reason(Enum):
    """Why a job is not tried again, for people; ``AGAIN`` is the opposite."""

    AGAIN = ""
    NO_RETRIES = "it has no retries left"
    NEVER = "that would not change it"
    NOT_CHOSEN = "`retries: {on: …}` does not name that"
    SAME = "the attempt before ended in the same way"
    NO_PROGRESS = f"the last {NO_PROGRESS} attempts came no further than those before"
    NO_TIME = "its time limit is over"


class RetryDecision(NamedTuple):
    """Whether a job is tried again, and after which pause."""

    reason: Reason
    pause_s: float = 0.0

    @property
    def is_again(self) -> bool:
        """Whether it is tried again."""
        return self.reason is Reason.AGAIN


def kind_of(outcome: Outcome | None, *, is_cancelled: bool = False) -> Kind:
    """Return the kind of a failure.

    Args:
        outcome: How the head says that the job ended; None if it says nothing.
        is_cancelled: Whether somebody has cancelled the job.
    """
    if is_cancelled:
        return Kind.CANCELLED
    if outcome is None:
        return Kind.PLATFORM
    failure = outcome.failure or Failure()
    text = "\n".join((failure.message, *failure.last_lines))[-_TEXT_LIMIT:]
    if _DISK.search(text):
        return Kind.DISK
    if outcome.cause in _KINDS:
        return _KINDS[outcome.cause]
    if _NETWORK.search(text):
        return Kind.NETWORK
    if outcome.cause is Cause.ENTRY:
        is_network = _UNREACHABLE.search(failure.message[:_TEXT_LIMIT])
        return Kind.NETWORK if is_network else Kind.ENTRY
    if failure.signal is not None:
        return Kind.CRASH
    return Kind.USER if outcome.exit_code in exits.EXCEPTION_CODES else Kind.EXIT


_KINDS = {
    Cause.TIMEOUT: Kind.TIMEOUT,
    Cause.HANG: Kind.HANG,
    Cause.PLATFORM: Kind.PLATFORM,
    # Its head was told to end, though nobody has cancelled the job.
    Cause.CANCELLED: Kind.PREEMPTED,
}


def decide(
    attempts: Sequence[FailedAttempt], rules: Rules, left_s: float | None = None
) -> RetryDecision:
    """Return whether a job is tried again after these attempts, of which the last has just failed.

    Args:
        left_s: Seconds until the time limit of the job, over all attempts; None without a limit.
    """
    last = attempts[-1]
    counted = sum(attempt.is_counted for attempt in attempts)
    pause_s = min(MAX_PAUSE_S, rules.backoff_s * 2 ** min(len(attempts) - 1, 16))
    if last.kind in NEVER:
        return RetryDecision(Reason.NEVER)
    if counted > rules.max_retries or not rules.max_retries or len(attempts) >= MOST_ATTEMPTS:
        return RetryDecision(Reason.NO_RETRIES)
    if last.kind.value not in rules.on:
        return RetryDecision(Reason.NOT_CHOSEN)
    if len(attempts) > 1 and _is_same(attempts[-2], last):
        return RetryDecision(Reason.SAME)
    if _without_progress(attempts) >= NO_PROGRESS:
        return RetryDecision(Reason.NO_PROGRESS)
    if left_s is not None and left_s <= pause_s:
        return RetryDecision(Reason.NO_TIME)
    return RetryDecision(Reason.AGAIN, pause_s)


def _is_same(one: FailedAttempt, other: FailedAttempt) -> bool:
    """Whether two attempts failed in the same way at the same place, as a third one would."""
    if one.kind is not other.kind or one.kind not in _REPEATED_ALIKE:
        return False
    return _place(one.failure) == _place(other.failure)


def _place(failure: Failure) -> tuple[object, ...]:
    # Which rank is the first to fail is chance; a host's name is new in each attempt.
    stack = tuple(line.strip() for line in failure.last_lines if line.lstrip().startswith("File "))
    return (failure.signal, failure.exit_code, failure.message, stack[-1:])


def _without_progress(attempts: Sequence[FailedAttempt]) -> int:
    """Return how many of the last attempts came no further than the best before them.

    A preemption says nothing about the job.
    """
    best, count = AttemptProgress(), 0
    for attempt in attempts:
        if attempt.progress.is_beyond(best):
            best, count = attempt.progress, 0
        else:
            count += attempt.is_counted
    return count


def explain(attempts: Sequence[FailedAttempt], rules: Rules, decision: RetryDecision) -> str:
    """Return the line of the job's log about the end of its last attempt."""
    last = attempts[-1]
    failed = f"attempt {len(attempts)} of {total(attempts, rules)} failed (cause: {last.kind})"
    if not decision.is_again:
        return f"{failed}; the job is not tried again: {decision.reason.value}"
    after = f" in {decision.pause_s:g} s" if decision.pause_s else ""
    return f"{failed}; attempt {len(attempts) + 1} of {total(attempts, rules)} begins{after}"


def total(attempts: Sequence[FailedAttempt], rules: Rules) -> int:
    """Return how many attempts a job may have, with those that do not count."""
    return rules.max_retries + 1 + sum(not attempt.is_counted for attempt in attempts)


_STEP = re.compile(
    rb"\b(?:[Gg]lobal_?[Ss]tep|[Ss]tep|[Ii]ter(?:ation)?|[Ee]poch)s?[ =:#\[]{0,3}(\d{1,12})"
)
# The beginning of a line that is searched; a step is printed first.
_LINE_LIMIT = 512


def progress_of(lines: Iterable[bytes]) -> AttemptProgress:
    """Return how far an attempt came, from lines of its log."""
    step, count = -1, 0
    for line in lines:
        if line.startswith(b"["):
            count += 1
            for match in _STEP.finditer(line, 0, _LINE_LIMIT):
                step = max(step, int(match[1]))
    return AttemptProgress(step, count)
