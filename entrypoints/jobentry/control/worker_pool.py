"""The head's connections to all workers: finds them, compares them with the head, ends them."""

from __future__ import annotations

import resource
import time
from typing import Any, Callable, Sequence

from jobentry.contract.env import NodeEnv
from jobentry.control import connection, node_table
from jobentry.control.dial import HeadIdentity, Resolver
from jobentry.control.event_loop import NodeLoop
from jobentry.control.messages import Message
from jobentry.control.remote_worker import RemoteWorker
from jobentry.log import log_message

# Seconds before the first table of the nodes; the next follows when the wait has doubled.
_LATE_S = 30.0
_TICK_S = 1.0
# If the head was itself suspended, one tick counts at most this much silence of the workers.
_MAX_TICK_S = 3.0


class WorkerPool:
    """The control connections from the head to its workers.

    Args:
        facts: The head's facts, which must be the same on the workers.
        on_message: Called with each message of a worker.
        on_lost: Called when a worker that had answered is gone, or one ended before it answered.
    """

    def __init__(
        self,
        node: NodeEnv,
        loop: NodeLoop,
        facts: dict[str, Any],
        on_message: Callable[[RemoteWorker, Message], None],
        on_lost: Callable[[RemoteWorker], None],
    ) -> None:
        self._loop = loop
        self._facts = facts
        self._on_lost = on_lost
        self._is_ending = False
        self._begun = 0.0
        self._is_late = False
        self._node = node
        self._ticked_at = 0.0
        # The silent workers, each with the silence after which it is reported next.
        self._silent: dict[int, float] = {}
        self.workers = [
            RemoteWorker(node, index, loop, on_message, self._lost)
            for index in range(1, node.nodes)
        ]

    @property
    def absent(self) -> list[RemoteWorker]:
        """The workers that have not answered yet."""
        return [worker for worker in self.workers if not worker.is_ready]

    @property
    def are_idle(self) -> bool:
        """Whether no worker has a running rank."""
        return all(worker.is_idle or worker.is_absent for worker in self.workers)

    @property
    def are_in_doubt(self) -> bool:
        """Whether a worker's connection has ended, and it is unknown whether the worker has."""
        return any(not worker.is_absent and not worker.link.is_attached for worker in self.workers)

    def open(self, key: bytes, port: int) -> None:
        """Start to look for every worker.

        Args:
            key: The private key of the job.
            port: Where workers listen.
        """
        _allow_open_files(len(self.workers))
        self._begun = self._ticked_at = time.monotonic()
        self._loop.schedule("late", _LATE_S, self._are_late)
        if not self.workers:
            return
        head = HeadIdentity(connection.secret(key), connection.nonce())
        resolver = Resolver(self._loop)
        for worker in self.workers:
            worker.open(head, resolver, port)
        self._loop.schedule("tick", _TICK_S, self._tick)

    def stop_waiting(self, *, for_good: bool = True) -> None:
        """Stop waiting for the workers that have not answered, if there are any.

        Args:
            for_good: Whether workers that answer later are rejected.
        """
        self._loop.cancel("late")
        if self._is_late and not self.absent:
            log_message("all workers are ready after %.0f s" % (time.monotonic() - self._begun))
        if for_good:
            for worker in self.absent:
                worker.close()

    def send(self, kind: str, **values: Any) -> None:
        """Send a message to every worker."""
        for worker in self.workers:
            worker.send(kind, **values)

    def end(
        self,
        code: int,
        *,
        is_over: bool,
        patience_s: float,
        reason: str = "",
        silent_limit_s: float = float("inf"),
    ) -> list[RemoteWorker]:
        """Report to every worker how and why the job ended, and wait until each has left.

        Args:
            silent_limit_s: Do not wait for a worker that has been silent for longer.

        Returns:
            The workers that have not confirmed that their outputs are stored.
        """
        self._is_ending = True
        self.stop_waiting()
        self.send("job-ended", code=code, is_over=is_over, reason=reason)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if all(
                worker.is_absent or worker.silent_s >= silent_limit_s for worker in self.workers
            ):
                break
            self._loop.step()
        for worker in self.workers:
            worker.close()
        self._loop.cancel("tick")
        return [worker for worker in self.workers if worker.is_ready and not worker.has_left]

    def unfit(self) -> list[node_table.Row]:
        """Return the workers that are absent, or do not match the head."""
        return [row for row in self._rows()[1:] if row.problem]

    def show(self, message: str = "") -> None:
        """Log the table of nodes, then ``message`` and hints."""
        rows = self._rows()
        log_message("the nodes after %.0f s:" % (time.monotonic() - self._begun))
        for line in node_table.lines(rows):
            log_message("  " + line)
        for line in [message, *node_table.hints(rows)]:
            if line:
                log_message(line)

    def _rows(self) -> list[node_table.Row]:
        """Return the table of the nodes: the head, then the workers."""
        head = node_table.Row(0, self._node.hosts[0], facts=self._facts)
        return [head, *(_row(worker, head) for worker in self.workers)]

    def _are_late(self) -> None:
        waited_s = time.monotonic() - self._begun
        self._is_late = True
        self.show()
        self._loop.schedule("late", waited_s, self._are_late)

    # -- silence ----------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = time.monotonic()
        elapsed_s = min(now - self._ticked_at, _MAX_TICK_S)
        self._ticked_at = now
        for worker in self.workers:
            worker.tick(elapsed_s)
        self._report_silence()
        self._loop.schedule("tick", _TICK_S, self._tick)

    def _report_silence(self) -> None:
        """Log which workers have become silent, are still silent, or are back."""
        silent, back = [], []
        for worker in self.workers:
            due_s = self._silent.get(worker.index)
            if worker.silent_s >= (due_s or connection.SILENT_S):
                silent.append(worker)
                self._silent[worker.index] = 2 * worker.silent_s
            elif due_s is not None and worker.silent_s < connection.SILENT_S:
                del self._silent[worker.index]
                if not worker.is_gone:
                    back.append(worker)
        if silent:
            log_message(
                "silent for %.0f s: %s; a node may be silent for %.0f s (network.stall_min)"
                % (
                    max(worker.silent_s for worker in silent),
                    self._named(silent),
                    self._node.stall_s,
                )
            )
        if back:
            log_message("no longer silent: %s" % self._named(back))

    def _named(self, workers: Sequence[RemoteWorker]) -> str:
        return node_table.named([worker.index for worker in workers], self._node.hosts)

    def _lost(self, worker: RemoteWorker) -> None:
        if not self._is_ending:
            self._on_lost(worker)


def _row(worker: RemoteWorker, head: node_table.Row) -> node_table.Row:
    attempt = worker.attempt
    is_open = attempt.is_listening if attempt.address else None
    row = node_table.Row(worker.index, worker.host, attempt.address, is_open)
    if worker.is_ready:
        known = row._replace(
            has_control=True, facts=worker.facts, clock_ahead_s=worker.clock_ahead_s
        )
        return node_table.compare(known, head)
    return row._replace(has_control=attempt.has_control, problem=attempt.problem, hint=attempt.hint)


def _allow_open_files(workers: int) -> None:
    """Raise the limit on open files if the connections to the workers need more.

    The usual limit, 1,024, is enough for 384 workers. Child processes inherit the limit, so it
    stays as it is for jobs that need no more.
    """
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # One for each worker, another while looking for a silent one; the rest is for the node itself.
    needed = 2 * workers + 256
    if soft != resource.RLIM_INFINITY and soft < needed:
        enough = needed if most == resource.RLIM_INFINITY else min(needed, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, most))
