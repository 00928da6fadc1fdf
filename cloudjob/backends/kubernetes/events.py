"""Events of a job's objects, and why a waiting job does not run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cloudjob.backends.kubernetes.client import EVENT, Client
from cloudjob.backends.kubernetes.engine import Engine
from cloudjob.backends.kubernetes.pod import Names
from cloudjob.backends.kubernetes.state import Pod
from cloudjob.backends.kubernetes.volcano import POD_GROUP
from cloudjob.errors import BackendError

_WARNING = "Warning"

Event = Mapping[str, Any]


def of_job(client: Client, job_names: Names) -> list[dict[str, Any]]:
    """Return the events of the job's objects: all of them have names that begin with its own."""
    found = client.list(EVENT.path(job_names.namespace), f"reading the events of {job_names.job}")
    return [
        item
        for item in found["items"]
        if _is_ours(str(item["involvedObject"].get("name") or ""), job_names.name)
    ]


def moment(item: Event) -> str:
    """Return when an event was last seen; schedulers and kubelets set different fields."""
    series = item.get("series") or {}
    return str(
        series.get("lastObservedTime") or item.get("lastTimestamp") or item.get("eventTime") or ""
    )


def reasons(
    client: Client, engine: Engine, job_names: Names, job: Mapping[str, Any], pods: list[Pod]
) -> list[str]:
    """Return why a job does not run if its pods give no reason, the best reason first.

    A reason that something newer has made obsolete is left out. Users who may not read events and
    pod groups may still submit.
    """
    messages: list[str] = []
    group = _group_name(engine, job_names, job)
    scheduled_at, unschedulable = "", ""
    with contextlib.suppress(BackendError):
        path = POD_GROUP.path(job_names.namespace, group)
        found = client.get(path, "reading the state of the queue")
        scheduled_at, unschedulable = _of_group(found)
    with contextlib.suppress(BackendError):
        messages += _of_stuck(client, job_names, pods)
        makers = [f"{job_names.name}{suffix}" for suffix in engine.makers]
        warnings = [w for name in makers for w in _warnings(client, job_names, name)]
        if group != job_names.name:
            warnings += _warnings(client, job_names, group)
        warnings.sort(key=moment, reverse=True)
        made_at = max((pod.created_at for pod in pods), default="")
        messages += [_text(w) for w in warnings if _is_of_create(w) and _is_after(w, made_at)]
        messages += [unschedulable]
        messages += [
            _text(w) for w in warnings if not _is_of_create(w) and _is_after(w, scheduled_at)
        ]
    return [message for message in [*messages, unschedulable] if message]


def _group_name(engine: Engine, job_names: Names, job: Mapping[str, Any]) -> str:
    # The group of Volcano's own jobs has their uid in its name; other operators use the job's name.
    is_own = engine.name == "volcano"
    return job_names.name + (f"-{job['metadata']['uid']}" if is_own else "")


def _of_group(group: Mapping[str, Any]) -> tuple[str, str]:
    """Return when a pod group was scheduled, and why it was not; at least one of them is empty."""
    conditions = [
        item
        for item in (group.get("status") or {}).get("conditions") or ()
        if item.get("status") == "True" and item.get("type") in ("Scheduled", "Unschedulable")
    ]
    # Volcano leaves the older condition true beside the newer one.
    newest = max(
        conditions, key=lambda item: str(item.get("lastTransitionTime") or ""), default=None
    )
    if newest is None:
        return "", ""
    if newest["type"] == "Scheduled":
        return str(newest.get("lastTransitionTime") or ""), ""
    return "", _text(newest)


def _of_stuck(client: Client, job_names: Names, pods: Iterable[Pod]) -> Iterator[str]:
    """Yield why the container of a scheduled node does not start, for the first such node."""
    stuck = [pod for pod in pods if pod.host and not (pod.has_started or pod.is_over)]
    if not stuck:
        return
    first = min(stuck, key=lambda pod: (pod.node if pod.node is not None else -1, pod.name))
    found = _named(client, job_names, first.name)
    # A later event makes a warning obsolete: a volume was mounted at last.
    last = max(found, key=lambda item: (moment(item), item.get("type") == _WARNING), default=None)
    if last is not None and last.get("type") == _WARNING:
        yield f"node {first.node}: {_text(last)}"


def _warnings(client: Client, job_names: Names, name: str) -> list[dict[str, Any]]:
    return _named(client, job_names, name, f",type={_WARNING}")


def _named(client: Client, job_names: Names, name: str, more: str = "") -> list[dict[str, Any]]:
    """Return the events of one object: a namespace may have a hundred thousand."""
    query = {"fieldSelector": f"involvedObject.name={name}{more}"}
    doing = f"reading the events of {name}"
    found: list[dict[str, Any]] = client.list(EVENT.path(job_names.namespace), doing, query)[
        "items"
    ]
    return found


def _is_of_create(warning: Event) -> bool:
    return str(warning.get("reason") or "").startswith("FailedCreate")


def _is_after(warning: Event, at: str) -> bool:
    # In whole seconds: a pod may be refused in the second in which the last pod was created.
    return not at or moment(warning)[:19] >= at[:19]


def _is_ours(name: str, own: str) -> bool:
    return name == own or name.startswith(f"{own}-")


def _text(item: Mapping[str, Any]) -> str:
    return f"{item.get('reason')}: {item.get('message')}"
