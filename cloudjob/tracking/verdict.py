"""Builds the status of a job from its platform's report and the record of its head."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from cloudjob.backends.base import NativeStatus
from cloudjob.home.records import JobRecord
from cloudjob.model import status as statuses
from cloudjob.model import times
from cloudjob.model.status import Code, Failure, Hang, JobState, JobStatus, Phase
from cloudjob.model.text import one_line
from jobentry.contract import exits, hangs, node_end

_ENTRY = "jobentry: "

# Returns the last log lines of a node's entry, by the number of the node.
EntryLines = Callable[["int | None"], "tuple[str, ...]"]


def as_status(record: JobRecord, native: NativeStatus) -> JobStatus:
    """Return the status of a job as its platform reports it."""
    return JobStatus(
        job=record.job,
        name=record.name,
        backend=record.backend,
        state=native.state,
        native_state=native.native,
        nodes=record.nodes,
        procs_per_node=record.procs_per_node,
        created_at=record.created_at,
        started_at=native.started_at,
        ended_at=native.ended_at,
        exit_code=native.exit_code,
        code=Code(
            uri=record.code_uri,
            digest=record.code_digest,
            size_bytes=record.code_size_bytes,
            files=record.code_files,
        ),
    )


def ended_elsewhere(
    native: NativeStatus,
    record: exits.ExitRecord | None,
    described: Mapping[str, Any],
) -> NativeStatus:
    """Return how a job ended by its record, if the record decides it; else ``native``.

    This is for jobs whose platform cannot be queried here.
    """
    if record is None:
        return native
    if record.exit_code == 0:
        state = JobState.SUCCEEDED
    elif described.get("retries"):
        # The job may have been restarted since.
        return native
    else:
        state = JobState.CANCELLED if record.cause == "cancelled" else JobState.FAILED
    return NativeStatus(state, "ended", started_at=record.started_at, ended_at=record.ended_at)


def with_record(
    status: JobStatus,
    native: NativeStatus,
    record: exits.ExitRecord | None,
    record_error: str,
    entry_lines: EntryLines,
) -> JobStatus:
    """Return the status of an ended job with its head's record, or else the platform's reasons.

    The record has more details than the platform.

    Args:
        record: The head's record of how the job ended; None if it left none.
        record_error: Why the record could not be read; empty if it was.
    """
    if record is not None and record.cause == "cancelled":
        if status.state is not JobState.CANCELLED and native.knows_cancels:
            record = _stopped(record)
        else:
            status = replace(status, state=JobState.CANCELLED)
            record = _without_node(record)
    came_late = native.is_unwatched or status.state is JobState.CANCELLED
    if record is not None and came_late and record.exit_code == 0:
        # The head writes its record last, so the job was complete.
        status = replace(status, state=JobState.SUCCEEDED)
    if record is not None and record.exit_code and status.state is JobState.SUCCEEDED:
        # The exit code of a head that was started again, for example, says less than its record.
        status = replace(status, state=JobState.FAILED)
    if record is None or _contradicts(status, record):
        return _without_record(status, native, record_error, entry_lines)
    failure = record.failure
    if failure is not None and native.reason:
        # The entry saw that a rank was killed; only the platform knows why.
        message = failure.message.replace(exits.MEMORY_GUESS, "")
        failure = failure._replace(message=f"{message} ({native.reason})")
    if failure is not None and failure.message.endswith(node_end.BEFORE_JOINING):
        # The head received nothing from that node, so the last lines are in the node's own log.
        failure = failure._replace(last_lines=entry_lines(failure.node))
    cancelled = status.state is JobState.CANCELLED
    return replace(
        status,
        exit_code=record.exit_code,
        cause="cancelled" if cancelled else record.cause or None,
        failure=None if failure is None else Failure(**failure._asdict()),
        phases=tuple(
            Phase(node=node, name=name, started_at=start, ended_at=end)
            for node, name, start, end in record.phases
        ),
        hang=hang_of(record.hang),
    )


def hang_of(hang: hangs.Hang | None) -> Hang | None:
    """Return how a job hangs, as its status has it; None if it does not, or moves again."""
    if hang is None or hang.is_over:
        return None
    return Hang(
        rule=hang.rule.value,
        confidence=hang.confidence.value,
        ranks=tuple(rank for group in hang.culprits for rank in group.ranks),
        since=times.rfc3339(hang.at - hang.lasted_s),
        message=one_line(hangs.headline(hang)),
        details=tuple(one_line(line) for line in hangs.details(hang)),
    )


def _without_record(
    status: JobStatus, native: NativeStatus, error: str, entry_lines: EntryLines
) -> JobStatus:
    """Add the platform's report for a job whose head left no record of this end."""
    if status.state is JobState.SUCCEEDED:
        return status
    cancelled = status.state is JobState.CANCELLED
    # The platform may report the exit code of its own command; a failed job must not show 0.
    code = native.exit_code if cancelled else native.exit_code or 1
    if cancelled and code == exits.code_of_signal(signal.SIGKILL):
        # A frozen head, for example, is killed after its grace period. The job was cancelled.
        code = exits.code_of_signal(signal.SIGTERM)
    lines = () if cancelled else entry_lines(native.node)
    # If the entry itself failed, its message is the reason for all later errors.
    reasons = [line for line in lines if code == exits.ENTRY_FAILED and _is_reason(line)]
    texts = (*reasons[-1:], native.message, native.reason, error)
    message = ": ".join(text.removeprefix(_ENTRY) for text in texts if text)
    failure = Failure(
        node=native.node,
        exit_code=code,
        message=message or "cancelled before the head could write its record",
        last_lines=lines,
    )
    cause = "cancelled" if cancelled else native.cause or "platform"
    return replace(status, exit_code=code, cause=cause, failure=failure)


def _is_reason(line: str) -> bool:
    """Whether a line of an entry's log reports a failure, rather than a hint or a retry."""
    return (
        line.startswith(_ENTRY)
        and not line.startswith((f"{_ENTRY}hint: ", f"{_ENTRY}writing the record"))
        and not line.endswith("; trying again")
    )


def _stopped(record: exits.ExitRecord) -> exits.ExitRecord:
    """Return the record of a job that was stopped by a signal to one node, not cancelled."""
    failure = record.failure or exits.Failure()
    name = signal.Signals(failure.signal).name if failure.signal else "a signal"
    message = f"stopped from outside with {name}, but the job was not cancelled"
    return record._replace(cause="platform", failure=failure._replace(message=message))


def _without_node(record: exits.ExitRecord) -> exits.ExitRecord:
    """Return the record of a cancelled job without the node that reported the cancel first."""
    if record.failure is None:
        return record
    return record._replace(failure=record.failure._replace(node=None, host=""))


def recorded_status(record: JobRecord) -> JobStatus | None:
    """Return the final status in the records; None if there is none or it is damaged."""
    if not record.final_json:
        return None
    try:
        return statuses.from_json(json.loads(record.final_json))
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def _contradicts(status: JobStatus, record: exits.ExitRecord) -> bool:
    """Whether a job failed after its head had recorded success."""
    return status.state is JobState.FAILED and record.exit_code == 0
