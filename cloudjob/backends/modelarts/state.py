"""Translates the service's status of a job into ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloudjob.backends.native import Ended, NativeStatus, Stop, unended
from cloudjob.model.status import JobState
from cloudjob.model.times import rfc3339
from jobentry.contract.exits import Cause, Failure

_STATES = {
    "Creating": JobState.PENDING,
    "Pending": JobState.PENDING,
    "Running": JobState.RUNNING,
    "Terminating": JobState.RUNNING,
    "Completed": JobState.SUCCEEDED,
    "Failed": JobState.FAILED,
    "Terminated": JobState.CANCELLED,
}
ACTIVE = ("Creating", "Pending", "Running", "Terminating")
# Abnormal is the service's own fault. With one of these secondary phases the job has failed for
# good; with any other it may recover, so its state is unknown.
_OVER = ("CreateFailed", "Failed", "TerminatedFailed")
_REASONS = {
    137: "killed: most likely the node ran out of memory",
    247: "killed: most likely the node ran out of memory",
    139: "a segmentation fault: most likely incompatible packages",
}


def status_of(job: Mapping[str, Any]) -> NativeStatus:
    """Return the status of a job.

    Args:
        job: The job as the service returns it.
    """
    status = job.get("status") or {}
    phase = str(status.get("phase") or "")
    second = str(status.get("secondary_phase") or "")
    state = _STATES.get(phase, JobState.UNKNOWN)
    native = phase
    if phase == "Abnormal" and second:
        state = JobState.FAILED if second in _OVER else state
        native = f"{phase} ({second})"
    started_s = _number(status.get("start_time")) / 1000
    started_at = rfc3339(started_s) if started_s else None
    if not state.is_final:
        return unended(state, native, started_at)
    cause, failure = _end(state, phase, second, status)
    return Ended(
        native,
        cause,
        failure,
        started_at=started_at,
        ended_at=_ended_at(status, started_s),
        attempt_at=_attempt_at(status),
        reason=_REASONS.get(failure.exit_code or 0, "") if failure else "",
        # The platform knows of every cancel. It ends the other nodes of a job of which one failed.
        stop=Stop.CANCEL if state is JobState.CANCELLED else Stop.PLATFORM,
    )


def _end(
    state: JobState, phase: str, second: str, status: Mapping[str, Any]
) -> tuple[Cause, Failure | None]:
    """Return what ended a job, and its failure."""
    if state is JobState.SUCCEEDED:
        return Cause.NONE, None
    if state is JobState.CANCELLED:
        return Cause.CANCELLED, Failure()
    failed = _failed_task(status)
    node = _node(str(failed.get("task") or ""))
    message = _message(phase, second, failed)
    return Cause.PLATFORM, Failure(node, exit_code=failed.get("exit_code"), message=message)


def tasks(job: Mapping[str, Any]) -> list[str]:
    """Return the names of the job's tasks, one per node, sorted by number."""
    names = (job.get("status") or {}).get("tasks") or []
    return sorted((str(task) for task in names), key=lambda task: (_node(task) or 0, task))


def node_of(task: str) -> int:
    """Return the number of a task's node."""
    return _node(task) or 0


def _node(task: str) -> int | None:
    number = task.rpartition("-")[2]
    return int(number) if number.isascii() and number.isdecimal() else None


def _failed_task(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the task that explains a failure: the first with an exit code of its own."""
    failed = [task for task in status.get("task_statuses") or [] if task.get("exit_code")]
    # A task that was ended because another had failed is not to blame.
    self_caused = [task for task in failed if task["exit_code"] != 143]
    first: Mapping[str, Any] = (self_caused or failed or [{}])[0]
    return first


def _message(phase: str, second: str, failed: Mapping[str, Any]) -> str:
    message = str(failed.get("message") or "").strip()
    if message:
        return message
    if failed:
        return f"{failed.get('task')} ended with exit code {failed['exit_code']}"
    return f"ModelArts reports {phase}" + (f" ({second})" if second and second != phase else "")


def _ended_at(status: Mapping[str, Any], started_s: float) -> str | None:
    ends = [_number(record.get("end_at")) for record in status.get("running_records") or []]
    last_s = max(ends, default=0.0)
    duration_ms = _number(status.get("duration"))
    if started_s and duration_ms:
        return rfc3339(started_s + duration_ms / 1000)
    return rfc3339(last_s) if last_s else None


def _attempt_at(status: Mapping[str, Any]) -> str:
    """Return when the last attempt began; empty while there was only one."""
    begins = [_number(record.get("start_at")) for record in status.get("running_records") or []]
    return rfc3339(max(begins)) if len(begins) > 1 else ""


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
