"""What a node will do, decided as one value before anything is done."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Callable, Mapping, NamedTuple, Sequence

from jobentry.contract import names
from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths
from jobentry.launchers.common import File, Launch, Process, Site
from jobentry.launchers.mpi import Mpi


class LaunchPlan(NamedTuple):
    """What a node will do.

    Args:
        role: ``head`` or ``worker``.
        processes: What this node starts; empty on a worker whose ranks the head starts.
        ranks: How many ranks the whole job has.
        is_everywhere: Whether each node starts its own ranks; else the head starts all of them.
        files: The files that they read.
        cwd: The folder of the code.
        notes: What was left out or changed, for people.
    """

    role: str
    processes: tuple[Process, ...]
    ranks: int
    is_everywhere: bool
    files: tuple[File, ...]
    cwd: str
    notes: tuple[str, ...] = ()


class Tools(NamedTuple):
    """What this node has: Open MPI, an interpreter for the script, our own entry, a rank table."""

    mpi: Mpi
    interpreter: str
    entry: tuple[str, ...]
    rank_table: str = ""


# Where each launcher is: its module is imported only where a job has it, for without bytecode each
# costs milliseconds. Those that start mpirun are told which one it is.
_MPI_LAUNCHERS = {
    "mpirun": "mpirun.launch",
    "horovod": "horovod.mpi",
    "mindspore-mpi": "mindspore.mpi",
}
_LAUNCHERS = {
    "horovod-gloo": "horovod.gloo",
    "horovod-elastic": "horovod.elastic",
    "srun": "srun.launch",
    "torchrun": "torchrun.launch",
    "msrun": "mindspore.msrun",
    "dynamic-cluster": "mindspore.dynamic_cluster",
    "rank-table": "rank_table.launch",
    "pytorch-modelarts": "every_node.pytorch_modelarts",
    "tensorflow": "every_node.tensorflow",
    "tensorflow-ps": "every_node.tensorflow_ps",
    "python": "every_node.python",
    "command": "every_node.command",
}


def node_environment(
    environ: Mapping[str, str], node: NodeEnv, paths: NodePaths, cwd: str
) -> dict[str, str]:
    """Return the environment that the ranks of this node have, apart from what the head carries."""
    result = {name: value for name, value in environ.items() if name not in names.STORE_ACCESS}
    result["PWD"] = cwd
    result[names.CLOUDJOB_NODE_DIR] = paths.node_dir
    result[names.CLOUDJOB_LOG_DIR] = paths.log_dir
    result.update({name: paths.input(name) for name, _ in node.inputs_here})
    result.update({name: paths.output(name) for name, _ in node.outputs})
    return result


def make(
    node: NodeEnv,
    environment: Mapping[str, str],
    paths: NodePaths,
    tools: Tools,
    words: Sequence[str],
) -> LaunchPlan:
    """Return what this node does to run ``words``, the script and its arguments.

    Args:
        environment: What ``node_environment`` returned.

    Raises:
        ArgsError: What the launcher was told cannot be used.
    """
    site = Site(node, environment, paths, *tools[1:])
    if node.launcher in _MPI_LAUNCHERS:
        launch = _function(_MPI_LAUNCHERS[node.launcher])(site, tools.mpi, words)
    else:
        launch = _function(_LAUNCHERS[node.launcher])(site, words)
    return LaunchPlan(
        role="head" if node.is_head else "worker",
        processes=launch.processes,
        ranks=launch.ranks,
        is_everywhere=launch.is_everywhere,
        files=launch.files,
        cwd=environment["PWD"],
        notes=launch.notes,
    )


def _function(place: str) -> Callable[..., Launch]:
    module, _, name = place.partition(".")
    function: Callable[..., Launch] = getattr(import_module(f"jobentry.launchers.{module}"), name)
    return function


def nothing(cwd: str) -> LaunchPlan:
    """Return the plan of a head that has no plan: it can only tell the workers so."""
    return LaunchPlan("head", (), 0, is_everywhere=False, files=(), cwd=cwd)


def masked(plan: LaunchPlan, secret_names: Sequence[str]) -> dict[str, Any]:
    """Return ``plan`` as JSON shows it, secrets as ``***``.

    ``argv`` and ``env`` are those of the first process; where there are more, ``processes`` has
    them all.
    """
    processes = [
        {
            "name": process.name,
            "argv": list(process.argv),
            "env": {
                name: "***" if name in secret_names else value
                for name, value in sorted(process.env.items())
            },
        }
        for process in plan.processes
    ]
    first = processes[0] if processes else {"argv": [], "env": {}}
    shown = {
        "role": plan.role,
        "argv": first["argv"],
        "env": first["env"],
        "files": [
            {"path": file.path, "mode": f"{file.mode:04o}", "text": file.text}
            for file in plan.files
        ],
        "cwd": plan.cwd,
    }
    return {**shown, "processes": processes} if len(processes) > 1 else shown
