"""The launchers by name: what starts the ranks. The laptop checks the name, the container acts."""

from __future__ import annotations

from typing import Mapping, NamedTuple


class Launcher(NamedTuple):
    """What one launcher is.

    Args:
        help: What it does, in a few words.
        needs_mpi: Whether mpirun on the head starts the ranks; else each node starts its own.
        is_one_a_node: Whether a node has one rank, whatever room there is.
        takes_command: Whether the script is any command, and not a file of the source.
    """

    help: str
    needs_mpi: bool = False
    is_one_a_node: bool = False
    takes_command: bool = False


LAUNCHERS: Mapping[str, Launcher] = {
    "mpirun": Launcher("Open MPI's mpirun on the head", needs_mpi=True),
    "srun": Launcher("Slurm's srun with PMIx on the head, in a job of Slurm"),
    "torchrun": Launcher("PyTorch's torchrun on every node, meeting at the head"),
    "pytorch-modelarts": Launcher(
        "one process a node, told --init_method, --rank and --world_size", is_one_a_node=True
    ),
    "tensorflow": Launcher("one process a node, told TF_CONFIG", is_one_a_node=True),
    "python": Launcher("the script once on every node, nothing added", is_one_a_node=True),
    "command": Launcher("any command once on every node", is_one_a_node=True, takes_command=True),
}
