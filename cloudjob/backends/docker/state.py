"""The status of a job, from the state of its containers. No I/O."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cloudjob.backends import supervision
from cloudjob.backends.docker.request import (
    JOB_LABEL,
    MEMORY_LABEL,
    NAME_LABEL,
    NODE_LABEL,
    NODES_LABEL,
    network_name,
)
from cloudjob.backends.native import CAUSES, Ended, NativeStatus, OutOfMemory, Stop, unended
from cloudjob.model import times
from cloudjob.model.status import JobState
from jobentry.contract.exits import Cause, Failure
from jobentry.contract.malformed import MALFORMED

_PAUSED = "paused"
# The engine's state of a container -> the state of its node; any other is UNKNOWN.
_STATES = {
    "created": JobState.PENDING,
    "initialized": JobState.PENDING,
    "running": JobState.RUNNING,
    _PAUSED: JobState.RUNNING,
    "restarting": JobState.RUNNING,
    "stopping": JobState.RUNNING,
    "removing": JobState.RUNNING,
    "exited": JobState.RUNNING,
    "stopped": JobState.RUNNING,
    "dead": JobState.RUNNING,
    "removed": JobState.RUNNING,
}
_REMOVED = "removed"
_OVER = ("exited", "stopped", "dead", "removing", _REMOVED)
_NEW = ("created", "initialized")
# The exit code of a node whose container was removed.
_KILLED = 128 + signal.SIGKILL


@dataclass(frozen=True, slots=True)
class Container:
    """One node as the engine sees it; ``inspected`` sets the fields that have defaults.

    Args:
        exit_code: None while it runs.
    """

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

    @property
    def is_removed(self) -> bool:
        """Whether the engine no longer has it."""
        return self.native == _REMOVED

    def inspected(self, details: Mapping[str, Any]) -> Container:
        """Return a copy with the values that ``inspect`` returned."""
        state = details["State"]
        native = str(state["Status"])
        return replace(
            self,
            native=native,
            started_at=times.normalised(state["StartedAt"]),
            ended_at=times.normalised(state["FinishedAt"]),
            # The engine reports 0 for a container that runs, or was started again.
            exit_code=state["ExitCode"] if native in _OVER else None,
            is_out_of_memory=bool(state.get("OOMKilled")),
            error=str(state.get("Error") or ""),
        )


def nodes_among(listed: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return those items of the engine's list that are containers which a submit has created.

    `docker commit` copies labels into an image, and so into each container that is made from it. A
    node that somebody has renamed is in the network of its job, and no other has its number.
    """
    named = [item for item in listed if _has_its_name(item)]
    places = {_place(item) for item in named}
    others = [item for item in listed if not _has_its_name(item) and _is_in_network(item)]
    return [*named, *(item for item in others if _place(item) not in places)]


def _has_its_name(item: Mapping[str, Any]) -> bool:
    # A container that is being removed may have no name any more.
    names = [name.lstrip("/") for name in item.get("Names") or ()]
    return not names or item["Labels"].get(NAME_LABEL) in names


def _is_in_network(item: Mapping[str, Any]) -> bool:
    network = item.get("HostConfig", {}).get("NetworkMode")
    return bool(network == network_name(item["Labels"].get(JOB_LABEL, "")))


def _place(item: Mapping[str, Any]) -> tuple[str | None, str | None]:
    return item["Labels"].get(JOB_LABEL), item["Labels"].get(NODE_LABEL)


def container(item: Mapping[str, Any]) -> Container:
    """Return a container from an item of the engine's list."""
    labels = item["Labels"]
    return Container(
        id=item["Id"],
        node=int(labels[NODE_LABEL]),
        host=labels.get(NAME_LABEL, ""),
        native=str(item["State"]).lower(),
        labels=labels,
        # That of its creation, until it is inspected.
        started_at=times.rfc3339(item.get("Created") or 0),
    )


def absent_nodes(containers: Sequence[Container]) -> list[int]:
    """Return the nodes of a job without a container; there is one container at least."""
    nodes = int(containers[0].labels.get(NODES_LABEL, "0"))
    return sorted({*range(nodes)} - {item.node for item in containers})


def removed(node: int, beside: Container, noticed_at: float) -> Container:
    """Return what is known about a node whose container was removed.

    Args:
        beside: Another container of the job.
        noticed_at: When it was first missed, in seconds since 1970.
    """
    name = f"{beside.labels[JOB_LABEL]}-{node}"
    ended_at = times.rfc3339(noticed_at)
    return Container(name, node, "", _REMOVED, beside.labels, "", ended_at, _KILLED)


def seen_nodes(
    containers: Sequence[Container], reported: Collection[str] = ()
) -> list[supervision.Node]:
    """Return the nodes of a job, by their numbers, as the rules of supervision see them.

    Args:
        containers: All of them; those that are over are inspected.
        reported: The ids of those whose end was reported to the head.
    """
    by_node = {item.node: item for item in containers}
    # A container that is not there may not be created yet.
    missing = supervision.Node()
    return [
        _seen(by_node[index], reported) if index in by_node else missing
        for index in range(max(by_node, default=-1) + 1)
    ]


def _seen(item: Container, reported: Collection[str]) -> supervision.Node:
    if item.is_alive:
        return supervision.Node()
    ended_at = times.seconds_of(item.ended_at) or math.inf
    return supervision.Node(False, item.exit_code, ended_at, item.id in reported)


def unended_status(containers: list[Container]) -> NativeStatus:
    """Return the status of a job that has not ended, from its containers; there is one at least."""
    item = _head(containers) or containers[0]
    paused = [f"node {item.node} ({item.host})" for item in containers if item.native == _PAUSED]
    native = f"{_PAUSED}: {', '.join(paused)}" if paused else item.native
    return unended(_STATES.get(item.native, JobState.UNKNOWN), native, _started_at(containers))


def ended_status(containers: list[Container], *, is_cancelled: bool) -> Ended:
    """Return the status of a job that has ended, from its containers; there is one at least."""
    head = _head(containers)
    cause, failure = _end(head, containers, is_cancelled=is_cancelled)
    ends = [item.ended_at for item in containers if item.ended_at]
    return Ended(
        head.native if head else "removed",
        cause,
        failure,
        started_at=_started_at(containers),
        ended_at=(head.ended_at if head else "") or max(ends, default=None),
        reason=_reason(containers),
        stop=Stop.OUTSIDE,
    )


def _started_at(containers: list[Container]) -> str | None:
    return min((item.started_at for item in containers if item.started_at), default=None)


def _head(containers: list[Container]) -> Container | None:
    return next((item for item in containers if item.node == 0), None)


def _end(
    head: Container | None, containers: list[Container], *, is_cancelled: bool
) -> tuple[Cause, Failure | None]:
    """Return what ended a job, and its failure."""
    code = head.exit_code if head else None
    are_new = any(item.is_new for item in containers)
    if code == 0 and not are_new:
        # Even if it was cancelled: the head was already storing its record.
        return Cause.NONE, None
    if is_cancelled:
        return Cause.CANCELLED, Failure(exit_code=code)
    if are_new:
        # The exit code of a container that was never started is 0.
        message = "the submit was interrupted before it had started every node"
        return Cause.PLATFORM, Failure(exit_code=1, message=message)
    message = "the container of node 0 was removed"
    if head:
        message = head.error or _how(head)
    return Cause.PLATFORM, Failure(0, exit_code=code, message=message)


def _how(item: Container) -> str:
    """Return how a node ended."""
    if item.is_removed:
        return f"the container of node {item.node} was removed"
    if item.exit_code is None:
        return f"node {item.node} ({item.host}) does not end"
    return f"node {item.node} ({item.host}) ended with exit code {item.exit_code}"


def all_removed(*, is_cancelled: bool) -> Ended:
    """Return the status of a job whose containers were removed before it was known to have ended.

    Its head may have stored a record, which then shows how it ended.
    """
    code = 128 + signal.SIGTERM if is_cancelled else _KILLED
    return Ended(
        "removed",
        Cause.CANCELLED if is_cancelled else Cause.PLATFORM,
        Failure(exit_code=code, message="the containers of all nodes were removed"),
        stop=Stop.OUTSIDE,
        is_unwatched=True,
    )


def with_failed_node(status: Ended, containers: list[Container]) -> Ended:
    """Return the status of a job whose head we ended because a worker failed: that worker's."""
    index = supervision.first_failed(seen_nodes(containers))
    if index is None or status.cause is Cause.NONE:
        return status
    first = next(item for item in containers if item.node == index)
    failure = Failure(first.node, exit_code=first.exit_code, message=_how(first))
    return status._replace(failure=failure, stop=Stop.PLATFORM)


# The keys of a saved status, for a job that has ended.
_TEXTS = ("native", "started_at", "ended_at", "attempt_at")


def dump(status: Ended) -> bytes:
    """Serialise the status of an ended job for ``load``."""
    failure = status.failure or Failure()
    values = {name: getattr(status, name) for name in _TEXTS}
    values |= {
        "state": status.state.value,
        "reason": status.reason,
        "exit_code": status.exit_code,
        "message": failure.message,
        "node": failure.node,
        "has_asked": status.stop is Stop.PLATFORM,
        "knows_cancels": status.stop is not Stop.CANCEL,
        "is_unwatched": status.is_unwatched,
    }
    return json.dumps(values).encode("ascii")


def load(data: bytes) -> Ended:
    """Return the status that ``dump`` serialised.

    Raises:
        ValueError: It is no such status.
    """
    try:
        values = json.loads(data)
        state = JobState(values["state"])
        stop = Stop.OUTSIDE if values["knows_cancels"] else Stop.CANCEL
        reason = values["reason"]
        return Ended(
            cause=CAUSES[state],
            failure=None
            if state is JobState.SUCCEEDED
            else Failure(values["node"], exit_code=values["exit_code"], message=values["message"]),
            stop=Stop.PLATFORM if values["has_asked"] else stop,
            is_unwatched=values["is_unwatched"],
            reason=reason if isinstance(reason, str) else OutOfMemory(*reason),
            **{name: values[name] for name in _TEXTS},
        )
    except MALFORMED as error:
        raise ValueError(f"it is not valid: {error!r}") from error


def _reason(containers: list[Container]) -> str | OutOfMemory:
    """Return which nodes ran out of memory, which the entry cannot know."""
    full = [item for item in containers if item.is_out_of_memory]
    if not full:
        return ""
    nodes = ", ".join(f"node {item.node} ({item.host})" for item in full)
    limit = float(full[0].labels.get(MEMORY_LABEL, "0"))
    return OutOfMemory(nodes, f"limited to {limit:g} GiB" if limit else "")
