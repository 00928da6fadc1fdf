"""Which engines a cluster offers to a user: its resources and version, and the permissions."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from cloudjob.backends.kubernetes import kueue
from cloudjob.backends.kubernetes.client import EVENT, POD, Client
from cloudjob.backends.kubernetes.engine import CONFIG_MAP, SECRET, SERVICE, Engine, Resource
from cloudjob.backends.kubernetes.errors import ApiError, ObjectNotFound
from cloudjob.backends.kubernetes.request import ENGINES
from cloudjob.backends.kubernetes.volcano import COMMAND, POD_GROUP
from cloudjob.backends.kubernetes.volumes import ACCOUNT, CLAIM

_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubject{}reviews"
_NUMBER = re.compile(r"\d{1,6}", re.ASCII)


class Lack(enum.Enum):
    """What keeps a job from using an engine."""

    NOTHING = enum.auto()
    RESOURCE = enum.auto()
    """The cluster does not serve its resource: the operator is not installed."""
    VERSION = enum.auto()
    """Kubernetes is too old."""
    PERMISSION = enum.auto()
    """The user lacks a permission in the namespace."""


class Permission(NamedTuple):
    """A permission in a namespace.

    Args:
        part: The subresource; empty for none.
    """

    verb: str
    resource: Resource
    part: str = ""

    def __str__(self) -> str:
        """Return it as ``kubectl auth can-i`` takes it."""
        group = f".{self.resource.group}" if self.resource.group else ""
        part = f"/{self.part}" if self.part else ""
        return f"{self.verb} {self.resource.plural}{group}{part}"


class Version(NamedTuple):
    """The version of a cluster.

    Args:
        text: As the cluster writes it; without a number in it, the others are 0.
    """

    major: int
    minor: int
    text: str


class Offer(NamedTuple):
    """An engine in a cluster, and what keeps the user from using it.

    Args:
        denied: The permissions that are missing.
        lost: What the user cannot do with a job, with the permissions that are missing for it.
    """

    engine: Engine
    lack: Lack
    denied: tuple[Permission, ...] = ()
    lost: Mapping[str, tuple[Permission, ...]] = MappingProxyType({})


class Discovery:
    """What a cluster offers; asks each question only once."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._permitted: dict[Permission, bool] = {}
        self._groups: dict[str, bool] = {"": True}
        self._given_rules: Mapping[str, Any] | None = None
        self.version = _version(client)

    def offer(
        self,
        engine: Engine,
        required: Iterable[Permission],
        optional: Mapping[str, Iterable[Permission]] = MappingProxyType({}),
    ) -> Offer:
        """Return what keeps the user from using an engine; the first lack counts.

        Args:
            optional: Permissions that only some commands need, by these.
        """
        if not self._serves(engine.resource):
            return Offer(engine, Lack.RESOURCE)
        if self.version[:2] < engine.min_version:
            return Offer(engine, Lack.VERSION)
        denied = self._denied(required)
        if denied:
            return Offer(engine, Lack.PERMISSION, denied)
        lost = {what: self._denied(needed) for what, needed in optional.items()}
        return Offer(engine, Lack.NOTHING, lost={what: each for what, each in lost.items() if each})

    def _denied(self, permissions: Iterable[Permission]) -> tuple[Permission, ...]:
        """Return the permissions that the user lacks, of resources that the cluster has."""
        return tuple(
            permission
            for permission in permissions
            if self._has_group(permission.resource.group) and not self._permits(permission)
        )

    def _has_group(self, group: str) -> bool:
        if group not in self._groups:
            try:
                self._client.get(f"/apis/{group}", f"looking for {group} in the cluster")
            except ObjectNotFound:
                self._groups[group] = False
            else:
                self._groups[group] = True
        return self._groups[group]

    def _serves(self, resource: Resource) -> bool:
        path = f"/apis/{resource.group}/{resource.version}"
        try:
            served = self._client.get(path, f"looking for {resource.kind} in the cluster")
        except ObjectNotFound:
            return False
        self._groups[resource.group] = True
        return any(item.get("name") == resource.plural for item in served.get("resources") or ())

    def _permits(self, permission: Permission) -> bool:
        """Whether the user has a permission; authorisers may not list all that they allow."""
        if permission not in self._permitted:
            rules = self._rules()
            is_known = any(covers(rule, permission) for rule in rules.get("resourceRules") or ())
            self._permitted[permission] = is_known or (
                rules.get("incomplete") is not False and self._is_allowed(permission)
            )
        return self._permitted[permission]

    def _is_allowed(self, permission: Permission) -> bool:
        body = _review(permission, self._client.cluster.namespace)
        doing = f"checking the permission to {permission}"
        status = self._client.post(_REVIEWS.format("access"), body, doing).get("status") or {}
        return bool(status.get("allowed"))

    def _rules(self) -> Mapping[str, Any]:
        """Return all that the user may do in the namespace, as far as the cluster lists it."""
        if self._given_rules is None:
            body = {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectRulesReview",
                "spec": {"namespace": self._client.cluster.namespace},
            }
            try:
                answer = self._client.post(_REVIEWS.format("rules"), body, "listing permissions")
            except ApiError:
                answer = {}
            self._given_rules = answer.get("status") or {}
        return self._given_rules


def offers(discovery: Discovery) -> list[Offer]:
    """Return what every engine lacks, in the order of preference."""
    return [
        discovery.offer(engine, required(engine), optional(engine)) for engine in ENGINES.values()
    ]


def choices(discovery: Discovery, launcher: str, *, restarts: bool) -> Iterator[Offer]:
    """Yield the engines that start this launcher, in the order of preference.

    Those that can restart a job come first if that is wanted, and of these the operators.

    Only the permission to create a job is checked: for any other missing one, the checks before
    the submit name the permissions of the chosen engine.
    """
    engines = list(ENGINES.values())
    if restarts:
        engines.sort(key=lambda engine: (bool(engine.no_retries), engine.restarts_each_node))
    for engine in engines:
        if not engine.launchers or launcher in engine.launchers:
            yield discovery.offer(engine, to_create(engine))


def to_create(engine: Engine) -> list[Permission]:
    """Return the permissions to create a job's own objects."""
    services = [Permission("create", SERVICE)] if engine.needs_services else []
    return [Permission("create", engine.resource), *services]


def required(engine: Engine) -> list[Permission]:
    """Return every permission that is needed to submit a job and to follow it."""
    created = [SECRET, CONFIG_MAP, *[SERVICE] * engine.needs_services]
    return [
        *to_create(engine),
        Permission("get", engine.resource),
        Permission("create", SECRET),
        Permission("create", CONFIG_MAP),
        # The job becomes their owner when it exists.
        *(Permission("patch", resource) for resource in created),
        *(Permission(verb, POD) for verb in ("get", "list", "watch")),
        Permission("get", POD, "log"),
    ]


def optional(engine: Engine) -> dict[str, list[Permission]]:
    """Return the permissions that only some commands and messages need, by these."""
    resource, is_queued = engine.resource, engine.kueue_resumes
    services = [SERVICE] * engine.needs_services
    groups = [] if engine.queues_in_kueue else [Permission("get", POD_GROUP)]
    workloads = [Permission("list", kueue.WORKLOAD)] * is_queued
    return {
        "cancel": [
            Permission("patch", resource),
            *[Permission("create", COMMAND)] * (engine.name == "volcano"),
        ],
        "cancel in Kueue": [*workloads, *[Permission("patch", kueue.WORKLOAD)] * is_queued],
        "cancel --now": [Permission("deletecollection", POD)],
        "rm": [
            *(Permission("delete", each) for each in (resource, SECRET, CONFIG_MAP, *services)),
            *(Permission("list", each) for each in services),
        ],
        "rm --orphans": [Permission("get", CONFIG_MAP)],
        "repeat a create without an answer": [
            Permission("get", each) for each in (SECRET, CONFIG_MAP, *services)
        ],
        "list": [Permission("list", resource)],
        "events, why a job waits": [Permission("list", EVENT), *groups, *workloads],
        "position in a queue": [
            *[Permission("get", kueue.VISIBLE_QUEUE, "pendingworkloads")] * is_queued
        ],
        "check of the queue": [Permission("get", kueue.LOCAL_QUEUE)] * engine.queues_in_kueue,
        "check of volumes": [
            Permission("get", each) for each in (CLAIM, SECRET, CONFIG_MAP, ACCOUNT)
        ],
        "exec, shell, stacks, forward": [Permission("create", POD, "exec")],
    }


def covers(rule: Mapping[str, Any], permission: Permission) -> bool:
    """Whether a rule of a role contains a permission for objects of any name."""
    resource, part = permission.resource, permission.part
    named = {"*", f"{resource.plural}/{part}", f"*/{part}"} if part else {"*", resource.plural}
    wanted = {
        "verbs": {"*", permission.verb},
        "apiGroups": {"*", resource.group},
        "resources": named,
    }
    is_for_all = not rule.get("resourceNames")
    return is_for_all and all(each & set(rule.get(key) or ()) for key, each in wanted.items())


def _version(client: Client) -> Version:
    answer = client.get("/version", f"asking {client.cluster.context} for its version")
    text = str(answer.get("gitVersion") or "")
    # As "v1.33.1+k3s1"; only this field has the same format in every distribution.
    numbers = [int(number) for number in _NUMBER.findall(text)[:2]]
    major, minor = numbers if len(numbers) == 2 else (0, 0)
    return Version(major, minor, text)


def _review(permission: Permission, namespace: str) -> Mapping[str, Any]:
    attributes: dict[str, Any] = {
        "namespace": namespace,
        "verb": permission.verb,
        "group": permission.resource.group,
        "resource": permission.resource.plural,
    }
    if permission.part:
        attributes["subresource"] = permission.part
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
