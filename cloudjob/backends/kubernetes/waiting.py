"""What a pod waits for before its container starts. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from cloudjob.backends.kubernetes import reasons
from cloudjob.model import summary, times
from cloudjob.model.status import Outlook, Wait, WaitPhase

# Normal reasons for which a container waits.
_NORMAL_REASONS = ("ContainerCreating", "PodInitializing", "")
_MOUNTS = ("FailedMount", "FailedAttachVolume", "FailedMapVolume")
_WARNING = "Warning"
# With this, a kubelet sums up mounts that failed, and hides the reason in an earlier event.
_SUMMARY = "Unable to attach or mount volumes"
# Of an autoscaler that adds a machine for a pod, or that cannot add one now.
_SCALING = ("TriggeredScaleUp", "Nominated")
_IS_SCALED_LATER = re.compile("max (node group size|cluster .*limit) reached|in backoff", re.ASCII)
# Characters of a reason that are shown: a scheduler can write pages.
_MAX_CHARS = 300
# A duration as Go writes it: "1m31.5s", "350ms".
_PART = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(h|ms|m|s)", re.ASCII)
_DURATION = re.compile(rf" in ((?:{_PART.pattern})+)", re.ASCII)
_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_QUOTED = re.compile(r'"([^"]+)"')


def of_pod(
    metadata: Mapping[str, Any], spec: Mapping[str, Any], status: Mapping[str, Any], container: str
) -> Wait | None:
    """Return what a pod waits for, as far as it says so itself; None if it has started or ended.

    Args:
        container: The name of our container.
    """
    of_container = [
        item for item in status.get("containerStatuses") or () if item.get("name") == container
    ]
    if any({"running", "terminated"} & set(item.get("state") or ()) for item in of_container):
        return None
    items = {item.get("type"): item for item in status.get("conditions") or ()}
    scheduled = items.get("PodScheduled") or {}
    since = str(scheduled.get("lastTransitionTime") or metadata.get("creationTimestamp") or "")
    before = [*(status.get("initContainerStatuses") or ()), *of_container]
    for item in before:
        waiting = (item.get("state") or {}).get("waiting") or {}
        reason = str(waiting.get("reason") or "")
        if reason not in _NORMAL_REASONS:
            phase = WaitPhase.PULLING if "Image" in reason else WaitPhase.STARTING
            return trouble(phase, since, reason, waiting.get("message"))
    if scheduled.get("status") == "False":
        reason = str(scheduled.get("reason") or "")
        return trouble(WaitPhase.SCHEDULING, since, reason, scheduled.get("message"))
    host = str(spec.get("nodeName") or "")
    if not host:
        return _normal(WaitPhase.SCHEDULING, since, "waiting for the scheduler")
    running = [item["name"] for item in before if "running" in (item.get("state") or {})]
    if running:
        text = f"its init container {running[-1]} runs on {host}"
        return _normal(WaitPhase.STARTING, since, text)
    if (items.get("PodReadyToStartContainers") or {}).get("status") == "False":
        text = f"{host} prepares its volumes and its network"
        return _normal(WaitPhase.MOUNTING, since, text)
    return _normal(WaitPhase.STARTING, since, f"{host} starts its container")


def with_events(wait: Wait, events: Iterable[Mapping[str, Any]], took: str) -> Wait:
    """Return what a scheduled pod waits for, with what its events say.

    Args:
        took: Which node has pulled the same image, and in which time; empty if none has.
    """
    in_order = sorted(events, key=lambda item: (moment(item), item.get("type") == _WARNING))
    if not in_order:
        return wait
    if wait.phase is WaitPhase.SCHEDULING:
        return _with_attempts(wait, in_order)
    if wait.is_trouble:
        return _with_error(wait, in_order)
    # A later event makes a warning obsolete: a volume was mounted at last.
    last = in_order[-1]
    if str(last.get("message")).startswith(_SUMMARY):
        reasons_of_mounts = [item for item in in_order if item.get("reason") in _MOUNTS]
        details = [e for e in reasons_of_mounts if not str(e.get("message")).startswith(_SUMMARY)]
        last = details[-1] if details else last
    reason, message = str(last.get("reason") or ""), str(last.get("message") or "")
    if last.get("type") == _WARNING:
        phase = WaitPhase.MOUNTING if reason in _MOUNTS else wait.phase
        return trouble(phase, first_moment(last), reason, message)
    if reason == "Pulling":
        image = _QUOTED.search(message)
        text = f"pulling the image {image[1]}" if image else message
        more = f" ({took})" if took else ""
        return _normal(WaitPhase.PULLING, moment(last), text + more)
    return wait


def _with_attempts(wait: Wait, pod_events: list[Mapping[str, Any]]) -> Wait:
    """Add since when a scheduler has found no machine that fits, unless an autoscaler adds one."""
    for item in pod_events:
        text = str(item.get("message"))
        if item.get("reason") in _SCALING or _IS_SCALED_LATER.search(text):
            return wait
    attempts = [item for item in pod_events if item.get("reason") == "FailedScheduling"]
    since = _stuck_since(attempts, "FailedScheduling")
    return wait._replace(since=since, outlook=Outlook.STUCK) if since else wait


def _stuck_since(in_order: Iterable[Mapping[str, Any]], reason: str) -> str:
    """Return since when events say that a pod is stuck; empty if the last one does not.

    A sentence that is repeated has the time of its first occurrence.
    """
    stuck: list[Mapping[str, Any]] = []
    other_at = ""
    for item in in_order:
        if reasons.outlook(reason, str(item.get("message"))) is Outlook.STUCK:
            stuck.append(item)
        else:
            stuck, other_at = [], times.normalised(moment(item))
    return max(_since(stuck), other_at) if stuck else ""


def _with_error(wait: Wait, pod_events: list[Mapping[str, Any]]) -> Wait:
    """Add since when a container cannot start, and why its image was not pulled.

    Kubelets tell that only in an event while they pause.
    """
    errors = [item for item in pod_events if item.get("reason") == "Failed"]
    pulls = [e for e in errors if str(e.get("message")).startswith("Failed to pull image")]
    if wait.phase is not WaitPhase.PULLING or not pulls:
        return wait._replace(since=_since(errors[-1:]) or wait.since)
    reason, text = wait.message.partition(": ")[0], str(pulls[-1].get("message"))
    # A registry that was away for an hour may refuse the first pull after that.
    wait = wait._replace(since=_stuck_since(pulls, reason) or _since(pulls))
    if "ErrImagePull" in wait.message:
        return wait
    message = shortened(f"{reason}: {text}")
    return wait._replace(message=message, outlook=reasons.outlook(reason, text))


def _since(pod_events: Iterable[Mapping[str, Any]]) -> str:
    """Return when the first of these events was first seen; empty for none."""
    return times.normalised(min(map(first_moment, pod_events), default=""))


def pull_time(node: int | None, events: Iterable[Mapping[str, Any]]) -> str:
    """Return how long a node has pulled its image: ``node 0 took 31 s``; empty if unknown."""
    for item in events:
        duration = _DURATION.search(str(item.get("message") or ""))
        if item.get("reason") == "Pulled" and duration:
            seconds = sum(float(n) * _UNITS_S[unit] for n, unit in _PART.findall(duration[1]))
            return f"node {node} took {summary.span(seconds)}"
    return ""


def moment(item: Mapping[str, Any]) -> str:
    """Return when an event was last seen; schedulers and kubelets set different fields."""
    series = item.get("series") or {}
    return str(
        series.get("lastObservedTime") or item.get("lastTimestamp") or item.get("eventTime") or ""
    )


def first_moment(item: Mapping[str, Any]) -> str:
    """Return when an event was first seen: it is repeated while its cause lasts."""
    return str(item.get("firstTimestamp") or item.get("eventTime") or moment(item))


def trouble(phase: WaitPhase, since: str, reason: str, message: object, *, nodes: int = 1) -> Wait:
    """Return a wait for something that may never come by itself.

    Args:
        nodes: The number of pods that a job needs at the same time, if they may not be created.
    """
    text = str(message or "")
    is_creation = phase is WaitPhase.CREATION
    refused = reasons.outlook_of_refusal(text, nodes) if is_creation else None
    return Wait(
        phase=phase,
        since=times.normalised(since),
        message=shortened(f"{reason}: {text}".strip(": ")),
        hint=reasons.hint(reason, text if is_creation else ""),
        is_trouble=True,
        outlook=refused or reasons.outlook(reason, text),
    )


def _normal(phase: WaitPhase, since: str, message: str) -> Wait:
    return Wait(phase=phase, since=times.normalised(since), message=message)


def shortened(text: object) -> str:
    """Return a text as one line of limited length."""
    line = " ".join(str(text).split())
    return line if len(line) <= _MAX_CHARS else f"{line[: _MAX_CHARS - 3]}..."
