"""What the cluster is told of a job: a ConfigMap, a Secret and the operator's manifest. No I/O."""

from __future__ import annotations

import base64
import copy
import os
import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cloudjob.backends import entry
from cloudjob.backends.kubernetes import mpi_operator, ms_operator, pod, volcano
from cloudjob.backends.kubernetes.engine import Engine, Resource
from cloudjob.backends.kubernetes.pod import Names
from cloudjob.backends.words import file_path, is_utf8
from cloudjob.errors import SpecError
from cloudjob.spec import MASK, MAX_WORD_BYTES, JobSpec, given, section
from cloudjob.submission import Submission
from jobentry.contract import names, paths, variables

ENGINES: Mapping[str, Engine] = {
    engine.name: engine for engine in (volcano.ENGINE, mpi_operator.ENGINE, ms_operator.ENGINE)
}
CONFIG_MAP = Resource("", "v1", "configmaps", "ConfigMap")
SECRET = Resource("", "v1", "secrets", "Secret")
SERVICE = Resource("", "v1", "services", "Service")
# What the API server, and etcd behind it, take of one object.
MAX_OBJECT_BYTES = 1_572_864
MAX_SECRET_BYTES = 1_048_576

_USER = re.compile(r"\d{1,9}(:\d{1,9})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class KubernetesRequest:
    """What is sent.

    Args:
        config_map: The entry; the same for all pods.
        secret: None when there is nothing to hide. The key for ssh is made when it is sent.
        hidden: The variables in the Secret.
        submission: What it was made of.
        services: Those that give names to nodes, where the operator does not.
        body: The operator's manifest.
    """

    job: str
    called: Names
    engine: Engine
    config_map: Mapping[str, Any] = field(repr=False)
    secret: Mapping[str, Any] | None
    hidden: Mapping[str, str] = field(repr=False)
    services: list[dict[str, Any]] = field(repr=False)
    body: Mapping[str, Any]
    has_key: bool
    submission: Submission = field(repr=False)


def build(submission: Submission, engine: Engine, namespace: str) -> KubernetesRequest:
    """Return the request for ``submission``.

    Raises:
        SpecError: The job asks for what this backend cannot do.
    """
    problems = list(_problems(submission, engine))
    if problems:
        raise SpecError(problems)
    spec = submission.spec
    called = Names(submission.job, namespace)
    hosts = engine.hosts(called.name, spec.nodes)
    hidden = pod.variables(submission, hosts, called.name, ()).hidden
    has_key = spec.nodes > 1 and not engine.makes_key
    has_delivery = bool(hidden) or has_key
    return KubernetesRequest(
        job=submission.job,
        called=called,
        engine=engine,
        config_map=_config_map(submission, called),
        secret=_secret(submission, called) if has_delivery else None,
        hidden=hidden,
        services=engine.services(submission, called),
        body=engine.manifest(submission, called, has_delivery),
        has_key=has_key,
        submission=submission,
    )


def environments(request: KubernetesRequest) -> Iterator[dict[str, str]]:
    """Yield the variables that the entry of each node would be given."""
    for node in range(request.submission.spec.nodes):
        yield request.engine.environment(request.submission, request.called, node)


def objects(request: KubernetesRequest, key: bytes) -> list[dict[str, Any]]:
    """Return the manifests in the order in which they are made.

    Args:
        key: The private key of the job for ssh, empty for none.
    """
    made = [dict(request.config_map)]
    if request.secret is not None:
        data = {}
        if request.hidden:
            data[paths.DELIVERED_ENV] = _base64(variables.dump(request.hidden))
        if key:
            data[paths.DELIVERED_SSH_KEY] = _base64(key)
        made.append({**request.secret, "data": data})
    return [*made, *request.services, dict(request.body)]


def shown(request: KubernetesRequest) -> list[dict[str, Any]]:
    """Return the manifests with what is secret as ``***``."""
    made = [dict(request.config_map)]
    if request.secret is not None:
        text = {}
        if request.hidden:
            text[paths.DELIVERED_ENV] = "".join(f"{name}={MASK}\0" for name in request.hidden)
        if request.has_key:
            text[paths.DELIVERED_SSH_KEY] = MASK
        made.append({**request.secret, "stringData": text})
    return copy.deepcopy([*made, *request.services, dict(request.body)])


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


def _config_map(submission: Submission, called: Names) -> dict[str, Any]:
    return {
        "apiVersion": CONFIG_MAP.api_version,
        "kind": CONFIG_MAP.kind,
        "metadata": _metadata(submission, called, called.entry),
        "immutable": True,
        "binaryData": {name: _base64(data) for name, data in entry.files().items()},
    }


def _secret(submission: Submission, called: Names) -> dict[str, Any]:
    return {
        "apiVersion": SECRET.api_version,
        "kind": SECRET.kind,
        "metadata": _metadata(submission, called, called.delivery),
        "type": "Opaque",
        "immutable": True,
    }


def _metadata(submission: Submission, called: Names, name: str) -> dict[str, Any]:
    options = section(submission.spec, "kubernetes")
    own = pod.metadata(submission, {**options, "annotations": {}})
    return {"name": name, "namespace": called.namespace, **own}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


# -- what is wrong ------------------------------------------------------------------------------


def _problems(submission: Submission, engine: Engine) -> Iterator[str]:
    spec = submission.spec
    options = section(spec, "kubernetes")
    if not spec.image:
        yield "image: is missing (allowed: an image that the cluster can pull)"
    yield from _engine_problems(spec, engine)
    user = str(options["user"])
    if user and not _USER.fullmatch(user):
        yield f"kubernetes.user: is not UID:GID (given {given(user)}; allowed like 1000:100)"
    for index, word in enumerate((spec.script, *spec.args)):
        if not is_utf8(word):
            key = f"args[{index - 1}]" if index else "script"
            yield f"{key}: holds bytes that are no UTF-8, which a manifest cannot hold"
    if options["presigned_h"]:
        yield from _signing_problems(submission)
    yield from _volume_problems(options["volumes"])
    yield from _place_problems(submission, options["volumes"])
    yield from _size_problems(submission, engine)


def _engine_problems(spec: JobSpec, engine: Engine) -> Iterator[str]:
    """Yield what the operator cannot do."""
    if spec.retries and engine.no_retries:
        yield f"retries: {engine.no_retries} (given {spec.retries}; allowed 0; volcano can)"
    patch = section(spec, "kubernetes")["pod"]
    if engine.name == "ms-operator" and isinstance(patch, Mapping) and patch.get("metadata"):
        yield (
            "kubernetes.pod.metadata: the MindSpore operator keeps no labels and annotations of "
            "pods (allowed: spec)"
        )
    if engine.launchers and spec.launcher not in engine.launchers:
        yield (
            f"launcher: kubernetes.engine {engine.name} starts {engine.runs} and nothing else "
            f"(given {spec.launcher}; allowed {', '.join(engine.launchers)}; or another engine)"
        )


def _signing_problems(submission: Submission) -> Iterator[str]:
    """Yield what an address for each object does not do: it names no folder."""
    spec, key = submission.spec, "kubernetes.presigned_h"
    if file_path(submission.code.uri):
        yield f"{key}: a folder has no addresses (allowed with a store of s3:// or obs://)"
    named = [f"outputs.{name}" for name, uri in submission.outputs if not file_path(uri)]
    named += [f"inputs.{name}" for name, uri in spec.inputs.items() if _is_of_store(uri)]
    if named:
        yield (
            f"{key}: an address is of one object, and {', '.join(named)} may be of many (allowed "
            "without them, or 0 hours)"
        )


def _is_of_store(uri: str) -> bool:
    return uri.startswith(("s3://", "obs://"))


def _volume_problems(volumes: object) -> Iterator[str]:
    assert isinstance(volumes, (list, tuple))
    for index, volume in enumerate(volumes):
        for key in ("name", "mountPath"):
            if not (isinstance(volume, Mapping) and volume.get(key)):
                yield (
                    f"kubernetes.volumes[{index}]: has no {key} (allowed: a volume of Kubernetes "
                    "with its name, and mountPath beside it)"
                )


def _place_problems(submission: Submission, volumes: object) -> Iterator[str]:
    """Yield the folders of this machine that no volume brings into the pods."""
    spec = submission.spec
    uris = {
        "store": submission.code.uri,
        **{f"inputs.{name}": uri for name, uri in spec.inputs.items()},
        **{f"outputs.{name}": uri for name, uri in spec.outputs.items()},
    }
    assert isinstance(volumes, (list, tuple))
    mounted = [str(item.get("mountPath")) for item in volumes if isinstance(item, Mapping)]
    for key, uri in uris.items():
        path = file_path(uri)
        if path and not any(_is_below(path, folder) for folder in mounted):
            yield (
                f"{key}: no pod has the folder {given(path)} of this machine (allowed s3:// or "
                "obs://; or a folder that one of kubernetes.volumes has as its mountPath)"
            )


def _size_problems(submission: Submission, engine: Engine) -> Iterator[str]:
    """Yield what Linux would refuse when the container starts, long after the queue."""
    nodes = submission.spec.nodes
    size = len(",".join(engine.hosts(Names(submission.job, "").name, nodes)))
    size += len(f"{names.VC_WORKER_HOSTS}=")
    if size > MAX_WORD_BYTES:
        yield (
            f"nodes: the names of {nodes} nodes are {size} bytes, and Linux takes {MAX_WORD_BYTES} "
            "as one variable (allowed: fewer nodes, or a shorter name of the job)"
        )
    hidden = pod.variables(submission, ("localhost",), "", ()).hidden
    size = sum(len(os.fsencode(name + value)) + 2 for name, value in hidden.items())
    if size > MAX_SECRET_BYTES:
        yield (
            f"secrets: are {size} bytes together (allowed {MAX_SECRET_BYTES}, what Kubernetes "
            "takes as one Secret)"
        )


def _is_below(path: str, folder: str) -> bool:
    folder = posixpath.normpath(folder)
    return path == folder or path.startswith(folder.rstrip("/") + "/")
