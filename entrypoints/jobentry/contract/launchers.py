"""The launchers by name: what starts the ranks. The laptop checks the name, the container acts."""

from __future__ import annotations

import re
from typing import Mapping, NamedTuple

from jobentry.contract import names


class Launcher(NamedTuple):
    """What one launcher is.

    Args:
        help: What it does, in a few words.
        needs_mpi: Whether mpirun on the head starts the ranks; else each node starts its own.
        needs_sshd: Whether the command may use ssh between the nodes, so each has an sshd.
        is_one_a_node: Whether a node has one rank, whatever room there is.
        takes_command: Whether the script is any command, and not a file of the source.
        module: What the interpreter of the nodes must be able to import; empty for nothing.
        devices: The device targets that it works on; empty for any.
        instead: The launcher for the other ones.
        is_elastic: Whether nodes may come and go while the job runs.
    """

    help: str
    needs_mpi: bool = False
    needs_sshd: bool = False
    is_one_a_node: bool = False
    takes_command: bool = False
    module: str = ""
    devices: tuple[str, ...] = ()
    instead: str = ""
    is_elastic: bool = False


# What the laptop takes when the job names none and nothing suggests another.
DEFAULT = "mpirun"
# The job's word for that: the laptop looks, and the entry is always told a name of the table.
AUTO = "auto"

LAUNCHERS: Mapping[str, Launcher] = {
    "mpirun": Launcher("Open MPI's mpirun on the head", needs_mpi=True),
    "srun": Launcher("Slurm's srun with PMIx on the head, in a job of Slurm"),
    "horovod": Launcher("Horovod under Open MPI's mpirun", needs_mpi=True, module="horovod"),
    "horovod-gloo": Launcher("Horovod over Gloo, without any MPI", module="horovod"),
    "horovod-elastic": Launcher(
        "Horovod over Gloo, with nodes that may come and go",
        module="horovod",
        is_elastic=True,
    ),
    "torchrun": Launcher("PyTorch's torchrun on every node, meeting at the head", module="torch"),
    "msrun": Launcher("MindSpore's msrun on every node", module="mindspore"),
    "dynamic-cluster": Launcher("MindSpore's dynamic cluster, without msrun", module="mindspore"),
    "mindspore-mpi": Launcher(
        "MindSpore under Open MPI's mpirun", needs_mpi=True, module="mindspore"
    ),
    "rank-table": Launcher(
        "one process a device, told of all by a rank table",
        devices=("Ascend",),
        instead="msrun",
    ),
    "pytorch-modelarts": Launcher(
        "one process a node, told --init_method, --rank and --world_size", is_one_a_node=True
    ),
    "tensorflow": Launcher("one process a node, told TF_CONFIG", is_one_a_node=True),
    "tensorflow-ps": Launcher(
        "one worker a node and a parameter server beside it, told of all", is_one_a_node=True
    ),
    "python": Launcher("the script once on every node, nothing added", is_one_a_node=True),
    # What the command is nobody knows: it may be an mpirun.
    "command": Launcher(
        "any command once on every node",
        needs_sshd=True,
        is_one_a_node=True,
        takes_command=True,
    ),
}

# Parameters of Open MPI about its remote shell: plm_rsh_…, plm_ssh_… or orte_rsh_….
_OF_SSH = ("sh_agent", "sh_args")
_YES = ("true", "1", "yes")


def needs_sshd(launcher: str, environ: Mapping[str, str]) -> bool:
    """Whether the nodes of a job speak ssh with each other, with these variables of the job.

    mpirun's daemons start over the control connection, unless the job configures their remote shell
    or asks for a tree of daemons, which start each other.
    """
    known = LAUNCHERS.get(launcher)
    if known is None or known.needs_sshd:
        return True
    return known.needs_mpi and asks_for_ssh(environ)


def asks_for_ssh(environ: Mapping[str, str]) -> bool:
    """Whether variables of a job configure the remote shell of mpirun."""
    if any(name.endswith(_OF_SSH) and "_MCA_" in name for name in environ):
        return True
    given = (environ.get(name, "") for name in (names.OPENMPI_MCA_ARGS, names.OPENMPI_EXTRA_ARGS))
    words = " ".join(given).split()
    pairs = zip(words, [*words[1:], ""])
    return any(
        name.endswith(_OF_SSH) or (name.endswith("_no_tree_spawn") and value not in _YES)
        for name, value in pairs
    )


OPEN_MPI = "Open MPI"
INTEL_MPI = "Intel MPI"
# What an mpirun says of its version, and the oldest and the newest that we drive.
_FAMILIES = (
    (OPEN_MPI, r"\(Open MPI\) (\d+)\.(\d+)", (4, 0), (5, 0)),
    ("MPICH", r"HYDRA build details:\s+Version:\s+(\d+)\.(\d+)", (3, 2), (5, 99)),
    (INTEL_MPI, r"Intel\(R\) MPI Library .*Version (\d+)\.(\d+)", (2019, 0), (2099, 0)),
)


class Mpi(NamedTuple):
    """Whose an mpirun is, its version, and whether we can drive it."""

    family: str
    version: tuple[int, int]
    is_driven: bool


def mpi(text: str) -> Mpi | None:
    """Return what ``mpirun --version`` says; None for one that we do not know."""
    for family, words, oldest, newest in _FAMILIES:
        found = re.search(words, text)
        if found:
            numbers = (int(found.group(1)), int(found.group(2)))
            return Mpi(family, numbers, oldest <= numbers <= newest)
    return None
