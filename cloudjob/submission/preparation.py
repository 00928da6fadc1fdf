"""Prepares a job before it is sent: package, launcher, ranks, signed URLs."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from cloudjob.backends import open_backend
from cloudjob.backends.base import Backend
from cloudjob.home import store_uri
from cloudjob.model import sizes, validation
from cloudjob.model.job import JobSpec
from cloudjob.model.progress import OnProgress
from cloudjob.model.submission import Code, Submission, prepare
from cloudjob.package import CodePackage, Options, SourceCache, cache, pack
from cloudjob.store import certificates, environment, job_store, open_store
from cloudjob.store.base import ObjectStore, Signer
from cloudjob.submission import (
    checks,
    launcher_choice,
    messages,
    nested_launchers,
    ranks,
)
from cloudjob.submission.launcher_choice import Choice
from cloudjob.submission.script_check import Script
from jobentry.contract import names
from jobentry.contract.launchers import AUTO
from jobentry.contract.packages import Layer, damage_key
from jobentry.contract.paths import JobPaths

# In a job with signed URLs, the number of nodes that can store their journals.
_SIGNED_JOURNALS = 16
_MB = 1_000_000
# No vowels and no letters that look alike, because people type ids and read them aloud.
_ID_LETTERS = "23456789bcdfghjkmnpqrstvwxz"


class Target(NamedTuple):
    """The platform of a job, and its store with the store's URI."""

    backend: Backend[Any]
    uri: str
    store: ObjectStore

    @classmethod
    def open(cls, spec: JobSpec, home: Path) -> Target:
        """Open the store that the job names, else its platform's, else a folder of this machine."""
        backend = open_backend(spec.backend, home, dict(spec.section(spec.backend)))
        default, keys = backend.store()
        uri = job_store(spec.store, default or store_uri(home), spec.sections)
        return cls(backend, uri, open_store(uri, environment(keys)))


def new_id(name: str) -> str:
    """Return a job id: the name, shortened to fit into a host name, and a random suffix."""
    letters = "".join(c if c.isascii() and c.isalnum() else "-" for c in name.lower())
    tail = "".join(_ID_LETTERS[byte % len(_ID_LETTERS)] for byte in os.urandom(8))
    # Host names contain the id, and each of their labels has at most 63 characters.
    return f"{letters.strip('-')[:30].strip('-') or 'job'}-{tail}"


class PreparedJob(NamedTuple):
    """A job with the values chosen for it, its package, and its target."""

    spec: JobSpec
    package: CodePackage
    target: Target


def prepare_job(
    spec: JobSpec, script: Script, home: Path, scratch: Path, on_progress: OnProgress
) -> PreparedJob:
    """Pack the source, and choose the launcher and the number of ranks.

    Args:
        scratch: The folder for the package.
    """
    checks.require(checks.script_checks(spec, script), on_progress)
    target = Target.open(spec, home)
    package = pack_source(spec, home, scratch, target.uri)
    spec, choice = with_launcher(spec, script)
    spec, chosen = ranks.choose(spec, target.backend, may_query=True)
    reports = (messages.launcher(choice), messages.ranks(chosen), messages.left_out(package))
    for report in chain.from_iterable(reports):
        on_progress(report)
    return PreparedJob(spec, package, target)


def pack_source(
    spec: JobSpec, home: Path, scratch: Path, uri: str, source_cache: SourceCache | None = None
) -> CodePackage:
    """Pack the source of a job; by default with the cache of earlier submits."""
    if source_cache is None:
        source_cache = cache.load(cache.path_of(home, Path(spec.source), uri))
    return pack(
        Path(spec.source),
        scratch / "layer",
        script=None if spec.takes_command else spec.script,
        limit_bytes=int(spec.source_limit_mb * _MB),
        options=Options(
            # Copying to a folder is faster than compressing; sending over a network is slower.
            is_compressed=not uri.startswith("file:"),
            follow_links=spec.links == "follow",
            home=home,
        ),
        source_cache=source_cache,
    )


def with_launcher(spec: JobSpec, script: Script) -> tuple[JobSpec, Choice | None]:
    """Return the job with a launcher, and the reason for it if the job names none."""
    choice = None
    if spec.launcher == AUTO:
        choice = launcher_choice.choose(spec, script)
        spec = spec.with_values(launcher=choice.launcher)
        # Some values are valid only with some launchers, and the job had no launcher until now.
        validation.check(spec)
    nested_launchers.check(spec, script.nested)
    return spec, choice


def prepare_for(
    prepared: PreparedJob,
    paths: JobPaths,
    package: CodePackage,
    code_layers: tuple[Layer, ...],
) -> Submission:
    """Return a job ready to send to its platform, with the package in its store."""
    spec, store = prepared.spec, prepared.target.store
    submission = prepare(
        spec,
        paths.job,
        code=Code(
            uri=store.uri(paths.code),
            digest=package.digest,
            layers=tuple(store.uri(layer.key) for layer in code_layers),
        ),
        record_uri=store.uri(paths.record),
        outputs_uri=store.uri(paths.outputs),
    )
    sizes.check(submission)
    # Inputs may come from a server of a private authority, too, whatever the store is.
    uris = (submission.code.uri, *spec.inputs.values(), *spec.outputs.values())
    is_local = all(uri.startswith("file:") for uri in uris if uri)
    bundle = None if is_local else certificates.bundle(os.environ)
    access = {**certificates.access(bundle), **_access(spec, paths, store, code_layers)}
    return replace(submission, access=access)


def _access(
    spec: JobSpec, paths: JobPaths, store: ObjectStore, code_layers: tuple[Layer, ...]
) -> dict[str, str]:
    """Return keys of the store, or signed URLs of the objects that the job reads and writes."""
    hours = spec.section(spec.backend).get("presigned_h")
    if not (isinstance(hours, (int, float)) and hours and isinstance(store, Signer)):
        return store.access()
    limit_s = round(hours * 3600)
    operations = [("GET", paths.code), ("PUT", paths.record)]
    # Each URL takes half a kilobyte of a variable; the journals of other nodes are in the log.
    operations += [
        ("PUT", paths.journal(node)) for node in range(min(spec.nodes, _SIGNED_JOURNALS))
    ]
    operations += [("GET", layer.key) for layer in code_layers]
    operations += [("PUT", damage_key(layer.key)) for layer in code_layers]
    signed = {store.uri(key): store.sign(method, key, limit_s) for method, key in operations}
    return {names.CLOUDJOB_SIGNED_URIS: json.dumps(signed)}
