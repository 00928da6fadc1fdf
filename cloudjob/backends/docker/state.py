"""The status of a job, from the state of its containers. No I/O."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cloudjob.backends.base import NativeStatus
from cloudjob.backends.docker.request import MEMORY_LABEL, NODE_LABEL
from cloudjob.model import times
from cloudjob.model.status import JobState

# The engine's state of a container -> the state of its node; any other is UNKNOWN.
_STATES = {
    "created": JobState.PENDING,
    "initialized": JobState.PENDING,
    "running": JobState.RUNNING,
    "paused": JobState.RUNNING,
    "restarting": JobState.RUNNING,
    "stopping": JobState.RUNNING,
    "removing": JobState.RUNNING,
    "exited": JobState.RUNNING,
    "stopped": JobState.RUNNING,
    "dead": JobState.RUNNING,
}
_OVER = ("exited", "stopped", "dead", "removing")
_NEW = ("created", "initialized")


@dataclass(frozen=True, slots=True)
class Container:
    """One node as the engine sees it; ``inspected`` sets the fields that have defaults."""

    id: str
    node: int
    host: str
    native: str
    labels: Mapping[str, str]
    started_at: str = ""
    ended_at: str = ""
    exit_code: int | None = None
    is_out_of_memory: bool = False
    error: str = ""

    @property
    def is_alive(self) -> bool:
        """Whether it runs, or may run again."""
        return self.native not in _OVER

    @property
    def is_new(self) -> bool:
        """Whether it has never been started."""
        return self.native in _NEW

    def inspected(self, found: Mapping[str, Any]) -> Container:
        """Return a copy with the values that ``inspect`` returned."""
        state = found["State"]
        return replace(
            self,
            native=str(state["Status"]),
            started_at=times.normalised(state["StartedAt"]),
            ended_at=times.normalised(state["FinishedAt"]),
            exit_code=state["ExitCode"],
            is_out_of_memory=bool(state.get("OOMKilled")),
            error=str(state.get("Error") or ""),
        )


def container(found: Mapping[str, Any]) -> Container:
    """Return a container from an item of the engine's list."""
    labels = found["Labels"]
    names = found.get("Names") or ["/"]
    return Container(
        id=found["Id"],
        node=int(labels[NODE_LABEL]),
        host=names[0].lstrip("/"),
        native=str(found["State"]).lower(),
        labels=labels,
    )


def status_of(found: list[Container], *, is_cancelled: bool, has_ended: bool) -> NativeStatus:
    """Return the status of a job from its containers, of which there is at least one."""
    head = next((item for item in found if item.node == 0), None)
    if not has_ended:
        item = head or found[0]
        return NativeStatus(_STATES.get(item.native, JobState.UNKNOWN), item.native)
    starts = [item.started_at for item in found if item.started_at]
    ends = [item.ended_at for item in found if item.ended_at]
    status = NativeStatus(
        state=JobState.FAILED,
        native=head.native if head else "removed",
        started_at=min(starts, default=None),
        ended_at=(head.ended_at if head else "") or max(ends, default=None),
        exit_code=head.exit_code if head else None,
        reason=_reason(found),
        knows_cancels=True,
    )
    are_new = any(item.is_new for item in found)
    # A head that ends with 0 has succeeded: it was already storing its record.
    if is_cancelled and (head is None or head.exit_code != 0 or are_new):
        return replace(status, state=JobState.CANCELLED)
    if are_new:
        # Its exit code is 0 nevertheless.
        message = "the submit was interrupted before it had started every node"
        return replace(status, exit_code=1, message=message)
    if head is None:
        return replace(status, message="the container of node 0 was removed", node=0)
    if head.exit_code == 0:
        return replace(status, state=JobState.SUCCEEDED)
    message = head.error or f"node 0 ({head.host}) ended with exit code {head.exit_code}"
    return replace(status, message=message, node=0)


def all_removed(*, is_cancelled: bool) -> NativeStatus:
    """Return the status of a job whose containers were removed before it was known to have ended.

    Its head may have stored a record, which then shows how it ended.
    """
    return NativeStatus(
        JobState.CANCELLED if is_cancelled else JobState.FAILED,
        "removed",
        exit_code=128 + (signal.SIGTERM if is_cancelled else signal.SIGKILL),
        message="the containers of all nodes were removed",
        is_unwatched=True,
        knows_cancels=True,
    )


def with_failed_node(status: NativeStatus, found: list[Container]) -> NativeStatus:
    """Return the status of a job whose head we ended because a worker failed: that worker's."""
    bad = [item for item in found if item.node and item.exit_code]
    if not bad:
        return status
    first = min(bad, key=lambda item: item.ended_at)
    message = f"node {first.node} ({first.host}) ended with exit code {first.exit_code}"
    return replace(
        status, exit_code=first.exit_code, message=message, node=first.node, has_asked=True
    )


def _reason(found: list[Container]) -> str:
    """Return which nodes ran out of memory, which the entry cannot know."""
    full = [item for item in found if item.is_out_of_memory]
    if not full:
        return ""
    nodes = ", ".join(f"node {item.node} ({item.host})" for item in full)
    limit = float(full[0].labels.get(MEMORY_LABEL, "0"))
    return f"out of memory: {nodes}" + (f", limited to {limit:g} GiB" if limit else "")
