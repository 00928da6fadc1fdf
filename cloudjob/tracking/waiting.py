"""Waits for the end of a job."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from cloudjob.errors import JobNotFound, Unreachable, WaitTimeout
from cloudjob.model.status import JobState, JobStatus
from cloudjob.retries import Patience, WaitNotices
from cloudjob.tracking.platforms import GONE

if TYPE_CHECKING:
    from cloudjob.tracking.job import Job

OnStatus = Callable[[JobStatus], None]

# The polling interval grows from the backend's to this one, so that the end of a short job is seen
# at once and a long job does not cost a hundred requests a second.
_POLL_S = 0.5
_POLL_GROWTH = 1.2


class Limits(NamedTuple):
    """How often to ask for the status, and until when.

    Args:
        end_s: When to stop waiting, by ``time.monotonic``.
        record_s: Seconds to retry reading the record of a job that has ended.
    """

    poll_s: float
    end_s: float
    record_s: float


def wait(
    job: Job, limits: Limits, record_error: Callable[[], str], on_status: OnStatus | None
) -> JobStatus:
    """Return the status of a job when it has ended, as ``Job.wait`` describes.

    Args:
        record_error: Returns why the last status lacks the record of the job's end, if it does.
    """
    pause_s, end_s, record_s = limits
    patience = Patience()
    ended_s, notices, shown = float("inf"), WaitNotices(), None
    while True:
        try:
            status = job.status()
        except Unreachable as error:
            _check_time(job.id, "its platform does not answer", end_s)
            patience.pause(error)
            continue
        patience.reset()
        if status != shown:
            if on_status:
                on_status(status)
            shown = status
        if status.state.is_final:
            ended_s = min(ended_s, time.monotonic())
            # A cancelled job does not wait for its record, which adds little.
            is_cancelled = status.state is JobState.CANCELLED
            is_late = time.monotonic() + pause_s > min(ended_s + record_s, end_s)
            if not record_error() or is_cancelled or is_late:
                return status
            notices.report(ended_s, record_error())
        if status.native_state in GONE:
            raise JobNotFound(
                f"waiting for {job.id}: {status.native_state}",
                hint="cloudjob rm removes it from the list",
            )
        _check_time(job.id, f"it is {status.state}", end_s)
        time.sleep(max(0.0, min(pause_s, end_s - time.monotonic())))
        pause_s = min(_POLL_GROWTH * pause_s, max(_POLL_S, limits.poll_s))


def _check_time(job: str, found: str, end_s: float) -> None:
    if time.monotonic() >= end_s:
        raise WaitTimeout(
            f"waiting for {job}: {found} after the given time; the job continues",
            hint=f"cloudjob wait {job}",
        )
