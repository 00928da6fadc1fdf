"""Checks of the cluster, before anything is packed or sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cloudjob.backends.base import Check
from cloudjob.backends.kubernetes import discovery, kueue, volumes
from cloudjob.backends.kubernetes.client import Client
from cloudjob.backends.kubernetes.discovery import Discovery, Lack, Offer, Version
from cloudjob.backends.kubernetes.engine import Engine, Resource
from cloudjob.backends.kubernetes.errors import AccessDenied, ApiError, ObjectNotFound
from cloudjob.backends.kubernetes.request import KubernetesRequest
from cloudjob.backends.kubernetes.volumes import CLAIM, CLAIM_HINTS, Doubt, Use
from cloudjob.errors import BackendError

if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

# The number of fields that a message lists.
_MOST = 3
_CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
_QUEUE = "/apis/scheduling.volcano.sh/v1beta1/queues"
_HINTS = {
    Lack.NOTHING: "",
    Lack.RESOURCE: "`cloudjob docs kubernetes` shows how to install an operator",
    Lack.VERSION: "use an operator, or a newer cluster",
    Lack.PERMISSION: "`cloudjob docs kubernetes-permissions` has a Role for each engine",
}


def choose(client: Client, launcher: str, *, restarts: bool) -> Engine:
    """Return the first engine that the cluster offers to this user.

    Args:
        launcher: The launcher of the job.
        restarts: Whether the engine must be able to restart the job.

    Raises:
        BackendError: There is none, or the cluster cannot be reached; a hint says what to do.
    """
    cluster = Discovery(client)
    unusable: list[Offer] = []
    for offer in discovery.choices(cluster, launcher, restarts=restarts):
        if offer.lack is Lack.NOTHING:
            return offer.engine
        unusable.append(offer)
    namespace = client.cluster.namespace
    lacks = "; ".join(
        f"{offer.engine.name}: {lack_text(offer, cluster.version, namespace)}" for offer in unusable
    )
    raise BackendError(
        f"choosing an engine in {client.cluster.context}: you can use none: {lacks}",
        hint="`cloudjob docs kubernetes` shows what each of them needs",
    )


def lack_text(offer: Offer, version: Version, namespace: str) -> str:
    """Return what keeps the user from using an engine, in a few words."""
    resource = offer.engine.resource
    if offer.lack is Lack.RESOURCE:
        return f"not installed: there is no {resource.kind} of {resource.group}/{resource.version}"
    if offer.lack is Lack.VERSION:
        first = ".".join(map(str, offer.engine.min_version))
        return f"needs Kubernetes {first}, and this is {version.text}"
    if offer.lack is Lack.PERMISSION:
        return f"not allowed in {namespace}: {', '.join(map(str, offer.denied))}"
    lost = (f"{what} ({', '.join(map(str, denied))})" for what, denied in offer.lost.items())
    return "; ".join([f"usable in {namespace}", *(f"without {text}" for text in lost)])


def run(
    client: Client,
    spec: JobSpec | None,
    engine: Engine | None,
    request: KubernetesRequest | None = None,
) -> list[Check]:
    """Return the results of all checks, first the one that the others depend on.

    Args:
        engine: The engine of the job; None for all engines, without a job.
        request: The request that will be sent, if it is known.
    """
    try:
        cluster = Discovery(client)
        offers = (
            discovery.offers(cluster)
            if engine is None
            else [cluster.offer(engine, discovery.required(engine))]
        )
    except BackendError as error:
        return [Check("cluster", False, error.message, error.hint)]
    reached = f"{client.cluster.context}, Kubernetes {cluster.version.text}"
    checks = [Check("cluster", True, reached)]
    # One usable engine is enough for jobs in general.
    is_needed = engine is not None or all(offer.lack is not Lack.NOTHING for offer in offers)
    checks += [
        _engine(offer, cluster.version, client.cluster.namespace, is_needed=is_needed)
        for offer in offers
    ]
    if engine is None or offers[0].lack in (Lack.RESOURCE, Lack.VERSION):
        return checks
    if request is not None and offers[0].lack is Lack.NOTHING:
        checks += [*_manifest(client, request), *_needs(client, request)]
    return checks + _queue(client, spec, engine)


def _engine(offer: Offer, version: Version, namespace: str, *, is_needed: bool) -> Check:
    is_usable = offer.lack is Lack.NOTHING
    text = lack_text(offer, version, namespace)
    return Check(f"engine {offer.engine.name}", is_usable, text, _HINTS[offer.lack], is_needed)


def _manifest(client: Client, request: KubernetesRequest) -> list[Check]:
    """Have the API server validate the manifest in a dry run, and find what it drops.

    Servers since 1.25 refuse fields that they do not know when asked to; older ones drop them.
    """
    resource = request.engine.resource
    body = _without(request.body, request.engine.optional)
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


def _without(body: Mapping[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    """Return a manifest without these fields of its ``spec``."""
    spec = {key: value for key, value in body["spec"].items() if key not in fields}
    return {**body, "spec": spec}


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


def _needs(client: Client, request: KubernetesRequest) -> Iterator[Check]:
    """Check what the pods need to exist: without it they wait, and only events say for what.

    What the user may not read is not checked.
    """
    job_names, needs = request.job_names, volumes.needs_of(request.body)
    for path in sorted(needs.host_paths):
        warning = "it is another folder on each machine, and many clusters forbid it"
        hint = "use a persistentVolumeClaim, unless every machine mounts the same disk there"
        yield Check(f"hostPath {path}", False, warning, hint, is_needed=False)
    uses: dict[tuple[Resource, str], Use | set[str]] = dict(needs.objects)
    uses.update({(CLAIM, name): use for name, use in needs.claims.items()})
    for (resource, name), used in uses.items():
        if name in (job_names.entry, job_names.delivery):
            continue
        title = f"{resource.kind} {name}"
        try:
            found_object = client.get(
                resource.path(job_names.namespace, name), f"looking for {title}"
            )
            if isinstance(used, Use):
                yield _claim(client, title, found_object, used, request.submission.spec.nodes)
            else:
                yield _object(title, found_object, used)
        except ObjectNotFound:
            hint = f"`kubectl get {resource.plural} -n {job_names.namespace}` lists them"
            yield Check(title, False, f"there is none in {job_names.namespace}", hint)
        except AccessDenied:
            continue
        except BackendError as error:
            yield Check(title, False, error.message, error.hint)


def _object(title: str, item: Mapping[str, Any], used: set[str]) -> Check:
    """Check that a Secret or a ConfigMap has the keys that are used."""
    held = {*(item.get("data") or {}), *(item.get("binaryData") or {})}
    missing = ", ".join(sorted(used - held))
    hint = f"it has {', '.join(sorted(held)) or 'nothing'}"
    return Check(title, not missing, f"it has no {missing}" if missing else "exists", hint)


def _claim(client: Client, title: str, claim: Mapping[str, Any], use: Use, nodes: int) -> Check:
    is_bound = (claim.get("status") or {}).get("phase") == "Bound"
    may_wait = not is_bound and _binds_late(client, claim)
    doubt = volumes.doubt_of(claim, use, nodes, binds_late=may_wait)
    modes = ", ".join((claim.get("spec") or {}).get("accessModes") or ())
    text = f"{doubt.value} ({modes})"
    return Check(title, doubt is Doubt.NONE, text, CLAIM_HINTS[doubt])


def _binds_late(client: Client, claim: Mapping[str, Any]) -> bool:
    """Whether the volume of a claim may be made only when a pod needs it."""
    name = (claim.get("spec") or {}).get("storageClassName")
    if not name:
        return False
    try:
        storage_class = client.get(f"{_CLASSES}/{name}", f"looking for the storage class {name}")
    except (ObjectNotFound, AccessDenied):
        # A static volume may have a class that exists only as a name.
        return True
    return str(storage_class.get("volumeBindingMode")) == "WaitForFirstConsumer"


def _queue(client: Client, spec: JobSpec | None, engine: Engine) -> list[Check]:
    """Check the queue: a job with an unknown one is accepted and never runs."""
    name = spec.kubernetes.queue if spec else ""
    if name and engine.name == "volcano":
        return [_volcano_queue(client, name)]
    if name and engine.queues_in_kueue:
        return [_kueue_queue(client, name)]
    return []


def _volcano_queue(client: Client, name: str) -> Check:
    try:
        queue = client.get(f"{_QUEUE}/{name}", f"looking for the queue {name}")
    except ObjectNotFound:
        hint = "`kubectl get queues.scheduling.volcano.sh` lists them"
        return Check("queue", False, f"there is no queue {name}", hint)
    except BackendError as error:
        return Check("queue", False, error.message, error.hint, is_needed=False)
    phase = str((queue.get("status") or {}).get("state") or "Open")
    hint = "choose another kubernetes.queue, or wait"
    return Check("queue", phase == "Open", f"{name} is {phase}", hint)


def _kueue_queue(client: Client, name: str) -> Check:
    try:
        served = kueue.version(client)
        if not served:
            hint = "kubernetes.queue is a LocalQueue of Kueue with the engine job; leave it out"
            return Check("queue", False, "the cluster has no Kueue", hint)
        is_there = kueue.has_queue(client, client.cluster.namespace, name, served)
    except BackendError as error:
        return Check("queue", False, error.message, error.hint, is_needed=False)
    hint = "`kubectl get localqueues` lists them"
    return Check("queue", is_there, name if is_there else f"there is no queue {name}", hint)
