"""What a platform reports of a job: its status, one class for each state, and its events."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from cloudjob.model.status import Absence, Attempt, Failure, JobState, Wait, state_of
from jobentry.contract.exits import Cause

# What ended a job, as far as a platform says that only reports these states.
CAUSES = {
    JobState.SUCCEEDED: Cause.NONE,
    JobState.FAILED: Cause.PLATFORM,
    JobState.CANCELLED: Cause.CANCELLED,
}


class Waiting(NamedTuple):
    """A job that has not started, or waits to start again.

    Args:
        native: The platform's own word for the state, and why the job waits if it says so.
        wait: What it waits for; None if the platform does not say so.
    """

    native: str
    wait: Wait | None = None

    @property
    def state(self) -> JobState:
        """The state of the job."""
        return JobState.PENDING


class Running(NamedTuple):
    """A job that runs.

    Args:
        wait: What nodes wait for that have not started or may be lost; None if that is unknown.
    """

    native: str
    started_at: str | None = None
    attempt: Attempt | None = None
    wait: Wait | None = None

    @property
    def state(self) -> JobState:
        """The state of the job."""
        return JobState.RUNNING


class Unknown(NamedTuple):
    """A job whose platform does not answer, or reports a state that cloudjob does not know."""

    native: str
    started_at: str | None = None

    @property
    def state(self) -> JobState:
        """The state of the job."""
        return JobState.UNKNOWN


class Absent(NamedTuple):
    """A job that is not on its platform, or that this machine cannot look for."""

    why: Absence

    @property
    def state(self) -> JobState:
        """The state of the job."""
        return JobState.UNKNOWN

    @property
    def native(self) -> str:
        """The reason, in words."""
        return self.why.value


class Stop(Enum):
    """What a record means in which the head says that it was told to end, as by a cancel."""

    # The platform does not know of every cancel, so somebody has cancelled the job.
    CANCEL = "cancel"
    # The platform knows of every cancel, and this was none: something else has stopped the node.
    OUTSIDE = "outside"
    # The platform has told the head to end, so the record says nothing about the cause.
    PLATFORM = "platform"


class OutOfMemory(NamedTuple):
    """A lack of memory on nodes.

    Args:
        where: The nodes, in words.
        limit: What the platform allows them, in words; empty if it does not say so.
        advice: What to do about it, to follow a message.
    """

    where: str
    limit: str = ""
    advice: str = ""

    def __str__(self) -> str:
        return f"out of memory: {self.detail}"

    @property
    def detail(self) -> str:
        """The nodes, the limit and the advice."""
        return f"{self.where}{self.limit and ', '}{self.limit}{self.advice}"


class Ended(NamedTuple):
    """A job that has ended; the record of its head knows more about how.

    Args:
        cause: What ended it, as far as the platform knows; ``NONE`` for success.
        failure: Why it failed or was cancelled, as far as the platform knows; None for success.
        attempt_at: When the last attempt began: an earlier record belongs to another attempt.
        reason: A cause of failure that only the platform can know: a node ran out of memory.
        is_unwatched: Whether nobody saw how the head ended, so that a record of success counts.
    """

    native: str
    cause: Cause = Cause.PLATFORM
    failure: Failure | None = None
    started_at: str | None = None
    ended_at: str | None = None
    attempt_at: str = ""
    reason: str | OutOfMemory = ""
    stop: Stop = Stop.CANCEL
    is_unwatched: bool = False
    attempt: Attempt | None = None

    @property
    def state(self) -> JobState:
        """The state of the job, which follows from the cause."""
        return state_of(self.cause)

    @property
    def exit_code(self) -> int | None:
        """The exit code of the job; None if the platform does not know it."""
        if self.cause is Cause.NONE:
            return 0
        return self.failure.exit_code if self.failure else None


NativeStatus = Waiting | Running | Unknown | Absent | Ended


def unended(
    state: JobState,
    native: str,
    started_at: str | None = None,
    wait: Wait | None = None,
    attempt: Attempt | None = None,
) -> NativeStatus:
    """Return the status of a job in a state that is not final."""
    if state is JobState.PENDING:
        # While it waits to start again, the attempt before does not count.
        return Waiting(native, wait)
    if state is JobState.RUNNING:
        return Running(native, started_at, attempt, wait)
    return Unknown(native, started_at)


class Event(NamedTuple):
    """An event of a job on its platform.

    Args:
        at: The time, as the platform writes it.
        level: ``Info``, ``Warning`` or ``Error``.
    """

    at: str
    level: str
    source: str
    message: str


class Metric(NamedTuple):
    """A measurement of a node's resource usage, minute by minute.

    Args:
        name: The platform's name for it, such as ``cpuUsage``.
        values: None for a minute without a measurement.
    """

    node: int
    name: str
    values: tuple[float | None, ...]
