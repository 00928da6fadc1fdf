"""Compute the plan of a node: the processes and files to start, as one value. No I/O."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Callable, Mapping, Sequence

from jobentry.contract import first_version, names
from jobentry.contract.env import NodeEnv
from jobentry.contract.launchers import LAUNCHERS
from jobentry.contract.paths import NodePaths
from jobentry.launchers.common import Launch, Site


def node_environment(
    environ: Mapping[str, str], node: NodeEnv, paths: NodePaths, cwd: str
) -> dict[str, str]:
    """Return the environment of this node's ranks, without the variables that the head carries."""
    result = {name: value for name, value in environ.items() if name not in names.STORE_ACCESS}
    if node.first_version:
        addresses = dict((*node.inputs_here, *node.outputs))
        older = first_version.variables(node.node, node.hosts, addresses)
        result = {**older, **first_version.variables_of(result), **result}
    result["PWD"] = cwd
    result[names.CLOUDJOB_NODE_DIR] = paths.node_dir
    result.update({name: paths.input(name) for name, _ in node.inputs_here})
    result.update({name: paths.output(name) for name, _ in node.outputs})
    return result


def make(site: Site, script_argv: Sequence[str]) -> Launch:
    """Return the plan of a node to run ``script_argv``, the script and its arguments.

    Raises:
        ArgsError: The launcher's variables are invalid.
    """
    module, _, name = LAUNCHERS[site.node.launcher].location.partition(":")
    # Imported only when used, as each module takes milliseconds without cached bytecode.
    function: Callable[..., Launch] = getattr(import_module(f"jobentry.launchers.{module}"), name)
    return function(site, script_argv)._replace(cwd=site.environment["PWD"])


def masked(launch: Launch, node: NodeEnv) -> dict[str, Any]:
    """Return the plan of a node as a JSON value, with secrets as ``***``.

    ``argv`` and ``env`` are those of the first process; if there are more, ``processes`` lists all.
    ``notes`` is present only if there are any.
    """
    processes = [
        {
            "name": process.name,
            "argv": list(process.argv),
            "env": {
                name: "***" if name in node.secret_names else value
                for name, value in sorted(process.env.items())
            },
        }
        for process in launch.processes
    ]
    first = processes[0] if processes else {"argv": [], "env": {}}
    values: dict[str, Any] = {
        "role": "head" if node.is_head else "worker",
        "argv": first["argv"],
        "env": first["env"],
        "files": [
            {"path": file.path, "mode": f"{file.mode:04o}", "text": file.text}
            for file in launch.files
        ],
        "cwd": launch.cwd,
        **({"notes": list(launch.notes)} if launch.notes else {}),
    }
    return {**values, "processes": processes} if len(processes) > 1 else values
