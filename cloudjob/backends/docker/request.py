"""The request for a job: one network, and one container for each node. No I/O."""

from __future__ import annotations

import copy
import math
import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cloudjob.backends.base import RETRY_S
from cloudjob.backends.encoding import argument_problems, file_path, undeclared_variables
from cloudjob.errors import SpecError
from cloudjob.model import submission as submissions
from cloudjob.model.submission import Submission
from cloudjob.model.text import masked
from jobentry.contract import names

if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

HOME = "/home/ma-user"
# The user of ModelArts' containers.
USER_ID, GROUP_ID = 1000, 100
DEFAULT_IMAGE = "cloudjob/base:latest"

JOB_LABEL = "cloudjob.job"
NODE_LABEL = "cloudjob.node"
NODES_LABEL = "cloudjob.nodes"
# The name of the container itself, which an image made from it has as a label, too.
NAME_LABEL = "cloudjob.container"
OWNER_LABEL = "cloudjob.owner"
GRACE_LABEL = "cloudjob.grace_s"
MEMORY_LABEL = "cloudjob.memory_gib"

# The folder of the files that each container gets before it starts. Only its user can read them,
# and the entry removes them.
DELIVERED = "/run/cloudjob"
ENV_FILE = f"{DELIVERED}/env"
SSH_KEY = f"{DELIVERED}/ssh-key"

# Addresses are known only once the network exists; the request is built before that.
UNKNOWN_ADDRESS = "0.0.0.0"
_GIB = 1 << 30
# Keeps logs complete and byte for byte: the default driver, json-file, turns bytes that are not
# UTF-8 into U+FFFD, and this one drops old lines unless its files may grow (both tried on 20.10).
LOG_DRIVER = "local"
LOG_CONFIG = {
    "Type": LOG_DRIVER,
    "Config": {"max-size": "1000g", "max-file": "1", "compress": "false"},
}
# What the containers of all nodes have in common, in their ``HostConfig``.
OF_NODES = {
    "LogConfig": LOG_CONFIG,
    "RestartPolicy": {"Name": "no"},
    # As on the platform: nothing in a container may become root.
    "CapDrop": ["ALL"],
    "SecurityOpt": ["no-new-privileges:true"],
}


# The default seccomp profile of 20.10 refuses process_vm_readv between ranks; Open MPI 4.1 then
# falls back to other means, but prints a warning for each message (tried).
OPEN_MPI = {"OMPI_MCA_btl_vader_single_copy_mechanism": "none", **submissions.ONE_MACHINE}


@dataclass(frozen=True, slots=True)
class ContainerRequest:
    """One container.

    Args:
        name: Its name in the engine.
        config: The body of ``POST /containers/create``.
        env: The variables of its entry that are not in ``config``: secrets, which ``inspect`` must
            not show, and values that JSON cannot hold.
    """

    name: str
    host: str
    config: Mapping[str, Any]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DockerRequest:
    """The request to the engine.

    Args:
        network: The body of ``POST /networks/create``.
        written: The job's folders in the store that the nodes write to, if it is on this machine. A
            container could plant links in other folders.
        read: The files of this machine that hold the package, if the store is a folder.
        outputs: Other folders of this machine that the nodes write to.
        has_key: Whether the nodes get a key for ssh; it is made when the job is sent.
        has_entry: Whether the image must have our entry, of our version; else any image will do.
        aliases: For each node, the names by which the others know it before it has started.
    """

    job: str
    image: str
    network: Mapping[str, Any]
    nodes: tuple[ContainerRequest, ...]
    written: tuple[str, ...]
    read: tuple[str, ...]
    outputs: tuple[str, ...]
    has_key: bool
    secret_names: tuple[str, ...]
    has_entry: bool = True
    aliases: tuple[tuple[str, ...], ...] = ()


def build(submission: Submission, owner: str) -> DockerRequest:
    """Return the request for ``submission``.

    Args:
        owner: The cloudjob that this job belongs to, so that others do not remove the job.

    Raises:
        SpecError: This backend cannot run the job.
    """
    spec = submission.spec
    problems = list(_problems(spec))
    if problems:
        raise SpecError(problems)
    hosts = submissions.host_names(submission)
    folder = posixpath.dirname(file_path(submission.code.uri))
    package = (submission.code.uri, *submission.code.layers)
    read = tuple(path for path in map(file_path, package) if path)
    outputs = _outputs(submission, folder)
    written = _written(submission, folder)
    labels = {
        JOB_LABEL: submission.job,
        NODES_LABEL: str(len(hosts)),
        OWNER_LABEL: owner,
        GRACE_LABEL: repr(spec.grace_s),
        MEMORY_LABEL: repr(spec.docker.memory_gib),
    }
    network = network_name(submission.job)
    image = spec.image or DEFAULT_IMAGE
    common = {
        "Image": image,
        "Cmd": [spec.script, *spec.args],
        "User": f"{USER_ID}:{GROUP_ID}",
        "WorkingDir": HOME,
        "StopSignal": "SIGTERM",
        "StopTimeout": math.ceil(spec.grace_s) + RETRY_S,
        "HostConfig": {
            **_limits(spec),
            "NetworkMode": network,
            **_mounts(spec, (*written, *outputs), read),
        },
    }
    return DockerRequest(
        job=submission.job,
        image=image,
        network=network_of(submission.job, labels),
        nodes=tuple(
            _node(submission, index, hosts, {**common, "Labels": labels}, network)
            for index in range(len(hosts))
        ),
        written=written,
        read=read,
        outputs=outputs,
        has_key=len(hosts) > 1,
        secret_names=submission.masked_names,
    )


def network_name(job: str) -> str:
    """Return the name of a job's network."""
    return f"cloudjob-{job}"


def network_of(job: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the request for a job's network."""
    return {
        "Name": network_name(job),
        "Driver": "bridge",
        "Labels": labels,
        "CheckDuplicate": True,
    }


def show(request: DockerRequest) -> dict[str, Any]:
    """Return ``request`` as plain JSON values, secrets as ``***``."""
    return {
        "network": copy.deepcopy(dict(request.network)),
        "containers": [
            {
                "name": node.name,
                "config": copy.deepcopy(dict(node.config)),
                "delivered": masked(node.env, request.secret_names),
            }
            for node in request.nodes
        ],
    }


def environment(node: ContainerRequest) -> dict[str, str]:
    """Return the variables that the entry of this node is given."""
    pairs = (text.partition("=") for text in node.config["Env"])
    env = {**{name: value for name, _, value in pairs}, **node.env}
    # The entry reads this file; a dry run has no such file.
    env.pop(names.CLOUDJOB_ENV_FILE, None)
    env.pop(names.CLOUDJOB_DELIVERED, None)
    return env


def with_address(config: Mapping[str, Any], address: str) -> dict[str, Any]:
    """Return a container's configuration with its address in the network."""
    addressed = copy.deepcopy(dict(config))
    unknown = {f"{name}={UNKNOWN_ADDRESS}": name for name in _ADDRESSES}
    addressed["Env"] = [
        f"{unknown[text]}={address}" if text in unknown else text for text in addressed["Env"]
    ]
    for endpoint in addressed["NetworkingConfig"]["EndpointsConfig"].values():
        endpoint["IPAMConfig"] = {"IPv4Address": address}
    return addressed


_ADDRESSES = (names.MA_CURRENT_IP, names.MA_CURRENT_HOST_IP)


def _node(
    submission: Submission,
    index: int,
    hosts: tuple[str, ...],
    common: Mapping[str, Any],
    network: str,
) -> ContainerRequest:
    spec = submission.spec
    host = hosts[index]
    short, _, domain = host.partition(".")
    node = submissions.node_env(submission, index, hosts)
    if len(hosts) > 1:
        node = node._replace(ssh_key=SSH_KEY)
    variables = {
        **OPEN_MPI,
        names.CLOUDJOB_EMULATED: "1",
        **submissions.variables(submission, node, home=HOME, address=UNKNOWN_ADDRESS),
    }
    variables.update({name: value for name, value in _gpus(spec).items() if name not in spec.env})
    delivered = undeclared_variables(variables, submission.masked_names)
    if delivered:
        variables[names.CLOUDJOB_ENV_FILE] = ENV_FILE
    if delivered or len(hosts) > 1:
        variables[names.CLOUDJOB_DELIVERED] = DELIVERED
    declared_env = [
        f"{name}={value}" for name, value in sorted(variables.items()) if name not in delivered
    ]
    config = {
        **common,
        "Hostname": short,
        "Domainname": domain,
        "Env": declared_env,
        "HostConfig": {**common["HostConfig"], **_devices(spec, index)},
        "Labels": {**common["Labels"], NODE_LABEL: str(index), NAME_LABEL: short},
        "NetworkingConfig": {"EndpointsConfig": {network: {"Aliases": [short, host]}}},
    }
    return ContainerRequest(name=short, host=host, config=config, env=delivered)


def _limits(spec: JobSpec) -> dict[str, Any]:
    """Return the limits and security options of one container."""
    limits: dict[str, Any] = {
        "ShmSize": int(spec.docker.shm_gib * _GIB),
        **OF_NODES,
    }
    memory_bytes = int(spec.docker.memory_gib * _GIB)
    if memory_bytes:
        # Swap counts with memory, or the limit would only make the job slow.
        limits.update(Memory=memory_bytes, MemorySwap=memory_bytes)
    cpus = spec.docker.cpus
    if cpus:
        limits["NanoCpus"] = int(cpus * 1e9)
    return limits


def _devices(spec: JobSpec, node: int) -> dict[str, Any]:
    """Return the GPUs of one node by name: from a count, all nodes would get the same GPUs."""
    gpus = spec.docker.gpus
    if not gpus:
        return {}
    device_ids = [str(gpu) for gpu in range(node * gpus, (node + 1) * gpus)]
    return {"DeviceRequests": [{"Driver": "", "DeviceIDs": device_ids, "Capabilities": [["gpu"]]}]}


def _gpus(spec: JobSpec) -> dict[str, str]:
    """Return the variables that ModelArts sets on a flavor with GPUs."""
    gpus = spec.docker.gpus
    if not gpus:
        return {}
    return {
        names.MA_NUM_GPUS: str(gpus),
        "NCCL_DEBUG": "INFO",
        "NCCL_IB_HCA": "^mlx5_bond_0",
        "NCCL_SOCKET_IFNAME": "bond0,eth0",
    }


def _mounts(spec: JobSpec, writable: tuple[str, ...], read: tuple[str, ...]) -> dict[str, Any]:
    """Return the mounts of this machine's folders under the same paths, for ``file://`` URIs."""
    inputs = dict.fromkeys(path for path in (*read, *map(file_path, spec.inputs.values())) if path)
    mounts = [
        *({"Type": "bind", "Source": path, "Target": path} for path in writable),
        *(
            {"Type": "bind", "Source": path, "Target": path, "ReadOnly": True}
            for path in inputs
            if not any(_is_below(path, other) for other in writable)
        ),
    ]
    return {"Mounts": mounts} if mounts else {}


def _written(submission: Submission, folder: str) -> tuple[str, ...]:
    """Return the folders in the job's own folder where the record and outputs are stored."""
    uris = (submission.record_uri, *(uri for _, uri in submission.outputs))
    above = dict.fromkeys(posixpath.dirname(file_path(uri)) for uri in uris)
    return tuple(path for path in above if folder and _is_below(path, folder))


def _outputs(submission: Submission, folder: str) -> tuple[str, ...]:
    """Return the folders outside the job's own folder where outputs are stored."""
    paths = dict.fromkeys(file_path(uri) for _, uri in submission.outputs)
    return tuple(path for path in paths if path and not (folder and _is_below(path, folder)))


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def _problems(spec: JobSpec) -> Iterator[str]:
    if spec.retries:
        # The submit may have ended when the job fails, and an engine restarts containers one by
        # one, while a job must restart as a whole.
        yield (
            f"retries: the docker backend does not start a job again "
            f"(given {spec.retries}; allowed 0)"
        )
    # The engine's API is JSON, which cannot hold bytes. (Such variables are delivered in a file.)
    yield from argument_problems((spec.script, *spec.args), "the API of the engine does not accept")
