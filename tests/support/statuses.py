"""Job statuses for tests, which name only the fields that matter."""

from __future__ import annotations

from typing import Any

from cloudjob.model.status import JobState, JobStatus


def status_of(job: str = "train-1", **more: Any) -> JobStatus:
    """Return the status of a running process job of two nodes, with these fields replaced."""
    values: dict[str, Any] = {
        "name": "train",
        "backend": "process",
        "state": JobState.RUNNING,
        "native_state": "running",
        "nodes": 2,
        "procs_per_node": 1,
        "created_at": "2026-01-01T00:00:00.000Z",
    }
    return JobStatus(job=job, **{**values, **more})
