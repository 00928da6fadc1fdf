"""The notifier: the process that follows a job or a sweep, and sends its notifications."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cloudjob.errors import CloudJobError, JobNotFound
from cloudjob.model.rules import HANG
from cloudjob.model.status import JobStatus
from cloudjob.notify import message, start
from cloudjob.notify.message import Notice, Targets
from cloudjob.notify.send import NotSent, send
from cloudjob.tracking.job import Job
from cloudjob.tracking.journals import Journals
from cloudjob.tracking.lookup import find
from cloudjob.tracking.sweep import Sweep
from jobentry.contract import hangs

T = TypeVar("T")
# Seconds between two checks of a log, and the pause after a platform has not answered.
_POLL_S, _PAUSE_S = 0.5, 30.0
# The notifier ends after a platform has not answered for so many seconds.
_RETRY_S = 24 * 3600.0


def main() -> None:
    """Follow the job or the sweep whose request is on standard input, and notify of it."""
    request = json.loads(sys.stdin.buffer.read())
    home, lock, name = Path(request.pop("home")), request.pop("lock"), request.pop("name")
    is_sweep = request.pop("is_sweep")
    outbox = Outbox(start.path_of(home, name), Targets(**request), lock)
    if is_sweep:
        follow_sweep(Sweep(name, home), outbox)
    else:
        follow_job(find(home, name), outbox)


class Outbox:
    """Sends notifications, and notes in the notifier's file what happens to them.

    Args:
        path: The file; if it is removed, nothing more is sent.
        lock: Its descriptor.
        retry_s: How long to ask a platform that does not answer.
    """

    def __init__(self, path: Path, targets: Targets, lock: int, retry_s: float = _RETRY_S) -> None:
        self.targets = targets
        self._retry_s = retry_s
        self._path = path
        self._lock = lock
        self._failures: list[str] = []

    @property
    def is_wanted(self) -> bool:
        """Whether notifications are still to be sent."""
        return self._path.exists()

    def send(self, notice: Notice) -> None:
        """Send a notification."""
        start.note(self._lock, start.SENDING, notice.event)
        try:
            send(notice, self.targets)
        except NotSent as error:
            self._failures.append(error.message)

    def close(self, end: Notice | None) -> None:
        """Send the notification of the end, if it is due, and remove the file.

        The file remains if something was not sent.

        Args:
            end: None if nothing is left whose end could be reported.
        """
        if not self.is_wanted:
            return
        if end and start.is_due(end, self.targets.events):
            self.send(end)
        if self._failures:
            start.note(self._lock, start.FAILED, "; ".join(self._failures))
        else:
            self._path.unlink(missing_ok=True)

    def until_answered(self, request: Callable[[], T]) -> T | None:
        """Retry a request and return its result; None if the job is gone or the time is over."""
        end_s = time.monotonic() + self._retry_s
        while time.monotonic() < end_s and self.is_wanted:
            try:
                return request()
            except JobNotFound:
                return None
            except CloudJobError:
                pause_end_s = time.monotonic() + _PAUSE_S
                while time.monotonic() < pause_end_s and self.is_wanted:
                    time.sleep(_POLL_S)
        return None


def follow_sweep(sweep: Sweep, outbox: Outbox) -> None:
    """Wait until every job of a sweep has ended, and send one notification."""
    statuses = outbox.until_answered(sweep.wait)
    if statuses is not None:
        outbox.close(message.of_sweep(sweep.id, statuses, sweep.values) if statuses else None)


def follow_job(job: Job, outbox: Outbox) -> None:
    """Report each hang of a job, and its end."""
    if HANG in outbox.targets.events:
        outbox.until_answered(_Watch(job, outbox).run)
    status = outbox.until_answered(job.wait)
    if status is None and job.is_over:
        status = job.last_status
    # Without a status the file remains, and the next command that waits for the job sends it.
    if status is not None:
        outbox.close(message.of_end(status))


class _Watch:
    """Follows the log of a job until it has ended, and reports hangs."""

    def __init__(self, job: Job, outbox: Outbox) -> None:
        self._job = job
        self._outbox = outbox
        self._journals = Journals(is_short=True)
        self._has_reported = self._has_reported_silence = False

    def run(self) -> None:
        for piece in self._job.pieces(follow=True, on_journal=self._journals.add):
            if not self._outbox.is_wanted:
                return
            self._report_hang()
            if not piece.data:
                time.sleep(_POLL_S)

    def _report_hang(self) -> None:
        """Report a hang once; a job that moves again may be reported again."""
        if self._journals.hang is not None:
            is_sure = self._journals.hang.confidence != hangs.Confidence.LOW.value
            if is_sure and not self._has_reported:
                self._has_reported = True
                self._outbox.send(message.of_hang(self._status(), self._journals.hang))
        elif self._journals.last_hang is not None:
            self._has_reported = False
        if self._is_silent() and not self._has_reported_silence:
            self._has_reported_silence = True
            first = max(self._journals.running, key=lambda each: each.sample.quiet_s)
            rank, quiet_s = first.sample.rank, first.sample.quiet_s
            self._outbox.send(message.of_silence(self._status(), first.node, rank, quiet_s))

    def _status(self) -> JobStatus:
        return self._job.last_status or self._job.status()

    def _is_silent(self) -> bool:
        """Whether all ranks have printed nothing for longer than the job file allows."""
        limit_s = self._outbox.targets.silent_s
        return bool(limit_s and self._journals.running and self._journals.silent_s >= limit_s)
