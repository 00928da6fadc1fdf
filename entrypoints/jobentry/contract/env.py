"""The environment of a node: the laptop or the platform writes it, the entry reads it.

Every backend sets the variables that ModelArts sets in a training container, and ``CLOUDJOB_*``
variables for everything that ModelArts has no variable for.
"""

from __future__ import annotations

import json
import re
from typing import Any, Callable, Mapping, NamedTuple, Tuple

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
# A mapping of texts.
_Pairs = Tuple[Tuple[str, str], ...]


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
        control_dir: The folder in which nodes on one machine announce their addresses; empty for
            nodes that are reached by host name.
        delivered_dir: The folder of files that the backend put into this container.
        first_version: Whether ranks get the variables of the platform's first version as well.
        stall_s: Seconds for which the connection between head and workers may be silent.
        preflight: How much to check before the ranks start: one of ``preflight_levels.LEVELS``.
        hang_action: What to do with a job that hangs: one of ``hang_actions.ACTIONS``.
        hang_after_s: How many seconds after the report of the hang to end the job.
        hang_scale: A factor for the times after which a job counts as hung.
        ends_together: Whether workers wait for the job's final exit code, and end with it.
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
    preflight: str = preflight_levels.QUICK
    hang_action: str = WARN
    hang_after_s: float = DEFAULT_HANG_AFTER_S
    hang_scale: float = 1.0
    first_version: bool = False
    ends_together: bool = False
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
    """Return the variables from which ``read`` restores ``node``.

    A setting that is left at its default has no variable, so that ranks get fewer.
    """
    text = {
        names.CLOUDJOB_JOB: node.job,
        names.VC_TASK_INDEX: str(node.node),
        names.VK_TASK_INDEX: str(node.node),
        names.VC_WORKER_HOSTS: ",".join(node.hosts),
        names.VC_WORKER_NUM: str(node.nodes),
        names.MA_NUM_HOSTS: str(node.nodes),
    }
    if node.slots:
        # Without it, the node counts its devices.
        text[names.CLOUDJOB_PROCS_PER_NODE] = str(node.slots)
    for part in (node, node.open_mpi, node.mindspore):
        for field, (name, form) in _SETTINGS[type(part)].items():
            value = getattr(part, field)
            if field in _ALWAYS or value != part._field_defaults[field]:
                text[name] = form.text(value)
    return text


def read(environ: Mapping[str, str]) -> NodeEnv:
    """Return the settings of this node from its environment.

    Raises:
        EnvError: Variables are invalid; lists all of them, not only the first.
    """
    reader = _Reader(environ)
    hosts = reader.all_hosts()
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
        **reader.settings(NodeEnv),
        open_mpi=OpenMpi(**reader.settings(OpenMpi)),
        mindspore=MindSpore(**reader.settings(MindSpore)),
    )
    if reader.problems:
        raise EnvError(reader.problems)
    return result


class _Reader:
    """Reads variables and collects the errors in them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.problems: list[str] = []

    def settings(self, part: Any) -> dict[str, Any]:
        """Return the settings of ``NodeEnv`` or of a part of it, by field."""
        return {
            field: form.read(self, name, part._field_defaults[field])
            for field, (name, form) in _SETTINGS[part].items()
        }

    def text(self, name: str, default: str | None) -> str | None:
        """Return ``name`` as it is, even if it is empty."""
        return self.environ.get(name, default)

    def word(self, name: str, default: str) -> str:
        """Return ``name`` as it is, unless it is empty."""
        return self.environ.get(name) or default

    def flag(self, name: str, _default: bool) -> bool:
        """Whether ``name`` is 1."""
        return self.environ.get(name) == "1"

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

    def ranks(self, name: str, _default: None) -> int | None:
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

    def path(self, name: str, default: str) -> str:
        """Return ``name`` as the absolute path of a file, as mpirun runs in another folder."""
        text = self.environ.get(name, default)
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

    def factor(self, name: str, default: float) -> float:
        """Return ``name`` as a factor that is neither tiny nor huge."""
        value = self.seconds(name, default)
        if not 0.001 <= value <= 1000:
            self.problems.append(f"{name}={value:g} is not a number from 0.001 to 1000")
            return default
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

    def names(self, name: str, _default: tuple[str, ...]) -> tuple[str, ...]:
        """Return ``name`` as a list of variable names."""
        return self._names(name, tuple(self.environ.get(name, "").split()))

    def _names(self, name: str, variables: tuple[str, ...]) -> tuple[str, ...]:
        for variable in variables:
            if not is_name(variable):
                self.problems.append(f"{name}: {_shown(variable)!r} is not a variable name")
        return variables

    def pairs(self, name: str, default: _Pairs) -> _Pairs:
        """Return ``name`` as a JSON object of strings whose keys are variable names."""
        text = self.environ.get(name, "")
        if not text:
            return default
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
            self.problems.append(f"{name}={_shown(text)!r} is not a JSON object of strings")
            return ()
        self._names(name, tuple(value))
        return tuple(value.items())

    def lists(self, name: str, default: _Pairs) -> _Pairs:
        """Return ``name`` as a JSON object whose values are lists of nodes."""
        pairs = self.pairs(name, default)
        for key, text in pairs:
            if not is_list(text):
                self.problems.append(f"{name}: {key}: {_shown(text)!r} is not a list of nodes")
        return pairs

    def choice(self, name: str, default: str, allowed: tuple[str, ...]) -> str:
        """Return ``name`` as one of the allowed values."""
        text = self.environ.get(name) or default
        if text not in allowed:
            values = ", ".join(allowed)
            self.problems.append(f"{name}={_shown(text)!r} is not valid (allowed: {values})")
        return text

    def devices(self, name: str, _default: tuple[str, ...]) -> tuple[str, ...]:
        """Return ``name`` as the devices of each node."""
        lines = tuple(self.environ.get(name, "").splitlines())
        for line in lines:
            try:
                devices.parse(line)
            except ValueError as error:
                self.problems.append(f"{name}: {_shown(line)!r} {error}")
        return lines

    def all_hosts(self) -> tuple[str, ...]:
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


class _Form(NamedTuple):
    """How a setting is read from its variable, and written as text.

    Args:
        read: Called with the reader, the name of the variable and the default.
    """

    read: Callable[[_Reader, str, Any], Any]
    text: Callable[[Any], str] = str


def _one_of(*allowed: str) -> _Form:
    return _Form(lambda reader, name, default: reader.choice(name, default, allowed))


def _json_of(pairs: _Pairs) -> str:
    return json.dumps(dict(pairs))


_TEXT, _WORD = _Form(_Reader.text), _Form(_Reader.word)
_PATH, _PORT = _Form(_Reader.path), _Form(_Reader.port)
_RANKS = _Form(_Reader.ranks)
_SECONDS, _FACTOR = _Form(_Reader.seconds, repr), _Form(_Reader.factor, repr)
_FLAG = _Form(_Reader.flag, lambda _value: "1")
_NAMES = _Form(_Reader.names, " ".join)
_PAIRS, _LISTS = _Form(_Reader.pairs, _json_of), _Form(_Reader.lists, _json_of)
_DEVICES = _Form(_Reader.devices, "\n".join)


# The fields with one variable each; ``read`` reads the job, its hosts and slots from several.
_SETTINGS: Mapping[type, Mapping[str, tuple[str, _Form]]] = {
    NodeEnv: {
        "launcher": (names.CLOUDJOB_LAUNCHER, _WORD),
        "interpreter": (names.MA_SCRIPT_INTERPRETER, _WORD),
        "code_uri": (names.CLOUDJOB_CODE_URI, _WORD),
        "code_digest": (names.CLOUDJOB_CODE_DIGEST, _WORD),
        "record_uri": (names.CLOUDJOB_RECORD_URI, _WORD),
        "node_dir": (names.CLOUDJOB_NODE_DIR, _WORD),
        "control_dir": (names.CLOUDJOB_CONTROL_DIR, _WORD),
        "delivered_dir": (names.CLOUDJOB_DELIVERED, _WORD),
        "stall_s": (names.CLOUDJOB_STALL_S, _SECONDS),
        "ssh_key": (names.CLOUDJOB_SSH_KEY, _WORD),
        "sshd_port": (names.SSHD_PORT, _PORT),
        "env_names": (names.CLOUDJOB_ENV_NAMES, _NAMES),
        "secret_names": (names.CLOUDJOB_SECRET_NAMES, _NAMES),
        "inputs": (names.CLOUDJOB_INPUTS, _PAIRS),
        "input_nodes": (names.CLOUDJOB_INPUT_NODES, _LISTS),
        "outputs": (names.CLOUDJOB_OUTPUTS, _PAIRS),
        "restore_outputs": (names.CLOUDJOB_RESTORE_OUTPUTS, _one_of(*RESTORE_CHOICES)),
        "output_sync_s": (names.CLOUDJOB_OUTPUT_SYNC_S, _SECONDS),
        "output_limit_s": (names.CLOUDJOB_OUTPUT_LIMIT_S, _SECONDS),
        "grace_s": (names.CLOUDJOB_GRACE_S, _SECONDS),
        "timeout_s": (names.CLOUDJOB_TIMEOUT_S, _SECONDS),
        "start_timeout_s": (names.CLOUDJOB_START_TIMEOUT_S, _SECONDS),
        "preflight": (names.CLOUDJOB_PREFLIGHT, _one_of(*preflight_levels.LEVELS)),
        "hang_action": (names.CLOUDJOB_HANG_ACTION, _one_of(*ACTIONS)),
        "hang_after_s": (names.CLOUDJOB_HANG_AFTER_S, _SECONDS),
        "hang_scale": (names.CLOUDJOB_HANG_SCALE, _FACTOR),
        "first_version": (names.CLOUDJOB_FIRST_VERSION, _FLAG),
        "ends_together": (names.CLOUDJOB_ENDS_TOGETHER, _FLAG),
    },
    OpenMpi: {
        "np": (names.OPENMPI_NP, _RANKS),
        "host_file": (names.OPENMPI_HOST_FILE_PATH, _PATH),
        "tune_file": (names.TUNE_ENV_FILE, _PATH),
        "bind_args": (names.OPENMPI_BIND_ARGS, _TEXT),
        "x_args": (names.OPENMPI_X_ARGS, _TEXT),
        "mca_args": (names.OPENMPI_MCA_ARGS, _TEXT),
        "extra_args": (names.OPENMPI_EXTRA_ARGS, _TEXT),
    },
    MindSpore: {
        "device_target": (names.CLOUDJOB_DEVICE_TARGET, _WORD),
        "parallel_mode": (names.CLOUDJOB_PARALLEL_MODE, _WORD),
        "search_mode": (names.CLOUDJOB_SEARCH_MODE, _WORD),
        "devices": (names.CLOUDJOB_DEVICES, _DEVICES),
    },
}
# The fields whose default has a variable, too.
_ALWAYS = ("launcher", "sshd_port", "grace_s", "timeout_s", "start_timeout_s")
