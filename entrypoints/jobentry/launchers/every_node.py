"""The launchers that start the script once on every node: python, command, and two conventions.

``pytorch-modelarts`` and ``tensorflow-ps`` are the platform's own conventions for its presets;
``tensorflow`` is TensorFlow's.
"""

from __future__ import annotations

import json
from typing import Mapping, Sequence

from jobentry.launchers.common import Launch, Process, Site, door, port, program


def python(site: Site, words: Sequence[str]) -> Launch:
    """Return the script once on every node, nothing added."""
    node = site.node
    return Launch((door(site, node.node, program(site, words), {}),), node.nodes)


def command(site: Site, words: Sequence[str]) -> Launch:
    """Return ``words``, any command, once on every node."""
    node = site.node
    return Launch((door(site, node.node, words, {}),), node.nodes)


def pytorch_modelarts(site: Site, words: Sequence[str]) -> Launch:
    """Return one process a node; the script starts one for each of its devices itself.

    As the platform's PyTorch preset does, ``world_size`` is the number of nodes.
    """
    node = site.node
    script, *args = words
    told = [
        "--init_method",
        "tcp://%s:%d" % (node.hosts[0], port(site)),
        "--rank",
        str(node.node),
        "--world_size",
        str(node.nodes),
    ]
    return Launch((door(site, node.node, program(site, [script, *told, *args]), {}),), node.nodes)


def tensorflow(site: Site, words: Sequence[str]) -> Launch:
    """Return one process a node with ``TF_CONFIG``: all workers, the first one the chief."""
    workers = _addresses(site, port(site))
    env = _told(site, {"worker": workers}, "worker")
    return Launch((door(site, site.node.node, program(site, words), env),), site.node.nodes)


def tensorflow_ps(site: Site, words: Sequence[str]) -> Launch:
    """Return a worker and a parameter server on every node, told of all by options and TF_CONFIG.

    As the platform's TensorFlow preset does; the job ends with its workers.
    """
    node, number = site.node, port(site)
    hosts = {"ps": _addresses(site, number + node.nodes), "worker": _addresses(site, number)}
    script, *args = words

    def command(task: str) -> tuple[str, ...]:
        told = ["--task_index", str(node.node), "--job_name", task]
        for name, addresses in hosts.items():
            told += ["--%s_hosts" % name, ",".join(addresses)]
        return program(site, [script, *told, *args])

    # The accelerators are the workers'.
    env = {**site.environment, "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    server = Process(
        "parameter server %d" % node.node,
        command("ps"),
        {**env, **_told(site, hosts, "ps")},
        is_server=True,
    )
    worker = door(site, node.node, command("worker"), _told(site, hosts, "worker"))
    return Launch((server, worker), node.nodes)


def _addresses(site: Site, number: int) -> list[str]:
    # Nodes that are emulated share their ports.
    return ["%s:%d" % (host, number + index) for index, host in enumerate(site.node.hosts)]


def _told(site: Site, cluster: Mapping[str, Sequence[str]], task: str) -> dict[str, str]:
    """Return what TensorFlow is told, unless the user has told it himself."""
    if "TF_CONFIG" in site.environment:
        return {}
    place = {"type": task, "index": site.node.node}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": place})}
