"""The head's watch for hangs: what the nodes report goes to the rules, and a hang to the log.

As long as every rank moves, no node reports anything, and nothing runs here.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Callable, NamedTuple

from jobentry.contract import hang_actions, hangs
from jobentry.contract.env import NodeEnv
from jobentry.contract.exits import TIMED_OUT, Failure
from jobentry.contract.hangs import Confidence, Hang, Standing
from jobentry.control import connection
from jobentry.control.event_loop import NodeLoop
from jobentry.control.hang_rules import (
    LIMITS,
    NOT_SUSPECTED,
    Event,
    advance,
    judge,
    lasted_s,
)
from jobentry.control.stop import Stop
from jobentry.control.worker_pool import WorkerPool
from jobentry.log import log_message
from jobentry.node.journal import Journal

# Seconds between two evaluations of the rules, and between two entries in the journal while a job
# hangs.
_PERIOD_S, _JOURNAL_S = 5.0, 60.0
# A node whose ranks do not move reports at least so often; older reports may not be true any more.
_FRESH_S, _LEAST_FRESH_S = 45.0, 15.0
_TIMER = "hangs"


class _Report(NamedTuple):
    """What a node has reported, and when it arrived, on the monotonic clock."""

    at_s: float
    standing: tuple[Standing, ...]


class HangWatch:
    """Watches for hangs.

    Args:
        running: Returns the ranks that have started and not ended.

    Attributes:
        journal: Where hangs are written.
    """

    def __init__(
        self,
        node: NodeEnv,
        loop: NodeLoop,
        pool: WorkerPool,
        stop: Stop,
        running: Callable[[], frozenset[int]],
    ) -> None:
        self.journal = Journal()
        self._node = node
        self._loop = loop
        self._pool = pool
        self._stop = stop
        self._running = running
        self._limits = LIMITS.scaled(node.hang_scale)
        self._reports: dict[int, _Report] = {}
        self._state = NOT_SUSPECTED
        self._written_s = 0.0

    @property
    def hang(self) -> Hang | None:
        """How the job hangs, or hung when it was ended; None if it does not."""
        confirmed = self._state.confirmed
        if confirmed is None:
            return None
        return confirmed._replace(at=time.time(), lasted_s=lasted_s(self._state, time.monotonic()))

    def take_rows(self, node: int, values: dict[str, Any]) -> None:
        """Take the report of a worker; one that cannot be read is ignored."""
        with contextlib.suppress(LookupError, TypeError, ValueError):
            rows = [hangs.from_row(row) for row in values["ranks"]]
            self.take(node, [each._replace(node=node) for each in rows])

    def take(self, node: int, standing: list[Standing]) -> None:
        """Take all ranks of a node that have not moved for long."""
        self._reports[node] = _Report(time.monotonic(), tuple(standing))
        if standing and not self._loop.is_scheduled(_TIMER):
            self._evaluate()

    def _evaluate(self) -> None:
        """Apply the rules to the last reports, and report what has changed."""
        if self._stop.has_begun:
            return
        if self._state.confirmed or any(each.standing for each in self._reports.values()):
            self._loop.schedule(_TIMER, self._node.hang_scale * _PERIOD_S, self._evaluate)
        now_s = time.monotonic()
        running = self._running()
        if not running or not self._is_known(now_s):
            return
        reports = [report for report in self._reports.values() if report.standing]
        standing = [
            each._replace(still_s=each.still_s + now_s - report.at_s)
            for report in reports
            for each in report.standing
        ]
        is_moving = bool(running - {each.rank for each in standing})
        verdict = judge(running, standing, self._limits)
        hang = self.hang
        self._state, event = advance(
            self._state,
            verdict,
            now_s,
            self._limits,
            is_moving=is_moving,
            reported_s=min((report.at_s for report in reports), default=now_s),
        )
        if event is Event.ENDS and hang is not None:
            self._has_ended(hang)
        elif event is Event.BEGINS:
            self._has_begun()
        elif event is Event.LASTS and self.hang is not None:
            log_message(f"the job still hangs: {hangs.headline(self.hang)}")
        self._continue(now_s)

    def _is_known(self, now_s: float) -> bool:
        """Whether every node has reported lately, so that what it has reported still holds."""
        fresh_s = max(_LEAST_FRESH_S, self._node.hang_scale * _FRESH_S)
        if any(now_s - each.at_s > fresh_s for each in self._reports.values() if each.standing):
            return False
        return all(worker.silent_s < connection.SILENT_S for worker in self._pool.workers)

    def _has_begun(self) -> None:
        hang = self.hang
        assert hang is not None
        verb = "may hang" if hang.confidence is Confidence.LOW else "hangs"
        log_message(f"the job {verb}: {hangs.headline(hang)}")
        for line in hangs.details(hang):
            log_message(f"  {line}")
        log_message(
            f"  `cloudjob stacks {self._node.job}` shows the stacks; {self._consequence(hang)}"
        )
        self._write(hang)

    def _consequence(self, hang: Hang) -> str:
        if self._node.hang_action != hang_actions.STOP:
            return "`hang: {action: stop}` in a job file ends such jobs"
        if not hang.may_stop:
            return "this is not certain enough to end the job"
        return f"the job is ended in {hangs.span(self._node.hang_after_s)} unless it moves"

    def _has_ended(self, hang: Hang) -> None:
        log_message(f"the job moves again after {hangs.span(hang.lasted_s)}: it was slow, not hung")
        self._write(hang._replace(is_over=True))

    def _continue(self, now_s: float) -> None:
        """Update the journal of a job that hangs, and end it if that was asked for."""
        hang = self.hang
        if hang is None:
            return
        if now_s - self._written_s >= _JOURNAL_S:
            self._write(hang)
        has_waited = now_s - self._state.began_s >= self._node.hang_after_s
        if self._node.hang_action == hang_actions.STOP and hang.may_stop and has_waited:
            self._stop.handle_hang(self._failure(hang))

    def _failure(self, hang: Hang) -> Failure:
        ranks = [rank for group in hang.culprits for rank in group.ranks]
        nodes = {node for group in hang.culprits for node in group.nodes}
        node = nodes.pop() if len(nodes) == 1 else None
        return Failure(
            node=node,
            host="" if node is None else self._node.hosts[node],
            rank=ranks[0] if len(ranks) == 1 else None,
            exit_code=TIMED_OUT,
            message=f"ended because it hangs: {hangs.headline(hang)}",
        )

    def _write(self, hang: Hang) -> None:
        self._written_s = time.monotonic()
        self.journal.add(hang)
