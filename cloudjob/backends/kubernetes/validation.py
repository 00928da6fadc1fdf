"""Finds what is wrong with a job for Kubernetes before anything is sent. No I/O."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cloudjob.backends.encoding import argument_problems, file_path
from cloudjob.backends.kubernetes import pod
from cloudjob.backends.kubernetes.engine import Engine
from cloudjob.backends.kubernetes.pod import Names
from cloudjob.backends.kubernetes.strategic_merge import unknown_directives
from cloudjob.model.rules import MAX_ARG_BYTES
from cloudjob.model.submission import Submission
from cloudjob.model.text import given
from jobentry.contract import names

if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec
    from cloudjob.model.sections import Kubernetes

MAX_SECRET_BYTES = 1_048_576

_USER = re.compile(r"\d{1,9}(:\d{1,9})?", re.ASCII)
# Longest name of an API object, and longest part of a name or label.
_MAX_NAME, _MAX_PART = 253, 63
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", re.ASCII)
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", re.ASCII)
_OWN_METADATA = ("name", "generateName", "namespace", "uid")


def find(
    submission: Submission, engine: Engine, namespace: str, engines: Iterable[Engine]
) -> Iterator[str]:
    """Yield everything that is wrong, each with its key.

    Args:
        engines: Those that the job file can name, for messages.
    """
    spec = submission.spec
    options = spec.kubernetes
    if not spec.image:
        yield "image: is missing (allowed: an image that the cluster can pull)"
    yield from _engine_problems(spec, engine, engines)
    user = options.user
    if user and not _USER.fullmatch(user):
        yield f"kubernetes.user: is not UID:GID (given {given(user)}; for example 1000:100)"
    yield from argument_problems((spec.script, *spec.args), "a manifest cannot contain")
    if options.presigned_h:
        yield from _signing_problems(submission)
    yield from _name_problems(options, namespace)
    yield from _patch_problems(options)
    yield from _volume_problems(spec, options.volumes)
    yield from _place_problems(submission, options.volumes)
    yield from _size_problems(submission, engine)


def _engine_problems(spec: JobSpec, engine: Engine, engines: Iterable[Engine]) -> Iterator[str]:
    """Yield settings that the operator does not support."""
    if spec.retries and engine.no_retries:
        able = ", ".join(each.name for each in engines if not each.no_retries)
        yield f"retries: {engine.no_retries} (given {spec.retries}; allowed 0; {able} can)"
    if engine.no_pod_metadata and spec.kubernetes.pod.get("metadata"):
        yield f"kubernetes.pod.metadata: {engine.no_pod_metadata} (allowed: spec)"
    if engine.launchers and spec.launcher not in engine.launchers:
        yield (
            f"launcher: kubernetes.engine {engine.name} starts {engine.runs} and nothing else "
            f"(given {spec.launcher}; allowed {', '.join(engine.launchers)}; or another engine)"
        )


def _signing_problems(submission: Submission) -> Iterator[str]:
    """Yield what signed URLs do not support: they cannot name a folder."""
    spec, key = submission.spec, "kubernetes.presigned_h"
    if file_path(submission.code.uri):
        yield f"{key}: URLs of a folder cannot be signed (allowed with an s3:// or obs:// store)"
    named = [f"outputs.{name}" for name, uri in submission.outputs if not file_path(uri)]
    named += [
        f"inputs.{name}" for name, uri in spec.inputs.items() if uri.startswith(("s3://", "obs://"))
    ]
    if named:
        yield (
            f"{key}: a signed URL is for one object, but {', '.join(named)} may have many "
            "(allowed without them, or 0 hours)"
        )


def _name_problems(options: Kubernetes, namespace: str) -> Iterator[str]:
    """Yield names that the API server would refuse."""
    if not (_DNS_LABEL.fullmatch(namespace) and len(namespace) <= _MAX_PART):
        yield (
            f"kubernetes.namespace: is not the name of a namespace (given {given(namespace)}; "
            "allowed small letters, digits and dashes, at most 63)"
        )
    for key in ("labels", "node_selector"):
        yield from _label_problems(f"kubernetes.{key}", getattr(options, key))
    yield from _key_problems("kubernetes.annotations", options.annotations)
    for patch in ("pod", "job"):
        metadata = _mapping(getattr(options, patch).get("metadata"))
        where = f"kubernetes.{patch}.metadata"
        yield from _label_problems(f"{where}.labels", metadata.get("labels"))
        yield from _key_problems(f"{where}.annotations", metadata.get("annotations"))


def _label_problems(where: str, labels: object) -> Iterator[str]:
    yield from _key_problems(where, labels)
    for key, value in _mapping(labels).items():
        if value is not None and not _LABEL_VALUE.fullmatch(str(value)):
            yield (
                f"{where}.{key}: is not a valid label value (given {given(value)}; allowed "
                "letters, digits, '-', '_' and '.', at most 63)"
            )


def _key_problems(where: str, value: object) -> Iterator[str]:
    for key in _mapping(value):
        if not _is_label_key(str(key)):
            yield (
                f"{where}: {given(key)} is not a valid key in Kubernetes (allowed letters, "
                "digits, '-', '_' and '.', at most 63, and a domain with '/' before them)"
            )


def _is_label_key(key: str) -> bool:
    prefix, slash, name = key.rpartition("/")
    is_domain = len(prefix) <= _MAX_NAME and all(
        _DNS_LABEL.fullmatch(part) for part in prefix.split(".")
    )
    return bool(name and _LABEL_VALUE.fullmatch(name)) and (is_domain or not slash)


def _patch_problems(options: Kubernetes) -> Iterator[str]:
    """Yield fields that a patch must not contain, and unknown directives."""
    for patch in ("pod", "job"):
        where = f"kubernetes.{patch}"
        for key in unknown_directives(getattr(options, patch), where):
            yield (
                f"{key}: is not a known directive (allowed $patch: delete, merge or "
                "replace; $retainKeys)"
            )
        metadata = _mapping(getattr(options, patch).get("metadata"))
        labels = _mapping(metadata.get("labels"))
        for label in (pod.JOB_LABEL, pod.MANAGER_LABEL):
            if label in labels:
                yield f"{where}.metadata.labels.{label}: is cloudjob's own (allowed: other labels)"
    metadata = _mapping(options.job.get("metadata"))
    fixed_keys = [f"metadata.{key}" for key in _OWN_METADATA if key in metadata]
    for key in (*fixed_keys, *(key for key in ("apiVersion", "kind") if key in options.job)):
        yield (
            f"kubernetes.job.{key}: cloudjob identifies the job by it (allowed: name and "
            "kubernetes.namespace in the job file)"
        )


def _volume_problems(spec: JobSpec, volumes: list[Any]) -> Iterator[str]:
    problems = [
        f"kubernetes.volumes[{index}]: has no {key} (allowed: a Kubernetes volume with a name "
        "and a mountPath)"
        for index, volume in enumerate(volumes)
        for key in ("name", "mountPath")
        if not (isinstance(volume, Mapping) and volume.get(key))
    ]
    yield from problems
    if problems:
        return
    mounted = pod.volumes(spec, Names("x", ""), has_delivery=True)
    first = len(mounted) - len(volumes)
    sources: dict[str, Any] = {}
    taken_paths = set()
    for index, (volume, mount) in enumerate(mounted, -first):
        name, path = volume["name"], posixpath.normpath(str(mount["mountPath"]))
        # The same volume may be mounted at several paths.
        if index >= 0 and sources.get(name, volume) != volume:
            yield f"kubernetes.volumes[{index}]: the name {name} is taken (allowed: another one)"
        if index >= 0 and path in taken_paths:
            yield (
                f"kubernetes.volumes[{index}]: something is mounted at {path} already (allowed: "
                "another mountPath)"
            )
        sources.setdefault(name, volume)
        taken_paths.add(path)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _place_problems(submission: Submission, volumes: list[Any]) -> Iterator[str]:
    """Yield the folders of this machine that no volume mounts into the pods."""
    spec = submission.spec
    uris = {
        "store": submission.code.uri,
        **{f"inputs.{name}": uri for name, uri in spec.inputs.items()},
        **{f"outputs.{name}": uri for name, uri in spec.outputs.items()},
    }
    mounted = [str(item.get("mountPath")) for item in volumes if isinstance(item, Mapping)]
    for key, uri in uris.items():
        path = file_path(uri)
        if path and not any(_is_below(path, folder) for folder in mounted):
            yield (
                f"{key}: pods cannot read the folder {given(path)} of this machine (allowed s3:// "
                "or obs://, or a folder that is the mountPath of one of kubernetes.volumes)"
            )


def _size_problems(submission: Submission, engine: Engine) -> Iterator[str]:
    """Yield sizes that are refused only when the objects are created or the container starts."""
    nodes = submission.spec.nodes
    hosts = engine.hosts(Names(submission.job, "").name, nodes)
    length = len(hosts[-1].partition(".")[0])
    if length > _MAX_PART:
        yield (
            f"name: node {nodes - 1} would have a host name of {length} characters (allowed "
            f"{_MAX_PART}; use a shorter job name)"
        )
    size = len(",".join(hosts))
    size += len(f"{names.VC_WORKER_HOSTS}=")
    if size > MAX_ARG_BYTES:
        yield (
            f"nodes: the names of {nodes} nodes have {size} bytes, too many for one variable "
            f"(allowed {MAX_ARG_BYTES}, Linux's limit; use fewer nodes, or a shorter job name)"
        )
    delivered = pod.variables(submission, ("localhost",), "").delivered
    size = sum(len(os.fsencode(name + value)) + 2 for name, value in delivered.items())
    if size > MAX_SECRET_BYTES:
        yield (
            f"secrets: have {size} bytes together (allowed {MAX_SECRET_BYTES}, the limit of "
            "a Kubernetes Secret)"
        )


def _is_below(path: str, folder: str) -> bool:
    folder = posixpath.normpath(folder)
    return path == folder or path.startswith(folder.rstrip("/") + "/")
