"""The cluster's reasons for ending a pod, or for not starting it, and what to do about each."""

from __future__ import annotations

import re

from cloudjob.model.status import Outlook

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
_QUOTA, _WEBHOOK = "exceeded quota", "failed calling webhook"
# What to do if a pod may not be created, by a part of the message.
_REFUSALS = (
    (_QUOTA, "ask for less, or wait for other jobs: `kubectl describe quota`"),
    ("failed quota", "the quota needs kubernetes.cpus and kubernetes.memory_gib"),
    (
        "violates PodSecurity",
        "the namespace restricts pods; see kubernetes.user and kubernetes.pod",
    ),
    ("usage per", "a LimitRange of the namespace limits pods: `kubectl describe limitrange`"),
    ("serviceaccount", "create it, or change kubernetes.service_account"),
    ("no PriorityClass", "correct kubernetes.priority_class"),
    ("denied", "an admission policy of the cluster refuses the pod"),
    (_WEBHOOK, "a webhook of the cluster does not answer; tell its administrator"),
)
_WITHOUT_OBJECT = r'(secret|configmap|persistentvolumeclaim) "[^"]+" not found|non-existent'
_WITHOUT_IMAGE = (
    r"not found|manifest unknown|does not exist|unauthorized|denied|forbidden|"
    r"authentication required|authorization failed|no such host|no match for platform"
)
# The messages of reasons for which a pod waits until somebody changes something.
_STUCK = {
    reason: re.compile(words, re.ASCII | re.IGNORECASE)
    for reason, words in {
        "ErrImageNeverPull": "",
        "ErrImagePull": _WITHOUT_IMAGE,
        "ImagePullBackOff": _WITHOUT_IMAGE,
        "CreateContainerConfigError": f"{_WITHOUT_OBJECT}|couldn't find key|runAsNonRoot",
        "FailedMount": f"{_WITHOUT_OBJECT}|hostPath type check failed",
        "FailedScheduling": _WITHOUT_OBJECT,
    }.items()
}
# What a scheduler says of machines that do not fit, whatever runs on them. Other taints may go, and
# machines that are full, cordoned or out of order may come back.
_UNFIT = re.compile(
    r"\d+ node\(s\) (didn't match (Pod's )?node (affinity|selector)(/selector)?|"
    r"had (untolerated )?taint \{(node-role\.kubernetes\.io/|nvidia\.com/|huawei\.com/)[^}]*\}"
    r"(, that the pod didn't tolerate)?)",
    re.ASCII,
)
# Since Kubernetes 1.31, this is also said of machines that are too small even when they are empty.
_UNHELPFUL = re.compile(r"0/(\d+) nodes are available: (\d+) Preemption is not helpful", re.ASCII)
_TOO_SMALL = re.compile(r"\d+ Insufficient [^ ,]+", re.ASCII)
# An amount with an exponent, or of another form, is not read.
_PAIR = re.compile(r"([^\s=,]+)=(\d+(?:\.\d+)?)([numkKMGTPE]?i?)(?![\w.])", re.ASCII)
# What pods use of a quota; other objects, such as jobs, services and claims, are counted once.
_OF_PODS = re.compile(
    r"(count/)?pods|cpu|memory|ephemeral-storage|hugepages-.+|limits\..+|requests\.(?!storage$).+",
    re.ASCII,
)
_UNITS = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3}
_UNITS |= {unit: 1000.0**power for power, unit in enumerate("MGTPE", 2)}
_UNITS |= {f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", 1)}


def outlook(reason: str, message: str) -> Outlook:
    """Return what can end the wait of a pod that exists, by the cluster's reason."""
    if reason == "InvalidImageName":
        return Outlook.HOPELESS
    words = _STUCK.get(reason)
    is_stuck = words is not None and bool(words.search(message))
    is_stuck |= reason == "FailedScheduling" and _fits_nowhere(message)
    return Outlook.STUCK if is_stuck else Outlook.OPEN


def outlook_of_refusal(message: str, nodes: int) -> Outlook:
    """Return what can end the wait for pods that may not be created.

    Args:
        nodes: The number of pods that the job has at the same time.
    """
    if _QUOTA in message:
        return Outlook.STUCK if _exceeds(message, nodes) else Outlook.OPEN
    is_known = any(part in message for part, _ in _REFUSALS) or " is invalid: " in message
    return Outlook.STUCK if is_known and _WEBHOOK not in message else Outlook.OPEN


def _exceeds(message: str, nodes: int) -> bool:
    """Whether a job needs more than a quota ever has."""
    requested, _, rest = message.partition("requested: ")[2].partition(", used: ")
    limits = dict(_amounts(rest.partition("limited: ")[2]))
    for name, amount in _amounts(requested):
        times = nodes if _OF_PODS.fullmatch(name) else 1
        if name in limits and amount * times > limits[name]:
            return True
    return False


def _amounts(text: str) -> list[tuple[str, float]]:
    return [
        (name, float(number) * _UNITS[unit])
        for name, number, unit in _PAIR.findall(text)
        if unit in _UNITS
    ]


def _fits_nowhere(message: str) -> bool:
    """Whether a scheduler says that no machine of the cluster fits, even if all were empty."""
    main, _, preemption = message.partition("preemption: ")
    unhelpful = _UNHELPFUL.search(preemption)
    rest, fits_not = _UNFIT.subn("", main.partition("available: ")[2])
    if unhelpful and unhelpful[1] == unhelpful[2]:
        rest, too_small = _TOO_SMALL.subn("", rest)
        fits_not += too_small
    rest = rest.replace("no new claims to deallocate", "")
    return bool(fits_not) and not rest.strip(" .,")


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
