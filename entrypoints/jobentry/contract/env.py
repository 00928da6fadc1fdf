"""The environment of a node: the laptop or the platform writes it, the entry reads it.

Every backend sets the variables that ModelArts sets in a training container, and ``CLOUDJOB_*``
variables for everything that ModelArts has no variable for.
"""

from __future__ import annotations

import json
import re
from typing import Mapping, NamedTuple

from jobentry.contract import devices
from jobentry.contract.names import (
    CARRIED_PREFIXES,
    CLOUDJOB_CODE_DIGEST,
    CLOUDJOB_CODE_URI,
    CLOUDJOB_CONTROL_DIR,
    CLOUDJOB_DELIVERED,
    CLOUDJOB_DEVICE_TARGET,
    CLOUDJOB_DEVICES,
    CLOUDJOB_ENV_NAMES,
    CLOUDJOB_FIRST_VERSION,
    CLOUDJOB_GRACE_S,
    CLOUDJOB_INPUT_NODES,
    CLOUDJOB_INPUTS,
    CLOUDJOB_JOB,
    CLOUDJOB_LAUNCHER,
    CLOUDJOB_MIN_NODES,
    CLOUDJOB_NODE_DIR,
    CLOUDJOB_OUTPUT_LIMIT_S,
    CLOUDJOB_OUTPUT_SYNC_S,
    CLOUDJOB_OUTPUTS,
    CLOUDJOB_PARALLEL_MODE,
    CLOUDJOB_PROCS_PER_NODE,
    CLOUDJOB_RECORD_URI,
    CLOUDJOB_RESTORE_OUTPUTS,
    CLOUDJOB_SEARCH_MODE,
    CLOUDJOB_SECRET_NAMES,
    CLOUDJOB_SSH_KEY,
    CLOUDJOB_STALL_S,
    CLOUDJOB_START_TIMEOUT_S,
    CLOUDJOB_TIMEOUT_S,
    MA_NUM_GPUS,
    MA_NUM_HOSTS,
    MA_NUM_NPUS,
    MA_SCRIPT_INTERPRETER,
    MA_TASK_INDEX,
    MA_TASK_NAME,
    MA_VJ_NAME,
    OPENMPI_BIND_ARGS,
    OPENMPI_EXTRA_ARGS,
    OPENMPI_HOST_FILE_PATH,
    OPENMPI_MCA_ARGS,
    OPENMPI_NP,
    OPENMPI_X_ARGS,
    PER_NODE,
    SSHD_PORT,
    TUNE_ENV_FILE,
    VC_TASK_INDEX,
    VC_WORKER_HOSTS,
    VC_WORKER_NUM,
    VK_TASK_INDEX,
)

DEFAULT_SSHD_PORT = 38888
DEFAULT_GRACE_S = 10.0
DEFAULT_START_TIMEOUT_S = 600.0
DEFAULT_STALL_S = 300.0
DEFAULT_OUTPUT_SYNC_S = 30.0
DEFAULT_OUTPUT_LIMIT_S = 3600.0

# The output files of an earlier run that a node restores: none, its own, or those of all nodes.
RESTORE_NONE, RESTORE_OWN, RESTORE_ALL = "none", "own", "all"
RESTORES = (RESTORE_NONE, RESTORE_OWN, RESTORE_ALL)

_LIST = re.compile(r"[0-9]{1,6}(-[0-9]{1,6})?(,[0-9]{1,6}(-[0-9]{1,6})?)*\Z", re.ASCII)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class EnvError(Exception):
    """The environment of this node is invalid; ``problems`` lists every error."""

    hint = "fix or unset it; `cloudjob docs environment` lists what each variable may hold"

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class OpenMpi(NamedTuple):
    """The user's parts of the mpirun command; None stands for the documented default."""

    np: int | None = None
    host_file: str = ""
    tune_file: str = ""
    bind_args: str | None = None
    x_args: str | None = None
    mca_args: str | None = None
    extra_args: str | None = None


class MindSpore(NamedTuple):
    """Settings for MindSpore scripts; an empty one leaves the choice to the script.

    Args:
        devices: The devices of each node, if the platform lists none (``contract.devices``).
    """

    device_target: str = ""
    parallel_mode: str = ""
    search_mode: str = ""
    devices: tuple[str, ...] = ()


class NodeEnv(NamedTuple):
    """The settings of one node and its job.

    Args:
        min_nodes: The minimum number of nodes, including the head; 0 if the job needs all.
        control_dir: The folder in which nodes on one machine announce their addresses; empty for
            nodes that are reached by host name.
        delivered_dir: The folder of files that the backend put into this container.
        first_version: Whether ranks get the variables of the platform's first version as well.
        stall_s: Seconds for which the connection between head and workers may be silent.
    """

    job: str = "job"
    node: int = 0
    hosts: tuple[str, ...] = ("localhost",)
    slots: int = 1
    launcher: str = "mpirun"
    interpreter: str = ""
    code_uri: str = ""
    code_digest: str = ""
    record_uri: str = ""
    node_dir: str = ""
    control_dir: str = ""
    delivered_dir: str = ""
    stall_s: float = DEFAULT_STALL_S
    ssh_key: str = ""
    sshd_port: int = DEFAULT_SSHD_PORT
    env_names: tuple[str, ...] = ()
    secret_names: tuple[str, ...] = ()
    inputs: tuple[tuple[str, str], ...] = ()
    input_nodes: tuple[tuple[str, str], ...] = ()
    outputs: tuple[tuple[str, str], ...] = ()
    restore_outputs: str = RESTORE_NONE
    output_sync_s: float = DEFAULT_OUTPUT_SYNC_S
    output_limit_s: float = DEFAULT_OUTPUT_LIMIT_S
    grace_s: float = DEFAULT_GRACE_S
    timeout_s: float = 0.0
    start_timeout_s: float = DEFAULT_START_TIMEOUT_S
    min_nodes: int = 0
    first_version: bool = False
    open_mpi: OpenMpi = OpenMpi()
    mindspore: MindSpore = MindSpore()

    @property
    def nodes(self) -> int:
        """The number of nodes of the job."""
        return len(self.hosts)

    @property
    def host(self) -> str:
        """The host name of this node."""
        return self.hosts[self.node]

    @property
    def reports_dir(self) -> str:
        """The folder in which the backend reports ended nodes to the head; empty if it does not."""
        return self.control_dir or self.delivered_dir

    @property
    def inputs_here(self) -> tuple[tuple[str, str], ...]:
        """The inputs that this node needs."""
        nodes = dict(self.input_nodes)
        return tuple(
            (name, uri)
            for name, uri in self.inputs
            if name not in nodes or is_listed(self.node, nodes[name])
        )

    @property
    def is_head(self) -> bool:
        """Whether this node is the head."""
        return self.node == 0


def is_name(text: str) -> bool:
    """Whether ``text`` can name an environment variable."""
    return _NAME.match(text) is not None


def is_list(text: str) -> bool:
    """Whether ``text`` lists nodes or ranks: ``0``, ``0,2-3``."""
    return _LIST.match(text) is not None


def is_listed(number: int, text: str) -> bool:
    """Whether a list of nodes or ranks contains this number."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        if int(first) <= number <= int(last or first):
            return True
    return False


def is_carried(name: str, node: NodeEnv) -> bool:
    """Whether the head's value of ``name`` goes to the ranks of every node."""
    if name in PER_NODE or name in node.secret_names:
        return False
    return name == "PATH" or name in node.env_names or name.startswith(CARRIED_PREFIXES)


def write(node: NodeEnv) -> dict[str, str]:
    """Return the variables from which ``read`` restores ``node``."""
    text = {
        CLOUDJOB_JOB: node.job,
        VC_TASK_INDEX: str(node.node),
        VK_TASK_INDEX: str(node.node),
        VC_WORKER_HOSTS: ",".join(node.hosts),
        VC_WORKER_NUM: str(node.nodes),
        MA_NUM_HOSTS: str(node.nodes),
        CLOUDJOB_PROCS_PER_NODE: str(node.slots),
        CLOUDJOB_LAUNCHER: node.launcher,
        SSHD_PORT: str(node.sshd_port),
        CLOUDJOB_GRACE_S: repr(node.grace_s),
        CLOUDJOB_TIMEOUT_S: repr(node.timeout_s),
        CLOUDJOB_START_TIMEOUT_S: repr(node.start_timeout_s),
    }
    optional = {
        MA_SCRIPT_INTERPRETER: node.interpreter,
        CLOUDJOB_CODE_URI: node.code_uri,
        CLOUDJOB_CODE_DIGEST: node.code_digest,
        CLOUDJOB_RECORD_URI: node.record_uri,
        CLOUDJOB_NODE_DIR: node.node_dir,
        CLOUDJOB_CONTROL_DIR: node.control_dir,
        CLOUDJOB_DELIVERED: node.delivered_dir,
        CLOUDJOB_SSH_KEY: node.ssh_key,
        CLOUDJOB_ENV_NAMES: " ".join(node.env_names),
        CLOUDJOB_SECRET_NAMES: " ".join(node.secret_names),
        CLOUDJOB_INPUTS: _pairs_text(node.inputs),
        CLOUDJOB_INPUT_NODES: _pairs_text(node.input_nodes),
        CLOUDJOB_OUTPUTS: _pairs_text(node.outputs),
        **_outputs_text(node),
        OPENMPI_HOST_FILE_PATH: node.open_mpi.host_file,
        TUNE_ENV_FILE: node.open_mpi.tune_file,
        CLOUDJOB_MIN_NODES: str(node.min_nodes or ""),
        CLOUDJOB_FIRST_VERSION: "1" if node.first_version else "",
        CLOUDJOB_STALL_S: "" if node.stall_s == DEFAULT_STALL_S else repr(node.stall_s),
        CLOUDJOB_DEVICE_TARGET: node.mindspore.device_target,
        CLOUDJOB_PARALLEL_MODE: node.mindspore.parallel_mode,
        CLOUDJOB_SEARCH_MODE: node.mindspore.search_mode,
        CLOUDJOB_DEVICES: "\n".join(node.mindspore.devices),
    }
    text.update({name: value for name, value in optional.items() if value})
    text.update(_open_mpi_text(node.open_mpi))
    if not node.slots:
        # The node counts its devices.
        del text[CLOUDJOB_PROCS_PER_NODE]
    return text


def read(environ: Mapping[str, str]) -> NodeEnv:
    """Return the settings of this node from its environment.

    Raises:
        EnvError: Variables are invalid; lists all of them, not only the first.
    """
    reader = _Reader(environ)
    hosts = reader.hosts()
    node = reader.first_number((MA_TASK_INDEX, VC_TASK_INDEX, VK_TASK_INDEX), 0)
    if node >= len(hosts):
        reader.problems.append(
            "this node has the index %d, but there are %d nodes in %s"
            % (node, len(hosts), VC_WORKER_HOSTS)
        )
    result = NodeEnv(
        job=reader.job(),
        node=node,
        hosts=hosts,
        slots=reader.slots(),
        launcher=environ.get(CLOUDJOB_LAUNCHER) or "mpirun",
        interpreter=environ.get(MA_SCRIPT_INTERPRETER, ""),
        code_uri=environ.get(CLOUDJOB_CODE_URI, ""),
        code_digest=environ.get(CLOUDJOB_CODE_DIGEST, ""),
        record_uri=environ.get(CLOUDJOB_RECORD_URI, ""),
        node_dir=environ.get(CLOUDJOB_NODE_DIR, ""),
        control_dir=environ.get(CLOUDJOB_CONTROL_DIR, ""),
        delivered_dir=environ.get(CLOUDJOB_DELIVERED, ""),
        stall_s=reader.seconds(CLOUDJOB_STALL_S, DEFAULT_STALL_S),
        ssh_key=environ.get(CLOUDJOB_SSH_KEY, ""),
        sshd_port=reader.port(SSHD_PORT, DEFAULT_SSHD_PORT),
        env_names=reader.names(CLOUDJOB_ENV_NAMES),
        secret_names=reader.names(CLOUDJOB_SECRET_NAMES),
        inputs=reader.pairs(CLOUDJOB_INPUTS),
        input_nodes=reader.lists(CLOUDJOB_INPUT_NODES),
        outputs=reader.pairs(CLOUDJOB_OUTPUTS),
        restore_outputs=reader.choice(CLOUDJOB_RESTORE_OUTPUTS, RESTORES),
        output_sync_s=reader.seconds(CLOUDJOB_OUTPUT_SYNC_S, DEFAULT_OUTPUT_SYNC_S),
        output_limit_s=reader.seconds(CLOUDJOB_OUTPUT_LIMIT_S, DEFAULT_OUTPUT_LIMIT_S),
        grace_s=reader.seconds(CLOUDJOB_GRACE_S, DEFAULT_GRACE_S),
        timeout_s=reader.seconds(CLOUDJOB_TIMEOUT_S, 0.0),
        start_timeout_s=reader.seconds(CLOUDJOB_START_TIMEOUT_S, DEFAULT_START_TIMEOUT_S),
        min_nodes=reader.nodes(CLOUDJOB_MIN_NODES, len(hosts)),
        first_version=environ.get(CLOUDJOB_FIRST_VERSION, "") == "1",
        open_mpi=OpenMpi(
            np=reader.ranks(OPENMPI_NP),
            host_file=reader.path(OPENMPI_HOST_FILE_PATH),
            tune_file=reader.path(TUNE_ENV_FILE),
            bind_args=environ.get(OPENMPI_BIND_ARGS),
            x_args=environ.get(OPENMPI_X_ARGS),
            mca_args=environ.get(OPENMPI_MCA_ARGS),
            extra_args=environ.get(OPENMPI_EXTRA_ARGS),
        ),
        mindspore=MindSpore(
            device_target=environ.get(CLOUDJOB_DEVICE_TARGET, ""),
            parallel_mode=environ.get(CLOUDJOB_PARALLEL_MODE, ""),
            search_mode=environ.get(CLOUDJOB_SEARCH_MODE, ""),
            devices=reader.devices(CLOUDJOB_DEVICES),
        ),
    )
    if reader.problems:
        raise EnvError(reader.problems)
    return result


class _Reader:
    """Reads variables and collects the errors in them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.problems: list[str] = []

    def slots(self) -> int:
        """Return the slots of this node: as many as it was given, else one for each device."""
        devices = [self.first_number((name,), 0) for name in (MA_NUM_GPUS, MA_NUM_NPUS)]
        return self.first_number((CLOUDJOB_PROCS_PER_NODE,), max(devices)) or 1

    def first_number(self, names: tuple[str, ...], default: int) -> int:
        """Return the first of ``names`` that is set and not empty, as a whole number."""
        for name in names:
            text = self.environ.get(name, "")
            if not text:
                continue
            # isdecimal() and int() also accept digits of other scripts, so require ASCII.
            if text.isdecimal() and text.isascii() and len(text) <= 9:
                return int(text)
            self.problems.append(f"{name}={_shown(text)!r} is not a whole number")
        return default

    def ranks(self, name: str) -> int | None:
        """Return ``name`` as a number of ranks, None if it is not set or empty."""
        faults = len(self.problems)
        number = self.first_number((name,), 0)
        if number or not self.environ.get(name):
            return number or None
        if len(self.problems) == faults:
            self.problems.append(
                f"{name}={_shown(self.environ[name])!r}: a job has at least 1 rank"
            )
        return None

    def nodes(self, name: str, most: int) -> int:
        """Return ``name`` as a number of nodes, at most ``most``; 0 if it is not set."""
        number = self.first_number((name,), 0)
        if number > most:
            self.problems.append("%s=%d: the job has %d nodes" % (name, number, most))
        return number

    def path(self, name: str) -> str:
        """Return ``name`` as the absolute path of a file, as mpirun runs in another folder."""
        text = self.environ.get(name, "")
        if text and (not text.startswith("/") or text.endswith("/")):
            self.problems.append(f"{name}={_shown(text)!r} is not the absolute path of a file")
        return text

    def port(self, name: str, default: int) -> int:
        """Return ``name`` as a port number."""
        number = self.first_number((name,), default)
        if not 1 <= number <= 65535:
            self.problems.append(f"{name}='{self.environ[name]}' is not a port")
        return number

    def seconds(self, name: str, default: float) -> float:
        """Return ``name`` as a number of seconds, not negative."""
        text = self.environ.get(name, "")
        if not text:
            return default
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            self.problems.append(f"{name}={_shown(text)!r} is not a number of seconds")
            return default
        return value

    def job(self) -> str:
        """Return the job's id, which is used in paths and shell commands."""
        for name in (CLOUDJOB_JOB, MA_VJ_NAME):
            text = self.environ.get(name, "")
            if text and not _is_host(text):
                self.problems.append(f"{name}={_shown(text)!r} is not a job id")
            elif text:
                return text
        return "job"

    def names(self, name: str) -> tuple[str, ...]:
        """Return ``name`` as a list of variable names."""
        return self._names(name, tuple(self.environ.get(name, "").split()))

    def _names(self, name: str, words: tuple[str, ...]) -> tuple[str, ...]:
        for word in words:
            if not is_name(word):
                self.problems.append(f"{name}: {_shown(word)!r} is not a variable name")
        return words

    def pairs(self, name: str) -> tuple[tuple[str, str], ...]:
        """Return ``name`` as a JSON object of strings whose keys are variable names."""
        text = self.environ.get(name, "")
        if not text:
            return ()
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
            self.problems.append(f"{name}={_shown(text)!r} is not a JSON object of strings")
            return ()
        self._names(name, tuple(value))
        return tuple(value.items())

    def lists(self, name: str) -> tuple[tuple[str, str], ...]:
        """Return ``name`` as a JSON object whose values are lists of nodes."""
        pairs = self.pairs(name)
        for key, text in pairs:
            if not is_list(text):
                self.problems.append(f"{name}: {key}: {_shown(text)!r} is not a list of nodes")
        return pairs

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        """Return ``name`` as one of the allowed values, by default the first."""
        text = self.environ.get(name) or allowed[0]
        if text not in allowed:
            values = ", ".join(allowed)
            self.problems.append(f"{name}={_shown(text)!r} is not valid (allowed: {values})")
        return text

    def devices(self, name: str) -> tuple[str, ...]:
        """Return ``name`` as the devices of each node."""
        lines = tuple(self.environ.get(name, "").splitlines())
        for line in lines:
            try:
                devices.parse(line)
            except ValueError as error:
                self.problems.append(f"{name}: {_shown(line)!r} {error}")
        return lines

    def hosts(self) -> tuple[str, ...]:
        """Return the host names of the job's nodes: the listed ones, or the platform's pattern."""
        listed = self.environ.get(VC_WORKER_HOSTS, "")
        count = self.first_number((MA_NUM_HOSTS, VC_WORKER_NUM), 0)
        if listed:
            return self._listed_hosts(listed, count)
        if count <= 1:
            return ("localhost",)
        job = self.environ.get(MA_VJ_NAME, "")
        if not job or count > 100000:
            self.problems.append(
                "%d nodes, but neither %s nor %s gives their names"
                % (count, VC_WORKER_HOSTS, MA_VJ_NAME)
            )
            return ("localhost",)
        task = self.environ.get(MA_TASK_NAME) or "worker"
        if not _is_host(f"{job}-{task}"):
            self.problems.append(
                f"{MA_VJ_NAME}={_shown(job)!r} and {MA_TASK_NAME}={_shown(task)!r}"
                " do not form a host name"
            )
        return tuple("%s-%s-%d.%s" % (job, task, i, job) for i in range(count))

    def _listed_hosts(self, listed: str, count: int) -> tuple[str, ...]:
        hosts = tuple(host.strip() for host in listed.split(","))
        if any(not _is_host(host) for host in hosts):
            self.problems.append(f"{VC_WORKER_HOSTS}={_shown(listed)!r} is not a list of hosts")
        if len(set(hosts)) != len(hosts):
            self.problems.append(f"{VC_WORKER_HOSTS} names a host twice")
        if count and count != len(hosts):
            self.problems.append(
                "%s lists %d hosts, but there should be %d" % (VC_WORKER_HOSTS, len(hosts), count)
            )
        return hosts


def _is_host(text: str) -> bool:
    # A leading dash would be an option of ssh; spaces and ":" would break the host file.
    return re.match(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\Z", text) is not None


def _shown(text: str) -> str:
    return text if len(text) <= 80 else text[:80] + "…"


def _pairs_text(pairs: tuple[tuple[str, str], ...]) -> str:
    return json.dumps(dict(pairs)) if pairs else ""


def _outputs_text(node: NodeEnv) -> dict[str, str]:
    """Return the variables that differ from the default; fewer clutter the ranks' environment."""
    default_node = NodeEnv()
    text = {
        CLOUDJOB_RESTORE_OUTPUTS: (node.restore_outputs, default_node.restore_outputs),
        CLOUDJOB_OUTPUT_SYNC_S: (node.output_sync_s, default_node.output_sync_s),
        CLOUDJOB_OUTPUT_LIMIT_S: (node.output_limit_s, default_node.output_limit_s),
    }
    return {name: str(value) for name, (value, default) in text.items() if value != default}


def _open_mpi_text(open_mpi: OpenMpi) -> dict[str, str]:
    text = {
        OPENMPI_BIND_ARGS: open_mpi.bind_args,
        OPENMPI_X_ARGS: open_mpi.x_args,
        OPENMPI_MCA_ARGS: open_mpi.mca_args,
        OPENMPI_EXTRA_ARGS: open_mpi.extra_args,
        OPENMPI_NP: None if open_mpi.np is None else str(open_mpi.np),
    }
    return {name: value for name, value in text.items() if value is not None}
