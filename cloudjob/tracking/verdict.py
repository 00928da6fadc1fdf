"""Builds the status of a job from its platform's report and the record of its head."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from typing import Any

from cloudjob.backends.native import (
    Absent,
    Ended,
    NativeStatus,
    OutOfMemory,
    Running,
    Stop,
    Waiting,
)
from cloudjob.home.records import JobRecord
from cloudjob.model import status as statuses
from cloudjob.model import times
from cloudjob.model.status import Code, Hang, JobStatus, Phase, SlowRanks, Wait, state_of
from cloudjob.model.text import one_line
from jobentry.contract import exits, hangs, messages, node_end, slow
from jobentry.contract.exits import Cause, ExitRecord, Failure, Outcome
from jobentry.contract.malformed import MALFORMED

# Returns the last log lines of a node's entry, by the number of the node.
EntryLines = Callable[["int | None"], "tuple[str, ...]"]


def as_status(record: JobRecord, native: NativeStatus) -> JobStatus:
    """Return the status of a job as its platform reports it."""
    ended = native if isinstance(native, Ended) else None
    return JobStatus(
        job=record.job,
        name=record.name,
        backend=record.backend,
        state=native.state,
        native_state=native.native,
        nodes=record.nodes,
        procs_per_node=record.procs_per_node,
        created_at=record.created_at,
        started_at=None if isinstance(native, (Waiting, Absent)) else native.started_at,
        ended_at=ended.ended_at if ended else None,
        exit_code=ended.exit_code if ended else None,
        attempt=native.attempt if isinstance(native, (Running, Ended)) else None,
        absence=native.why if isinstance(native, Absent) else None,
        wait=_since_submit(native, record) if isinstance(native, (Waiting, Running)) else None,
        code=Code(
            uri=record.code_uri,
            digest=record.code_digest,
            size_bytes=record.code_size_bytes,
            files=record.code_files,
        ),
    )


def _since_submit(native: Waiting | Running, record: JobRecord) -> Wait | None:
    """Return a wait that has a time: that of the submit if the platform does not tell it."""
    return native.wait and native.wait._replace(since=native.wait.since or record.created_at)


def ended_elsewhere(record: ExitRecord, described: Mapping[str, Any]) -> Ended | None:
    """Return how a job ended by its record; None if the record does not decide it.

    This is for jobs whose platform cannot be queried here.
    """
    code, cause, _ = record.outcome
    if code and described.get("retries"):
        # The job may have been restarted since.
        return None
    if cause is not Cause.CANCELLED or not code:
        cause = Cause.PLATFORM if code else Cause.NONE
    return Ended("ended", cause, started_at=record.started_at, ended_at=record.ended_at)


def with_record(
    status: JobStatus,
    native: Ended,
    record: ExitRecord | None,
    record_error: str,
    entry_lines: EntryLines,
) -> JobStatus:
    """Return the status of an ended job with its head's record, or else the platform's reasons.

    The record has more details than the platform.

    Args:
        record: The head's record of how the job ended; None if it left none.
        record_error: Why the record could not be read; empty if it was.
    """
    outcome = _agreed(native, record) if record else None
    if record is None or outcome is None:
        return _without_record(status, native, record_error, entry_lines)
    failure = outcome.failure and _explained(outcome.failure, native, entry_lines)
    return status._replace(
        state=state_of(outcome.cause),
        exit_code=outcome.exit_code,
        cause=outcome.cause or None,
        failure=failure,
        phases=tuple(
            Phase(node=node, name=name, started_at=start, ended_at=end)
            for node, name, start, end in record.phases
        ),
        hang=hang_of(record.hang),
        cut_logs=record.cut_logs,
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


def slow_of(report: slow.Slow | None) -> SlowRanks | None:
    """Return which ranks slow a job down, as its status has it; None if none does any more."""
    if report is None or report.is_over:
        return None
    return SlowRanks(
        ranks=report.ranks,
        nodes=report.nodes,
        cost_percent=report.cost_percent,
        reason=report.reason.value,
        place=one_line(slow.place_text(report.place)),
        message=one_line(slow.headline(report)),
    )


def _agreed(native: Ended, record: ExitRecord) -> Outcome | None:
    """Return how a job ended by its record, if that fits the platform's report; else None."""
    outcome = record.outcome
    if record.ended_at < native.attempt_at:
        return None
    if outcome.exit_code == 0:
        # The head writes its record last, so the job was complete when its watcher failed, or when
        # it was cancelled; but a job may fail after its head has succeeded.
        has_failed = native.cause not in (Cause.NONE, Cause.CANCELLED)
        return None if has_failed and not native.is_unwatched else Outcome(0)
    if outcome.cause is Cause.CANCELLED:
        return _stopped(native, outcome)
    # A head that was started again may have succeeded, so success of the platform does not count.
    cause = outcome.cause or Cause.PLATFORM
    return outcome._replace(cause=Cause.CANCELLED if native.cause is Cause.CANCELLED else cause)


def _stopped(native: Ended, outcome: Outcome) -> Outcome | None:
    """Return how a job ended whose head was told to end; None if the platform did so by itself."""
    failure = outcome.failure or Failure()
    if native.stop is Stop.PLATFORM:
        return None
    if native.cause is Cause.CANCELLED or native.stop is Stop.CANCEL:
        # The node that reported the cancel first is of no interest.
        without_node = outcome.failure and failure._replace(node=None, host="")
        return outcome._replace(failure=without_node)
    name = signal.Signals(failure.signal).name if failure.signal else "a signal"
    message = f"stopped from outside with {name}, but the job was not cancelled"
    return Outcome(outcome.exit_code, Cause.PLATFORM, failure._replace(message=message))


def _explained(failure: Failure, native: Ended, entry_lines: EntryLines) -> Failure:
    """Add to a recorded failure what only the platform and the log of its node can tell."""
    if native.reason:
        # The entry saw that a rank was killed; the platform knows why.
        message = failure.message.replace(exits.MEMORY_GUESS, "")
        message = message.replace(exits.NOT_FOR_MEMORY, "")
        reason = native.reason
        if isinstance(reason, OutOfMemory) and exits.OUT_OF_MEMORY in message:
            has_limit = f"{exits.OUT_OF_MEMORY} (limit " in message
            reason = (reason._replace(limit="") if has_limit else reason).detail
        failure = failure._replace(message=f"{message} ({reason})")
    if node_end.is_before_joining(failure):
        failure = failure._replace(last_lines=entry_lines(failure.node))
    return failure


def _without_record(
    status: JobStatus, native: Ended, error: str, entry_lines: EntryLines
) -> JobStatus:
    """Add the platform's report for a job whose head left no record of this end."""
    if native.cause is Cause.NONE:
        return status
    failure = native.failure or Failure()
    is_cancelled = native.cause is Cause.CANCELLED
    code = failure.exit_code if is_cancelled else failure.exit_code or 1
    if is_cancelled and code == exits.code_of_signal(signal.SIGKILL):
        # The head was frozen, and killed after its grace.
        code = exits.code_of_signal(signal.SIGTERM)
    lines = () if is_cancelled else entry_lines(failure.node)
    # If the entry itself failed, its message is the reason for all later errors.
    reasons = [line for line in lines if code == exits.ENTRY_FAILED and messages.is_reason(line)]
    texts = (*reasons[-1:], failure.message, str(native.reason), error)
    # A platform's failure and its reason may be the same.
    parts = dict.fromkeys(text.removeprefix(messages.MARK) for text in texts if text)
    message = ": ".join(parts)
    unknown = f"{'cancelled' if is_cancelled else 'ended'} before the head could write its record"
    failure = failure._replace(exit_code=code, message=message or unknown, last_lines=lines)
    return status._replace(exit_code=code, cause=native.cause, failure=failure)


def recorded_status(record: JobRecord) -> JobStatus | None:
    """Return the final status in the records; None if there is none or it is damaged."""
    if not record.final_json:
        return None
    try:
        return statuses.from_json(json.loads(record.final_json))
    except MALFORMED:
        return None


def recorded_text(record: JobRecord) -> str:
    """Return the final status in the records as JSON; empty if it must be read and written anew."""
    try:
        is_current = statuses.is_current(json.loads(record.final_json or "{}"))
    except MALFORMED:
        return ""
    return record.final_json if is_current else ""
