"""Which nodes a job needs: all of them, or for an elastic one, those that now take part.

Bring-up, run and head ask ``FixedHosts`` or ``ElasticHosts`` and do not know which one it is, apart
from the start of ranks, which is up to the driver of an elastic job.
"""

from __future__ import annotations

import json
import os

from jobentry.contract.env import NodeEnv
from jobentry.contract.exits import Failure
from jobentry.contract.paths import NodePaths
from jobentry.control.loop import NodeLoop
from jobentry.control.node_table import Row
from jobentry.control.peers import RemoteWorker, WorkerPool
from jobentry.control.stop import Stop
from jobentry.log import log_message

# How long an elastic job with enough nodes waits for the others before it starts.
_GATHER_S = 10.0


class Members:
    """The available nodes, as the head sees them; the driver reads them from a file.

    The driver never reuses a node that it has removed, so a node that returns gets another name:
    ``HOST~2`` when it joins for the second time.
    """

    def __init__(self, node: NodeEnv, paths: NodePaths) -> None:
        self._hosts = node.hosts
        self._min_nodes = node.min_nodes
        self._path = paths.members
        self._times: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._excluded: set[int] = set()

    @property
    def count(self) -> int:
        """The number of nodes whose ranks have not failed."""
        return len(self._names.keys() - self._excluded)

    @property
    def are_enough(self) -> bool:
        """Whether there are enough nodes for the job to continue."""
        return self.count >= self._min_nodes

    def add(self, index: int) -> None:
        """Add a node."""
        self._excluded.discard(index)
        times = self._times[index] = self._times.get(index, 0) + 1
        self._names[index] = self._hosts[index] + ("~%d" % times if times > 1 else "")
        self._write()

    def exclude(self, index: int) -> None:
        """Stop counting a node with a failed rank, which the driver no longer uses."""
        self._excluded.add(index)

    def remove(self, index: int) -> None:
        """Remove a node if it takes part in the job."""
        if self._names.pop(index, ""):
            self._write()

    def _write(self) -> None:
        members = {name: (index, self._hosts[index]) for index, name in self._names.items()}
        with open(self._path + ".new", "w", encoding="ascii") as file:
            json.dump(members, file)
        os.replace(self._path + ".new", self._path)


class FixedHosts:
    """The nodes of a job that needs all of them."""

    is_elastic = False

    def __init__(self, pool: WorkerPool, stop: Stop) -> None:
        self._pool = pool
        self._stop = stop

    @property
    def may_begin(self) -> bool:
        """Whether enough nodes are there."""
        return not self._pool.absent

    def begin(self) -> None:
        """Stop waiting for workers."""
        self._pool.stop_waiting()

    def unfit(self) -> list[Row]:
        """Return the nodes with which the job cannot start."""
        return self._pool.unfit()

    def worker_joined(self, index: int) -> None:
        """Do nothing: bring-up waits for each worker."""

    def worker_lost(self, worker: RemoteWorker, failure: Failure) -> None:
        """End the job."""
        self._stop.fail_for_lost_node(failure)

    def can_go_on_without(self, node: int | None) -> bool:
        """Whether the job continues without that node, a rank of which has failed."""
        return False


class ElasticHosts:
    """The nodes of an elastic job, which starts and continues with at least ``min_nodes``."""

    is_elastic = True

    def __init__(
        self, node: NodeEnv, paths: NodePaths, loop: NodeLoop, pool: WorkerPool, stop: Stop
    ) -> None:
        self._has_begun = False
        self._node = node
        self._loop = loop
        self._pool = pool
        self._stop = stop
        self._members = Members(node, paths)
        self._members.add(node.node)
        self._check()

    @property
    def may_begin(self) -> bool:
        """Whether all nodes are there, or enough of them have waited for the others."""
        return self._has_begun or not self._pool.absent

    def begin(self) -> None:
        """Begin with the nodes that are there; the others may join later."""
        self._has_begun = True
        self._pool.stop_waiting(for_good=False)

    def unfit(self) -> list[Row]:
        """Return the nodes with which the job cannot start: it starts without absent ones."""
        return [row for row in self._pool.unfit() if row.facts]

    def worker_joined(self, index: int) -> None:
        """Add a worker, which may join at any time."""
        row = next((row for row in self._pool.unfit() if row.node == index), None)
        if row is not None and self._has_begun:
            log_message(
                "node %d (%s) does not take part: it has %s" % (index, row.host, row.problem)
            )
            return
        self._members.add(index)
        if self._has_begun:
            log_message("node %d (%s) takes part" % (index, self._node.hosts[index]))
        self._check()

    def worker_lost(self, worker: RemoteWorker, failure: Failure) -> None:
        """Continue without a worker if enough are left, and look for it again."""
        self._members.remove(worker.index)
        worker.reconnect()
        self._check(failure)

    def can_go_on_without(self, node: int | None) -> bool:
        """Whether the job continues without that node, a rank of which has failed."""
        if node is None:
            return False
        self._members.exclude(node)
        return self._members.are_enough

    def _check(self, lost: Failure | None = None) -> None:
        """Check whether the job has enough nodes to start or to continue."""
        if self._members.are_enough:
            self._loop.cancel("too-few")
            if not self._has_begun and not self._loop.is_scheduled("begin"):
                self._loop.schedule("begin", _GATHER_S, self._begin)
        elif lost is not None and self._has_begun:
            patience_s = self._node.start_timeout_s
            self._loop.schedule("too-few", patience_s, lambda: self._too_few(lost, patience_s))

    def _begin(self) -> None:
        self._has_begun = self._members.are_enough

    def _too_few(self, lost: Failure, waited_s: float) -> None:
        text = "waiting for nodes: after %g s %d of %d are there, and the job needs %d (min_nodes)"
        counts = (waited_s, self._members.count, self._node.nodes, self._node.min_nodes)
        message = "%s; %s" % (text % counts, lost.message)
        log_message(message)
        self._stop.fail_for_lost_node(lost._replace(message=message))
