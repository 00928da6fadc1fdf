"""Reads the status of one job from its platform and the record of its head; waits for its end."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable

from cloudjob.backends.native import Absent, Ended, NativeStatus, Unknown, Waiting
from cloudjob.errors import (
    BackendError,
    CloudJobError,
    JobNotFound,
    NotAuthorised,
    ObjectMissing,
    RecordsError,
    RunsElsewhere,
    StoreError,
    Unreachable,
    UnreadableObject,
    UsageError,
    WaitTimeout,
)
from cloudjob.home import records_path
from cloudjob.home.records import SUBMITTING, Records
from cloudjob.model import status as statuses
from cloudjob.model import summary, times
from cloudjob.model.progress import log_once
from cloudjob.model.status import Absence, JobFailed, JobState, JobStatus
from cloudjob.model.text import one_line
from cloudjob.package import claims
from cloudjob.retries import OutageLimit, WaitNotices
from cloudjob.store.base import SMALL_LIMIT_BYTES
from cloudjob.store.parallel import call_with_timeout
from cloudjob.tracking import log, verdict
from cloudjob.tracking.access import JobAccess
from jobentry.contract import exits
from jobentry.contract.packages import LAYERS_LIMIT
from jobentry.contract.paths import DELIVERED_ENV, DELIVERED_SSH_KEY, JobPaths

# Characters of a reason why a record cannot be read.
_REASON_CHARS = 200
# Last log lines of the entry to show in the status of a job without a record.
_LAST_LINES = 5
# Seconds that a status query waits for the store.
_STORE_S = 5.0
# Seconds by which a record that the platform uploads may arrive late.
_LATE_S = 120.0
# The polling interval grows from the backend's to this one, so that the end of a short job is
# noticed at once and a long job does not cost a hundred requests per second.
_POLL_S = 0.5
_POLL_GROWTH = 1.2


class StatusReader:
    """Reads the status of a job; any number of threads may use it at the same time."""

    def __init__(self, access: JobAccess) -> None:
        self._access = access
        # Why the record of the ended job could not be read; empty if it was read.
        self.record_error = ""
        # Whether something else is in the place of the record.
        self._has_invalid_record = False
        self._last: JobStatus | None = None
        # Why only another machine knows the status; None if this machine does, too.
        self.elsewhere: RunsElsewhere | None = None
        # One request at a time, because ``record_error`` belongs to the status being built.
        self._query_lock = threading.Lock()

    @property
    def last(self) -> JobStatus | None:
        """The status that was returned last, else the final one in the records, if it is there."""
        # A list of thousands of jobs reads only the statuses that it shows.
        if self._last is None:
            self._last = verdict.recorded_status(self._access.record)
        return self._last

    def status(self) -> JobStatus:
        """Return the current status; if the store does not answer, this takes a few seconds."""
        with self._query_lock:
            self.elsewhere = None
            try:
                self._last = verdict.recorded_status(self._access.record) or self._read()
            except RunsElsewhere as error:
                self.elsewhere = error
                return self.unknown(f"runs on {error.host}")
            return self._last

    def need_here(self, doing: str) -> None:
        """Check that the last status is not one that only another machine knows.

        Raises:
            RunsElsewhere: It is.
        """
        if self.elsewhere is not None:
            raise RunsElsewhere(doing, self._access.record.job, self.elsewhere.host)

    def need_ended(self, doing: str) -> None:
        """Check that the job has ended, as ``Job.need_ended`` describes."""
        if self.status().state in (JobState.PENDING, JobState.RUNNING):
            job = self._access.record.job
            raise UsageError(f"{doing} {job}: it has not ended", hint=f"cloudjob cancel {job}")

    def need_running(self, doing: str) -> None:
        """Check that the job runs.

        Raises:
            UsageError: It does not.
        """
        state = self.status().state
        if state is not JobState.RUNNING:
            raise UsageError(f"{doing}: it is {state}")

    def json(self) -> str:
        """Return the JSON of ``last``, or of ``status`` if there is none yet."""
        recorded = verdict.recorded_text(self._access.record)
        return recorded or json.dumps(statuses.to_json(self.last or self.status()))

    def from_list(self, native: NativeStatus | None) -> JobStatus:
        """Return the status of the job from a list of its platform's jobs.

        Args:
            native: Its status in the list; None if the job is not in it.
        """
        is_sent = self._access.record.is_ours and self._access.record.state != SUBMITTING
        if native is None and is_sent:
            native = Absent(Absence.NO_JOB)
        if native is None or isinstance(native, Ended):
            return self.status()
        self._last = verdict.as_status(self._access.record, native)
        return self._last

    def unknown(self, why: str) -> JobStatus:
        """Return the status of a job whose platform cannot be queried."""
        self._last = verdict.as_status(self._access.record, Unknown(why))
        return self._last

    def wait(
        self, end_s: float, record_s: float, on_status: Callable[[JobStatus], object]
    ) -> JobStatus:
        """Wait for the end of the job and return its status, as ``Job.wait`` describes.

        Args:
            end_s: When to stop waiting, by ``time.monotonic``.
            record_s: Seconds to retry reading the record of a job that has ended.
            on_status: Called with each status that differs from the last.
        """
        pause_s = poll_s = self._access.backend.poll_s
        outage, notices = OutageLimit(), WaitNotices()
        ended_s, last = math.inf, None
        passing: tuple[type[BackendError], ...] = (Unreachable,)
        while True:
            try:
                status = self.status()
            except passing as error:
                self._check_time("its platform does not answer", end_s)
                outage.pause(error)
                continue
            outage.reset()
            # Credentials that were valid may be renewed.
            passing = (Unreachable, NotAuthorised)
            self.need_here("waiting for")
            if status != last:
                on_status(status)
                last = status
            if status.state.is_final:
                ended_s = min(ended_s, time.monotonic())
                # Do not wait for the record of a cancelled job, which adds little.
                is_cancelled = status.state is JobState.CANCELLED
                is_late = time.monotonic() + pause_s > min(ended_s + record_s, end_s)
                if not self.record_error or is_cancelled or is_late:
                    return status
                notices.report(ended_s, self.record_error)
            if status.absence is Absence.OUT_OF_REACH and self._has_invalid_record:
                raise StoreError(
                    f"waiting for {status.job}: its record is invalid, which says how it ended",
                    hint="the message above names the record; ask the submitter of the job",
                )
            if status.is_gone:
                raise JobNotFound(
                    f"waiting for {status.job}: {status.native_state}",
                    hint="cloudjob rm removes it from the list",
                )
            self._check_time(f"it is {status.state}", end_s)
            time.sleep(max(0.0, min(pause_s, end_s - time.monotonic())))
            pause_s = min(_POLL_GROWTH * pause_s, max(_POLL_S, poll_s))

    def need_success(self, status: JobStatus) -> None:
        """Raise ``JobFailed`` if the job did not succeed."""
        if status.state is not JobState.SUCCEEDED:
            why = summary.reason(status) or status.native_state
            message = f"job {status.job}: {status.state}: {why}"
            raise JobFailed(message, status, statuses.exit_code(status))

    def _check_time(self, what: str, end_s: float) -> None:
        job = self._access.record.job
        if time.monotonic() >= end_s:
            raise WaitTimeout(
                f"waiting for {job}: {what} after the given time; the job continues",
                hint=f"cloudjob.attach({job!r}).wait() waits for its end",
            )

    def _read(self) -> JobStatus:
        record = self._access.record
        answers = True
        try:
            native = self._native()
        except Unreachable:
            ended = self._ended_elsewhere()
            if ended is None:
                raise
            native, answers = ended, False
        if native == Absent(Absence.OUT_OF_REACH):
            native = self._ended_elsewhere() or native
        status = verdict.as_status(record, native)
        if not isinstance(native, Ended):
            return status
        exit_record = self._exit_record()
        status = verdict.with_record(
            status, native, exit_record, self.record_error, self._entry_lines
        )
        # A platform that does not answer may still hold what the next status frees.
        is_read = answers and not self.record_error
        if is_read and self._has_forgotten_secrets() and self._is_settled(status):
            text = json.dumps(statuses.to_json(status))
            # A job found in another store is not in the records; and a full disk or damaged records
            # do not hide how a job ended.
            unsaved = (JobNotFound, RecordsError)
            with contextlib.suppress(*unsaved), Records(records_path(self._access.home)) as db:
                db.update(record.job, state=status.state.value, final_json=text)
            self._access.record = record._replace(final_json=text)
        return status

    def _is_settled(self, status: JobStatus) -> bool:
        """Whether the status is final: a record that the platform uploads may arrive late.

        Until then the status is incomplete, and the next call requests it again.
        """
        has_record = bool(status.phases) or status.cause not in (None, exits.Cause.PLATFORM)
        if has_record or not self._access.backend.copies_files or status.ended_at is None:
            return True
        return time.time() - times.seconds_of(status.ended_at) > _LATE_S

    def _has_forgotten_secrets(self) -> bool:
        """Delete the secrets that were stored next to the code for the nodes.

        Returns:
            Whether the store has answered; if not, the next status deletes them.
        """
        if not self._access.backend.copies_files:
            return True
        folder = JobPaths(self._access.record.job).node
        store = self._access.open_store(self._access.record.store, retry_s=_STORE_S)

        def forget() -> None:
            for name in (DELIVERED_ENV, DELIVERED_SSH_KEY):
                store.delete(f"{folder}/{name}")

        try:
            call_with_timeout(_STORE_S, forget)
        except TimeoutError:
            return False
        except CloudJobError:
            # The store may refuse it for good.
            pass
        return True

    def _native(self) -> NativeStatus:
        """Return the status that the platform reports, or why it reports none."""
        record = self._access.record
        # Checked before the status: a submit that ends between the two queries has sent its job.
        is_being_sent = self._access.is_being_sent()
        try:
            if record.handle:
                return self._access.backend.status(record.handle)
        except JobNotFound:
            self._access.need_here("looking for")
        except RunsElsewhere:
            ended = self._ended_elsewhere()
            if ended is None:
                raise
            return ended
        if is_being_sent:
            return Waiting("being submitted")
        if not record.is_ours:
            return Absent(Absence.OUT_OF_REACH)
        was_sent = record.handle and record.state != SUBMITTING
        return Absent(Absence.NO_JOB if was_sent else Absence.INTERRUPTED)

    def _ended_elsewhere(self) -> Ended | None:
        """Return how a job ended by its record, which the head writes last and anyone can read."""
        record = self._exit_record()
        # Without a record, the store may not answer, which has the description of another's job.
        if record is None:
            return None
        ended = verdict.ended_elsewhere(record, self._access.spec())
        if ended is None:
            log_once(
                f"{record.job}: its last attempt has ended with exit code "
                f"{record.outcome.exit_code}; whether it is tried again, only its platform knows"
            )
        return ended

    def _exit_record(self) -> exits.ExitRecord | None:
        """Return the head's record of how the job ended, if it left one."""
        try:
            record = call_with_timeout(_STORE_S, self._stored_exit_record)
            self.record_error = ""
        except (StoreError, TimeoutError) as error:
            store_uri = self._access.record.store.partition("?")[0]
            text = f"{store_uri}: {error}" if isinstance(error, TimeoutError) else error
            self.record_error = f"reading the record of the job: {text}"
            return None
        return record

    def _stored_exit_record(self) -> exits.ExitRecord | None:
        store = self._access.store_with_retries(_STORE_S)
        job = self._access.record.job
        key = JobPaths(job).record
        try:
            record = exits.load(store.get_bytes(key, limit_bytes=SMALL_LIMIT_BYTES))
            if record.job != job:
                raise exits.RecordError(f"reading an exit record: it is of the job {record.job}")
        except ObjectMissing:
            return None
        except (UnreadableObject, exits.RecordError) as error:
            self._has_invalid_record = True
            reason = one_line(str(error))
            is_named = isinstance(error, UnreadableObject)
            log_once(reason if is_named else f"{store.uri(key)}: {reason[:_REASON_CHARS]}")
            return None
        if record.damaged_layers and self._access.record.is_ours:
            # If the platform delivers the package, the nodes cannot mark it as damaged themselves.
            with contextlib.suppress(StoreError):
                claims.mark_damaged(store, record.damaged_layers[:LAYERS_LIMIT])
        return record

    def _entry_lines(self, node: int | None) -> tuple[str, ...]:
        """Return the last log lines of a node's entry."""
        if node is None:
            return ()
        last: deque[bytes] = deque(maxlen=_LAST_LINES)
        with contextlib.suppress(BackendError):
            lines = log.lines_of(log.pieces(log.read(self._access, node, follow=False)))
            last.extend(line.data for line in lines if line.rank is None)
        return tuple(line.decode("utf-8", "replace").rstrip() for line in last)
