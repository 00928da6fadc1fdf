"""Decides and computes everything that a submit needs, once, before it sends anything."""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from cloudjob.backends import open_backend
from cloudjob.backends.base import Backend
from cloudjob.home import store_uri
from cloudjob.model import sizes, validation
from cloudjob.model.job import JobSpec
from cloudjob.model.progress import Progress
from cloudjob.model.submission import StoredCode, Submission, submission_of
from cloudjob.package import CodePackage, PackOptions, SourceCache, cache, pack
from cloudjob.package.messages import shown
from cloudjob.package.tree import LINK, Rule
from cloudjob.store import certificates, environment, job_store, open_store
from cloudjob.store.base import ObjectStore, Signer
from cloudjob.submission import launcher_choice
from cloudjob.submission.checks import Script
from cloudjob.submission.launcher_choice import Choice
from jobentry.contract import devices, names
from jobentry.contract.launchers import AUTO, LAUNCHERS
from jobentry.contract.packages import Layer, damage_key
from jobentry.contract.paths import SIGNED_S, JobPaths

# In a job with signed URLs, the number of nodes that can store their journals.
_SIGNED_JOURNALS = 16
_MB = 1_000_000
# No vowels and no letters that look alike, because people type ids and read them aloud.
_ID_LETTERS = "23456789bcdfghjkmnpqrstvwxz"
# The most files that are left out, each on its own line, and the most paths on one line.
_LEFT_OUT_LINES, _PATHS_ON_LINE = 5, 3


class Target(NamedTuple):
    """The platform of a job, its store with the store's URI, and the state folder here."""

    backend: Backend[Any]
    uri: str
    store: ObjectStore
    home: Path

    @classmethod
    def open(cls, spec: JobSpec, home: Path) -> Target:
        """Open the store that the job names, else its platform's, else a folder of this machine."""
        backend = open_backend(spec.backend, home, dict(spec.section(spec.backend)))
        default, keys = backend.store()
        uri = job_store(spec.store, default or store_uri(home), spec.sections)
        return cls(backend, uri, open_store(uri, environment(keys)), home)


class DecidedJob(NamedTuple):
    """What is decided for a job, or for all jobs of a sweep, before anything is sent.

    Args:
        spec: The job with a launcher and, unless only the nodes know it, a number of ranks.
        choice: The launcher that was chosen; None if the job names one.
        ranks: The number of ranks of a node and the reason; empty if it is obvious.
    """

    spec: JobSpec
    package: CodePackage
    choice: Choice | None
    ranks: str


class SweepMember(NamedTuple):
    """The place of a job in its sweep.

    Args:
        values: The values of the sweep for this job.
    """

    sweep: str
    values: Mapping[str, str]


class Prepared(NamedTuple):
    """A job with everything that its submit needs; nothing of it was sent.

    Args:
        paths: The keys of its objects in the store, made from its id.
        layers: The layers of its package, from the oldest to the newest.
        scratch: The folder for the package, which is removed at the end.
        request: What the backend sends to the platform for the submission.
        member: Its place in a sweep; None for a job on its own.
    """

    paths: JobPaths
    package: CodePackage
    layers: tuple[Layer, ...]
    target: Target
    scratch: Path
    submission: Submission
    request: Any
    member: SweepMember | None = None

    @property
    def spec(self) -> JobSpec:
        """The job with all values that were decided."""
        return self.submission.spec

    def with_package(self, package: CodePackage, layers: tuple[Layer, ...]) -> Prepared:
        """Return the job with another package, or with fresh keys of its store."""
        submission = _submission(self.spec, self.paths, package, layers, self.target)
        request = self.target.backend.build(submission)
        return self._replace(package=package, layers=layers, submission=submission, request=request)


def prepare(
    job: str, decision: DecidedJob, target: Target, scratch: Path, member: SweepMember | None = None
) -> Prepared:
    """Return a job with its submission and its request.

    Raises:
        SpecError: Its arguments and variables are too long for Linux.
        CloudJobError: The platform cannot run it as it is described.
    """
    paths, package = JobPaths(job), decision.package
    submission = _submission(decision.spec, paths, package, package.layers, target)
    request = target.backend.build(submission)
    sizes.check(submission.spec, next(iter(target.backend.environments(request))))
    return Prepared(paths, package, package.layers, target, scratch, submission, request, member)


def decide(
    spec: JobSpec, script: Script, target: Target, scratch: Path, *, may_query: bool
) -> DecidedJob:
    """Pack the source, and choose the launcher and the number of ranks.

    Args:
        may_query: Whether the platform may be queried.
    """
    package = pack_source(spec, target, scratch)
    choice = None
    if spec.launcher == AUTO:
        choice = launcher_choice.choose(spec, script.files, script.nested)
        spec = spec.with_values(launcher=choice.launcher)
        # Some values are valid only with some launchers, and the job had no launcher until now.
        validation.check(spec)
    launcher_choice.check_nested(spec, script.nested)
    spec, ranks = choose_ranks(spec, target.backend, may_query=may_query)
    return DecidedJob(spec, package, choice, ranks)


def new_id(name: str) -> str:
    """Return a job id: the name, shortened to fit into a host name, and a random suffix."""
    letters = "".join(c if c.isascii() and c.isalnum() else "-" for c in name.lower())
    tail = "".join(_ID_LETTERS[byte % len(_ID_LETTERS)] for byte in os.urandom(8))
    # Host names contain the id, and each of their labels has at most 63 characters.
    return f"{letters.strip('-')[:30].strip('-') or 'job'}-{tail}"


def pack_source(
    spec: JobSpec, target: Target, scratch: Path, source_cache: SourceCache | None = None
) -> CodePackage:
    """Pack the source of a job; by default with the cache of earlier submits."""
    if source_cache is None:
        source_cache = cache.load(cache.path_of(target.home, Path(spec.source), target.uri))
    return pack(
        Path(spec.source),
        scratch / "layer",
        script=None if spec.takes_command else spec.script,
        limit_bytes=int(spec.source_limit_mb * _MB),
        options=PackOptions(
            # Copying to a folder is faster than compressing; sending over a network is slower.
            is_compressed=not target.uri.startswith("file:"),
            follow_links=spec.links == "follow",
            home=target.home,
        ),
        source_cache=source_cache,
    )


def choose_ranks(spec: JobSpec, backend: Backend[Any], *, may_query: bool) -> tuple[JobSpec, str]:
    """Return the job with a number of ranks, and the choice as a message; empty if it is obvious.

    If only the nodes know their devices, no number is chosen, and each node counts its devices.

    Args:
        may_query: Whether the platform may be queried.
    """
    if spec.procs_per_node:
        return spec, ""
    count, why = 1, ""
    if spec.mindspore.devices:
        count, why = len(devices.parse(spec.mindspore.devices[0]).devices), "mindspore.devices"
    elif not LAUNCHERS[spec.launcher].is_one_a_node:
        counted = backend.devices(spec, may_query=may_query)
        if counted is None:
            return spec, "procs_per_node auto: each node starts a rank for each of its GPUs or NPUs"
        count, why = max(1, counted.per_node), counted.source
    chosen = spec.with_values(procs_per_node=count)
    validation.check(chosen)
    return chosen, f"procs_per_node {count}: {why}" if count > 1 else ""


# -- the submission -------------------------------------------------------------------------------


def _submission(
    spec: JobSpec,
    paths: JobPaths,
    package: CodePackage,
    layers: tuple[Layer, ...],
    target: Target,
) -> Submission:
    """Return a job ready to send to its platform, with the package in its store."""
    store = target.store
    submission = submission_of(
        spec,
        paths.job,
        code=StoredCode(
            uri=store.uri(paths.code),
            digest=package.digest,
            layers=tuple(store.uri(layer.key) for layer in layers),
        ),
        record_uri=store.uri(paths.record),
        outputs_uri=store.uri(paths.outputs),
    )
    # Inputs may come from a server of a private authority, too, whatever the store is.
    uris = (submission.code.uri, *spec.inputs.values(), *spec.outputs.values())
    is_local = all(uri.startswith("file:") for uri in uris if uri)
    trusted = {} if is_local else certificates.access(certificates.bundle(os.environ))
    return submission._replace(access={**trusted, **_access(spec, paths, target, layers)})


def _access(
    spec: JobSpec, paths: JobPaths, target: Target, layers: tuple[Layer, ...]
) -> dict[str, str]:
    """Return keys of the store, or signed URLs of the objects that the job reads and writes."""
    store = target.store
    if target.backend.copies_files and isinstance(store, Signer):
        # No command reaches the nodes of such a platform: its head looks for requests in the store.
        operations = [("GET", paths.request), ("PUT", paths.answer)]
        return {**store.access(), **_signed(store, operations, SIGNED_S)}
    hours = spec.section(spec.backend).get("presigned_h")
    if not (isinstance(hours, (int, float)) and hours and isinstance(store, Signer)):
        return store.access()
    limit_s = round(hours * 3600)
    operations = [("GET", paths.code), ("PUT", paths.record)]
    # Each URL takes half a kilobyte of a variable; the journals of other nodes are in the log.
    operations += [
        ("PUT", paths.journal(node)) for node in range(min(spec.nodes, _SIGNED_JOURNALS))
    ]
    operations += [("GET", layer.key) for layer in layers]
    operations += [("PUT", damage_key(layer.key)) for layer in layers]
    return _signed(store, operations, limit_s)


def _signed(store: Any, operations: list[tuple[str, str]], limit_s: int) -> dict[str, str]:
    signed = {store.uri(key): store.sign(method, key, limit_s) for method, key in operations}
    return {names.CLOUDJOB_SIGNED_URIS: json.dumps(signed)}


# -- reports --------------------------------------------------------------------------------------


def choices(choice: Choice | None, ranks: str) -> Iterator[str]:
    """Yield the launcher and the number of ranks that were chosen, each with the reason."""
    if choice:
        yield f"launcher {choice.launcher}: {choice.why}"
    if ranks:
        yield ranks


def left_out(package: CodePackage) -> Iterator[Progress]:
    """Report what a job may miss: each file that may hold a secret, and the others on one line."""
    ignored = [shown(item.path) for item in package.left_out if item.rule is Rule.IGNORE_FILE]
    if ignored:
        text = f"left out of the package by ignore rules: {_first_of(ignored)}"
        yield Progress("note", f"{text}; `cloudjob package ls` shows all")
    # Links in the package to files that are left out.
    lost: list[str] = []
    missing = {item.path.rstrip("/") for item in package.left_out}
    for link, *_ in package.source_cache.entries if missing else ():
        if link.kind == LINK:
            target = PurePosixPath(posixpath.normpath(posixpath.join(link.name, "..", link.target)))
            if not missing.isdisjoint(map(str, (target, *target.parents))):
                lost.append(f"{shown(link.name)} -> {shown(link.target)}")
    if lost:
        text = f"links whose target is left out of the package: {_first_of(lost)}"
        yield Progress("warning", text)
    hidden = [item for item in package.left_out if item.rule in (Rule.SECRET, Rule.STATE)]
    for path, reason, _ in hidden[:_LEFT_OUT_LINES]:
        yield Progress("note", f"left out of the package: {path}: {reason}")
    if len(hidden) > _LEFT_OUT_LINES:
        more = len(hidden) - _LEFT_OUT_LINES
        yield Progress("note", f"… and {more} more; `--dry-run --json` lists all")


def _first_of(paths: list[str]) -> str:
    more = len(paths) - _PATHS_ON_LINE
    return ", ".join(paths[:_PATHS_ON_LINE]) + (f" and {more} more" if more > 0 else "")
