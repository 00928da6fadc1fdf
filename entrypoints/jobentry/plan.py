"""What a node will do, decided as one value before anything is done."""

from __future__ import annotations

import posixpath
from typing import Any, Mapping, NamedTuple, Sequence

from jobentry.contract import names
from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths
from jobentry.launchers import mpirun

PRIVATE = 0o600


class File(NamedTuple):
    """A file to write before the start."""

    path: str
    mode: int
    text: str


class LaunchPlan(NamedTuple):
    """What a node will do.

    Args:
        role: ``head`` or ``worker``.
        argv: The command to run, empty on a worker: it serves the head's remote shell.
        env: The environment of that command.
        files: The files it reads.
        cwd: The folder of the code.
        notes: What was left out or changed, for people.
    """

    role: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    files: tuple[File, ...]
    cwd: str
    notes: tuple[str, ...] = ()


class Tools(NamedTuple):
    """What this node has: Open MPI, an interpreter for the script, and our own entry."""

    mpi: mpirun.Mpi
    interpreter: str
    entry: tuple[str, ...]


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
        mpirun.ArgsError: A variable with mpirun options cannot be used.
    """
    cwd = environment["PWD"]
    host_file = node.open_mpi.host_file or paths.host_file
    tune_file = node.open_mpi.tune_file or paths.tune_file
    if not node.is_head:
        # mpirun 4.1 names the file to its daemons, and each says so when it finds none.
        return LaunchPlan("worker", (), {}, (File(tune_file, PRIVATE, ""),), cwd)
    command = mpirun.command(
        node,
        environment,
        tools.mpi,
        (host_file, tune_file),
        mpirun.rank_program(tools.entry, program(tools, words)),
        ssh_config=paths.ssh_config if node.ssh_key else "",
    )
    return LaunchPlan(
        role="head",
        argv=command.argv,
        env=command.env,
        files=(
            File(host_file, PRIVATE, command.host_file),
            File(tune_file, PRIVATE, command.tune_file),
        ),
        cwd=cwd,
        notes=command.notes,
    )


def program(tools: Tools, words: Sequence[str]) -> tuple[str, ...]:
    """Return the command of one rank: by what the script's name says it is."""
    script = words[0]
    suffix = posixpath.splitext(script)[1]
    if suffix == ".py":
        return (tools.interpreter, tools.entry[-1], "--script", *words)
    if suffix == ".sh":
        # A script from object storage has lost its x bit.
        return ("bash", *words)
    return (script if script.startswith("/") else "./" + script, *words[1:])


def masked(plan: LaunchPlan, secret_names: Sequence[str]) -> dict[str, Any]:
    """Return ``plan`` as JSON shows it, secrets as ``***``."""
    return {
        "role": plan.role,
        "argv": list(plan.argv),
        "env": {
            name: "***" if name in secret_names else value
            for name, value in sorted(plan.env.items())
        },
        "files": [
            {"path": file.path, "mode": f"{file.mode:04o}", "text": file.text}
            for file in plan.files
        ],
        "cwd": plan.cwd,
    }
