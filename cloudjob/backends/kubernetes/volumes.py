"""The volumes that inputs and outputs name, and what the pods need to exist. No I/O."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import unquote

from cloudjob.backends.encoding import file_uri
from cloudjob.backends.kubernetes.engine import CONFIG_MAP, SECRET, Resource
from cloudjob.model.rules import VOLUME_SCHEMES
from cloudjob.model.submission import Submission
from cloudjob.model.text import given

CLAIM = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
ACCOUNT = Resource("", "v1", "serviceaccounts", "ServiceAccount")

# The name of an object of Kubernetes.
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", re.ASCII)
# Below this folder, volumes are mounted under the name of their input or output.
_MOUNTS = "/mnt/cloudjob"
# The fields of a pod that refer to an object, wherever they are.
_REFERENCES = {
    **dict.fromkeys(("secret", "secretRef", "secretKeyRef"), SECRET),
    **dict.fromkeys(("configMap", "configMapRef", "configMapKeyRef"), CONFIG_MAP),
}
# The kinds of volumes that a URI can name.
_SOURCES = ("persistentVolumeClaim", "secret", "configMap")
_HOST = "kubernetes.io/hostname"
_SHARED, _READ_SHARED, _OF_ONE_POD = "ReadWriteMany", "ReadOnlyMany", "ReadWriteOncePod"


class VolumePlace(NamedTuple):
    """A place in a volume, as the URI of an input or an output names it.

    Args:
        name: The name of a claim, a Secret or a ConfigMap.
        path: The path in it; empty for all of it.
    """

    scheme: str
    name: str
    path: str

    @property
    def source(self) -> dict[str, Any]:
        """The source of the volume, as a pod has it."""
        if self.scheme == "pvc":
            return {"persistentVolumeClaim": {"claimName": self.name}}
        items = {"items": [{"key": self.path, "path": self.path}]} if self.path else {}
        if self.scheme == "secret":
            return {"secret": {"secretName": self.name, **items}}
        return {"configMap": {"name": self.name, **items}}


def place_of(uri: str) -> VolumePlace | None:
    """Return the place that a URI names; None if it names no volume."""
    scheme, mark, rest = uri.partition("://")
    name, _, path = rest.partition("/")
    is_volume = bool(mark) and scheme in VOLUME_SCHEMES
    return VolumePlace(scheme, name, unquote(path).strip("/")) if is_volume else None


def uri_problems(submission: Submission) -> Iterator[str]:
    """Yield what is wrong with inputs and outputs that name volumes."""
    spec = submission.spec
    uris = {
        **{f"inputs.{name}": uri for name, uri in spec.inputs.items()},
        **{f"outputs.{name}": uri for name, uri in spec.outputs.items()},
    }
    for key, uri in uris.items():
        place = place_of(uri)
        if place and (not _NAME.fullmatch(place.name) or ".." in place.path.split("/")):
            example = f"{place.scheme}://name/path"
            yield f"{key}: names no place in a volume (given {given(uri)}; for example {example})"
    for name in spec.input_nodes:
        if place_of(spec.inputs.get(name, "")):
            yield f"input_nodes.{name}: every pod mounts a volume (allowed: leave it out)"


def resolved(submission: Submission) -> Submission:
    """Return a job whose volumes are mounted, so that no URI names one any more.

    The variable of an input is its path in the volume, which is read-only there: it is not copied.
    An output is stored in the volume as in any folder.
    """
    spec = submission.spec
    mounts: list[dict[str, Any]] = []
    # A pod that mounts one claim as two volumes may never start (kubernetes#28502).
    names = _names_of_sources(spec.kubernetes.volumes)
    names_in_job_file = set(names.values())

    def mounted(name: str, place: VolumePlace, *, is_read_only: bool) -> str:
        volume = names.setdefault(str(place.source), f"cloudjob-{len(names)}")
        mount = {"mountPath": f"{_MOUNTS}/{name}", "readOnly": is_read_only}
        mounts.append({"name": volume, **place.source, **mount})
        return f"{_MOUNTS}/{name}/{place.path}".rstrip("/")

    paths = {
        name: mounted(name, place, is_read_only=True)
        for name, uri in spec.inputs.items()
        if (place := place_of(uri))
    }
    outputs = tuple(
        (name, file_uri(mounted(name, place, is_read_only=False)) if place else uri)
        for name, uri, place in ((name, uri, place_of(uri)) for name, uri in submission.outputs)
    )
    if not mounts:
        return submission
    written = {mount["name"] for mount in mounts if not mount["readOnly"]}
    written |= names_in_job_file
    for mount in mounts:
        claim = mount.get("persistentVolumeClaim")
        if claim and mount["name"] not in written:
            # Otherwise the kubelet may change the group of every file in it.
            mount["persistentVolumeClaim"] = {**claim, "readOnly": True}
    options = spec.kubernetes.with_values(volumes=[*spec.kubernetes.volumes, *mounts])
    inputs = {name: uri for name, uri in spec.inputs.items() if name not in paths}
    local_spec = spec.with_values(inputs=inputs, env={**spec.env, **paths}, kubernetes=options)
    return submission._replace(spec=local_spec, outputs=outputs)


def _names_of_sources(volumes: list[Any]) -> dict[str, str]:
    """Return the names of the job file's volumes, by what a URI may name, too."""
    return {
        str({key: volume[key]}): str(volume["name"])
        for volume in volumes
        for key in _SOURCES
        if isinstance(volume, Mapping) and key in volume and "name" in volume
    }


# -- what must exist ------------------------------------------------------------------------------


class Use(NamedTuple):
    """How the pods use a claim.

    Args:
        is_read_only: Whether every mount of it is.
        is_together: Whether the pods ask to be on one machine.
    """

    is_read_only: bool
    is_together: bool


@dataclass(frozen=True, slots=True)
class Needs:
    """What the pods of a manifest need to exist.

    Args:
        objects: Secrets, ConfigMaps and service accounts, each with the keys that are used.
        host_paths: The folders of machines that they mount.
    """

    claims: dict[str, Use] = field(default_factory=dict)
    objects: dict[tuple[Resource, str], set[str]] = field(default_factory=dict)
    host_paths: set[str] = field(default_factory=set)


def needs_of(manifest: Any) -> Needs:
    """Return what the pods of a manifest need to exist before they can start."""
    needs = Needs()
    for pod in _pods(manifest):
        for volume in pod.get("volumes") or ():
            claim = str((volume.get("persistentVolumeClaim") or {}).get("claimName") or "")
            if claim:
                used, now = needs.claims.get(claim), _use(pod, volume)
                is_read_only = now.is_read_only and (used is None or used.is_read_only)
                is_together = now.is_together and (used is None or used.is_together)
                needs.claims[claim] = Use(is_read_only, is_together)
            if path := str((volume.get("hostPath") or {}).get("path") or ""):
                needs.host_paths.add(path)
        for resource, name, keys in _references(pod):
            needs.objects.setdefault((resource, name), set()).update(keys)
        accounts = [(ACCOUNT, pod.get("serviceAccountName"))]
        pull = [(SECRET, item.get("name")) for item in pod.get("imagePullSecrets") or ()]
        for resource, name in (*accounts, *pull):
            if name:
                needs.objects.setdefault((resource, str(name)), set())
    return needs


def _pods(item: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the ``spec`` of each pod in a manifest, whatever its kind."""
    if isinstance(item, Mapping):
        if isinstance(item.get("containers"), list):
            yield item
        else:
            for value in item.values():
                yield from _pods(value)
    elif isinstance(item, list):
        for value in item:
            yield from _pods(value)


def _use(pod: Mapping[str, Any], volume: Mapping[str, Any]) -> Use:
    containers = [*pod["containers"], *(pod.get("initContainers") or ())]
    mounts = [
        mount
        for container in containers
        for mount in container.get("volumeMounts") or ()
        if mount.get("name") == volume.get("name")
    ]
    is_read_only = bool(volume["persistentVolumeClaim"].get("readOnly"))
    is_read_only |= all(mount.get("readOnly") for mount in mounts)
    affinity = (pod.get("affinity") or {}).get("podAffinity") or {}
    # A preferred affinity is no guarantee.
    together = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    is_together = _HOST in str(together) or _HOST in (pod.get("nodeSelector") or {})
    return Use(is_read_only, is_together or bool(pod.get("nodeName")))


def _references(item: Any) -> Iterator[tuple[Resource, str, set[str]]]:
    """Yield the Secrets and ConfigMaps that a pod cannot do without, and their keys."""
    if isinstance(item, list):
        for value in item:
            yield from _references(value)
    if not isinstance(item, Mapping):
        return
    for key, value in item.items():
        if key in _REFERENCES and isinstance(value, Mapping):
            name = value.get("secretName") or value.get("name")
            keys = [value.get("key"), *(each.get("key") for each in value.get("items") or ())]
            if name and not value.get("optional"):
                yield _REFERENCES[key], str(name), {str(each) for each in keys if each}
        else:
            yield from _references(value)


# -- claims ---------------------------------------------------------------------------------------


class Doubt(enum.Enum):
    """What is wrong with a claim of a volume."""

    NONE = "usable"
    DELETED = "it is being deleted"
    UNBOUND = "it has no volume"
    ONE_MACHINE = "only one machine can mount it at a time"
    ONE_POD = "only one pod can mount it at a time"
    READ_ONLY = "it can only be read"


CLAIM_HINTS = {
    Doubt.NONE: "",
    Doubt.DELETED: "use another claim",
    Doubt.UNBOUND: "`kubectl describe pvc` says why; wait if it is new",
    Doubt.ONE_MACHINE: "use a claim with ReadWriteMany, one node, or a podAffinity for one machine",
    Doubt.ONE_POD: "use a claim with ReadWriteMany, or one node",
    Doubt.READ_ONLY: "mount it with readOnly: true",
}


def doubt_of(claim: Mapping[str, Any], use: Use, nodes: int, *, binds_late: bool) -> Doubt:
    """Return what keeps the pods of a job from using a claim.

    Args:
        nodes: The number of pods.
        binds_late: Whether its volume is made only when a pod needs it.
    """
    status, metadata = claim.get("status") or {}, claim.get("metadata") or {}
    modes = {str(mode) for mode in (claim.get("spec") or {}).get("accessModes") or ()}
    if metadata.get("deletionTimestamp"):
        return Doubt.DELETED
    if status.get("phase") != "Bound" and not binds_late:
        return Doubt.UNBOUND
    if nodes > 1 and modes <= {_OF_ONE_POD}:
        return Doubt.ONE_POD
    if modes <= {_READ_SHARED} and not use.is_read_only:
        return Doubt.READ_ONLY
    is_shared = _SHARED in modes or (use.is_read_only and _READ_SHARED in modes)
    if nodes > 1 and not (is_shared or use.is_together):
        return Doubt.ONE_MACHINE
    return Doubt.NONE
