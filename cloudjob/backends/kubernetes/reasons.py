"""The cluster's reasons for ending a pod, or for not starting it, and what to do about each."""

from __future__ import annotations

OUT_OF_MEMORY = "OOMKilled"
LOST = "NodeLost"

_AGAIN = "submit the job again"
_REFUSED = f"its machine refused the pod, which the scheduler had sent there; {_AGAIN}"
_IMAGE = "check the job's image, and kubernetes.image_pull_secrets if its registry is private"
_VOLUME = "check kubernetes.volumes, and `kubectl describe pvc`"
_HINTS = {
    # Of the condition DisruptionTarget.
    "PreemptionByScheduler": "a pod of higher priority took its place; set "
    "kubernetes.priority_class, or submit the job again",
    "DeletionByTaintManager": f"its machine was drained or does not report; {_AGAIN}",
    "EvictionByEvictionAPI": f"its machine was drained or scaled down; {_AGAIN}",
    "DeletionByPodGC": f"its machine was removed from the cluster; {_AGAIN}",
    "TerminationByKubelet": f"its machine ran short of memory or disk, or shut down; {_AGAIN}",
    # Of the status of a pod.
    "Evicted": "its machine ran short of memory or disk; request what the job uses "
    "(kubernetes.memory_gib)",
    LOST: f"its machine no longer reports to the cluster; {_AGAIN}",
    "Preempting": f"its machine made room for a critical pod; {_AGAIN}",
    "Terminated": f"its machine shut down; {_AGAIN}",
    "NodeShutdown": f"its machine was shutting down; {_AGAIN}",
    "DeadlineExceeded": "it ran longer than timeout_min and grace_s allow",
    "NodeAffinity": _REFUSED,
    "UnexpectedAdmissionError": f"a device of its machine could not be allocated; {_AGAIN}",
    "TopologyAffinityError": "its machine cannot place CPUs and devices together; ask for fewer",
    # Of a container.
    OUT_OF_MEMORY: "raise kubernetes.memory_gib, to which /dev/shm counts",
    "ContainerStatusUnknown": f"its machine restarted or lost the container; {_AGAIN}",
    "StartError": "does the image have python3 and sh?",
    "ContainerCannotRun": "does the image have python3 and sh?",
    # Of a container that waits.
    "ErrImagePull": _IMAGE,
    "ImagePullBackOff": _IMAGE,
    "InvalidImageName": "correct the job's image",
    "ErrImageNeverPull": "kubernetes.image_pull_policy is Never, and the machine lacks the image",
    "RegistryUnavailable": "the registry of the image does not answer",
    "CreateContainerConfigError": "check the Secrets and ConfigMaps that kubernetes.pod names",
    "RunContainerError": "does the image have python3 and sh?",
    # Of the scheduler.
    "Unschedulable": "ask for less, or wait for other jobs to end",
    "SchedulingGated": "something in the cluster holds the pod back; ask its administrator",
    # Of events.
    "FailedMount": _VOLUME,
    "FailedAttachVolume": _VOLUME,
    "FailedCreatePodSandBox": "the machine's network is not ready; tell its administrator",
    "Preempted": "a pod of higher priority took its place; set kubernetes.priority_class, or "
    "submit the job again",
    "TaintManagerEviction": f"its machine was drained or does not report; {_AGAIN}",
    "NodeNotReady": f"its machine no longer reports to the cluster; {_AGAIN}",
    "ScaleDown": f"its machine was scaled down; {_AGAIN}",
    "Evict": f"Volcano gave its place to another job; {_AGAIN}",
}
# The reasons of events of pods that were removed; the rest of these reasons is a pod's own.
REMOVALS = ("Preempted", "TaintManagerEviction", "NodeNotReady", "ScaleDown", "Evict", "Evicted")
# What to do if a pod may not be created, by a part of the message.
_REFUSALS = (
    ("exceeded quota", "ask for less, or wait for other jobs: `kubectl describe quota`"),
    ("failed quota", "the quota needs kubernetes.cpus and kubernetes.memory_gib"),
    (
        "violates PodSecurity",
        "the namespace restricts pods; see kubernetes.user and kubernetes.pod",
    ),
    ("usage per", "a LimitRange of the namespace limits pods: `kubectl describe limitrange`"),
    ("serviceaccount", "create it, or change kubernetes.service_account"),
    ("no PriorityClass", "correct kubernetes.priority_class"),
    ("denied", "an admission policy of the cluster refuses the pod"),
    ("failed calling webhook", "a webhook of the cluster does not answer; tell its administrator"),
)


def hint(reason: str, message: str = "") -> str:
    """Return what to do about a reason; empty if it is not known.

    Args:
        message: The cluster's message, if a pod may not be created.
    """
    if reason.startswith("OutOf"):
        # The rest of it is a resource.
        return _REFUSED
    return _HINTS.get(reason) or next((what for part, what in _REFUSALS if part in message), "")


def advice(reason: str) -> str:
    """Return what to do about a reason, to follow a message."""
    return f"; {hint(reason)}" if hint(reason) else ""
