"""The head's part of the check: it asks all nodes, judges, and ends a job that cannot work.

Ranks wait for it, so it costs a healthy job two messages a node; only a node with a problem makes
it wait until its limit. mpirun starts meanwhile.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, Mapping, Sequence

from jobentry.contract import exits, preflight
from jobentry.contract.env import NodeEnv
from jobentry.contract.exits import Cause, Failure, Outcome
from jobentry.contract.lists import columns
from jobentry.contract.paths import NodePaths
from jobentry.contract.preflight import (
    Finding,
    NodeFacts,
    PreflightError,
    Report,
    Speeds,
    Transfer,
    Weight,
)
from jobentry.contract.preflight_levels import FULL
from jobentry.control import handshake, transport
from jobentry.control.peers import WorkerPool
from jobentry.control.run import JobContext
from jobentry.log import log_message
from jobentry.node.network import NodeNetwork
from jobentry.node.prepare import read_key
from jobentry.preflight import judgement, table
from jobentry.preflight.judgement import Setting
from jobentry.preflight.node import NodePreflight, peers_of

# Seconds until the head goes on without a node's answer.
_FACTS_S, _TRANSFER_S, _SPEEDS_S = 2.0, 4.0, 22.0
# How long one node sends to its partner.
_SENDING_S = 1.0


def offer(
    node: NodeEnv, node_paths: NodePaths, network: NodeNetwork, environ: Mapping[str, str]
) -> NodePreflight | None:
    """Listen for the check of the nodes; None if that is not possible, as it ends no job itself."""
    try:
        listening = None
        if node.nodes > 1:
            # A port of an emulated node must not be reachable from other machines.
            listening = handshake.listen(0, network.route.address if node.control_dir else "")
        key = transport.secret(read_key(node))
        return NodePreflight(node, node_paths, key, listening, network, environ)
    except (OSError, RuntimeError) as error:
        log_message(f"checking the nodes: not this one: {error}")
        return None


class Check:
    """Asks the nodes, one step after another, and judges what they answer."""

    def __init__(self, context: JobContext, here: NodePreflight) -> None:
        self._node = context.setup.node
        self._loop = context.loop
        self._pool = context.pool
        self._stop = context.stop
        self._here = here
        # The workers that take part, each with the rows of its endpoints.
        self._endpoints: dict[int, Any] = {}
        self._number = 0
        self._waiting: set[int] = set()
        self._answers: dict[int, Any] = {}

    def take(self, node: int, values: Mapping[str, Any]) -> None:
        """Note a node's answer, unless it belongs to a step that has ended."""
        if values.get("number") == self._number and node in self._waiting:
            self._waiting.discard(node)
            self._answers[node] = values.get("found")

    def run(self) -> Outcome | None:
        """Check the nodes; return an outcome only if the job cannot work, and log what is wrong."""
        # Bring-up limits the time for the workers to come up, which they have done.
        self._loop.cancel("start")
        nodes = self._facts()
        if judgement.broken_links(nodes):
            nodes = judgement.confirmed(nodes, judgement.broken_links(self._facts()))
        if self._node.preflight == FULL:
            nodes = self._with_speeds(self._with_transfers(nodes))
        self._close()
        if self._stop.has_begun:
            return None
        findings = judgement.judge(nodes, Setting(self._node.preflight, self._node.launcher))
        for text in table.warnings(findings, self._node.hosts):
            log_message(text)
        if self._node.preflight == FULL:
            self._show(table.report(nodes, findings))
        return self._outcome(findings)

    def _facts(self) -> list[NodeFacts]:
        """Return the facts of all nodes that take part; of one without an answer, only that."""
        self._endpoints = {0: self._here.endpoints}
        for worker in self._pool.workers:
            if not worker.is_absent and "probe" in worker.facts:
                self._endpoints[worker.index] = worker.facts["probe"]
        questions = {
            node: {"step": "facts", "endpoints": self._of_peers(node)} for node in self._endpoints
        }
        answers = self._ask(questions, _FACTS_S)
        clocks = {worker.index: worker.clock_ahead_s for worker in self._pool.workers}
        return [
            self._read(node, answers.get(node))._replace(clock_ahead_s=clocks.get(node, 0.0))
            for node in self._endpoints
        ]

    def _of_peers(self, node: int) -> list[Any]:
        """Return the endpoints of each node that a node shall reach, by number."""
        peers = peers_of(node, self._node.nodes)
        return [[peer, self._endpoints[peer]] for peer in peers if peer in self._endpoints]

    def _read(self, node: int, answer: Any) -> NodeFacts:
        """Return the facts in an answer, without what they say of nodes that the job has not."""
        host, numbers = self._node.hosts[node], range(self._node.nodes)
        try:
            facts = preflight.from_values(answer)
        except PreflightError:
            return NodeFacts(node, host, late=("everything",))
        return facts._replace(
            node=node,
            host=host,
            links=tuple(link for link in facts.links if link.to in numbers),
            names=tuple(name for name in facts.names if name.of in numbers),
        )

    def _with_transfers(self, nodes: Sequence[NodeFacts]) -> list[NodeFacts]:
        """Return the nodes with the speed of the network between partners."""
        sent: dict[int, list[Transfer]] = {}
        usable = [node.node for node in nodes if node.endpoints and self._endpoints[node.node]]
        for pairs in rounds(usable):
            for partners in (dict(pairs), {last: first for first, last in pairs}):
                for node, mb_s in self._transfer(partners).items():
                    sent.setdefault(node, []).append(Transfer(partners[node], mb_s))
        return [node._replace(transfers=tuple(sent.get(node.node, ()))) for node in nodes]

    def _transfer(self, partners: Mapping[int, int]) -> dict[int, float]:
        """Have nodes send to their partners at the same time; return the speed of each in MB/s."""
        questions = {
            sender: {
                "step": "transfer",
                "to": receiver,
                "endpoint": self._endpoints[receiver][0],
                "seconds": _SENDING_S,
            }
            for sender, receiver in partners.items()
        }
        answers = self._ask(questions, _TRANSFER_S)
        return {node: float(mb_s) for node, mb_s in answers.items() if isinstance(mb_s, float)}

    def _with_speeds(self, nodes: Sequence[NodeFacts]) -> list[NodeFacts]:
        """Return the nodes with what each measures of itself, all at the same time."""
        measured = {}
        answers = self._ask({node.node: {"step": "speeds"} for node in nodes}, _SPEEDS_S)
        for node, answer in answers.items():
            with contextlib.suppress(PreflightError):
                measured[node] = preflight.speeds_from(answer)
        return [node._replace(speeds=measured.get(node.node, Speeds())) for node in nodes]

    def _ask(self, questions: Mapping[int, dict[str, Any]], limit_s: float) -> dict[int, Any]:
        """Ask nodes to do a step, and return the answers that come in time."""
        self._number += 1
        self._waiting, self._answers = set(questions), {}
        for node, values in questions.items():
            if node == 0:
                self._here.start({**values, "number": self._number}, self._answered_here)
        for worker in self._pool.workers:
            if worker.index in questions:
                worker.send("preflight", **questions[worker.index], number=self._number)
        self._loop.schedule("preflight", limit_s, lambda: None)
        while self._waiting and self._loop.is_scheduled("preflight") and not self._stop.has_begun:
            self._loop.step()
            self._waiting -= {worker.index for worker in self._pool.workers if worker.is_gone}
        self._loop.cancel("preflight")
        self._waiting = set()
        return self._answers

    def _close(self) -> None:
        """Have all nodes close their ports, which no rank needs."""
        self._here.close()
        close_ports(self._pool)

    def _answered_here(self, values: dict[str, Any]) -> None:
        # From a thread of the check.
        self._loop.post(lambda: self.take(0, values))

    def _outcome(self, findings: Sequence[Finding]) -> Outcome | None:
        """Return how a job ends whose nodes have a certain fault: the platform's, not its own."""
        for finding in findings:
            if finding.weight is Weight.FAULT:
                node = finding.nodes[0]
                failure = Failure(
                    *(node, self._node.hosts[node]),
                    exit_code=exits.ENTRY_FAILED,
                    message=table.line(finding, self._node.hosts),
                )
                return Outcome(exits.ENTRY_FAILED, Cause.PLATFORM, failure)
        return None

    def _show(self, report: Report) -> None:
        """Log the table of a full check, and store it beside the record."""
        log_message("the nodes:")
        for text in columns(report.rows):
            log_message("  " + text)
        if self._node.record_uri:
            try:
                problem = self._loop.run_in_thread(
                    lambda: _store(report, self._node.record_uri), lambda: self._stop.requested_at
                )
            except TimeoutError:
                problem = "storing the check of the nodes: the job was stopped meanwhile"
            if problem:
                log_message(problem)


def close_ports(pool: WorkerPool) -> None:
    """Have all workers close the ports that they have opened for the check."""
    for worker in pool.workers:
        if "probe" in worker.facts:
            worker.send("preflight", step="close")


def rounds(nodes: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Return pairs of nodes for each round, so that every node has two different partners.

    The partner of a slow node is slow only in the round with it. With an odd number, one node has
    no partner in a round, so there are three of them; two nodes have only each other.
    """
    places: list[int | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    count = len(places)
    wanted = 3 if len(nodes) % 2 else 2
    for _ in range(min(wanted, count - 1)):
        pairs = ((places[each], places[count - 1 - each]) for each in range(count // 2))
        yield [(first, last) for first, last in pairs if first is not None and last is not None]
        # All but the first node move on by one place.
        places = [places[0], places[-1], *places[1:-1]]


def _store(report: Report, record_uri: str) -> str:
    """Write the report beside the record; return what went wrong."""
    from jobentry import objects
    from jobentry.contract import paths

    uri = f"{record_uri.rpartition('/')[0]}/{paths.PREFLIGHT}"
    try:
        objects.write(preflight.dump(report), uri)
    except (objects.ObjectError, OSError) as error:
        return f"storing the check of the nodes: {error}"
    return ""
