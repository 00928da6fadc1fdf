"""CRDs of JobSet and Kueue, with the fields and rules that concern cloudjob.

Written from the documentation of ``jobset.x-k8s.io/v1alpha2`` and ``kueue.x-k8s.io/v1beta2``. The
Jobs and pods inside are upstream's own types. The CRDs of other operators are files.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from typing import Any

Object = dict[str, Any]
# The version of Kubernetes whose types of Jobs and pods these have.
VERSION = "1.36"

_TEXT: Object = {"type": "string"}
_FLAG: Object = {"type": "boolean"}
_NUMBER: Object = {"type": "integer", "format": "int32"}
_TEXTS: Object = {"type": "array", "items": _TEXT}
_TEXT_BY_NAME: Object = {"type": "object", "additionalProperties": _TEXT}
_QUANTITY: Object = {
    "x-kubernetes-int-or-string": True,
    "anyOf": [{"type": "integer"}, {"type": "string"}],
}
_IMMUTABLE = [{"rule": "self == oldSelf", "message": "Value is immutable"}]
# A custom resource keeps only these fields of an object inside it.
_EMBEDDED_METADATA = {
    **dict.fromkeys(("name", "namespace"), _TEXT),
    **dict.fromkeys(("labels", "annotations"), _TEXT_BY_NAME),
    "finalizers": _TEXTS,
}


def _object(required: tuple[str, ...] = (), /, **properties: Object) -> Object:
    more = {"required": list(required)} if required else {}
    return {"type": "object", "properties": properties, **more}


def _root(spec: Object, status: Object) -> Object:
    metadata = {"type": "object"}
    return _object(apiVersion=_TEXT, kind=_TEXT, metadata=metadata, spec=spec, status=status)


def _choice(*names: str, **more: Any) -> Object:
    return {**_TEXT, "enum": list(names), **more}


def _keyed(key: str, item: Object, **bounds: int) -> Object:
    """Return a list of objects none of which have the same key."""
    keys = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
    return {"type": "array", "items": item, **bounds, **keys}


_CONDITIONS = _keyed(
    "type",
    _object(
        ("lastTransitionTime", "message", "reason", "status", "type"),
        lastTransitionTime={**_TEXT, "format": "date-time"},
        message={**_TEXT, "maxLength": 32768},
        observedGeneration={"type": "integer", "format": "int64"},
        reason={**_TEXT, "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
        status=_choice("True", "False", "Unknown"),
        type={**_TEXT, "maxLength": 316},
    ),
    maxItems=16,
)


@functools.cache
def _types() -> Object:
    folder = importlib.resources.files("kubernetes_validate") / "kubernetes-json-schema"
    text = (folder / f"v{VERSION}.0-local-strict" / "_definitions.json").read_text()
    definitions: Object = json.loads(text)["$defs"]
    return definitions


def upstream(name: str) -> Object:
    """Return the schema of a type of Kubernetes, as a CRD may contain it."""
    return _structural(_types()[name])


def _structural(schema: Object) -> Object:
    kind = str(schema.get("$ref") or "").rpartition("/")[2]
    if kind.endswith((".Quantity", ".IntOrString")):
        return _QUANTITY
    if kind.endswith(".ObjectMeta"):
        return _object(**_EMBEDDED_METADATA)
    if kind:
        return upstream(kind)
    structural: Object = {key: schema[key] for key in ("format", "required") if key in schema}
    kinds = schema["type"]
    structural["type"] = kinds if isinstance(kinds, str) else kinds[0]
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            structural[key] = _structural(schema[key])
    if "properties" in schema:
        items = schema["properties"].items()
        structural["properties"] = {name: _structural(item) for name, item in items}
    return structural


def _jobset_schema() -> Object:
    rule = _object(
        ("name", "action"),
        name={**_TEXT, "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
        action=_choice(
            *("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
            *("RestartJob", "RestartJobAndIgnoreMaxRestarts"),
        ),
        onJobFailureReasons=_TEXTS,
        onJobFailureMessagePatterns=_TEXTS,
        targetReplicatedJobs=_TEXTS,
    )
    strategies = ("Recreate", "BlockingRecreate", "InPlaceRestart")
    group = _object(
        ("name", "template"),
        name=_TEXT,
        groupName={**_TEXT, "default": "default"},
        replicas={**_NUMBER, "default": 1},
        template=upstream("io.k8s.api.batch.v1.JobTemplateSpec"),
    )
    policy = _object(
        maxRestarts=_NUMBER,
        restartStrategy=_choice(*strategies, default="Recreate"),
        rules={"type": "array", "items": rule},
    )
    network = _object(enableDNSHostnames=_FLAG, publishNotReadyAddresses=_FLAG, subdomain=_TEXT)
    counts = ("active", "failed", "ready", "succeeded", "suspended")
    spec = _object(
        replicatedJobs=_keyed("name", group),
        network={**network, "x-kubernetes-validations": _IMMUTABLE},
        failurePolicy={**policy, "x-kubernetes-validations": _IMMUTABLE},
        managedBy=_TEXT,
        suspend=_FLAG,
        ttlSecondsAfterFinished={**_NUMBER, "minimum": 0},
    )
    status = _object(
        conditions=_CONDITIONS,
        restarts=_NUMBER,
        restartsCountTowardsMax=_NUMBER,
        terminalState=_TEXT,
        replicatedJobsStatus=_keyed(
            "name", _object((*counts, "name"), name=_TEXT, **dict.fromkeys(counts, _NUMBER))
        ),
    )
    return _root(spec, status)


def _held(side: str, kind: str) -> str:
    """Return a rule's term: whether an object has this condition."""
    conditions = f"{side}.status.conditions"
    is_there = f"has({side}.status) && has({conditions})"
    return f"({is_there} && {conditions}.exists(c, c.type == '{kind}' && c.status == 'True'))"


def _workload_schema() -> Object:
    pods = _object(
        ("template",),
        name={**_TEXT, "default": "main", "maxLength": 63},
        count={**_NUMBER, "default": 1, "minimum": 0},
        template=upstream("io.k8s.api.core.v1.PodTemplateSpec"),
    )
    spec = _object(
        active={**_FLAG, "default": True},
        queueName={**_TEXT, "maxLength": 253},
        priority=_NUMBER,
        maximumExecutionTimeSeconds={**_NUMBER, "minimum": 1},
        podSets=_keyed("name", pods, minItems=1, maxItems=8),
    )
    assignment = _object(name={**_TEXT, "default": "main"}, count=_NUMBER, flavors=_TEXT_BY_NAME)
    admission = _object(
        ("clusterQueue", "podSetAssignments"),
        clusterQueue=_TEXT,
        podSetAssignments=_keyed("name", assignment, maxItems=8),
    )
    requeue = _object(count=_NUMBER, requeueAt={**_TEXT, "format": "date-time"})
    status = _object(conditions=_CONDITIONS, admission=admission, requeueState=requeue)
    reserved = [_held(side, "QuotaReserved") for side in ("oldSelf", "self")]
    names = "has(oldSelf.spec.queueName) && has(self.spec.queueName)"
    rule = {
        "rule": f"{' && '.join(reserved)} && {names} ? "
        "oldSelf.spec.queueName == self.spec.queueName : true",
        "message": "queueName is immutable while workload quota reserved",
    }
    return {**_root(spec, status), "x-kubernetes-validations": [rule]}


def _queue_schema() -> Object:
    spec = _object(clusterQueue=_TEXT, stopPolicy=_choice("None", "Hold", "HoldAndDrain"))
    status = _object(conditions=_CONDITIONS, pendingWorkloads=_NUMBER)
    return _root(spec, status)


def _definition(group: str, kind: str, versions: tuple[str, ...], schema: Object) -> Object:
    """Return a CRD whose versions have the same schema; the first one is stored."""
    plural = f"{kind.lower()}s"
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            # Names that end in k8s.io are Kubernetes' own.
            "annotations": {"api-approved.kubernetes.io": "unapproved, in a test"},
        },
        "spec": {
            "group": group,
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "scope": "Namespaced",
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": version == versions[0],
                    "subresources": {"status": {}},
                    "schema": {"openAPIV3Schema": schema},
                }
                for version in versions
            ],
        },
    }


@functools.cache
def jobset() -> Object:
    """Return the CRD of JobSet."""
    return _definition("jobset.x-k8s.io", "JobSet", ("v1alpha2",), _jobset_schema())


@functools.cache
def kueue() -> tuple[Object, ...]:
    """Return the CRDs of Kueue."""
    group, versions = "kueue.x-k8s.io", ("v1beta2", "v1beta1")
    return (
        _definition(group, "Workload", versions, _workload_schema()),
        _definition(group, "LocalQueue", versions, _queue_schema()),
    )
