"""The head's connections to its workers: finds them, compares them with the head, ends them.

When a connection ends, the node may be dead or the network broken, so the head reconnects at once.
If nothing listens there any more, or another process does, or the backend reports the end of its
node, the worker's entry has ended. If nothing answers, the node is silent, and the head waits for
it (``CLOUDJOB_STALL_S``).
"""

from __future__ import annotations

import time
from typing import Any, Callable, Sequence

from jobentry.contract.env import NodeEnv
from jobentry.contract.exits import Failure
from jobentry.control import node_table, transport
from jobentry.control.handshake import Access, Answer, Attempt, Dial
from jobentry.control.loop import NodeLoop
from jobentry.control.transport import Break, Link, Message
from jobentry.log import log_message
from jobentry.node import early_ends

# Seconds before the first table of the nodes; the next follows when the wait has doubled.
_LATE_S = 30.0
# The pause before the next attempt while a worker comes up. It grows by half, so that finding a
# worker takes at most a third longer than its start.
_PAUSE_S = (0.02, 1.0)
_GROWTH = 1.5
# The pause between attempts to find a worker again, and to reach one that is silent.
_AGAIN_S = 0.2
_SILENT_AGAIN_S = 5.0
# A worker counts as dead after the first time if nothing listens there, and after the second if its
# kernel has closed or reset the connection and no new one was possible.
_DEAD_S = 1.0
_CLOSED_S = 5.0
# Seconds for which the head tries to send the final exit code to workers that wait for it.
_DISMISS_S = 10.0
_NO_ENTRY = "it can be reached, but its entry does not answer: what does its own log say?"
_ENDED = "its entry ended"


class RemoteWorker:
    """The head's view of one worker.

    Args:
        on_message: Called with each message of the worker.
        on_lost: Called with the ``reason`` when the head gives up a worker that had answered, or
            one that ended before, as reported by the backend.
    """

    def __init__(
        self,
        node: NodeEnv,
        index: int,
        loop: NodeLoop,
        access: Access,
        on_message: Callable[[RemoteWorker, Message], None],
        on_lost: Callable[[RemoteWorker], None],
    ) -> None:
        self.index = index
        self.host = node.hosts[index]
        # Why its outputs are not stored.
        self.problem = ""
        self.reason = ""
        # Whether it stays until the exit code of the job is final.
        self.is_held = False
        # How it ended before it had answered, if the backend has reported that.
        self.early_end: Failure | None = None
        self.clock_ahead_s = 0.0
        self.attempt = Attempt()
        self._node = node
        self._loop = loop
        self._access = access
        self._message = on_message
        self._on_lost = on_lost
        self._is_closed = False
        self._begin()

    def _begin(self) -> None:
        self.facts: dict[str, Any] = {}
        self.is_idle = False
        self.is_gone = False
        # Whether the worker has reported that its outputs are stored, or why they are not.
        self.has_left = False
        self._is_dismissed = False
        self.link = Link(self._received, self._disconnected)
        self._dial: Dial | None = None
        self._entry = ""
        self._pause_s = _PAUSE_S[0]
        # Since when nothing has listened there, and since when the connection has been closed.
        self._dead_since: float | None = None
        self._closed_since: float | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the worker's entry has answered."""
        return bool(self.facts)

    @property
    def is_absent(self) -> bool:
        """Whether the worker is not there yet, or no longer."""
        return self.is_gone or not self.is_ready

    @property
    def silent_s(self) -> float:
        """Return the seconds since a worker that had answered was last heard from."""
        return 0.0 if self.is_absent else self.link.silent_s

    def open(self) -> None:
        """Start to look for the worker, and greet its entry."""
        self.link.send("hello")
        self._connect()

    def send(self, kind: str, **values: Any) -> None:
        """Send a message to the worker, unless it is gone."""
        if not self.is_gone:
            self.link.send(kind, **values)

    def dismiss(self, **values: Any) -> None:
        """Let the worker end, which waits for this: its last message could be lost otherwise."""
        self._is_dismissed = True
        self.send("bye", **values)

    def close(self) -> None:
        """Close the connection, and stop trying to reach the worker."""
        self._close_connection()
        self._is_closed = True

    def _close_connection(self) -> None:
        self._loop.cancel(self._timer)
        if self._dial is not None:
            self._dial.stop()
            self._dial = None
        self.link.detach()

    def _reconnect(self) -> None:
        """Look for the worker again, which ended before it was ready."""
        self._close_connection()
        self._begin()
        self._pause_s = _PAUSE_S[1]
        self.link.send("hello")
        self._connect_later(_PAUSE_S[1])

    def tick(self, elapsed_s: float) -> None:
        """Update the time, about once a second, and look for a worker that has become silent."""
        if self.is_gone:
            return
        self.link.tick(elapsed_s)
        if not self.is_ready:
            return
        # Only while the connection is in doubt: it may still hold the worker's last messages.
        code = early_ends.reported_code(self._node, self.index) if self._is_connecting else None
        if code is not None:
            self._lose("it ended with exit code %d" % code)
        elif self.link.silent_s >= self._node.stall_s:
            self._lose("it has been silent for %.0f s" % self.link.silent_s)
        elif self.link.silent_s >= transport.SILENT_S and not self._is_connecting:
            self._connect_later(0.0)

    # -- one attempt after another ----------------------------------------------------------------

    @property
    def _timer(self) -> str:
        return "look-%d" % self.index

    @property
    def _is_connecting(self) -> bool:
        return self._dial is not None or self._loop.is_scheduled(self._timer)

    def _connect_later(self, pause_s: float) -> None:
        self._loop.schedule(self._timer, pause_s, self._connect)

    def _connect(self) -> None:
        if self._is_closed:
            return
        self._dial = Dial(
            self._loop, self._access, self.index, self.link.received, self._answered, self._failed
        )
        self._dial.start(self.host, self._node.control_dir)

    def _answered(self, answer: Answer) -> None:
        self._dial = None
        if self._entry and answer.entry != self._entry:
            answer.stream.close()
            self._lose("its entry was started again")
            return
        self._entry = answer.entry
        self._dead_since = self._closed_since = None
        self.attempt = Attempt(answer.address, True, "its entry has not answered", _NO_ENTRY)
        self.link.attach(answer.stream, answer.channel, answer.received)

    def _failed(self, attempt: Attempt) -> None:
        self._dial = None
        now = self._loop.now_s()
        if not self._entry:
            self._not_up(attempt)
            return
        if not attempt.is_dead:
            self._dead_since = None
        elif self._dead_since is None:
            self._dead_since = now
        limits = ((self._dead_since, _DEAD_S), (self._closed_since, _CLOSED_S))
        if any(since is not None and now - since >= limit_s for since, limit_s in limits):
            self._lose("its connection ended")
        elif attempt.is_dead or self._closed_since is not None:
            self._connect_later(_AGAIN_S)
        elif not self.link.is_attached or self.link.silent_s >= transport.SILENT_S:
            self._connect_later(
                _SILENT_AGAIN_S if self.link.silent_s >= transport.SILENT_S else 1.0
            )

    def _not_up(self, attempt: Attempt) -> None:
        """Try again, unless the worker has ended before it answered."""
        self.attempt = attempt
        self.early_end = early_ends.reported(self._node, self.index)
        if self.early_end is not None:
            self._lose(self.early_end.message)
            return
        self._connect_later(self._pause_s)
        self._pause_s = min(_GROWTH * self._pause_s, _PAUSE_S[1])

    def _disconnected(self, how: Break) -> None:
        """Handle the end of the connection."""
        if self.is_gone:
            return
        # After a break of the network, it still waits for its dismissal.
        if self._is_dismissed and how is not Break.OTHER:
            self._lose(_ENDED)
            return
        if how in (Break.CLOSED, Break.RESET):
            self._closed_since = self._loop.now_s()
        if self._dial is not None:
            self._dial.stop()
        self._connect_later(0.0)

    def _lose(self, reason: str) -> None:
        self.reason = reason
        was_ready = self.is_ready
        self.is_gone = True
        self._close_connection()
        if was_ready or self.early_end:
            self._on_lost(self)
        else:
            self._reconnect()

    def _received(self, message: Message) -> None:
        kind, values = message
        if kind == "ready":
            self.facts = values
            self.clock_ahead_s = values["at_s"] - time.time()
        elif kind == "idle":
            self.is_idle = True
        elif kind == "left":
            self.problem = values["trouble"]
            self.has_left = True
            if not self.is_held:
                self.dismiss()
        self._message(self, message)
        # To send the dismissal may have shown that it has ended.
        if self._is_dismissed and not self.is_gone:
            self._lose(_ENDED)


class WorkerPool:
    """The control connections from the head to its workers.

    Args:
        facts: The head's facts, which must be the same on the workers.
        access: How to reach the workers.
        on_message: Called with each message of a worker.
        on_lost: Called when a worker that had answered is gone, or one ended before it answered.
    """

    def __init__(
        self,
        node: NodeEnv,
        loop: NodeLoop,
        facts: dict[str, Any],
        access: Access,
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
        # The silent workers, each with the silence after which it is reported next.
        self._silent: dict[int, float] = {}
        self.workers = [
            RemoteWorker(node, index, loop, access, on_message, self._lost)
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

    def open(self) -> None:
        """Start to look for every worker."""
        self._begun = self._loop.now_s()
        self._loop.schedule("late", _LATE_S, self._are_late)
        for worker in self.workers:
            worker.open()
        if self.workers:
            self._loop.start_clock(self._tick)

    def stop_waiting(self) -> None:
        """Stop looking for the workers that have not answered, for good."""
        self._loop.cancel("late")
        if self._is_late and not self.absent:
            log_message("all workers are ready after %.0f s" % (self._loop.now_s() - self._begun))
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
        for worker in self.workers:
            worker.is_held = self._node.ends_together
        self.send("job-ended", code=code, is_over=is_over, reason=reason)
        deadline = self._loop.now_s() + patience_s
        while self._loop.now_s() < deadline:
            if all(
                worker.is_absent or worker.has_left or worker.silent_s >= silent_limit_s
                for worker in self.workers
            ):
                break
            self._loop.step()
        waiting = self._waiting()
        for worker in self.workers:
            if worker not in waiting:
                worker.close()
        return [worker for worker in self.workers if worker.is_ready and not worker.has_left]

    def dismiss(self, code: int) -> None:
        """Let the workers end that wait for the final exit code of the job."""
        waiting = self._waiting()
        for worker in waiting:
            worker.dismiss(code=code)
        deadline = self._loop.now_s() + _DISMISS_S
        while not all(worker.is_gone for worker in waiting) and self._loop.now_s() < deadline:
            self._loop.step()
        for worker in waiting:
            worker.close()
        self._loop.stop_clock()

    def _waiting(self) -> list[RemoteWorker]:
        return [worker for worker in self.workers if worker.has_left and not worker.is_gone]

    def unfit(self) -> list[node_table.Row]:
        """Return the workers that are absent, or do not match the head."""
        return [row for row in self._rows()[1:] if row.problem]

    def show(self, message: str = "") -> None:
        """Log the table of nodes, then ``message`` and hints."""
        rows = self._rows()
        log_message("the nodes after %.0f s:" % (self._loop.now_s() - self._begun))
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
        waited_s = self._loop.now_s() - self._begun
        self._is_late = True
        self.show()
        self._loop.schedule("late", max(waited_s, _LATE_S), self._are_late)

    # -- silence ----------------------------------------------------------------------------------

    def _tick(self, elapsed_s: float) -> None:
        for worker in self.workers:
            worker.tick(elapsed_s)
        # Waiting longer does not help then.
        is_misnamed = any(worker.attempt.is_misnamed for worker in self.absent)
        if is_misnamed and not self._is_late and self._loop.is_scheduled("late"):
            self._are_late()
        self._report_silence()

    def _report_silence(self) -> None:
        """Log which workers have become silent, are still silent, or are back."""
        silent, back = [], []
        for worker in self.workers:
            due_s = self._silent.get(worker.index)
            if worker.silent_s >= (due_s or transport.SILENT_S):
                silent.append(worker)
                self._silent[worker.index] = 2 * worker.silent_s
            elif due_s is not None and worker.silent_s < transport.SILENT_S:
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
        row = row._replace(has_control=True, facts=worker.facts, clock_ahead_s=worker.clock_ahead_s)
        return node_table.compare(row, head)
    return row._replace(has_control=attempt.has_control, problem=attempt.problem, hint=attempt.hint)
