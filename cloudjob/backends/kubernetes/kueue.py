"""Kueue, which admits jobs to quotas, and resumes an admitted job that somebody else suspends.

Facts: Kueue 0.19, ``kueue.x-k8s.io/v1beta2`` and ``v1beta1``. A Workload that is not active is
evicted and never admitted again; users with the role ``batch-user`` may read Workloads but not
change them.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from cloudjob.backends.kubernetes import errors, waiting
from cloudjob.backends.kubernetes.client import Client
from cloudjob.backends.kubernetes.engine import KUEUE_QUEUE, Resource
from cloudjob.errors import BackendError
from cloudjob.model.status import Outlook, Wait, WaitPhase

_GROUP = "kueue.x-k8s.io"
_GROUP_PATH = f"/apis/{_GROUP}"
# The versions that cloudjob can read, the preferred one first.
_VERSIONS = ("v1beta2", "v1beta1")
WORKLOAD = Resource(_GROUP, _VERSIONS[0], "workloads", "Workload")
LOCAL_QUEUE = Resource(_GROUP, _VERSIONS[0], "localqueues", "LocalQueue")
_JOB_UID = f"{_GROUP}/job-uid"
_DOING = "looking for Kueue in the cluster"
# The optional API that tells positions in a queue.
_POSITIONS = "visibility.kueue.x-k8s.io"
VISIBLE_QUEUE = LOCAL_QUEUE._replace(group=_POSITIONS)
# Positions beyond this one are not looked for.
_MOST_POSITIONS = 1000
# Reasons that no other job's end removes: only another request or another queue does.
_HOPELESS = ("ExceedsMaxQuota", "Misconfigured")
# How Kueue itself stops a job for good, as opposed to a user who may let it continue.
_GIVEN_UP = ("DeactivatedDueTo", "InactiveWorkload")
# Reasons that say nothing: Kueue has not looked at the job yet, or has evicted it since.
_UNJUDGED = ("", "PendingEvaluation", "Admitted")
# Seconds that a submit gives Kueue to look at the job.
_JUDGE_S = 3.0
_JUDGE_PAUSE_S = 0.2


class Deactivation(enum.Enum):
    """The result of asking Kueue to stop a job for good."""

    UNMANAGED = enum.auto()
    """Kueue does not manage the job, so nothing resumes it."""
    ASKED_BEFORE = enum.auto()
    """Kueue was asked already, so it does not resume the job, but it has not ended its pods."""
    DONE = enum.auto()
    """Kueue ends the pods of the job, and does not resume it."""
    IMPOSSIBLE = enum.auto()
    """Kueue manages the job, and the user may not change its Workload, or it has none yet."""


class Queued(NamedTuple):
    """Why a job that Kueue manages does not run.

    Args:
        queue: The name of its LocalQueue.
        why: Kueue's reason and message; empty if it has not looked at the job yet.
        is_admitted: Whether Kueue lets it run, so that something else keeps it from running.
        is_hopeless: Whether it will never run unless the job or the queue changes.
        since: Since when it waits.
    """

    queue: str
    why: str
    is_admitted: bool = False
    is_hopeless: bool = False
    since: str = ""


def version(client: Client) -> str:
    """Return the version of Kueue's API in the cluster that cloudjob can read; empty for none."""
    try:
        group = client.get(_GROUP_PATH, _DOING)
    except (errors.ObjectNotFound, errors.AccessDenied):
        # Every user may list what a cluster serves, unless an administrator has forbidden it.
        return ""
    served = {item.get("version") for item in group.get("versions") or ()}
    return next((name for name in _VERSIONS if name in served), "")


def has_queue(client: Client, namespace: str, name: str, served: str) -> bool:
    """Whether the namespace has a LocalQueue of this name.

    Args:
        served: The version of Kueue's API.
    """
    queues = LOCAL_QUEUE._replace(version=served)
    try:
        client.get(queues.path(namespace, name), f"looking for the queue {name}")
    except errors.ObjectNotFound:
        return False
    return True


def wait(client: Client, job: Mapping[str, Any]) -> Wait | None:
    """Return why Kueue has not admitted a job, with its position; None if it has, or unknown."""
    with contextlib.suppress(BackendError):
        served = version(client)
        for workload in _workloads(client, job, served, "reading why the job waits"):
            queued = queued_of(workload)
            if not queued.why:
                return None
            position = _position(client, workload, queued.queue)
            text = f"queue {queued.queue}: {position}{queued.why}"
            trouble = waiting.trouble(WaitPhase.QUEUE, queued.since, "", text)
            return trouble._replace(outlook=Outlook.STUCK) if queued.is_hopeless else trouble
    return None


def require_hope(client: Client, job: Mapping[str, Any]) -> None:
    """Wait until Kueue has looked at a job that was just created, for some seconds at most.

    Raises:
        BackendError: Kueue will never admit it.
    """
    queued = None
    # The job exists, and users who may not read Workloads may still submit.
    with contextlib.suppress(BackendError):
        queued = _judged(client, job)
    if queued is not None and queued.is_hopeless:
        raise BackendError(
            f"submitting the job to the queue {queued.queue}: it would wait for ever: {queued.why}",
            hint="request fewer nodes or less of the resource, or use another queue",
        )


def _judged(client: Client, job: Mapping[str, Any]) -> Queued | None:
    """Return what Kueue thinks of a new job; None if it does not say so in time."""
    served = version(client)
    end = time.monotonic() + _JUDGE_S
    while served and time.monotonic() < end:
        for workload in _workloads(client, job, served, "reading whether the job may run"):
            queued = queued_of(workload)
            if queued.is_admitted or queued.why:
                return queued
        time.sleep(_JUDGE_PAUSE_S)
    return None


def queued_of(workload: Mapping[str, Any]) -> Queued:
    """Return why a Workload is not admitted, from its conditions: the type counts, not the order.

    Since Kueue 0.19, or 0.18 with a feature gate, the reason of QuotaReserved says what is missing;
    before, it is ``Pending`` or ``Inadmissible``, and only the message does.
    """
    queue = str((workload.get("spec") or {}).get("queueName") or "")
    items = (workload.get("status") or {}).get("conditions") or ()
    conditions = {str(item.get("type")): item for item in items}
    is_evicted = _is_true(conditions, "Evicted")
    if _is_true(conditions, "Admitted") and not is_evicted:
        return Queued(queue, "", is_admitted=True)
    if (workload.get("spec") or {}).get("active") is False:
        eviction = conditions.get("Evicted") or {}
        since = str(eviction.get("lastTransitionTime") or "")
        if str(eviction.get("reason")).startswith(_GIVEN_UP):
            return Queued(queue, _words(eviction), is_hopeless=True, since=since)
        return Queued(queue, "Deactivated: it was stopped for good", since=since)
    quota = conditions.get("QuotaReserved") or {}
    waits = [conditions.get("Admitted") or {}] if _is_true(conditions, "QuotaReserved") else [quota]
    if is_evicted:
        waits.insert(0, conditions["Evicted"])
    judged = [item for item in waits if str(item.get("reason") or "") not in _UNJUDGED]
    is_hopeless = waits[-1] is quota and str(quota.get("reason")) in _HOPELESS
    since = str(waits[0].get("lastTransitionTime") or "")
    return Queued(queue, "; ".join(map(_words, judged)), is_hopeless=is_hopeless, since=since)


def _is_true(conditions: Mapping[str, Mapping[str, Any]], kind: str) -> bool:
    return (conditions.get(kind) or {}).get("status") == "True"


def _words(condition: Mapping[str, Any]) -> str:
    return f"{condition.get('reason')}: {condition.get('message') or ''}".rstrip(": ")


def _position(client: Client, workload: Mapping[str, Any], queue: str) -> str:
    """Return the position in the queue as text; empty if the cluster does not tell it."""
    namespace, name = workload["metadata"].get("namespace"), workload["metadata"].get("name")
    doing = "reading the position in the queue"
    with contextlib.suppress(BackendError):
        group = client.get(f"/apis/{_POSITIONS}", doing)
        served = (group.get("preferredVersion") or {}).get("version")
        path = f"/apis/{_POSITIONS}/{served}/namespaces/{namespace}/localqueues/{queue}"
        answer = client.get(f"{path}/pendingworkloads", doing, {"limit": str(_MOST_POSITIONS)})
        for item in answer.get("items") or ():
            position = item.get("positionInLocalQueue")
            if (item.get("metadata") or {}).get("name") == name and isinstance(position, int):
                return f"position {position + 1}; "
    return ""


def _workloads(
    client: Client, job: Mapping[str, Any], served: str, doing: str
) -> list[dict[str, Any]]:
    """Return the Workloads of a job: none, or one.

    Args:
        served: The version of Kueue's API; empty for a cluster without Kueue.
    """
    if not served:
        return []
    metadata = job["metadata"]
    uid = str(metadata["uid"])
    workloads = WORKLOAD._replace(version=served)
    query = {"labelSelector": f"{_JOB_UID}={uid}"}
    items = client.list(workloads.path(str(metadata["namespace"])), doing, query)["items"]
    return [item for item in items if _is_owned(item, uid)]


def deactivate(client: Client, job: Mapping[str, Any], doing: str) -> Deactivation:
    """Deactivate the Workload of a job, so that Kueue stops the job and does not resume it."""
    served = version(client)
    if not served:
        return Deactivation.UNMANAGED
    metadata = job["metadata"]
    namespace = str(metadata["namespace"])
    workloads = WORKLOAD._replace(version=served)
    try:
        owned = _workloads(client, job, served, doing)
    except errors.AccessDenied:
        owned = []
    if not owned:
        return Deactivation.IMPOSSIBLE if is_queued(job) else Deactivation.UNMANAGED
    if all(item["spec"].get("active") is False for item in owned):
        # A Kueue that does not answer leaves the job running (kueue#8387).
        return Deactivation.ASKED_BEFORE
    try:
        for item in owned:
            path = workloads.path(namespace, str(item["metadata"]["name"]))
            client.patch(path, {"spec": {"active": False}}, doing)
    except errors.AccessDenied:
        return Deactivation.IMPOSSIBLE
    return Deactivation.DONE


def is_queued(job: Mapping[str, Any]) -> bool:
    """Whether a job names a queue; Kueue also writes a namespace's default queue into its label."""
    return bool((job["metadata"].get("labels") or {}).get(KUEUE_QUEUE))


def _is_owned(workload: Mapping[str, Any], uid: str) -> bool:
    owners = workload["metadata"].get("ownerReferences") or ()
    return any(owner.get("uid") == uid for owner in owners)
