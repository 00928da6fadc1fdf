"""Kueue, which admits jobs to quotas, and resumes an admitted job that somebody else suspends.

Facts: Kueue 0.19, ``kueue.x-k8s.io/v1beta2`` and ``v1beta1``. A Workload that is not active is
evicted and never admitted again; users with the role ``batch-user`` may read Workloads but not
change them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from cloudjob.backends.kubernetes import errors
from cloudjob.backends.kubernetes.client import Client
from cloudjob.backends.kubernetes.engine import KUEUE_QUEUE, Resource

_GROUP = "kueue.x-k8s.io"
_GROUP_PATH = f"/apis/{_GROUP}"
# The versions that cloudjob can read, the preferred one first.
_VERSIONS = ("v1beta2", "v1beta1")
_JOB_UID = f"{_GROUP}/job-uid"
_DOING = "looking for Kueue in the cluster"


class Deactivation(enum.Enum):
    """The result of asking Kueue to stop a job for good."""

    UNMANAGED = enum.auto()
    """Kueue does not manage the job, so nothing resumes it."""
    DONE = enum.auto()
    """Kueue ends the pods of the job, and does not resume it."""
    IMPOSSIBLE = enum.auto()
    """Kueue manages the job, and the user may not change its Workload, or it has none yet."""


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
    queues = Resource(_GROUP, served, "localqueues", "LocalQueue")
    try:
        client.get(queues.path(namespace, name), f"looking for the queue {name}")
    except errors.ObjectNotFound:
        return False
    return True


def deactivate(client: Client, job: Mapping[str, Any], doing: str) -> Deactivation:
    """Deactivate the Workload of a job, so that Kueue stops the job and does not resume it."""
    served = version(client)
    if not served:
        return Deactivation.UNMANAGED
    metadata = job["metadata"]
    namespace = str(metadata["namespace"])
    workloads = Resource(_GROUP, served, "workloads", "Workload")
    # Kueue also writes a namespace's default queue into this label.
    is_queued = bool((metadata.get("labels") or {}).get(KUEUE_QUEUE))
    query = {"labelSelector": f"{_JOB_UID}={metadata['uid']}"}
    try:
        items = client.list(workloads.path(namespace), doing, query)["items"]
    except errors.AccessDenied:
        items = []
    owned = [item for item in items if _is_owned(item, str(metadata["uid"]))]
    if not owned:
        return Deactivation.IMPOSSIBLE if is_queued else Deactivation.UNMANAGED
    try:
        for item in owned:
            path = workloads.path(namespace, str(item["metadata"]["name"]))
            client.patch(path, {"spec": {"active": False}}, doing)
    except errors.AccessDenied:
        return Deactivation.IMPOSSIBLE
    return Deactivation.DONE


def _is_owned(workload: Mapping[str, Any], uid: str) -> bool:
    owners = workload["metadata"].get("ownerReferences") or ()
    return any(owner.get("uid") == uid for owner in owners)
