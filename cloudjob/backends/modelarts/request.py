"""Builds the request that creates a job on ModelArts, and the files beside its code. No I/O."""

from __future__ import annotations

import copy
import math
import os
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from cloudjob.backends.encoding import argument_problems
from cloudjob.backends.modelarts.site import Site
from cloudjob.errors import SpecError
from cloudjob.model import sizes
from cloudjob.model import submission as submissions
from cloudjob.model.rules import MAX_ARG_BYTES
from cloudjob.model.submission import Submission
from cloudjob.model.text import given, masked
from jobentry.contract import env, names, retry_kinds, variables
from jobentry.contract.paths import JobPaths

if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec
    from cloudjob.model.sections import ModelArts

HOME = "/home/ma-user"
_JOB_DIR = f"{HOME}/modelarts/user-job-dir"
# The output with the head's record. Its variable holds the path on the node.
RECORD_OUTPUT = names.CLOUDJOB_RECORD_DIR
BOOT_FILE = "boot.py"

# Limits of the service; variables beyond them are delivered in a file beside the code.
MAX_VARIABLES = 100
MAX_NAME = 8192
MAX_VALUE = 4096
MAX_DESCRIPTION = 256
MAX_RETRIES = 3
_HOUR_MIN = 60
# The platform sets these itself, on each node; a user may not set MA_*.
_PLATFORMS = ("MA_", "VC_", "VK_")
# Names, versions and ids of engines whose own command is mpirun: it would start the entry for every
# rank. The engine MPI contains MindSpore for GPUs, and its id does not contain "mpi".
_MPI_ENGINES = re.compile(r"horovod|(?<![a-z])mpi(?![a-z])|mindspore.*(gpu|cuda)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ModelArtsRequest:
    """The request for a job on ModelArts.

    Args:
        body: Of ``POST /v2/{project}/training-jobs``.
        env: Variables that are not in ``body``: secrets, and values that the service refuses.
        args: The entry's arguments, for a preset engine, whose command takes none.
        tags: The tags that the job gets after it was created.
        has_key: Whether the nodes get a key for ssh.
        environments: The variables of each node, for a dry run.
    """

    job: str
    body: Mapping[str, Any]
    env: Mapping[str, str] = field(repr=False)
    args: tuple[str, ...]
    tags: Mapping[str, str]
    has_key: bool
    secret_names: tuple[str, ...]
    environments: tuple[Mapping[str, str], ...] = field(repr=False)


def build(submission: Submission, site: Site) -> ModelArtsRequest:
    """Return the request for ``submission``.

    Raises:
        SpecError: This backend cannot run the job.
    """
    spec = submission.spec
    options = spec.modelarts
    problems = list(_problems(submission, site, options))
    if problems:
        raise SpecError(problems)
    visible, delivered = _variables(submission)
    body: dict[str, Any] = {
        "kind": "job",
        "metadata": _metadata(submission, options),
        "algorithm": {
            **_engine(spec, site, options, folder_url(f"{_job_uri(submission)}/{_NODE}")),
            "parameters": [
                {"name": name, "value": value} for name, value in options.parameters.items()
            ],
            "policies": {"auto_search": None},
            "inputs": [
                _channel("inputs", name, _url(uri), options.access_method)
                for name, uri in _copied_inputs(spec)
            ],
            "outputs": [
                *(_output(name, uri, options.access_method) for name, uri in submission.outputs),
                _record(submission),
            ],
            "environments": visible,
        },
        "spec": _spec(submission, site, options),
    }
    keys = list(options.ssh_keys)
    if keys:
        body["endpoints"] = {"ssh": {"key_pair_names": keys}}
    return ModelArtsRequest(
        job=submission.job,
        body=_merged(body, copy.deepcopy(options.body)),
        env=delivered,
        args=_entry_args(spec) if _is_preset(options) else (),
        tags=dict(options.tags),
        has_key=spec.nodes > 1,
        secret_names=submission.masked_names,
        environments=tuple(_environments(submission, {**visible, **delivered})),
    )


def show(request: ModelArtsRequest) -> dict[str, Any]:
    """Return ``request`` as plain JSON values, secrets as ``***``."""
    return {
        "create": copy.deepcopy(dict(request.body)),
        "delivered": masked(request.env, request.secret_names),
        "tags": dict(request.tags),
    }


def calls_mpirun(*identifiers: str) -> bool:
    """Return whether an engine starts mpirun itself, by its id, name or version."""
    return any(_MPI_ENGINES.search(identifier) for identifier in identifiers)


def delivered_env(request: ModelArtsRequest) -> bytes:
    """Return the file with the variables that are not in the body."""
    return variables.dump(request.env)


def folder_url(uri: str) -> str:
    """Return the URL of a folder in OBS in the service's form: ``/bucket/folder/``."""
    return "/" + unquote(_bucket_path(uri)).strip("/") + "/"


# -- the parts of the body ------------------------------------------------------------------------


def _metadata(submission: Submission, options: ModelArts) -> dict[str, Any]:
    spec = submission.spec
    annotations = dict(options.annotations)
    is_for_platform = retry_kinds.OF_PLATFORM.issuperset(spec.retry.on)
    if spec.retries:
        annotations["fault-tolerance/job-retry-num"] = str(spec.retries)
        if not is_for_platform:
            # Without it the service retries only after faults of the platform.
            annotations["fault-tolerance/job-unconditional-retry"] = "true"
    if options.hang_retry or (spec.retries and is_for_platform and "hang" in spec.retry.on):
        annotations["fault-tolerance/hang-retry"] = "true"
    # The name is cloudjob's own id, which is unique, so the job can be found by it.
    metadata: dict[str, Any] = {"name": submission.job}
    metadata["workspace_id"] = options.workspace_id
    metadata["description"] = options.description or spec.name
    if annotations:
        metadata["annotations"] = annotations
    return metadata


def _engine(spec: JobSpec, site: Site, options: ModelArts, folder: str) -> dict[str, Any]:
    """Return what runs: an image with our command, or a preset engine with our boot file."""
    image = re.sub(r"^swr[.-][^/]*/", "", spec.image or site.default_image)
    if not _is_preset(options):
        return {"code_dir": folder, "engine": {"image_url": image}, "command": command(spec)}
    name, colon, version = options.engine.partition(":")
    engine = {"engine_name": name, "engine_version": version} if colon else {"engine_id": name}
    if spec.image:
        engine["image_url"] = image
    return {"code_dir": folder, "boot_file": folder + BOOT_FILE, "engine": engine}


def command(spec: JobSpec) -> str:
    """Return the command of a custom image, which works with and without a shell.

    The platform appends `` --name=value`` for each parameter of the job; because the entry comes
    last, the script gets them.
    """
    folder = f'"${{MA_JOB_DIR:-{_JOB_DIR}}}/{_NODE}"'
    start = f'd={folder}; {names.CLOUDJOB_DELIVERY}="$d" exec sh "$d/boot.sh" "$@"'
    return shlex.join(("sh", "-c", start, "jobentry", *_entry_args(spec)))


def _entry_args(spec: JobSpec) -> tuple[str, ...]:
    return (spec.script, *spec.args)


def _output(name: str, uri: str, access_method: str) -> dict[str, Any]:
    return _channel("outputs", name, folder_url(uri), access_method)


def _channel(kind: str, name: str, url: str, access_method: str) -> dict[str, Any]:
    return {
        "name": name,
        "local_dir": f"{HOME}/modelarts/{kind}/{name}_0",
        "access_method": access_method,
        "remote": {"obs": {"obs_url": url}},
    }


def _record(submission: Submission) -> dict[str, Any]:
    record = posixpath.dirname(submission.record_uri)
    return _output(RECORD_OUTPUT, record, "env")


def _spec(submission: Submission, site: Site, options: ModelArts) -> dict[str, Any]:
    spec = submission.spec
    resource: dict[str, Any] = {"node_count": spec.nodes}
    flavor = spec.flavor or ("" if options.pool_id else site.default_flavor)
    if flavor:
        resource["flavor_id"] = flavor
    if options.pool_id:
        resource["pool_id"] = options.pool_id
    job_spec: dict[str, Any] = {"resource": resource}
    volumes = copy.deepcopy(options.volumes)
    if volumes:
        job_spec["volumes"] = volumes
    logs = options.log_export or _job_uri(submission) + "/logs"
    if logs != "none":
        job_spec["log_export_path"] = {"obs_url": folder_url(logs)}
    hours = _auto_stop_hours(spec, options)
    if hours:
        job_spec["auto_stop"] = {"time_unit": "HOURS", "duration": hours}
    policy = _schedule_policy(options)
    if policy:
        job_spec["schedule_policy"] = policy
    return job_spec


def _auto_stop_hours(spec: JobSpec, options: ModelArts) -> int:
    """Return the hours after which the service ends a job if its entry does not; 0 for never."""
    hours = options.auto_stop_hours
    if hours or not spec.timeout_min:
        return hours
    return math.ceil((spec.timeout_min + spec.grace_s / 60) / _HOUR_MIN) + 1


def _schedule_policy(options: ModelArts) -> dict[str, Any]:
    policy: dict[str, Any] = {}
    if options.priority:
        policy["priority"] = options.priority
    if options.preemptible:
        policy["preemptible"] = True
    if options.affinity != "none":
        policy["required_affinity"] = {"affinity_type": options.affinity}
        if options.affinity_group_size:
            size = options.affinity_group_size
            policy["required_affinity"]["affinity_group_size"] = size
    return policy


# -- variables ----------------------------------------------------------------------------------


def _variables(submission: Submission) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables in the body, and those in a file beside the code.

    Every user who may see the job can read the body in the console, as long as the service stores
    it.
    """
    spec = submission.spec
    node = env.write(_node(submission, 0, ("localhost",)))
    node_env = {name: value for name, value in node.items() if not name.startswith(_PLATFORMS)}
    visible: dict[str, str] = {}
    delivered: dict[str, str] = {}
    for name, value in {**node_env, **spec.env}.items():
        is_accepted = len(visible) < MAX_VARIABLES and _is_accepted(name, value)
        (visible if is_accepted else delivered)[name] = value
    # The platform cannot copy an input from S3, so the entry fetches it.
    needs_keys = any(uri.startswith("s3://") for uri in spec.inputs.values())
    # For requests in the store, and for inputs of a web server.
    others = (names.CLOUDJOB_SIGNED_URIS, names.CLOUDJOB_CA_CERTIFICATES)
    access = {k: v for k, v in submission.access.items() if needs_keys or k in others}
    return visible, {**delivered, **spec.secrets, **access}


def _is_accepted(name: str, value: str) -> bool:
    """Return whether the service accepts this variable and does not change it."""
    if len(name) > MAX_NAME or len(value) > MAX_VALUE or "$" in value:
        return False
    # The documentation does not say what happens to an empty value or to line ends.
    return bool(value) and value.isprintable()


def _node(submission: Submission, index: int, hosts: tuple[str, ...]) -> env.NodeEnv:
    """Return a node's variables, without those for files that the platform copies itself."""
    spec = submission.spec
    copied = dict(_copied_inputs(spec))
    return submissions.node_env(submission, index, hosts)._replace(
        # Without a number, each node counts its devices.
        slots=submission.spec.procs_per_node,
        code_uri="",
        record_uri="",
        inputs=tuple((name, uri) for name, uri in spec.inputs.items() if name not in copied),
        outputs=(),
    )


def _copied_inputs(spec: JobSpec) -> list[tuple[str, str]]:
    """Return the inputs that the platform copies to the nodes; the entry fetches the others."""
    return [(name, uri) for name, uri in spec.inputs.items() if _is_obs(uri)]


def _environments(
    submission: Submission, spec_env: Mapping[str, str]
) -> Iterator[Mapping[str, str]]:
    """Yield the variables of each node, for a dry run."""
    hosts = submissions.host_names(submission)
    for index in range(len(hosts)):
        node = _node(submission, index, hosts)
        common = submissions.variables(submission, node, home=HOME, address="0.0.0.0")
        yield {**common, **spec_env, **env.write(node)}


# -- what is wrong ------------------------------------------------------------------------------


def _problems(submission: Submission, site: Site, options: ModelArts) -> Iterator[str]:
    spec = submission.spec
    if not _is_obs(submission.code.uri):
        yield (
            f"store: ModelArts copies code from OBS only (given {given(spec.store)}; "
            "allowed obs://bucket/folder, or modelarts.bucket)"
        )
    if spec.retries > MAX_RETRIES:
        yield f"retries: is out of range (given {spec.retries}; allowed 0 to {MAX_RETRIES})"
    if not (spec.image or site.default_image or _is_preset(options)):
        yield "image: is missing (allowed an image in SWR; or name a modelarts.engine)"
    if not (spec.flavor or site.default_flavor or options.pool_id):
        yield "flavor: is missing (allowed one that `cloudjob doctor --backend modelarts` lists)"
    yield from _engine_problems(spec, options)
    yield from _text_problems(submission, options)
    yield from _place_problems(submission)


def _place_problems(submission: Submission) -> Iterator[str]:
    if submission.spec.restore_outputs != "none":
        yield (
            "restore_outputs: ModelArts does not copy outputs back to nodes (allowed none; "
            "make the outputs of an earlier job an --input)"
        )
    for name, uri in submission.outputs:
        if not _is_obs(uri):
            yield f"outputs.{name}: ModelArts stores outputs in OBS only (given {given(uri)})"
    for name, uri in submission.spec.inputs.items():
        if name in submission.spec.input_nodes and _is_obs(uri):
            yield f"input_nodes.{name}: ModelArts copies an input to every node"
        if uri.startswith("file:"):
            yield f"inputs.{name}: nodes cannot read files of this machine (given {given(uri)})"


def _engine_problems(spec: JobSpec, options: ModelArts) -> Iterator[str]:
    engine = options.engine
    if calls_mpirun(engine):
        yield (
            "modelarts.engine: this engine starts mpirun itself, and would start a job for each "
            f"rank (given {given(engine)}; allowed: another, or an image of yours and no engine)"
        )
    if engine and spec.image and ":" not in engine:
        yield f"modelarts.engine: with an image it must be NAME:VERSION (given {given(engine)})"


def _text_problems(submission: Submission, options: ModelArts) -> Iterator[str]:
    spec = submission.spec
    if len(options.description) > MAX_DESCRIPTION:
        yield f"modelarts.description: is too long (allowed {MAX_DESCRIPTION} characters)"
    yield from argument_problems(_entry_args(spec), "ModelArts does not accept")
    size = len(os.fsencode(command(spec)))
    if size > MAX_ARG_BYTES and not _is_preset(options):
        yield (
            f"args: too long for ModelArts' start command (given {size} bytes, of which "
            f"{sizes.largest_argument(spec)}; allowed {MAX_ARG_BYTES})"
        )


# -- small things -------------------------------------------------------------------------------

_NODE = posixpath.basename(JobPaths("job").node)


def _is_preset(options: ModelArts) -> bool:
    return bool(options.engine)


def _is_obs(uri: str) -> bool:
    return uri.startswith("obs://")


def _url(uri: str) -> str:
    """Return a URL in OBS in the service's form; one that ends in a slash is a folder."""
    return "/" + unquote(_bucket_path(uri))


def _bucket_path(uri: str) -> str:
    return uri.partition("://")[2].partition("?")[0]


def _job_uri(submission: Submission) -> str:
    """Return the folder of the job."""
    return posixpath.dirname(submission.code.uri)


def _merged(body: Any, more: Any) -> Any:
    """Return ``body`` merged with ``modelarts.body`` of the job file; None removes a key."""
    if not (isinstance(body, dict) and isinstance(more, Mapping)):
        return more
    merged = dict(body)
    for key, value in more.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(merged[key], value) if key in merged else value
    return merged
