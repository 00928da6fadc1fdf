"""The environment of a node: the laptop or the platform writes it, the entry reads it.

Every backend sets the variables that ModelArts sets in a training container, and ``CLOUDJOB_*``
variables for everything that ModelArts has no variable for.
"""

from __future__ import annotations

import json
import re
from typing import Mapping, NamedTuple

from jobentry.contract import devices, names, preflight_levels
from jobentry.contract.hang_actions import ACTIONS, WARN

DEFAULT_SSHD_PORT = 38888
DEFAULT_GRACE_S = 10.0
DEFAULT_START_TIMEOUT_S = 600.0
DEFAULT_STALL_S = 300.0
DEFAULT_OUTPUT_SYNC_S = 30.0
DEFAULT_OUTPUT_LIMIT_S = 3600.0
DEFAULT_HANG_AFTER_S = 600.0

# The output files of an earlier run that a node restores: none, its own, or those of all nodes.
RESTORE_NONE, RESTORE_OWN, RESTORE_ALL = "none", "own", "all"
RESTORE_CHOICES = (RESTORE_NONE, RESTORE_OWN, RESTORE_ALL)

_LIST = r"(?a)[0-9]{1,6}(-[0-9]{1,6})?(,[0-9]{1,6}(-[0-9]{1,6})?)*\Z"
_NAME = r"[A-Za-z_][A-Za-z0-9_]*\Z"


class EnvError(Exception):
    """The environment of this node is invalid; ``problems`` lists every error."""

    hint = "fix or unset it; `cloudjob docs environment` lists what each variable may hold"

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class OpenMpi(NamedTuple):
    """The user's parts of the mpirun command; None means the documented default."""

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
        preflight: How much to check before the ranks start: one of ``preflight_levels.LEVELS``.
        hang_action: What to do with a job that hangs: one of ``hang_actions.ACTIONS``.
        hang_after_s: How many seconds after the report of the hang to end the job.
        hang_scale: A factor for the times after which a job counts as hung.
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
    preflight: str = preflight_levels.QUICK
    hang_action: str = WARN
    hang_after_s: float = DEFAULT_HANG_AFTER_S
    hang_scale: float = 1.0
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
    return re.match(_NAME, text) is not None


def is_list(text: str) -> bool:
    """Whether ``text`` lists nodes or ranks: ``0``, ``0,2-3``."""
    return re.match(_LIST, text) is not None


def is_listed(number: int, text: str) -> bool:
    """Whether a list of nodes or ranks contains this number."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        if int(first) <= number <= int(last or first):
            return True
    return False


def is_carried(name: str, node: NodeEnv) -> bool:
    """Whether the head's value of ``name`` goes to the ranks of every node."""
    if name in names.PER_NODE or name in node.secret_names:
        return False
    return name == "PATH" or name in node.env_names or name.startswith(names.CARRIED_PREFIXES)


def write(node: NodeEnv) -> dict[str, str]:
    """Return the variables from which ``read`` restores ``node``."""
    text = {
        names.CLOUDJOB_JOB: node.job,
        names.VC_TASK_INDEX: str(node.node),
        names.VK_TASK_INDEX: str(node.node),
        names.VC_WORKER_HOSTS: ",".join(node.hosts),
        names.VC_WORKER_NUM: str(node.nodes),
        names.MA_NUM_HOSTS: str(node.nodes),
        names.CLOUDJOB_LAUNCHER: node.launcher,
        names.SSHD_PORT: str(node.sshd_port),
        names.CLOUDJOB_GRACE_S: repr(node.grace_s),
        names.CLOUDJOB_TIMEOUT_S: repr(node.timeout_s),
        names.CLOUDJOB_START_TIMEOUT_S: repr(node.start_timeout_s),
    }
    optional = {
        # Without it, the node counts its devices.
        names.CLOUDJOB_PROCS_PER_NODE: str(node.slots or ""),
        names.MA_SCRIPT_INTERPRETER: node.interpreter,
        names.CLOUDJOB_CODE_URI: node.code_uri,
        names.CLOUDJOB_CODE_DIGEST: node.code_digest,
        names.CLOUDJOB_RECORD_URI: node.record_uri,
        names.CLOUDJOB_NODE_DIR: node.node_dir,
        names.CLOUDJOB_CONTROL_DIR: node.control_dir,
        names.CLOUDJOB_DELIVERED: node.delivered_dir,
        names.CLOUDJOB_SSH_KEY: node.ssh_key,
        names.CLOUDJOB_ENV_NAMES: " ".join(node.env_names),
        names.CLOUDJOB_SECRET_NAMES: " ".join(node.secret_names),
        names.CLOUDJOB_INPUTS: _pairs_text(node.inputs),
        names.CLOUDJOB_INPUT_NODES: _pairs_text(node.input_nodes),
        names.CLOUDJOB_OUTPUTS: _pairs_text(node.outputs),
        names.CLOUDJOB_RESTORE_OUTPUTS: _unless(RESTORE_NONE, node.restore_outputs),
        names.CLOUDJOB_OUTPUT_SYNC_S: _unless(DEFAULT_OUTPUT_SYNC_S, node.output_sync_s),
        names.CLOUDJOB_OUTPUT_LIMIT_S: _unless(DEFAULT_OUTPUT_LIMIT_S, node.output_limit_s),
        names.OPENMPI_HOST_FILE_PATH: node.open_mpi.host_file,
        names.TUNE_ENV_FILE: node.open_mpi.tune_file,
        names.CLOUDJOB_MIN_NODES: str(node.min_nodes or ""),
        names.CLOUDJOB_FIRST_VERSION: "1" if node.first_version else "",
        names.CLOUDJOB_PREFLIGHT: _unless(preflight_levels.QUICK, node.preflight),
        names.CLOUDJOB_HANG_ACTION: _unless(WARN, node.hang_action),
        names.CLOUDJOB_HANG_AFTER_S: _unless(DEFAULT_HANG_AFTER_S, node.hang_after_s),
        names.CLOUDJOB_HANG_SCALE: _unless(1.0, node.hang_scale),
        names.CLOUDJOB_STALL_S: _unless(DEFAULT_STALL_S, node.stall_s),
        names.CLOUDJOB_DEVICE_TARGET: node.mindspore.device_target,
        names.CLOUDJOB_PARALLEL_MODE: node.mindspore.parallel_mode,
        names.CLOUDJOB_SEARCH_MODE: node.mindspore.search_mode,
        names.CLOUDJOB_DEVICES: "\n".join(node.mindspore.devices),
    }
    text.update({name: value for name, value in optional.items() if value})
    text.update(_open_mpi_text(node.open_mpi))
    return text


def read(environ: Mapping[str, str]) -> NodeEnv:
    """Return the settings of this node from its environment.

    Raises:
        EnvError: Variables are invalid; lists all of them, not only the first.
    """
    reader = _Reader(environ)
    hosts = reader.hosts()
    node = reader.first_number((names.MA_TASK_INDEX, names.VC_TASK_INDEX, names.VK_TASK_INDEX), 0)
    if node >= len(hosts):
        reader.problems.append(
            "this node has the index %d, but there are %d nodes in %s"
            % (node, len(hosts), names.VC_WORKER_HOSTS)
        )
    result = NodeEnv(
        job=reader.job(),
        node=node,
        hosts=hosts,
        slots=reader.slots(),
        launcher=environ.get(names.CLOUDJOB_LAUNCHER) or "mpirun",
        interpreter=environ.get(names.MA_SCRIPT_INTERPRETER, ""),
        code_uri=environ.get(names.CLOUDJOB_CODE_URI, ""),
        code_digest=environ.get(names.CLOUDJOB_CODE_DIGEST, ""),
        record_uri=environ.get(names.CLOUDJOB_RECORD_URI, ""),
        node_dir=environ.get(names.CLOUDJOB_NODE_DIR, ""),
        control_dir=environ.get(names.CLOUDJOB_CONTROL_DIR, ""),
        delivered_dir=environ.get(names.CLOUDJOB_DELIVERED, ""),
        stall_s=reader.seconds(names.CLOUDJOB_STALL_S, DEFAULT_STALL_S),
        ssh_key=environ.get(names.CLOUDJOB_SSH_KEY, ""),
        sshd_port=reader.port(names.SSHD_PORT, DEFAULT_SSHD_PORT),
        env_names=reader.names(names.CLOUDJOB_ENV_NAMES),
        secret_names=reader.names(names.CLOUDJOB_SECRET_NAMES),
        inputs=reader.pairs(names.CLOUDJOB_INPUTS),
        input_nodes=reader.lists(names.CLOUDJOB_INPUT_NODES),
        outputs=reader.pairs(names.CLOUDJOB_OUTPUTS),
        restore_outputs=reader.choice(names.CLOUDJOB_RESTORE_OUTPUTS, RESTORE_CHOICES),
        output_sync_s=reader.seconds(names.CLOUDJOB_OUTPUT_SYNC_S, DEFAULT_OUTPUT_SYNC_S),
        output_limit_s=reader.seconds(names.CLOUDJOB_OUTPUT_LIMIT_S, DEFAULT_OUTPUT_LIMIT_S),
        grace_s=reader.seconds(names.CLOUDJOB_GRACE_S, DEFAULT_GRACE_S),
        timeout_s=reader.seconds(names.CLOUDJOB_TIMEOUT_S, 0.0),
        start_timeout_s=reader.seconds(names.CLOUDJOB_START_TIMEOUT_S, DEFAULT_START_TIMEOUT_S),
        min_nodes=reader.nodes(names.CLOUDJOB_MIN_NODES, len(hosts)),
        preflight=reader.choice(names.CLOUDJOB_PREFLIGHT, preflight_levels.LEVELS),
        hang_action=reader.choice(names.CLOUDJOB_HANG_ACTION, ACTIONS),
        hang_after_s=reader.seconds(names.CLOUDJOB_HANG_AFTER_S, DEFAULT_HANG_AFTER_S),
        hang_scale=reader.factor(names.CLOUDJOB_HANG_SCALE),
        first_version=environ.get(names.CLOUDJOB_FIRST_VERSION, "") == "1",
        open_mpi=OpenMpi(
            np=reader.ranks(names.OPENMPI_NP),
            host_file=reader.path(names.OPENMPI_HOST_FILE_PATH),
            tune_file=reader.path(names.TUNE_ENV_FILE),
            bind_args=environ.get(names.OPENMPI_BIND_ARGS),
            x_args=environ.get(names.OPENMPI_X_ARGS),
            mca_args=environ.get(names.OPENMPI_MCA_ARGS),
            extra_args=environ.get(names.OPENMPI_EXTRA_ARGS),
        ),
        mindspore=MindSpore(
            device_target=environ.get(names.CLOUDJOB_DEVICE_TARGET, ""),
            parallel_mode=environ.get(names.CLOUDJOB_PARALLEL_MODE, ""),
            search_mode=environ.get(names.CLOUDJOB_SEARCH_MODE, ""),
            devices=reader.devices(names.CLOUDJOB_DEVICES),
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
        """Return the number of slots of this node: the given number, or one for each device."""
        devices = [self.first_number((name,), 0) for name in (names.MA_NUM_GPUS, names.MA_NUM_NPUS)]
        return self.first_number((names.CLOUDJOB_PROCS_PER_NODE,), max(devices)) or 1

    def first_number(self, variables: tuple[str, ...], default: int) -> int:
        """Return the first of ``variables`` that is set and not empty, as a whole number."""
        for name in variables:
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
        problem_count = len(self.problems)
        number = self.first_number((name,), 0)
        if number or not self.environ.get(name):
            return number or None
        if len(self.problems) == problem_count:
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

    def factor(self, name: str) -> float:
        """Return ``name`` as a factor that is neither tiny nor huge; 1 if it is not set."""
        value = self.seconds(name, 1.0)
        if not 0.001 <= value <= 1000:
            self.problems.append(f"{name}={value:g} is not a number from 0.001 to 1000")
            return 1.0
        return value

    def job(self) -> str:
        """Return the job's id, which is used in paths and shell commands."""
        for name in (names.CLOUDJOB_JOB, names.MA_VJ_NAME):
            text = self.environ.get(name, "")
            if text and not _is_host(text):
                self.problems.append(f"{name}={_shown(text)!r} is not a job id")
            elif text:
                return text
        return "job"

    def names(self, name: str) -> tuple[str, ...]:
        """Return ``name`` as a list of variable names."""
        return self._names(name, tuple(self.environ.get(name, "").split()))

    def _names(self, name: str, variables: tuple[str, ...]) -> tuple[str, ...]:
        for variable in variables:
            if not is_name(variable):
                self.problems.append(f"{name}: {_shown(variable)!r} is not a variable name")
        return variables

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
        listed = self.environ.get(names.VC_WORKER_HOSTS, "")
        count = self.first_number((names.MA_NUM_HOSTS, names.VC_WORKER_NUM), 0)
        if listed:
            return self._listed_hosts(listed, count)
        if count <= 1:
            return ("localhost",)
        job = self.environ.get(names.MA_VJ_NAME, "")
        if not job or count > 100000:
            self.problems.append(
                "%d nodes, but neither %s nor %s gives their names"
                % (count, names.VC_WORKER_HOSTS, names.MA_VJ_NAME)
            )
            return ("localhost",)
        task = self.environ.get(names.MA_TASK_NAME) or "worker"
        if not _is_host(f"{job}-{task}"):
            self.problems.append(
                f"{names.MA_VJ_NAME}={_shown(job)!r} and {names.MA_TASK_NAME}={_shown(task)!r}"
                " do not form a host name"
            )
        return tuple("%s-%s-%d.%s" % (job, task, i, job) for i in range(count))

    def _listed_hosts(self, listed: str, count: int) -> tuple[str, ...]:
        hosts = tuple(host.strip() for host in listed.split(","))
        if any(not _is_host(host) for host in hosts):
            self.problems.append(
                f"{names.VC_WORKER_HOSTS}={_shown(listed)!r} is not a list of hosts"
            )
        if len(set(hosts)) != len(hosts):
            self.problems.append(f"{names.VC_WORKER_HOSTS} names a host twice")
        if count and count != len(hosts):
            self.problems.append(
                "%s lists %d hosts, but there should be %d"
                % (names.VC_WORKER_HOSTS, len(hosts), count)
            )
        return hosts


def _is_host(text: str) -> bool:
    # A leading dash would be an option of ssh; spaces and ":" would break the host file.
    return re.match(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\Z", text) is not None


def _shown(text: str) -> str:
    return text if len(text) <= 80 else text[:80] + "…"


def _pairs_text(pairs: tuple[tuple[str, str], ...]) -> str:
    return json.dumps(dict(pairs)) if pairs else ""


def _unless(default: object, value: object) -> str:
    """Return ``value`` as text, or "" for the default, so that ranks get fewer variables."""
    return "" if value == default else str(value)


def _open_mpi_text(open_mpi: OpenMpi) -> dict[str, str]:
    text = {
        names.OPENMPI_BIND_ARGS: open_mpi.bind_args,
        names.OPENMPI_X_ARGS: open_mpi.x_args,
        names.OPENMPI_MCA_ARGS: open_mpi.mca_args,
        names.OPENMPI_EXTRA_ARGS: open_mpi.extra_args,
        names.OPENMPI_NP: None if open_mpi.np is None else str(open_mpi.np),
    }
    return {name: value for name, value in text.items() if value is not None}
