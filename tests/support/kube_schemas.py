"""Upstream's rules for pods: schemas for each version of Kubernetes, and Pod Security."""

from __future__ import annotations

import functools
import json
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
from referencing import Registry, Resource

# The versions that have a schema, and in which the engine ``job`` works.
VERSIONS = tuple(f"1.{minor}" for minor in range(29, 38))


def problems(item: dict[str, Any], version: str) -> list[str]:
    """Return what a version of Kubernetes does not know or accept in an object: the first such."""
    group, _, name = item["apiVersion"].rpartition("/")
    api = f"{group.partition('.')[0]}-{name}" if group else name
    error = jsonschema.exceptions.best_match(
        _validator(f"{item['kind'].lower()}-{api}.json", version).iter_errors(item)
    )
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}"] if error else []


# To read a schema takes longer than a validation.
@functools.cache
def _validator(name: str, version: str) -> jsonschema.Draft202012Validator:
    registry = _registry(version)
    return jsonschema.Draft202012Validator(_read(name, version), registry=registry)


@functools.cache
def _registry(version: str) -> Registry[Any]:
    return (Resource.from_contents(_read("_definitions.json", version)) @ Registry()).crawl()


def _read(name: str, version: str) -> dict[str, Any]:
    schemas = Path(str(resources.files("kubernetes_validate") / "kubernetes-json-schema"))
    [path] = schemas.glob(f"v{version}.*-local-strict/{name}")
    content: dict[str, Any] = json.loads(path.read_text())
    return content


# The volumes that the Pod Security Standard ``restricted`` allows.
_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim"),
    *("projected", "secret"),
}


def restricted_problems(spec: dict[str, Any]) -> list[str]:
    """Return what the Pod Security Standard ``restricted`` forbids in the ``spec`` of a pod.

    https://kubernetes.io/docs/concepts/security/pod-security-standards/
    """
    violations = [key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    violations += [
        f"volumes.{item['name']}"
        for item in spec.get("volumes") or ()
        if not item.keys() - {"name"} <= _VOLUMES
    ]
    for container in [*(spec.get("initContainers") or ()), *spec["containers"]]:
        context = container.get("securityContext") or {}
        both = {**(spec.get("securityContext") or {}), **context}
        capabilities = context.get("capabilities") or {}
        added = {*capabilities.get("add", ())} - {"NET_BIND_SERVICE"}
        rules = {
            "privileged": not context.get("privileged"),
            "allowPrivilegeEscalation": context.get("allowPrivilegeEscalation") is False,
            "runAsNonRoot": both.get("runAsNonRoot") is True,
            "runAsUser": both.get("runAsUser") != 0,
            "seccompProfile": (both.get("seccompProfile") or {}).get("type")
            in ("RuntimeDefault", "Localhost"),
            "capabilities": "ALL" in capabilities.get("drop", ()) and not added,
            "hostPort": not any(port.get("hostPort") for port in container.get("ports") or ()),
        }
        violations += [
            f"{container['name']}.{rule}" for rule, is_kept in rules.items() if not is_kept
        ]
    return violations
