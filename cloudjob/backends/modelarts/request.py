"""What ModelArts is told of a job: the body of its create, and what lies beside it. No I/O."""

from __future__ import annotations

import copy
import math
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from cloudjob.backends.encoding import is_utf8
from cloudjob.backends.modelarts.site import Site
from cloudjob.errors import SpecError
from cloudjob.model import submission as submissions
from cloudjob.model.submission import Submission
from cloudjob.model.text import MASK, given
from jobentry.contract import env, names, variables
from jobentry.contract.paths import JobPaths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

HOME = "/home/ma-user"
_JOB_DIR = f"{HOME}/modelarts/user-job-dir"
# The output by which the record of the head reaches the store. Its variable says where it lies.
RECORD_OUTPUT = names.CLOUDJOB_RECORD_DIR
BOOT_FILE = "boot.py"

# What the service takes as variables of a job; the rest goes another way.
MAX_VARIABLES = 100
MAX_NAME = 8192
MAX_VALUE = 4096
MAX_DESCRIPTION = 256
MAX_RETRIES = 3
_HOUR_MIN = 60
# Who names a node, or is true on one node only, is the platform, and the user may not set MA_*.
_PLATFORMS = ("MA_", "VC_", "VK_")
# Names, versions and ids of engines whose own command is mpirun: it would start the entry at every
# rank. The engine MPI has MindSpore for GPUs, and its id does not say mpi.
_MPI_ENGINES = re.compile(r"horovod|(?<![a-z])mpi(?![a-z])|mindspore.*(gpu|cuda)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ModelArtsRequest:
    """What is sent.

    Args:
        body: Of ``POST /v2/{project}/training-jobs``.
        env: Variables that do not stand in ``body``: secrets, and what the service does not take.
        words: What the entry is called with, where the platform's own command leaves it no room.
        tags: Put on the job when it is there.
        has_key: Whether the nodes get a key for ssh.
    """

    job: str
    body: Mapping[str, Any]
    env: Mapping[str, str] = field(repr=False)
    words: tuple[str, ...]
    tags: Mapping[str, str]
    has_key: bool
    hidden_names: tuple[str, ...]
    environments: tuple[Mapping[str, str], ...] = field(repr=False)


def build(submission: Submission, site: Site) -> ModelArtsRequest:
    """Return the request for ``submission``.

    Raises:
        SpecError: The job asks for what this backend cannot do.
    """
    spec = submission.spec
    options = spec.section("modelarts")
    problems = list(_problems(submission, site, options))
    if problems:
        raise SpecError(problems)
    shown, delivered = _variables(submission)
    body: dict[str, Any] = {
        "kind": "job",
        "metadata": _metadata(submission, options),
        "algorithm": {
            **_engine(spec, site, options, _folder(submission)),
            "parameters": [
                {"name": name, "value": value} for name, value in _map(options, "parameters")
            ],
            "policies": {"auto_search": None},
            "inputs": [_input(name, uri, options) for name, uri in _brought(spec)],
            "outputs": [
                *(_output(name, uri, options) for name, uri in submission.outputs),
                _record(submission),
            ],
            "environments": shown,
        },
        "spec": _spec(submission, site, options),
    }
    keys = _words(options, "ssh_keys")
    if keys:
        body["endpoints"] = {"ssh": {"key_pair_names": keys}}
    return ModelArtsRequest(
        job=submission.job,
        body=_merged(body, _tree(options, "body")),
        env=delivered,
        words=_entry_words(spec) if _is_preset(options) else (),
        tags=dict(_map(options, "tags")),
        has_key=spec.nodes > 1,
        hidden_names=submission.hidden_names,
        environments=tuple(_environments(submission, {**shown, **delivered})),
    )


def show(request: ModelArtsRequest) -> dict[str, Any]:
    """Return ``request`` as plain JSON values, secrets as ``***``."""
    return {
        "create": copy.deepcopy(dict(request.body)),
        "delivered": {
            name: MASK if name in request.hidden_names else value
            for name, value in request.env.items()
        },
        "tags": dict(request.tags),
    }


def calls_mpirun(*words: str) -> bool:
    """Whether the start command of an engine is mpirun, by its id, name or version."""
    return any(_MPI_ENGINES.search(word) for word in words)


def delivered_env(request: ModelArtsRequest) -> bytes:
    """Return the file of the variables that do not stand in the body."""
    return variables.dump(request.env)


def folder_url(uri: str) -> str:
    """Return a folder of OBS as the service writes it: ``/bucket/folder/``."""
    return "/" + unquote(_bucket_path(uri)).strip("/") + "/"


# -- the parts of the body ------------------------------------------------------------------------


def _metadata(submission: Submission, options: Mapping[str, object]) -> dict[str, Any]:
    spec = submission.spec
    annotations = dict(_map(options, "annotations"))
    if spec.retries:
        annotations["fault-tolerance/job-retry-num"] = str(spec.retries)
        # Without it only the platform's own faults count, and not those of the script.
        annotations["fault-tolerance/job-unconditional-retry"] = "true"
    if options["hang_retry"] == "true":
        annotations["fault-tolerance/hang-retry"] = "true"
    # The id is the name: no other job has it, so a job that was created can always be found again.
    metadata: dict[str, Any] = {"name": submission.job}
    metadata["workspace_id"] = str(options["workspace_id"])
    metadata["description"] = str(options["description"] or spec.name)
    if annotations:
        metadata["annotations"] = annotations
    return metadata


def _engine(
    spec: JobSpec, site: Site, options: Mapping[str, object], folder: str
) -> dict[str, Any]:
    """Return what runs: an image with our command, or a preset engine with our boot file."""
    image = re.sub(r"^swr[.-][^/]*/", "", spec.image or site.default_image)
    if not _is_preset(options):
        return {"code_dir": folder, "engine": {"image_url": image}, "command": command(spec)}
    name, colon, version = str(options["engine"]).partition(":")
    engine = {"engine_name": name, "engine_version": version} if colon else {"engine_id": name}
    if spec.image:
        engine["image_url"] = image
    return {"code_dir": folder, "boot_file": folder + BOOT_FILE, "engine": engine}


def command(spec: JobSpec) -> str:
    """Return the command of a custom image.

    The entry is the last command in it: the platform appends `` --name=value`` for each parameter,
    and these are the script's. It runs on every node, with or without a shell around it.
    """
    folder = f'"${{MA_JOB_DIR:-{_JOB_DIR}}}/{_NODE}"'
    start = f'd={folder}; {names.CLOUDJOB_DELIVERY}="$d" exec sh "$d/boot.sh" "$@"'
    return shlex.join(("sh", "-c", start, "jobentry", *_entry_words(spec)))


def _entry_words(spec: JobSpec) -> tuple[str, ...]:
    return (spec.script, *spec.args)


def _input(name: str, uri: str, options: Mapping[str, object]) -> dict[str, Any]:
    return {
        "name": name,
        "local_dir": f"{HOME}/modelarts/inputs/{name}_0",
        "access_method": str(options["access_method"]),
        "remote": {"obs": {"obs_url": _url(uri)}},
    }


def _output(name: str, uri: str, options: Mapping[str, object]) -> dict[str, Any]:
    return {
        "name": name,
        "local_dir": f"{HOME}/modelarts/outputs/{name}_0",
        "access_method": str(options["access_method"]),
        "remote": {"obs": {"obs_url": folder_url(uri)}},
    }


def _record(submission: Submission) -> dict[str, Any]:
    record = posixpath.dirname(submission.record_uri)
    return _output(RECORD_OUTPUT, record, {"access_method": "env"})


def _spec(submission: Submission, site: Site, options: Mapping[str, object]) -> dict[str, Any]:
    spec = submission.spec
    resource: dict[str, Any] = {"node_count": spec.nodes}
    flavor = spec.flavor or ("" if options["pool_id"] else site.default_flavor)
    if flavor:
        resource["flavor_id"] = flavor
    if options["pool_id"]:
        resource["pool_id"] = str(options["pool_id"])
    made: dict[str, Any] = {"resource": resource}
    volumes = _tree(options, "volumes")
    if volumes:
        made["volumes"] = volumes
    logs = str(options["log_export"]) or _job_uri(submission) + "/logs"
    if logs != "none":
        made["log_export_path"] = {"obs_url": folder_url(logs)}
    hours = _auto_stop_hours(spec, options)
    if hours:
        made["auto_stop"] = {"time_unit": "HOURS", "duration": hours}
    policy = _schedule_policy(options)
    if policy:
        made["schedule_policy"] = policy
    return made


def _auto_stop_hours(spec: JobSpec, options: Mapping[str, object]) -> int:
    """The entry ends a job in time; this ends one whose entry cannot."""
    hours = options["auto_stop_hours"]
    assert isinstance(hours, int)
    if hours or not spec.timeout_min:
        return hours
    return math.ceil((spec.timeout_min + spec.grace_s / 60) / _HOUR_MIN) + 1


def _schedule_policy(options: Mapping[str, object]) -> dict[str, Any]:
    policy: dict[str, Any] = {}
    if options["priority"]:
        policy["priority"] = options["priority"]
    if options["preemptible"] == "true":
        policy["preemptible"] = True
    if options["affinity"] != "none":
        policy["required_affinity"] = {"affinity_type": options["affinity"]}
        if options["affinity_group_size"]:
            size = options["affinity_group_size"]
            policy["required_affinity"]["affinity_group_size"] = size
    return policy


# -- variables ----------------------------------------------------------------------------------


def _variables(submission: Submission) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables that stand in the body, and those that lie beside the code.

    What is in the body can be read in the console by everybody who may see the job, for as long as
    the service keeps it.
    """
    spec = submission.spec
    told = _node(submission, 0, ("localhost",))
    own = {
        name: value for name, value in env.write(told).items() if not name.startswith(_PLATFORMS)
    }
    wanted = {**own, **spec.env}
    shown: dict[str, str] = {}
    delivered: dict[str, str] = {}
    for name, value in wanted.items():
        is_taken = len(shown) < MAX_VARIABLES and _is_taken(name, value)
        (shown if is_taken else delivered)[name] = value
    delivered.update(spec.secrets)
    if _entry_fetches(submission):
        delivered.update(submission.access)
    return shown, delivered


def _is_taken(name: str, value: str) -> bool:
    """Whether the service takes this variable, exactly as it is."""
    if len(name) > MAX_NAME or len(value) > MAX_VALUE or "$" in value:
        return False
    # What an empty value becomes, and a line's end, nothing says.
    return bool(value) and value.isprintable()


def _node(submission: Submission, index: int, hosts: tuple[str, ...]) -> env.NodeEnv:
    """Return what a node is told: what the platform brings by itself is left out."""
    spec = submission.spec
    brought = dict(_brought(spec))
    return submissions.node_env(submission, index, hosts)._replace(
        code_uri="",
        record_uri="",
        inputs=tuple((name, uri) for name, uri in spec.inputs.items() if name not in brought),
        outputs=(),
    )


def _brought(spec: JobSpec) -> list[tuple[str, str]]:
    """The inputs that the platform brings; others are fetched by the entry."""
    return [(name, uri) for name, uri in spec.inputs.items() if _is_obs(uri)]


def _entry_fetches(submission: Submission) -> bool:
    """Whether an entry needs the keys of the store, because it has to fetch from one like it."""
    return any(uri.startswith("s3://") for uri in submission.spec.inputs.values())


def _environments(submission: Submission, given: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """Yield what each node would be given, for a dry run."""
    hosts = submissions.host_names(submission)
    for index in range(len(hosts)):
        node = _node(submission, index, hosts)
        told = submissions.variables(submission, node, home=HOME, address="0.0.0.0")
        yield {**told, **given, **env.write(node)}


# -- what is wrong ------------------------------------------------------------------------------


def _problems(submission: Submission, site: Site, options: Mapping[str, object]) -> Iterator[str]:
    spec = submission.spec
    if not _is_obs(submission.code.uri):
        yield (
            f"store: ModelArts takes code from OBS only (given {given(spec.store)}; "
            "allowed obs://bucket/folder, or modelarts.bucket)"
        )
    if spec.retries > MAX_RETRIES:
        yield f"retries: is out of range (given {spec.retries}; allowed 0 to {MAX_RETRIES})"
    if not (spec.image or site.default_image or _is_preset(options)):
        yield "image: is missing (allowed an image in SWR; or name a modelarts.engine)"
    if not (spec.flavor or site.default_flavor or options["pool_id"]):
        yield "flavor: is missing (allowed one that `cloudjob doctor --backend modelarts` lists)"
    yield from _engine_problems(spec, options)
    yield from _word_problems(spec, options)
    yield from _place_problems(submission)


def _place_problems(submission: Submission) -> Iterator[str]:
    if submission.spec.restore_outputs != "none":
        yield (
            "restore_outputs: ModelArts keeps the outputs and does not bring them back (allowed "
            "none; make what an earlier job left an --input)"
        )
    for name, uri in submission.outputs:
        if not _is_obs(uri):
            yield f"outputs.{name}: ModelArts keeps outputs in OBS only (given {given(uri)})"
    for name, uri in submission.spec.inputs.items():
        if name in submission.spec.input_nodes and _is_obs(uri):
            yield f"input_nodes.{name}: ModelArts brings an input to every node"
        if uri.startswith("file:"):
            yield f"inputs.{name}: no node has the files of this machine (given {given(uri)})"


def _engine_problems(spec: JobSpec, options: Mapping[str, object]) -> Iterator[str]:
    engine = str(options["engine"])
    if calls_mpirun(engine):
        yield (
            "modelarts.engine: this engine calls mpirun itself, and so would start a job at each "
            f"rank (given {given(engine)}; allowed: another, or an image of yours and no engine)"
        )
    if engine and spec.image and ":" not in engine:
        yield f"modelarts.engine: with an image it is NAME:VERSION (given {given(engine)})"


def _word_problems(spec: JobSpec, options: Mapping[str, object]) -> Iterator[str]:
    if len(str(options["description"])) > MAX_DESCRIPTION:
        yield f"modelarts.description: is too long (allowed {MAX_DESCRIPTION} characters)"
    for index, word in enumerate(_entry_words(spec)):
        if not is_utf8(word):
            key = f"args[{index - 1}]" if index else "script"
            yield f"{key}: holds bytes that are no UTF-8, which ModelArts cannot be told"


# -- small things -------------------------------------------------------------------------------

_NODE = posixpath.basename(JobPaths("job").node)


def _folder(submission: Submission) -> str:
    return folder_url(f"{_job_uri(submission)}/{_NODE}")


def _is_preset(options: Mapping[str, object]) -> bool:
    return bool(options["engine"])


def _is_obs(uri: str) -> bool:
    return uri.startswith("obs://")


def _url(uri: str) -> str:
    """Return a place in OBS as the service writes it; what ends in a slash is a folder."""
    return "/" + unquote(_bucket_path(uri))


def _bucket_path(uri: str) -> str:
    return uri.partition("://")[2].partition("?")[0]


def _job_uri(submission: Submission) -> str:
    """Return the folder of the job."""
    return posixpath.dirname(submission.code.uri)


def _map(options: Mapping[str, object], key: str) -> Iterator[tuple[str, str]]:
    value = options[key]
    assert isinstance(value, Mapping)
    yield from value.items()


def _words(options: Mapping[str, object], key: str) -> list[str]:
    value = options[key]
    assert isinstance(value, tuple)
    return list(value)


def _tree(options: Mapping[str, object], key: str) -> Any:
    return copy.deepcopy(options[key])


def _merged(body: Any, more: Any) -> Any:
    """Return ``body`` with what the user says of it himself; None takes a key away."""
    if not (isinstance(body, dict) and isinstance(more, Mapping)):
        return more
    merged = dict(body)
    for key, value in more.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(merged[key], value) if key in merged else value
    return merged
