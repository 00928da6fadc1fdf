"""The variables, command and folders that the platform gives each node. No I/O."""

from __future__ import annotations

import json
import posixpath
import re
import shlex
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from cloudjob.emulator import models
from cloudjob.emulator.database import JobRow
from cloudjob.emulator.models import HOME, Algorithm, Channel
from cloudjob.emulator.settings import Settings
from jobentry.contract import first_version
from jobentry.contract.paths import with_emulated_packages
from jobentry.contract.sigv4 import Keys

CACHE, WORK = "/cache", "/home/work"
# The folder with the rank table, which only nodes with Ascends have, and the table's name.
CONFIG, RANK_TABLE = "/user/config", "jobstart_hccl.json"
# The folders that every node has from the start.
FOLDERS = tuple(f"{HOME}/modelarts/{name}" for name in ("inputs", "outputs", "log", "user-job-dir"))
# Paths of the same folders in other versions of the platform.
ALIASES = {
    f"{HOME}/user-job-dir": f"{HOME}/modelarts/user-job-dir",
    f"{WORK}/user-job-dir": f"{HOME}/modelarts/user-job-dir",
    f"{WORK}/modelarts": f"{HOME}/modelarts",
}
# The launchers that match the presets of these engines; other presets start one process per node.
_LAUNCHERS = {
    **dict.fromkeys(("MPI", "Horovod"), "mpirun"),
    **dict.fromkeys(("MindSpore", "Ascend-Powered-Engine"), "rank-table"),
}
# The values of MA_RUN_METHOD that replace one process for each device of a rank table.
_RUN_METHODS = ("torchrun", "msrun")
# The first port of PyTorch presets and the number of ports: jobs in processes share the ports of
# this machine. Scripts use the last four characters of the address as the port.
_PORTS = (6060, 900)
_PRE_START = "ma-pre-start"
# Sources $0 and, if it succeeds, runs the command in the same shell, which has its exports.
_AFTER_SHELL = (
    'ma_command=("$@"); set --; ma_folder=$PWD; '
    'ma_run() { [ "$1" = 0 ] || exit "$1"; trap - EXIT; '
    'cd "$ma_folder"; exec "${ma_command[@]}"; }; '
    """trap 'ma_run $?' EXIT; . "$0"; ma_run $?"""
)
_AFTER_PYTHON = (
    "import os, runpy, sys\n"
    "folder, argv = os.getcwd(), sys.argv[2:]\n"
    "del sys.argv[0], sys.argv[1:]\n"
    "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    "except SystemExit as end:\n"
    "    if end.code: raise\n"
    "sys.stdout.flush(); os.chdir(folder); os.execvp(argv[0], argv)\n"
)


@dataclass(frozen=True, slots=True)
class NodeContext:
    """The paths and programs of an emulated node.

    Args:
        root: The root folder of a node that has no file system of its own; empty for others.
        python: The interpreter of presets.
        entry: The command that runs a script under mpirun on all nodes, for the MPI presets.
        endpoint: The address of OBS, as seen from a node.
        api: The address of the API, as seen from a node.
        first_version: Whether presets start in the folder of the platform's first version.
        archive: The entry's archive, or the folder of the unpacked one, on a node.
    """

    root: str
    python: str
    entry: tuple[str, ...]
    endpoint: str
    api: str = ""
    archive: str = "/opt/modelarts/jobentry.pyz"
    first_version: bool = False


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of a node that is downloaded from OBS or uploaded to it.

    Args:
        kind: ``code``, ``input`` or ``output``.
        path: Its path on the node, in the platform's layout.
        url: Its URL in OBS.
    """

    kind: str
    name: str
    path: str
    url: str


def names(row: JobRow) -> tuple[str, ...]:
    """Return the host names of the nodes."""
    job = f"modelarts-job-{row.id}"
    return tuple(f"{job}-worker-{index}.{job}" for index in range(row.nodes))


def aliases(row: JobRow, index: int) -> tuple[str, ...]:
    """Return all host names of a node: the platform's documents mention two."""
    aliases_of_nodes = []
    for job in (f"modelarts-job-{row.id}", f"ma-job-{row.id}"):
        aliases_of_nodes += [f"{job}-worker-{index}.{job}", f"{job}-worker-{index}"]
    return tuple(aliases_of_nodes)


def folders(row: JobRow) -> list[Folder]:
    """Return the folders of a node."""
    algorithm = row.body.algorithm
    places = []
    if algorithm.code_dir:
        places.append(Folder("code", "code", code_path(algorithm), algorithm.code_dir))
    for kind, channels in (("input", algorithm.inputs), ("output", algorithm.outputs)):
        places += [Folder(kind, item.name, item.local_dir, item.url) for item in channels]
    return places


def code_path(algorithm: Algorithm) -> str:
    """Return the folder of the code on a node."""
    if algorithm.local_code_dir:
        return algorithm.local_code_dir
    last = models.place(algorithm.code_dir).key.rstrip("/").rpartition("/")[2]
    return f"{HOME}/modelarts/user-job-dir/{last}".rstrip("/")


def environment(
    row: JobRow, index: int, address: str, context: NodeContext, settings: Settings, keys: Keys
) -> dict[str, str]:
    """Return the variables of a node; the user's values override the platform's.

    Args:
        keys: The job's keys for OBS.
    """
    algorithm = row.body.algorithm
    hosts = names(row)
    flavor = row.body.flavor(settings)
    mount = f"{HOME}/modelarts"
    instance = hosts[index].partition(".")[0]
    platform = {
        "MA_HOME": HOME,
        "HOME": HOME,
        "MA_MOUNT_PATH": mount,
        "MA_JOB_DIR": f"{mount}/user-job-dir",
        "MA_LOG_DIR": f"{mount}/log",
        # For a code directory named "code", the documents show ".../code".
        "WORKSPACE": _workspace(algorithm),
        "MA_CURRENT_IP": address,
        "MA_CURRENT_HOST_IP": address,
        "MA_CURRENT_INSTANCE_NAME": instance,
        "POD_NAME": instance,
        "HOSTNAME": instance,
        "MA_NUM_GPUS": str(flavor.cards),
        "MA_NUM_HOSTS": str(row.nodes),
        "MA_TASK_NAME": "worker",
        "MA_VJ_NAME": f"ma-job-{row.id}",
        "MA_JOB_KIND": row.kind,
        "MA_TASK_INDEX": str(index),
        # The documents say that this is usually empty.
        "MA_SCRIPT_INTERPRETER": "",
        "MA_DETECT_TRAIN_INJECT_CODE": "0",
        "MA_APIGW_ENDPOINT": context.api,
        "MA_ENGINE_VERSION": algorithm.engine.engine_version or "",
        "MA_INPUTS": _channels("inputs", algorithm.inputs),
        "MA_OUTPUTS": _channels("outputs", algorithm.outputs),
        "VC_TASK_INDEX": str(index),
        "VK_TASK_INDEX": str(index),
        "VC_WORKER_NUM": str(row.nodes),
        "VC_WORKER_HOSTS": ",".join(hosts),
        "BATCH_JOB_ID": row.id,
        "JOB_ID": row.id,
        "CACHE_HOME": CACHE,
        "PYTHONUNBUFFERED": "1",
        "S3_ENDPOINT": context.endpoint,
        "S3_VERIFY_SSL": "0",
        "S3_USE_HTTPS": "0",
        "ACCESS_KEY_ID": keys.access_key,
        "SECRET_ACCESS_KEY": keys.secret_key,
        "SECURITY_TOKEN": keys.token,
    }
    if flavor.kind == "Ascend":
        platform["MA_NUM_NPUS"] = str(flavor.cards)
        if _launcher(algorithm) not in _RUN_METHODS:
            platform["RANK_TABLE_FILE"] = CONFIG
    elif flavor.cards:
        platform.update(
            NCCL_VERSION="2.7.8",
            NCCL_DEBUG="INFO",
            NCCL_IB_HCA="^mlx5_bond_0",
            NCCL_SOCKET_IFNAME="bond0,eth0",
        )
    if settings.pip_url:
        platform["MA_PIP_URL"] = settings.pip_url
        platform["MA_PIP_HOST"] = urlsplit(settings.pip_url).hostname or ""
    if settings.first_version:
        platform.update(first_version.variables_of(platform))
        platform.update(first_version.variables(index, hosts, _addresses(algorithm)))
    by_env = {
        item.name: item.local_dir for item in algorithm.channels if item.access_method == "env"
    }
    launcher = _launcher(algorithm)
    led = {"CLOUDJOB_LAUNCHER": launcher} if launcher else {}
    if launcher == "rank-table":
        led["CLOUDJOB_DEVICES"] = _devices(row.nodes, max(1, flavor.cards))
    return {
        name: replace_paths(value, row, context)
        for name, value in {**platform, **led, **by_env, **algorithm.environments}.items()
    }


def start(row: JobRow, index: int, context: NodeContext) -> str:
    """Return the shell command of a node, preceded by a PYTHONPATH with the platform's packages.

    The shell extends the variable, because an image may have a PYTHONPATH of its own.
    """
    algorithm = row.body.algorithm
    code = replace_paths(code_path(algorithm), row, context) if algorithm.boot_file else ""
    path = shlex.quote(with_emulated_packages(code, context.archive))
    text = f"PYTHONPATH=${{PYTHONPATH:+$PYTHONPATH:}}{path}; export PYTHONPATH"
    return f"{text}; {command(row, index, context)}"


def becoming(variable: str) -> str:
    """Return the text of a shell that becomes the last command of the text in a variable.

    SIGTERM is for that command: as the first process of a container, a shell above it keeps the
    signal, and as any other it ends, and all processes of the node with it. dash would stay.
    """
    return f'bash=$(command -v bash) || bash=/bin/sh; exec "$bash" -c "${variable}"'


def command(row: JobRow, index: int, context: NodeContext) -> str:
    """Return the shell command of a node: the user's, with the arguments the platform appends."""
    algorithm = row.body.algorithm
    arguments = shlex.join(_appended(algorithm))
    if not algorithm.boot_file:
        text = f"{algorithm.command.rstrip()} {arguments}".rstrip()
        if algorithm.working_dir:
            text = f"cd {shlex.quote(algorithm.working_dir)} && {text}"
        return replace_paths(text, row, context)
    return replace_paths(_preset(row, index, context, arguments), row, context)


def replace_paths(text: str, row: JobRow, context: NodeContext) -> str:
    """Return ``text`` with the platform's paths replaced by paths on this machine."""
    if not context.root:
        return text
    for path in sorted(_roots(row), key=len, reverse=True):
        new = on_machine(context.root, path).replace("\\", r"\\")
        text = re.sub(rf"(?<![\w./-]){re.escape(path)}(?![\w.-])", new, text)
    return text


def on_machine(root: str, path: str) -> str:
    """Return the path on this machine for a path of a node, never outside the node's root."""
    return root + normal(path)


def normal(path: str) -> str:
    """Return a path without ``.``, ``..`` and doubled slashes; ``..`` cannot leave the root."""
    return posixpath.normpath("/" + path.lstrip("/"))


def mounts(row: JobRow) -> dict[str, str]:
    """Return the mounts of a container as target -> path of its node; none is inside another."""
    roots = [f"{HOME}/modelarts", CACHE, WORK, *(item.path for item in folders(row))]
    kept: list[str] = []
    for path in sorted(map(normal, roots)):
        if not any(path == other or path.startswith(other + "/") for other in kept):
            kept.append(path)
    return {**{path: path for path in kept}, **ALIASES}


def has_rank_table(row: JobRow, settings: Settings) -> bool:
    """Whether the platform writes a rank table for the nodes of a job."""
    return row.body.flavor(settings).kind == "Ascend"


def rank_table(row: JobRow, addresses: Sequence[str], settings: Settings) -> str:
    """Return the platform's rank table, version 0.1.

    Args:
        addresses: The address of each node; empty while they are not known.
    """
    cards = row.body.flavor(settings).cards
    instances = [
        {
            "pod_name": host.partition(".")[0],
            "server_id": address,
            "devices": [
                {"device_id": str(card), "device_ip": _device_address(node, card)}
                for card in range(cards)
            ],
        }
        for node, (host, address) in enumerate(zip(names(row), addresses, strict=False))
    ]
    group = {
        "group_name": "worker",
        "device_count": str(cards * row.nodes),
        "instance_count": str(row.nodes),
        "instance_list": instances,
    }
    status = "completed" if addresses else "initializing"
    return json.dumps({"status": status, "group_count": "1", "group_list": [group]})


def is_led_by_entry(row: JobRow) -> bool:
    """Whether cloudjob's entry starts the ranks, in place of the platform's own start script."""
    return bool(_launcher(row.body.algorithm))


# -- parts ----------------------------------------------------------------------------------------


def _workspace(algorithm: Algorithm) -> str:
    if algorithm.code_dir:
        return code_path(algorithm)
    return f"{HOME}/modelarts/user-job-dir"


def _roots(row: JobRow) -> list[str]:
    """Return the platform's paths to replace in a text."""
    outside_home = [item.path for item in folders(row) if not item.path.startswith(HOME + "/")]
    return [HOME, CACHE, WORK, CONFIG, *map(normal, outside_home)]


def _appended(algorithm: Algorithm) -> Iterable[str]:
    for parameter in algorithm.parameters:
        yield f"--{parameter.name}={parameter.value}"
    for channel in algorithm.channels:
        if channel.access_method == "parameter":
            yield f"--{channel.name}={channel.local_dir}"


def _preset(row: JobRow, index: int, context: NodeContext, arguments: str) -> str:
    algorithm = row.body.algorithm
    code = models.place(algorithm.code_dir)
    boot = models.place(algorithm.boot_file).key[len(code.prefix) :]
    folder = code_path(algorithm)
    script = shlex.quote(f"{folder}/{boot}")
    if _launcher(algorithm):
        run = f"{shlex.join(context.entry)} {script} {arguments}"
    else:
        run = f"{shlex.quote(context.python)} {script} {_ranks(row, index)}{arguments}"
    hooks = _hooks(boot, context)
    if context.first_version:
        # Its scripts started in this folder; hooks and requirements are in that of the code.
        run = f"""sh -c 'cd {WORK} && exec "$@"' sh {run}"""
    start = f'set -- {run.rstrip()}; {hooks}exec "$@"'
    return f"cd {shlex.quote(folder)} && {{ {_requirements(context)}; {start}; }}"


def _hooks(boot: str, context: NodeContext) -> str:
    """Return the shell code that runs existing hooks before the command."""
    boot_folder = posixpath.dirname(boot)
    folders = shlex.join([f"./{boot_folder}", "."] if boot_folder else ["."])
    kinds = ((".py", context.python, _AFTER_PYTHON), (".sh", "bash", _AFTER_SHELL))
    return "".join(
        f"for hook in {folders}; do hook=$hook/{_PRE_START}{suffix}; "
        f'if [ -f "$hook" ]; then '
        f'set -- {shlex.quote(program)} -c {shlex.quote(text)} "$hook" "$@"; break; fi; done; '
        for suffix, program, text in kinds
    )


def _requirements(context: NodeContext) -> str:
    """Return the shell code that installs the requirements of the code folder, if it has any."""
    install = f"{shlex.quote(context.python)} -m pip install -r $list || exit"
    if context.root:
        # An installation would change the interpreter of this machine.
        install = 'echo "not installed, as nodes share the files of this machine: $list" >&2'
    names = " ".join(f"{prefix}requirement{s}.txt" for prefix in ("pip-", "") for s in ("s", ""))
    return f"for list in {names}; do if [ -f $list ]; then {install}; break; fi; done"


def _ranks(row: JobRow, index: int) -> str:
    """Return the options that the PyTorch preset adds on several nodes."""
    algorithm = row.body.algorithm
    if row.nodes == 1 or algorithm.engine.engine_name != "PyTorch":
        return ""
    parameter_names = {item.name for item in algorithm.parameters}
    port = _PORTS[0] + zlib.crc32(row.id.encode()) % _PORTS[1]
    options = {
        "init_method": f"tcp://{names(row)[0]}:{port}",
        "rank": str(index),
        "world_size": str(row.nodes),
    }
    return "".join(
        f"--{name}={value} " for name, value in options.items() if name not in parameter_names
    )


def _launcher(algorithm: Algorithm) -> str:
    """Return the entry's launcher for a preset; empty if the platform starts the boot file."""
    if not algorithm.boot_file:
        return ""
    launcher = _LAUNCHERS.get(algorithm.engine.engine_name or "", "")
    method = algorithm.environments.get("MA_RUN_METHOD", "")
    return method if launcher == "rank-table" and method in _RUN_METHODS else launcher


def _devices(nodes: int, cards: int) -> str:
    """Return made-up addresses of devices, which are used only in a rank table."""
    return "\n".join(
        " ".join(
            [
                f"192.168.0.{node + 1}",
                *(f"{card}={_device_address(node, card)}" for card in range(cards)),
            ]
        )
        for node in range(nodes)
    )


def _device_address(node: int, card: int) -> str:
    return f"192.168.{card + 1}.{node + 1}"


def _addresses(algorithm: Algorithm) -> dict[str, str]:
    """Return the OBS addresses of channels and parameters, by name."""
    address_of = {item.name: item.value for item in algorithm.parameters}
    return {**address_of, **{item.name: _address(item) for item in algorithm.channels}}


def _address(channel: Channel) -> str:
    return f"s3://{channel.place.bucket}/{channel.place.key}"


def _channels(key: str, channels: Iterable[Channel]) -> str:
    urls = [
        {
            "name": item.name,
            "local_dir": item.local_dir,
            "remote": {"obs": {"obs_url": _address(item)}},
        }
        for item in channels
    ]
    return json.dumps({key: urls})


def image(row: JobRow, settings: Settings) -> str:
    """Return the image in which the nodes of a job run.

    Raises:
        ServiceRefusal: The settings no longer have the engine of the job.
    """
    choice = row.body.algorithm.engine
    engine = choice.preset(settings)
    return str(choice.image_url or (engine.image if engine else settings.image))
