"""Launchers that start the script once on every node.

``python`` and ``command`` add nothing. ``pytorch-modelarts`` and ``tensorflow-ps`` follow the
conventions of ModelArts' presets, ``tensorflow`` those of TensorFlow.
"""

from __future__ import annotations

import json
from typing import Mapping, Sequence

from jobentry.launchers.common import (
    PORTS_OF_FOUR_DIGITS,
    Launch,
    Process,
    Site,
    port,
    program,
    rank_wrapper,
)


def python(site: Site, script_argv: Sequence[str]) -> Launch:
    """Return the script, once on every node, without additional arguments or variables."""
    return _one(site, program(site, script_argv))


def command(site: Site, argv: Sequence[str]) -> Launch:
    """Return the command ``argv``, once on every node."""
    return _one(site, argv)


def pytorch_modelarts(site: Site, script_argv: Sequence[str]) -> Launch:
    """Return one process on each node; the script itself starts one for each device.

    As in the platform's PyTorch preset, ``world_size`` is the number of nodes.
    """
    node = site.node
    script, *args = script_argv
    own_args = [
        "--init_method",
        "tcp://%s:%d" % (node.hosts[0], port(site, ports=PORTS_OF_FOUR_DIGITS)),
        "--rank",
        str(node.node),
        "--world_size",
        str(node.nodes),
    ]
    return _one(site, program(site, [script, *own_args, *args]))


def tensorflow(site: Site, script_argv: Sequence[str]) -> Launch:
    """Return one worker on each node, with ``TF_CONFIG``; the first one is the chief."""
    workers = _addresses(site, port(site))
    env = _tf_config(site, {"worker": workers}, "worker")
    return _one(site, program(site, script_argv), env)


def tensorflow_ps(site: Site, script_argv: Sequence[str]) -> Launch:
    """Return a worker and a parameter server on every node.

    Both get all addresses as options and as ``TF_CONFIG``.

    As in the platform's TensorFlow preset, the job ends with its workers.
    """
    node, number = site.node, port(site)
    hosts = {"ps": _addresses(site, number + node.nodes), "worker": _addresses(site, number)}
    script, *args = script_argv

    def command(task: str) -> tuple[str, ...]:
        own_args = ["--task_index", str(node.node), "--job_name", task]
        for name, addresses in hosts.items():
            own_args += ["--%s_hosts" % name, ",".join(addresses)]
        return program(site, [script, *own_args, *args])

    # The accelerators are for the workers.
    env = {**site.environment, "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    server = Process(
        "parameter server %d" % node.node,
        command("ps"),
        {**env, **_tf_config(site, hosts, "ps")},
        is_server=True,
    )
    launch = _one(site, command("worker"), _tf_config(site, hosts, "worker"))
    return launch._replace(processes=(server, *launch.processes))


def _one(site: Site, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Launch:
    node = site.node
    return Launch((rank_wrapper(site, node.node, argv, env or {}),), node.nodes)


def _addresses(site: Site, number: int) -> list[str]:
    # A port for each node, as emulated nodes share one network.
    return ["%s:%d" % (host, number + index) for index, host in enumerate(site.node.hosts)]


def _tf_config(site: Site, cluster: Mapping[str, Sequence[str]], task: str) -> dict[str, str]:
    """Return the variable ``TF_CONFIG``, unless the user has set it."""
    if "TF_CONFIG" in site.environment:
        return {}
    own_task = {"type": task, "index": site.node.node}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": own_task})}
