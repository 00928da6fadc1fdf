"""The request for a job: a ConfigMap, a Secret and the engine's manifest. No I/O."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cloudjob.backends import delivery
from cloudjob.backends.kubernetes import pod, validation
from cloudjob.backends.kubernetes.engine import CONFIG_MAP, SECRET, Engine
from cloudjob.backends.kubernetes.indexed_job import IndexedJob
from cloudjob.backends.kubernetes.jobset import JobSet
from cloudjob.backends.kubernetes.mpi_operator import MpiOperator
from cloudjob.backends.kubernetes.ms_operator import MsOperator
from cloudjob.backends.kubernetes.pod import Names
from cloudjob.backends.kubernetes.volcano import Volcano
from cloudjob.backends.kubernetes.volumes import resolved, uri_problems
from cloudjob.errors import SpecError
from cloudjob.model import sizes
from cloudjob.model.submission import Submission
from cloudjob.model.text import MASK
from jobentry.contract import names, paths, variables

# In the order of preference: an operator starts all pods or none, or restarts a whole job.
ENGINES: Mapping[str, Engine] = {
    engine.name: engine
    for engine in (Volcano(), MpiOperator(), MsOperator(), IndexedJob(), JobSet())
}

# etcd stores 1.5 MiB (--max-request-bytes), in which the API server also notes who set each field.
MAX_OBJECT_BYTES = 1_300_000


@dataclass(frozen=True, slots=True)
class KubernetesRequest:
    """The objects to create.

    Args:
        config_map: The entry; the same for all pods.
        secret: None if nothing is secret. The key for ssh is made when it is sent.
        delivered: The variables in the Secret.
        submission: The submission that it was built from.
        services: The services that give names to nodes, if the operator makes none.
        body: The operator's manifest.
    """

    job: str
    job_names: Names
    engine: Engine
    config_map: Mapping[str, Any] = field(repr=False)
    secret: Mapping[str, Any] | None
    delivered: Mapping[str, str] = field(repr=False)
    services: list[dict[str, Any]] = field(repr=False)
    body: Mapping[str, Any]
    has_key: bool
    submission: Submission = field(repr=False)


def build(submission: Submission, engine: Engine, namespace: str) -> KubernetesRequest:
    """Return the request for ``submission``.

    Raises:
        SpecError: This backend cannot run the job.
    """
    wrong = list(uri_problems(submission))
    submission = resolved(submission)
    problems = [*wrong, *validation.find(submission, engine, namespace, ENGINES.values())]
    if problems:
        raise SpecError(problems)
    spec = submission.spec
    job_names = Names(submission.job, namespace)
    hosts = engine.hosts(job_names.name, spec.nodes)
    delivered = pod.variables(submission, hosts, job_names.name).delivered
    has_key = spec.nodes > 1 and not engine.makes_key
    has_delivery = bool(delivered) or has_key
    body = engine.manifest(submission, job_names, has_delivery=has_delivery)
    _check_size(submission, body)
    return KubernetesRequest(
        job=submission.job,
        job_names=job_names,
        engine=engine,
        config_map=_config_map(submission, job_names),
        secret=_secret(submission, job_names) if has_delivery else None,
        delivered=delivered,
        services=engine.services(submission, job_names),
        body=body,
        has_key=has_key,
        submission=submission,
    )


def _check_size(submission: Submission, body: Mapping[str, Any]) -> None:
    """Refuse a manifest that is too long for the cluster to store.

    Raises:
        SpecError: The manifest is too long; the message has the key of the longest argument or
            variable.
    """
    size = len(json.dumps(body))
    if size > MAX_OBJECT_BYTES:
        raise SpecError(
            [
                f"arguments and variables: too long for a Kubernetes {body['kind']} (given "
                f"{size} bytes, of which {sizes.largest(submission.spec)}; allowed "
                f"{MAX_OBJECT_BYTES})"
            ],
            hint=sizes.HINT,
        )


def environments(request: KubernetesRequest) -> Iterator[dict[str, str]]:
    """Yield the variables that the entry of each node would be given."""
    for node in range(request.submission.spec.nodes):
        yield request.engine.environment(request.submission, request.job_names, node)


def objects(request: KubernetesRequest, key: bytes) -> list[dict[str, Any]]:
    """Return the manifests in the order in which they are created.

    Args:
        key: The private key of the job for ssh, empty for none.
    """
    items = [dict(request.config_map)]
    if request.secret is not None:
        data = {}
        if request.delivered:
            data[paths.DELIVERED_ENV] = _base64(variables.dump(request.delivered))
        if key:
            data[paths.DELIVERED_SSH_KEY] = _base64(key)
        items.append({**request.secret, "data": data})
    return [*items, *request.services, dict(request.body)]


def shown(request: KubernetesRequest) -> list[dict[str, Any]]:
    """Return the manifests with secrets as ``***``."""
    items = [dict(request.config_map)]
    if request.secret is not None:
        text = {}
        if request.delivered:
            text[paths.DELIVERED_ENV] = "".join(f"{name}={MASK}\0" for name in request.delivered)
        if request.has_key:
            text[paths.DELIVERED_SSH_KEY] = MASK
        items.append({**request.secret, "stringData": text})
    return copy.deepcopy([*items, *request.services, dict(request.body)])


def show(request: KubernetesRequest) -> dict[str, Any]:
    """Return ``request`` as plain JSON values, secrets as ``***``: a list that kubectl takes."""
    return {"apiVersion": "v1", "kind": "List", "items": shown(request)}


def text(request: KubernetesRequest) -> str:
    """Return ``request`` as YAML that kubectl takes, secrets as ``***``."""
    import yaml

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    documents = yaml.dump_all(
        shown(request), Dumper=dumper, sort_keys=False, allow_unicode=False, width=120
    )
    return str(documents)


def _config_map(submission: Submission, job_names: Names) -> dict[str, Any]:
    return {
        "apiVersion": CONFIG_MAP.api_version,
        "kind": CONFIG_MAP.kind,
        "metadata": _metadata(submission, job_names, job_names.entry),
        "immutable": True,
        "binaryData": {name: _base64(data) for name, data in delivery.files().items()},
    }


def _secret(submission: Submission, job_names: Names) -> dict[str, Any]:
    return {
        "apiVersion": SECRET.api_version,
        "kind": SECRET.kind,
        "metadata": _metadata(submission, job_names, job_names.delivery),
        "type": "Opaque",
        # Temporary keys may be replaced while the job runs.
        "immutable": names.CLOUDJOB_S3_SESSION_TOKEN not in submission.access,
    }


def _metadata(submission: Submission, job_names: Names, name: str) -> dict[str, Any]:
    return {"name": name, "namespace": job_names.namespace, **pod.labels(submission)}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
