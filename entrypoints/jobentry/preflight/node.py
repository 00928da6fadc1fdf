"""A node's part of the check: it listens for the others, and does the steps that the head asks for.

Each step runs in a thread with a deadline of its own, so that the node goes on to serve its head.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any, Callable, Generic, Mapping, Sequence, TypeVar

from jobentry.contract import preflight
from jobentry.contract.env import NodeEnv
from jobentry.contract.malformed import MALFORMED
from jobentry.contract.paths import NodePaths
from jobentry.contract.preflight import (
    Endpoint,
    Name,
    NodeFacts,
    PreflightError,
)
from jobentry.node.network import NodeNetwork
from jobentry.preflight import facts, probe, speeds
from jobentry.preflight.probe import Target

# A packet that asks for a connection is repeated after a second; one that carries data, at the
# latest after 0.2, 0.6 and 1.4 seconds.
REACH_S = 1.6
# A job of many nodes checks some pairs of them only, chosen so that every node is in some.
_MOST_PEERS = 64

# What can end a step: a limit of this node, or a question of another form.
_STEP_ERRORS = (*MALFORMED, PreflightError, OSError, RuntimeError, MemoryError)

Result = TypeVar("Result")


class NodePreflight:
    """What this node offers to the check.

    Args:
        key: Known to the nodes of the job only.
        listening: Where the other nodes reach this one; None if there are none.
        network: The network of this node; ``environ`` chooses interfaces for libraries.
    """

    def __init__(
        self,
        node: NodeEnv,
        node_paths: NodePaths,
        key: bytes,
        listening: socket.socket | None,
        network: NodeNetwork,
        environ: Mapping[str, str],
    ) -> None:
        self._node = node
        self._paths = node_paths
        self._key = key
        self._environ = environ
        self._own = [address for each in network.interfaces for address in each.addresses]
        # Gathered while this node waits for its head, or the head for its workers.
        self._gathered: _Later[NodeFacts] = _Later(lambda: facts.gather(node, node_paths, environ))
        self._server: probe.Server | None = None
        self.endpoints: tuple[Endpoint, ...] = ()
        if listening is not None:
            self._server = probe.Server(key, node.node, listening)
            self.endpoints = facts.endpoints(network, environ, self._server.port)
            if node.control_dir:
                # Other interfaces of this machine would lead to all of its nodes.
                self.endpoints = self.endpoints[:1]

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    def start(self, values: Mapping[str, Any], on_done: Callable[[dict[str, Any]], None]) -> None:
        """Do a step of the check in a thread, and call ``on_done`` there with what came of it.

        The step ``close`` is the last one, and has no answer.
        """
        if values.get("step") == "close":
            self.close()
            return

        def answer(result: Any) -> None:
            on_done({"number": values.get("number"), "found": result})

        try:
            threading.Thread(target=lambda: answer(self._step(values)), daemon=True).start()
        except RuntimeError as error:
            answer(_problem(error))

    def _step(self, values: Mapping[str, Any]) -> Any:
        try:
            if values["step"] == "facts":
                return preflight.to_values(self._facts(values["endpoints"]))
            if values["step"] == "transfer":
                return self._transfer(values)
            return speeds.measure(self._node, self._paths, self._environ)
        except _STEP_ERRORS as error:
            return _problem(error)

    def _facts(self, rows: Sequence[Sequence[Any]]) -> NodeFacts:
        """Return everything about this node, and its way to the others.

        Args:
            rows: The number and the endpoints of each node to reach.
        """
        others = {int(number): preflight.endpoints_from(each) for number, each in rows}
        targets = [
            Target(peer, number, endpoint)
            for peer, offered in others.items()
            for number, endpoint in enumerate(offered)
        ]
        named = sorted({0, self._node.node, *others} & set(range(self._node.nodes)))
        looked_up: _Later[tuple[Name, ...]] = _Later(
            lambda: facts.resolve(self._node, named, REACH_S)
        )
        links = probe.reach(targets, self._key, self._node.node, self._own, REACH_S)
        names = looked_up.result()
        late = ("names of other nodes",) if len(names) < len(named) else ()
        return self._gathered.result()._replace(
            endpoints=self.endpoints, links=tuple(links), names=names, late=late
        )

    def _transfer(self, values: Mapping[str, Any]) -> float:
        """Return how fast a partner has received what this node sent, in MB/s; 0 if it has not."""
        (endpoint,) = preflight.endpoints_from([values["endpoint"]])
        target = Target(int(values["to"]), 0, endpoint)
        seconds = min(5.0, float(values["seconds"]))
        return probe.transfer(target, self._key, self._node.node, seconds)


def _problem(error: BaseException) -> dict[str, str]:
    return {"problem": str(error)[:200]}


class _Later(Generic[Result]):
    """The result of work in a thread."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._results: list[Result] = []
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError, RuntimeError, ValueError, MemoryError):
            self._results.append(self._work())

    def result(self) -> Result:
        """Return the result; the work has a deadline of its own.

        Raises:
            LookupError: The work has failed.
        """
        self._thread.join()
        return self._results[0]


def peers_of(node: int, nodes: int) -> list[int]:
    """Return the other nodes that a node connects to: all, or of many those at distances 1, 2, 4 ….

    Every node then is a receiver as often as it is a sender.
    """
    if nodes <= _MOST_PEERS:
        return [each for each in range(nodes) if each != node]
    distances = [1 << power for power in range(nodes.bit_length()) if 1 << power < nodes]
    return sorted({(node + distance) % nodes for distance in distances} - {node})
