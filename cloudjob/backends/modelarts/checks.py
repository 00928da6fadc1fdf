"""Checks what a job on ModelArts needs, before anything is packed or sent."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from cloudjob.backends.base import Check, Devices
from cloudjob.backends.modelarts.bucket import Bucket, BucketError
from cloudjob.backends.modelarts.client import ModelArtsClient
from cloudjob.backends.modelarts.errors import ServiceError
from cloudjob.backends.modelarts.request import calls_mpirun, folder_url
from cloudjob.backends.modelarts.transport import SKEW_LIMIT_S
from cloudjob.errors import BackendError
from cloudjob.model.rules import AUTO_RANKS
from cloudjob.model.text import counted, nearest

if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

_MINUTE_S = 60.0
_UNAUTHORISED = 401
_CLOCK = "set the clock (timedatectl set-ntp true)"
_SHOWN = 8
_RUNNING = ("Creating", "Pending", "Running")
# ORGANISATION/NAME:TAG, as the service takes it, or with the registry's own host in front.
_IN_SWR = re.compile(
    r"(?:swr\.[\w.-]+/)?(?P<namespace>[a-z0-9_-]+)/(?P<name>[a-z0-9._/-]+)(?::(?P<tag>[\w.-]+))?"
)


def run(client: ModelArtsClient, spec: JobSpec | None, store: str) -> list[Check]:
    """Return the result of every check. They run in parallel, in about the time of one request."""
    checks: list[Callable[[], Iterator[Check]]] = [
        lambda: _flavor(client, spec),
        lambda: _engine(client, spec),
        lambda: _image(client, spec),
        lambda: _pool(client, spec),
        lambda: _quota(client, spec),
        lambda: _inputs(client, spec, store),
        lambda: _outputs(client, spec),
        lambda: _bucket(client, store),
    ]
    try:
        # First: without valid credentials every other answer would be the same refusal.
        project = client.project_id()
    except BackendError as error:
        return [Check("credentials", False, error.message, error.hint)]
    with ThreadPoolExecutor(len(checks)) as pool:
        all_results = [result for results in pool.map(_results, checks) for result in results]
    refused = next((check for check in all_results if check.name == "credentials"), None)
    first = refused or Check("credentials", True, f"project {project} ({client.site.origin})")
    rest = [check for check in all_results if check.name != "credentials"]
    return [first, Check("endpoint", True, client.site.endpoint), _clock(client), *rest]


def _results(check: Callable[[], Iterator[Check]]) -> list[Check]:
    """Return the results of a check; a user who may not ask this may still be allowed to submit."""
    try:
        return list(check())
    except BackendError as error:
        if isinstance(error, ServiceError) and error.status == _UNAUTHORISED:
            return [Check("credentials", False, error.message, error.hint)]
        name = error.message.partition(":")[0]
        return [Check(name, False, error.message, error.hint, is_needed=False)]


def _clock(client: ModelArtsClient) -> Check:
    ahead_s = client.clock_ahead_s
    if abs(ahead_s) <= _MINUTE_S:
        return Check("clock", True, "agrees with the service's to a minute")
    where = "ahead of" if ahead_s > 0 else "behind"
    return Check(
        "clock",
        abs(ahead_s) < SKEW_LIMIT_S,
        f"{abs(ahead_s) / _MINUTE_S:.0f} min {where} the service's",
        f"{_CLOCK}; until then requests to ModelArts carry the service's time",
        is_needed=False,
    )


# -- what the job runs on ---------------------------------------------------------------------


def _flavor(client: ModelArtsClient, spec: JobSpec | None) -> Iterator[Check]:
    flavor_id = spec.flavor if spec else ""
    if spec is not None and spec.modelarts.pool_id:
        return
    if spec is not None and not flavor_id:
        flavor_id = client.site.default_flavor
    flavors = {str(item.get("flavor_id")): item for item in client.flavors()}
    listed = ", ".join(sorted(flavors)[:_SHOWN]) + (", ..." if len(flavors) > _SHOWN else "")
    if not flavor_id:
        yield Check("flavor", True, f"{len(flavors)} flavors: {listed}")
        return
    if flavor_id not in flavors:
        guess = nearest(flavor_id, flavors)
        yield Check("flavor", False, f"there is no flavor {flavor_id}{guess}", f"one of {listed}")
        return
    assert spec is not None, "without a job there is no flavor to check"
    max_nodes = _max_nodes(flavors[flavor_id])
    limit = (
        f": at most {counted(max_nodes, 'node')}, but the job has {spec.nodes}" if max_nodes else ""
    )
    yield Check(
        "flavor",
        not max_nodes or spec.nodes <= max_nodes,
        f"{flavor_id}{limit}",
        f"ask for {max_nodes} --nodes or fewer, or choose another --flavor",
    )
    yield from _accelerators(flavors[flavor_id], spec)


def devices(client: ModelArtsClient, spec: JobSpec) -> Devices | None:
    """Return the GPUs or NPUs of a job's flavor; None if the service does not list it."""
    flavor_id = spec.flavor or client.site.default_flavor
    if spec.modelarts.pool_id:
        return None
    try:
        flavors = [item for item in client.flavors() if item.get("flavor_id") == flavor_id]
    except BackendError:
        # The checks report it.
        return None
    return Devices(_cards(flavors[0]), f"the flavor is {flavor_id}") if flavors else None


def _cards(flavor: Mapping[str, Any]) -> int:
    info = flavor.get("flavor_info") or {}
    return int((info.get("gpu") or info.get("npu") or {}).get("unit_num") or 0)


def _accelerators(flavor: Mapping[str, Any], spec: JobSpec) -> Iterator[Check]:
    cards = _cards(flavor)
    if cards and spec.procs_per_node not in (AUTO_RANKS, cards):
        yield Check(
            "accelerators",
            False,
            f"a node has {cards}, but the job runs {counted(spec.procs_per_node, 'rank')} on each",
            f"--procs-per-node {cards} uses all of them",
            is_needed=False,
        )


def _max_nodes(flavor: Mapping[str, Any]) -> int:
    info = flavor.get("flavor_info") or {}
    return int(flavor.get("max_num") or info.get("max_num") or 0)


def _engine(client: ModelArtsClient, spec: JobSpec | None) -> Iterator[Check]:
    engine = spec.modelarts.engine if spec else ""
    if spec is not None and not engine:
        return
    engines = client.engines()
    # Each name that a job may use -> id, name and version.
    known_engines: dict[str, tuple[str, ...]] = {}
    for item in engines:
        number, name, version = (
            str(item.get(f"engine_{key}")) for key in ("id", "name", "version")
        )
        known_engines[number] = known_engines[f"{name}:{version}"] = (number, name, version)
    listed = ", ".join(sorted({names[0] for names in known_engines.values()})[:_SHOWN])
    if not engine:
        yield Check("engine", True, f"{len(engines)} engines: {listed}")
        return
    if engine not in known_engines:
        problem = f"there is no engine {engine}{nearest(engine, known_engines)}"
        yield Check("engine", False, problem, f"one of {listed}")
        return
    name = known_engines[engine][1]
    yield Check(
        "engine",
        not calls_mpirun(*known_engines[engine]),
        f"{engine} ({name}) starts mpirun itself, and would start a job for each rank"
        if calls_mpirun(*known_engines[engine])
        else engine,
        "choose another engine, or name its image with --image and no engine",
    )


def _image(client: ModelArtsClient, spec: JobSpec | None) -> Iterator[Check]:
    """Look for the image in the region's registry, as the service does."""
    image = spec.image if spec else ""
    parts = _IN_SWR.fullmatch(image)
    if not (parts and client.site.registry):
        return
    namespace, repository, tag = parts["namespace"], parts["name"], parts["tag"] or "latest"
    try:
        tags = client.image_tags(namespace, repository, tag)
    except ServiceError as error:
        if error.status != 404:
            raise
        # An image that another account shares can be used although it is not listed.
        yield Check(
            "image",
            False,
            f"the registry lists no {namespace}/{repository}",
            "is the name right, and the image in the region of the job, or shared with you?",
            is_needed=False,
        )
        return
    yield Check(
        "image",
        tag in tags,
        image if tag in tags else f"{image}: there is no tag {tag}{nearest(tag, tags)}",
        "push it to the registry of the job's region, or correct the name",
    )


def _pool(client: ModelArtsClient, spec: JobSpec | None) -> Iterator[Check]:
    pool_id = spec.modelarts.pool_id if spec else ""
    if not pool_id:
        return
    try:
        pool = client.pool(pool_id)
    except ServiceError as error:
        if error.status not in (400, 404):
            raise
        yield Check(
            "pool", False, error.message, "set modelarts.pool_id to the id of one of your pools"
        )
        return
    phase = str((pool.get("status") or {}).get("phase") or "")
    is_up = phase.lower() in ("running", "")
    hint = "wait for it, or choose another pool"
    yield Check("pool", is_up, f"{pool_id} is {phase or 'available'}", hint)


def _quota(client: ModelArtsClient, spec: JobSpec | None) -> Iterator[Check]:
    for item in client.quotas():
        quota, used = int(item.get("quota") or -1), int(item.get("used") or 0)
        name = str(item.get("resource") or "")
        if quota < 0 or "job" not in name.lower():
            continue
        yield Check(
            "quota",
            used < quota,
            f"{name}: {used} of {quota} used",
            "wait for other jobs to end, or ask for a larger quota",
            is_needed=spec is not None,
        )


# -- where its data is --------------------------------------------------------------------------


def _inputs(client: ModelArtsClient, spec: JobSpec | None, store: str) -> Iterator[Check]:
    """Check that inputs exist: the service treats a missing one as empty, and the job succeeds."""
    keys = client.site.keys
    for name, uri in spec.inputs.items() if spec and keys else ():
        if not uri.startswith("obs://"):
            continue
        assert keys is not None
        whole = uri if "?" in uri else f"{uri}?{urlsplit(store).query}"
        try:
            is_there = Bucket(whole, keys, client.site.region).has(
                unquote(urlsplit(uri).path.lstrip("/"))
            )
        except BucketError as error:
            if not error.is_missing:
                # The platform reads it with its own permissions.
                hint = "are these keys allowed to list it?"
                yield Check("inputs", False, f"{name}: {error.message}", hint, is_needed=False)
                continue
            is_there = False
        hint = "is it misspelt? an object whose name ends in / makes an empty folder an input"
        result = f"{name}: {uri}" if is_there else f"{name}: there is nothing at {uri}"
        yield Check("inputs", is_there, result, hint)


def _outputs(client: ModelArtsClient, spec: JobSpec | None) -> Iterator[Check]:
    """Check outputs: after hours in the queue, the service refuses one that another job writes."""
    urls = {
        name: folder_url(uri)
        for name, uri in (spec.outputs.items() if spec else ())
        if uri.startswith("obs://")
    }
    if not urls:
        return
    filters = [{"key": "phase", "operator": "in", "value": list(_RUNNING)}]
    for job in client.search(filters):
        taken = set(_output_urls(job))
        other = job.get("metadata", {}).get("name")
        for name, url in urls.items():
            if url in taken:
                problem = f"{name}: {url} is an output of the running job {other}"
                hint = "give each running job an output folder of its own"
                yield Check("outputs", False, problem, hint)


def _output_urls(job: Mapping[str, Any]) -> Iterator[str]:
    for output in (job.get("algorithm") or {}).get("outputs") or ():
        url = ((output.get("remote") or {}).get("obs") or {}).get("obs_url") or ""
        if url:
            yield folder_url(url if "://" in url else f"obs:/{url}")


def _bucket(client: ModelArtsClient, store: str) -> Iterator[Check]:
    """Check that the bucket exists in the job's region and is not encrypted."""
    keys, region = client.site.keys, client.site.region
    if keys is None or not store.startswith("obs://"):
        return
    bucket = Bucket(store, keys, region)
    try:
        its_region = bucket.region()
    except BucketError as error:
        if error.is_missing:
            hint = f"create it in the region {region}"
            yield Check("bucket", False, f"there is no bucket {bucket.name}", hint)
        else:
            hint = _CLOCK if error.is_skewed else "are these keys allowed to read and write it?"
            yield Check("bucket", False, error.message, error.hint or hint)
        return
    is_here = not (its_region and region) or its_region == region
    yield Check(
        "bucket",
        is_here,
        bucket.name if is_here else f"{bucket.name} is in {its_region}, but jobs run in {region}",
        "choose a bucket in the region of the job",
    )
    is_encrypted = bucket.is_encrypted()
    yield Check(
        "encryption",
        not is_encrypted,
        "the bucket is encrypted, so ModelArts cannot read it" if is_encrypted else "none",
        "choose a bucket without default encryption",
    )
