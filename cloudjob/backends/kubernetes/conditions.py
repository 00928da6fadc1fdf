"""Where a job stands by the conditions that Kubeflow's operators, and those like them, write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloudjob.backends.kubernetes.engine import Stage
from cloudjob.model.status import JobState


def stage(job: Mapping[str, Any], is_cancelled: bool) -> Stage:
    """Return where a job stands."""
    status = job.get("status") or {}
    held = [item for item in status.get("conditions") or [] if item.get("status") == "True"]
    # The last to come true comes last; these stay true beside those that follow.
    by_type = {str(item.get("type")): item for item in held}
    for name, state in (
        ("Failed", JobState.FAILED),
        ("Succeeded", JobState.SUCCEEDED),
        ("Suspended", JobState.CANCELLED),
        ("Running", JobState.RUNNING),
        ("Restarting", JobState.RUNNING),
        ("Created", JobState.PENDING),
    ):
        if name in by_type:
            return _stage(name, state, by_type[name], status, is_cancelled)
    if by_type:
        return Stage(JobState.UNKNOWN, ", ".join(by_type))
    return Stage(JobState.PENDING, "new")


def _stage(
    name: str,
    state: JobState,
    condition: Mapping[str, Any],
    status: Mapping[str, Any],
    is_cancelled: bool,
) -> Stage:
    if name == "Suspended" and not is_cancelled:
        # Somebody has put it aside; it may go on.
        state = JobState.PENDING
    if name == "Failed" and is_cancelled:
        state = JobState.CANCELLED
    words = [str(condition.get(key) or "") for key in ("reason", "message")]
    ended_at = status.get("completionTime") or condition.get("lastTransitionTime") or ""
    return Stage(
        state=state,
        native=name,
        message=": ".join(word for word in words if word) if state is JobState.FAILED else "",
        ended_at=str(ended_at) if state.is_final else "",
        started_at=str(status.get("startTime") or "") if state is JobState.RUNNING else "",
        has_asked=name == "Suspended",
    )
