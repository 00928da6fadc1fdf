"""Checks of the cluster, before anything is packed or sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cloudjob.backends.base import Check
from cloudjob.backends.kubernetes.client import Client
from cloudjob.backends.kubernetes.engine import Engine, Resource
from cloudjob.backends.kubernetes.errors import ApiError, ObjectNotFound
from cloudjob.backends.kubernetes.request import (
    CONFIG_MAP,
    ENGINES,
    SECRET,
    SERVICE,
    KubernetesRequest,
)
from cloudjob.errors import BackendError

if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_CRDS = "`cloudjob docs kubernetes` shows how to install one"
# The number of fields that a message lists.
_MOST = 3
_QUEUE = "/apis/scheduling.volcano.sh/v1beta1/queues"


def engines(client: Client) -> list[Engine]:
    """Return the engines whose operator's resources the cluster has."""
    return [engine for engine in ENGINES.values() if _has(client, engine.resource)]


def run(
    client: Client,
    spec: JobSpec | None,
    engine: Engine | None,
    request: KubernetesRequest | None = None,
) -> list[Check]:
    """Return the results of all checks, first the one that the others depend on.

    Args:
        request: The request that will be sent, if it is known.
    """
    try:
        version = client.get("/version", f"asking {client.cluster.context} for its version")
        found = engines(client)
    except BackendError as error:
        return [Check("cluster", False, error.message, error.hint)]
    reached = f"{client.cluster.context}, Kubernetes {version.get('gitVersion')}"
    checks = [Check("cluster", True, reached)]
    listed = ", ".join(item.name for item in found) or "none"
    is_there = bool(found) if engine is None else engine in found
    requirement = f", but the job needs {engine.name}" if engine and not is_there else ""
    checks.append(Check("operator", is_there, listed + requirement, _CRDS))
    if not is_there:
        return checks
    checks += _rights(client, engine or found[0])
    if request is not None and all(check.is_ok for check in checks):
        checks += _manifest(client, request)
    return checks + _queue(client, spec, engine or found[0])


def _has(client: Client, resource: Resource) -> bool:
    path = f"/apis/{resource.group}/{resource.version}"
    try:
        found = client.get(path, f"looking for {resource.kind} in the cluster")
    except ObjectNotFound:
        return False
    return any(item.get("name") == resource.plural for item in found.get("resources") or ())


def _rights(client: Client, engine: Engine) -> list[Check]:
    """Check that the user has every right that a job needs."""
    required = [
        ("create", engine.resource, ""),
        ("get", engine.resource, ""),
        ("create", SECRET, ""),
        ("create", CONFIG_MAP, ""),
        ("list", Resource("", "v1", "pods", "Pod"), ""),
        ("watch", Resource("", "v1", "pods", "Pod"), ""),
        ("get", Resource("", "v1", "pods", "Pod"), "log"),
    ]
    if engine.needs_services:
        required.append(("create", SERVICE, ""))
    missing = [
        f"{verb} {resource.plural}{'/' + part if part else ''}"
        for verb, resource, part in required
        if not _may(client, verb, resource, part)
    ]
    namespace = client.cluster.namespace
    found = f"not allowed in {namespace}: {', '.join(missing)}" if missing else namespace
    hint = "`cloudjob docs kubernetes` has a Role with everything that is needed"
    return [Check("namespace", not missing, found, hint)]


def _may(client: Client, verb: str, resource: Resource, part: str) -> bool:
    attributes: dict[str, Any] = {
        "namespace": client.cluster.namespace,
        "verb": verb,
        "group": resource.group,
        "resource": resource.plural,
    }
    if part:
        attributes["subresource"] = part
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = client.post(_REVIEWS, body, f"checking the permission to {verb} {resource.plural}")
    return bool((answer.get("status") or {}).get("allowed"))


def _manifest(client: Client, request: KubernetesRequest) -> list[Check]:
    """Have the API server validate the manifest in a dry run, and find what it drops.

    Servers since 1.25 refuse fields that they do not know when asked to; older ones drop them.
    """
    resource, body = request.engine.resource, request.body
    query = {"dryRun": "All", "fieldValidation": "Strict"}
    path = resource.path(request.job_names.namespace)
    try:
        kept = client.post(
            path, body, f"validating the {resource.kind} {request.job_names.name}", query
        )
    except ApiError as error:
        if "does not support dry run" in error.message:
            # The operator's webhook has side effects, so the manifest cannot be tried.
            return []
        return [Check("manifest", False, error.message, error.hint)]
    dropped = list(_dropped(body, kept))
    if not dropped:
        return [Check("manifest", True, f"the cluster accepts the {resource.kind}")]
    hint = "compare kubernetes.pod, job and volumes with the fields that `kubectl explain` lists"
    rest = len(dropped) - _MOST
    listed = ", ".join([*dropped[:_MOST], *([f"and {rest} more"] if rest > 0 else [])])
    return [Check("manifest", False, f"the cluster does not know {listed}", hint)]


def _dropped(sent: Any, kept: Any, where: str = "") -> Iterator[str]:
    """Yield the fields that were sent and dropped, except for empty ones."""
    if isinstance(sent, Mapping) and isinstance(kept, Mapping):
        for key, value in sent.items():
            if key in kept:
                yield from _dropped(value, kept[key], f"{where}.{key}" if where else str(key))
            elif value not in ({}, [], "", None):
                yield f"{where}.{key}"
    elif isinstance(sent, list) and isinstance(kept, list) and len(sent) == len(kept):
        for index, (one, other) in enumerate(zip(sent, kept, strict=True)):
            yield from _dropped(one, other, f"{where}[{index}]")


def _queue(client: Client, spec: JobSpec | None, engine: Engine) -> list[Check]:
    """Check the queue: Volcano accepts a job with an unknown queue and never runs it."""
    name = spec.kubernetes.queue if spec else ""
    if not name or engine.name != "volcano":
        return []
    try:
        queue = client.get(f"{_QUEUE}/{name}", f"looking for the queue {name}")
    except ObjectNotFound:
        hint = "`kubectl get queues.scheduling.volcano.sh` lists them"
        return [Check("queue", False, f"there is no queue {name}", hint)]
    except BackendError as error:
        return [Check("queue", False, error.message, error.hint, is_needed=False)]
    phase = str((queue.get("status") or {}).get("state") or "Open")
    hint = "choose another kubernetes.queue, or wait"
    return [Check("queue", phase == "Open", f"{name} is {phase}", hint)]
