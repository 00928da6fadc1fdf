"""Measure what the check before the ranks costs a healthy job: time, and CPU time of each node.

``python -m benchmarks.preflight [NODES [ROUNDS]]`` has NODES probes on the loopback of this machine
answer the head's question at the same time, as the nodes of a job do, and prints one JSON object.
It exits with 1 if two nodes take too long.
"""

from __future__ import annotations

import json
import queue
import sys
import tempfile
import time
from typing import Any

from jobentry.contract import preflight, preflight_levels
from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths
from jobentry.control.handshake import listen
from jobentry.node.network import Interface, NodeNetwork, Route
from jobentry.preflight import judgement
from jobentry.preflight.node import NodePreflight, peers_of

LIMIT_S = 0.05
_LOOPBACK = "127.0.0.1"
_NETWORK = NodeNetwork((Interface("lo", (_LOOPBACK,), is_loopback=True),), Route("lo", _LOOPBACK))


def main(nodes: int = 2, rounds: int = 20) -> int:
    """Measure, print, and return the exit code."""
    hosts = (_LOOPBACK,) * nodes
    with tempfile.TemporaryDirectory() as folder:
        paths = NodePaths(*[folder] * 5)
        probes = [
            NodePreflight(
                NodeEnv(node=node, hosts=hosts), paths, b"key", listen(0, _LOOPBACK), _NETWORK, {}
            )
            for node in range(nodes)
        ]
        costs = [_check(probes) for _ in range(rounds)]
        for each in probes:
            each.close()
    middle = rounds // 2
    figures = {
        "nodes": nodes,
        "connections": sum(len(peers_of(node, nodes)) for node in range(nodes)),
        "median_ms": round(1000 * sorted(wall_s for wall_s, _ in costs)[middle], 2),
        "cpu_ms_per_node": round(1000 * sorted(cpu_s for _, cpu_s in costs)[middle] / nodes, 2),
    }
    print(json.dumps(figures))
    return 0 if nodes > 2 or figures["median_ms"] <= 1000 * LIMIT_S else 1


def _check(probes: list[NodePreflight]) -> tuple[float, float]:
    """Ask all nodes, judge their answers, and return the time and the CPU time, in seconds."""
    answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    begun_s, begun_cpu_s = time.monotonic(), time.process_time()
    for node, probe in enumerate(probes):
        peers = [[peer, probes[peer].endpoints] for peer in peers_of(node, len(probes))]
        probe.start({"step": "facts", "number": 1, "endpoints": peers}, answers.put)
    facts = [preflight.from_values(answers.get()["found"]) for _ in probes]
    findings = judgement.judge(facts, judgement.Setting(preflight_levels.QUICK, "mpirun"))
    taken_s, cpu_s = time.monotonic() - begun_s, time.process_time() - begun_cpu_s
    serious = [each for each in findings if each.weight is preflight.Weight.FAULT]
    assert not serious, serious
    assert all(link.reach.is_broken is False for each in facts for link in each.links)
    return taken_s, cpu_s


if __name__ == "__main__":
    sys.exit(main(*(int(argument) for argument in sys.argv[1:])))
