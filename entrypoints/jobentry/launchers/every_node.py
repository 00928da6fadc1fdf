"""The launchers that start the script once on every node: python, command, and two conventions.

``pytorch-modelarts`` and ``tensorflow`` are the platform's own conventions for its presets.
"""

from __future__ import annotations

import json
from typing import Sequence

from jobentry.launchers.common import Launch, Site, door, port, program


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
    node = site.node
    number = port(site)
    config = {
        "cluster": {"worker": ["%s:%d" % (host, number + i) for i, host in enumerate(node.hosts)]},
        "task": {"type": "worker", "index": node.node},
    }
    env = {} if "TF_CONFIG" in site.environment else {"TF_CONFIG": json.dumps(config)}
    return Launch((door(site, node.node, program(site, words), env),), node.nodes)
