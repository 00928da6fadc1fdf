"""Events of a job's objects, and why a waiting job does not run."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cloudjob.backends.kubernetes import reasons, waiting
from cloudjob.backends.kubernetes.client import EVENT, Client
from cloudjob.backends.kubernetes.engine import Engine
from cloudjob.backends.kubernetes.pod import Names
from cloudjob.backends.kubernetes.state import Pod
from cloudjob.backends.kubernetes.volcano import POD_GROUP
from cloudjob.errors import BackendError
from cloudjob.model.status import Wait, WaitPhase

# The beginnings of reasons for which pods are missing: those of the Job controller, Volcano and
# MindSpore's operator, those of JobSet, and that of the MPI operator.
_CREATES = ("FailedCreate", "JobCreationFailed", "HeadlessServiceCreationFailed", "MPIJobFailed")
# Events of pods that run, of which a namespace may have very many.
_ORDINARY = ("Scheduled", "Pulling", "Pulled", "Created", "Started", "FailedScheduling", "BackOff")

Event = Mapping[str, Any]


def of_job(client: Client, job_names: Names) -> list[dict[str, Any]]:
    """Return the events of the job's objects: all of them have names that begin with its own."""
    listed = client.list(EVENT.path(job_names.namespace), f"reading the events of {job_names.job}")
    return [item for item in listed["items"] if _is_ours(_object_name(item), job_names.name)]


def explained(client: Client, job_names: Names, pods: list[Pod]) -> list[Pod]:
    """Return the pods, the first of them that does not start with what its events say.

    Users who may not read events may still submit.
    """
    waiting_pods = [pod for pod in pods if pod.wait and not pod.is_leaving]
    stuck = [pod for pod in waiting_pods if pod.host or pod.is_in_trouble]
    if not stuck:
        return pods
    first = min(stuck, key=lambda pod: (not pod.is_in_trouble, pod.node or 0, pod.name))
    with contextlib.suppress(BackendError):
        # A pod of an earlier attempt may have had the same name.
        named = _named(client, job_names, first.name)
        pod_events = [item for item in named if _is_after(item, first.created_at)]
        took = _pull_time(client, job_names, pods) if _is_pulling(pod_events) else ""
        assert first.wait is not None
        better = replace(first, wait=waiting.with_events(first.wait, pod_events, took))
        return [better if pod is first else pod for pod in pods]
    return pods


def _is_pulling(pod_events: list[dict[str, Any]]) -> bool:
    last = max(pod_events, key=waiting.moment, default={})
    return last.get("reason") == "Pulling"


def _pull_time(client: Client, job_names: Names, pods: list[Pod]) -> str:
    """Return how long another node has pulled the image; empty if unknown."""
    done = next((pod for pod in pods if pod.has_started and pod.node is not None), None)
    if done is None:
        return ""
    return waiting.pull_time(done.node, _named(client, job_names, done.name, ",reason=Pulled"))


def waits(
    client: Client, engine: Engine, job_names: Names, job: Mapping[str, Any], pods: list[Pod]
) -> list[Wait]:
    """Return why a job does not run if its pods give no reason, the best reason first.

    A reason that something newer has made obsolete is left out. Users who may not read events and
    pod groups may still submit.
    """
    job_waits: list[Wait] = []
    group = _group_name(engine, job_names, job)
    scheduled_at, unschedulable = "", None
    with contextlib.suppress(BackendError):
        path = POD_GROUP.path(job_names.namespace, group)
        scheduled_at, unschedulable = _of_group(client.get(path, "reading the state of the queue"))
    with contextlib.suppress(BackendError):
        names = dict.fromkeys([*(f"{job_names.name}{suffix}" for suffix in engine.makers), group])
        warnings = [item for name in names for item in _warnings(client, job_names, name)]
        warnings.sort(key=waiting.moment, reverse=True)
        made_at = max((pod.created_at for pod in pods), default="")
        creates = [item for item in warnings if _is_of_create(item)]
        others = [item for item in warnings if not _is_of_create(item)]
        creates = [item for item in creates if _is_after(item, made_at)]
        # Each refused pod has a name of its own, and with it an event.
        since = min(map(waiting.first_moment, creates), default="")
        nodes = engine.nodes(job)
        job_waits += [_wait(WaitPhase.CREATION, item, since=since, nodes=nodes) for item in creates]
        job_waits += [unschedulable] if unschedulable else []
        job_waits += [
            _wait(WaitPhase.QUEUE, item) for item in others if _is_after(item, scheduled_at)
        ]
    return [*job_waits, unschedulable] if unschedulable else job_waits


def losses(client: Client, job_names: Names) -> list[Wait]:
    """Return why pods of a job were removed, as far as events still say so, the last one first."""
    kinds = "".join(f",reason!={reason}" for reason in _ORDINARY)
    query = {"fieldSelector": f"involvedObject.kind=Pod{kinds}"}
    with contextlib.suppress(BackendError):
        doing = f"reading why pods of {job_names.job} were removed"
        listed = client.list(EVENT.path(job_names.namespace), doing, query)["items"]
        ours = [item for item in listed if _is_ours(_object_name(item), job_names.name)]
        removals = [item for item in ours if _is_of_removal(item)]
        removals.sort(key=waiting.moment, reverse=True)
        return [_loss(item) for item in removals]
    return []


def _loss(item: Event) -> Wait:
    wait = _wait(WaitPhase.STARTING, item)
    return wait._replace(message=f"the pod {_object_name(item)} was removed: {wait.message}")


def _group_name(engine: Engine, job_names: Names, job: Mapping[str, Any]) -> str:
    # The group of Volcano's own jobs has their uid in its name; other operators use the job's name.
    is_own = engine.name == "volcano"
    return job_names.name + (f"-{job['metadata']['uid']}" if is_own else "")


def _of_group(group: Mapping[str, Any]) -> tuple[str, Wait | None]:
    """Return when a pod group was scheduled, or why it was not."""
    conditions = [
        item
        for item in (group.get("status") or {}).get("conditions") or ()
        if item.get("status") == "True" and item.get("type") in ("Scheduled", "Unschedulable")
    ]
    # Volcano leaves the older condition true beside the newer one.
    newest = max(conditions, key=_changed_at, default=None)
    if newest is None:
        return "", None
    if newest["type"] == "Scheduled":
        return _changed_at(newest), None
    reason, message = str(newest.get("reason") or ""), newest.get("message")
    return "", waiting.trouble(WaitPhase.QUEUE, _changed_at(newest), reason, message)


def _changed_at(condition: Mapping[str, Any]) -> str:
    return str(condition.get("lastTransitionTime") or "")


def _warnings(client: Client, job_names: Names, name: str) -> list[dict[str, Any]]:
    return _named(client, job_names, name, ",type=Warning")


def _named(client: Client, job_names: Names, name: str, more: str = "") -> list[dict[str, Any]]:
    """Return the events of one object: a namespace may have a hundred thousand."""
    query = {"fieldSelector": f"involvedObject.name={name}{more}"}
    doing = f"reading the events of {name}"
    named_events: list[dict[str, Any]] = client.list(EVENT.path(job_names.namespace), doing, query)[
        "items"
    ]
    return named_events


def _is_of_create(warning: Event) -> bool:
    # The MPI operator gives a job that has failed the same reason.
    has_failed = str(warning.get("message") or "").endswith("has failed")
    return str(warning.get("reason") or "").startswith(_CREATES) and not has_failed


def _is_of_removal(item: Event) -> bool:
    # A tolerated taint that went away is an event of its own.
    is_cancelled = str(item.get("message") or "").startswith("Cancelling deletion")
    return item.get("reason") in reasons.REMOVALS and not is_cancelled


def _is_after(warning: Event, at: str) -> bool:
    # In whole seconds: a pod may be refused in the second in which the last pod was created.
    return not at or waiting.moment(warning)[:19] >= at[:19]


def _is_ours(name: str, job_name: str) -> bool:
    return name == job_name or name.startswith(f"{job_name}-")


def _object_name(item: Event) -> str:
    return str(item["involvedObject"].get("name") or "")


def _wait(phase: WaitPhase, item: Event, *, since: str = "", nodes: int = 1) -> Wait:
    reason, message = str(item.get("reason") or ""), item.get("message")
    since = since or waiting.first_moment(item)
    return waiting.trouble(phase, since, reason, message, nodes=nodes)
