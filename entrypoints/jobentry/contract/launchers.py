"""The table of launchers by name, with what each needs from the submission and the nodes."""

from __future__ import annotations

import re
from typing import Mapping, NamedTuple

from jobentry.contract import names


class Launcher(NamedTuple):
    """The properties of a launcher.

    Args:
        help: A short description.
        location: Its function, as ``module:name`` in ``jobentry.launchers``.
        needs_mpi: Whether mpirun on the head starts the ranks; otherwise each node starts its own.
        needs_sshd: Whether the command may use ssh between nodes, so that each runs an sshd.
        is_one_a_node: Whether each node has exactly one rank, however many slots it has.
        takes_command: Whether the script is any command rather than a file of the source.
        module: The module that the nodes' interpreter must be able to import; may be empty.
        devices: The device targets that it supports; empty for all.
        alternative: The launcher to use for other device targets.
    """

    help: str
    location: str
    needs_mpi: bool = False
    needs_sshd: bool = False
    is_one_a_node: bool = False
    takes_command: bool = False
    module: str = ""
    devices: tuple[str, ...] = ()
    alternative: str = ""


# The launcher if the job names none and nothing suggests another.
DEFAULT = "mpirun"
# Lets the laptop choose; the entry always gets a name from the table.
AUTO = "auto"

LAUNCHERS: Mapping[str, Launcher] = {
    "mpirun": Launcher("Open MPI's mpirun on the head", "mpirun:launch", needs_mpi=True),
    "srun": Launcher("Slurm's srun with PMIx on the head, in a job of Slurm", "srun:launch"),
    "horovod": Launcher(
        "Horovod under Open MPI's mpirun", "horovod:mpi", needs_mpi=True, module="horovod"
    ),
    "horovod-gloo": Launcher(
        "Horovod over Gloo, without any MPI", "horovod:gloo", module="horovod"
    ),
    "torchrun": Launcher(
        "PyTorch's torchrun on every node, meeting at the head", "torchrun:launch", module="torch"
    ),
    "msrun": Launcher("MindSpore's msrun on every node", "mindspore:msrun", module="mindspore"),
    "dynamic-cluster": Launcher(
        "MindSpore's dynamic cluster, without msrun",
        "mindspore:dynamic_cluster",
        module="mindspore",
    ),
    "mindspore-mpi": Launcher(
        "MindSpore under Open MPI's mpirun", "mindspore:mpi", needs_mpi=True, module="mindspore"
    ),
    "rank-table": Launcher(
        "one process per device, with a rank table",
        "rank_table:launch",
        devices=("Ascend",),
        alternative="msrun",
    ),
    "pytorch-modelarts": Launcher(
        "one process per node, with --init_method, --rank and --world_size",
        "every_node:pytorch_modelarts",
        is_one_a_node=True,
    ),
    "tensorflow": Launcher(
        "one process per node, with TF_CONFIG", "every_node:tensorflow", is_one_a_node=True
    ),
    "tensorflow-ps": Launcher(
        "one worker and one parameter server per node",
        "every_node:tensorflow_ps",
        is_one_a_node=True,
    ),
    "python": Launcher(
        "the script once on every node, unchanged", "every_node:python", is_one_a_node=True
    ),
    # The command may be anything, including an mpirun that needs ssh.
    "command": Launcher(
        "any command once on every node",
        "every_node:command",
        needs_sshd=True,
        is_one_a_node=True,
        takes_command=True,
    ),
}

# Endings of Open MPI's remote shell parameters: plm_rsh_…, plm_ssh_… or orte_rsh_….
_SSH_SUFFIXES = ("sh_agent", "sh_args")
_YES = ("true", "1", "yes")


def needs_sshd(launcher: str, environ: Mapping[str, str]) -> bool:
    """Whether the nodes of a job need ssh between them.

    mpirun's daemons start over the control connection, unless the job's variables ``environ``
    configure the remote shell or enable tree spawn, in which daemons start each other.
    """
    kind = LAUNCHERS.get(launcher)
    if kind is None or kind.needs_sshd:
        return True
    return kind.needs_mpi and asks_for_ssh(environ)


def asks_for_ssh(environ: Mapping[str, str]) -> bool:
    """Whether the variables of a job configure mpirun's remote shell."""
    if any(name.endswith(_SSH_SUFFIXES) and "_MCA_" in name for name in environ):
        return True
    texts = (environ.get(name, "") for name in (names.OPENMPI_MCA_ARGS, names.OPENMPI_EXTRA_ARGS))
    # Quotes may be around a word or around a whole value.
    arguments = re.sub("[\"']", " ", " ".join(texts)).split()
    pairs = zip(arguments, [*arguments[1:], ""])
    return any(
        name.endswith(_SSH_SUFFIXES) or (name.endswith("_no_tree_spawn") and value not in _YES)
        for name, value in pairs
    )


OPEN_MPI = "Open MPI"
INTEL_MPI = "Intel MPI"
# Family, pattern of the version, and the oldest and the newest supported version.
_FAMILIES = (
    (OPEN_MPI, r"\(Open MPI\) (\d+)\.(\d+)", (4, 0), (5, 0)),
    ("MPICH", r"HYDRA build details:\s+Version:\s+(\d+)\.(\d+)", (3, 2), (5, 99)),
    (INTEL_MPI, r"Intel\(R\) MPI Library .*Version (\d+)\.(\d+)", (2019, 0), (2099, 0)),
)


class MpiVersion(NamedTuple):
    """The family and version of an mpirun, and whether cloudjob supports it."""

    family: str
    version: tuple[int, int]
    is_supported: bool


def parse_mpi_version(text: str) -> MpiVersion | None:
    """Parse the output of ``mpirun --version``; None for an unknown family."""
    for family, pattern, oldest, newest in _FAMILIES:
        match = re.search(pattern, text)
        if match:
            numbers = (int(match.group(1)), int(match.group(2)))
            return MpiVersion(family, numbers, oldest <= numbers <= newest)
    return None
