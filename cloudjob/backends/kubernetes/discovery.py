"""Which engines a cluster offers to a user: its resources and version, and the permissions."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from cloudjob.backends.kubernetes.client import POD, Client
from cloudjob.backends.kubernetes.engine import CONFIG_MAP, SECRET, SERVICE, Engine, Resource
from cloudjob.backends.kubernetes.errors import ObjectNotFound
from cloudjob.backends.kubernetes.request import ENGINES

_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
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
    """

    engine: Engine
    lack: Lack
    denied: tuple[Permission, ...] = ()


class Discovery:
    """What a cluster offers; asks each question only once."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._permitted: dict[Permission, bool] = {}
        self.version = _version(client)

    def offer(self, engine: Engine, required: Iterable[Permission]) -> Offer:
        """Return what keeps the user from using an engine; the first lack counts."""
        if not self._serves(engine.resource):
            return Offer(engine, Lack.RESOURCE)
        if self.version[:2] < engine.min_version:
            return Offer(engine, Lack.VERSION)
        denied = tuple(permission for permission in required if not self._permits(permission))
        return Offer(engine, Lack.PERMISSION if denied else Lack.NOTHING, denied)

    def _serves(self, resource: Resource) -> bool:
        path = f"/apis/{resource.group}/{resource.version}"
        try:
            served = self._client.get(path, f"looking for {resource.kind} in the cluster")
        except ObjectNotFound:
            return False
        return any(item.get("name") == resource.plural for item in served.get("resources") or ())

    def _permits(self, permission: Permission) -> bool:
        if permission not in self._permitted:
            body = _review(permission, self._client.cluster.namespace)
            doing = f"checking the permission to {permission}"
            status = self._client.post(_REVIEWS, body, doing).get("status") or {}
            self._permitted[permission] = bool(status.get("allowed"))
        return self._permitted[permission]


def offers(discovery: Discovery) -> list[Offer]:
    """Return what every engine lacks, in the order of preference."""
    return [discovery.offer(engine, required(engine)) for engine in ENGINES.values()]


def choices(discovery: Discovery, launcher: str, *, restarts: bool) -> Iterator[Offer]:
    """Yield the engines that start this launcher, in the order of preference.

    Those that can restart a job come first if that is wanted.

    Only the permission to create a job is checked: for any other missing one, the checks before
    the submit name the permissions of the chosen engine.
    """
    engines = sorted(ENGINES.values(), key=lambda engine: restarts and bool(engine.no_retries))
    for engine in engines:
        if not engine.launchers or launcher in engine.launchers:
            yield discovery.offer(engine, to_create(engine))


def to_create(engine: Engine) -> list[Permission]:
    """Return the permissions to create a job's own objects."""
    services = [Permission("create", SERVICE)] if engine.needs_services else []
    return [Permission("create", engine.resource), *services]


def required(engine: Engine) -> list[Permission]:
    """Return every permission that a job needs."""
    return [
        *to_create(engine),
        Permission("get", engine.resource),
        Permission("create", SECRET),
        Permission("create", CONFIG_MAP),
        Permission("list", POD),
        Permission("watch", POD),
        Permission("get", POD, "log"),
    ]


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
