"""The head's watch for hangs and slow ranks: reports go to the rules, results to log and journal.

As long as every rank moves, no node reports a hang, and no rule of hangs is applied.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import Any, Callable, NamedTuple, Sequence

from jobentry.contract import hang_actions, hangs, slow
from jobentry.contract.env import NodeEnv
from jobentry.contract.exits import TIMED_OUT, Failure
from jobentry.contract.hangs import Confidence, Hang, Standing
from jobentry.contract.malformed import MALFORMED
from jobentry.contract.slow import RankShare, Slow
from jobentry.control import hang_rules, slow_rules, transport
from jobentry.control.hang_rules import LIMITS, NOT_SUSPECTED, Event, lasted_s
from jobentry.control.loop import NodeLoop
from jobentry.control.peers import WorkerPool
from jobentry.control.stop import Stop
from jobentry.log import log_message
from jobentry.node.journal import Journal

# Seconds between two evaluations of the rules, and between two entries in the journal while a job
# hangs.
_PERIOD_S, _JOURNAL_S = 5.0, 60.0
# A node whose ranks do not move reports at least so often; older reports may not be true any more.
_FRESH_S, _LEAST_FRESH_S = 45.0, 15.0
_TIMER = "hangs"
# After a rank was reported, a job that changes its mind all the time is reported no more than so
# often; each view still shows how it is.
_MOST_MESSAGES = 10


class _Report(NamedTuple):
    """What a node has reported, and when it arrived, by a clock that counts no suspension."""

    at_s: float
    standing: tuple[Standing, ...]


class HangWatch:
    """Watches for hangs.

    Args:
        running: Returns the ranks that have started and not ended.
        journal: Where hangs are written.
    """

    def __init__(
        self,
        node: NodeEnv,
        loop: NodeLoop,
        pool: WorkerPool,
        stop: Stop,
        running: Callable[[], frozenset[int]],
        journal: Journal,
    ) -> None:
        self._journal = journal
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
        return confirmed._replace(
            at=time.time(), lasted_s=lasted_s(self._state, self._loop.awake.now_s())
        )

    @property
    def standing(self) -> list[Standing]:
        """The ranks that have not moved for long, as of the last reports before the job's end."""
        return [each for report in self._reports.values() for each in report.standing]

    def take_rows(self, node: int, values: dict[str, Any]) -> None:
        """Take the report of a worker; one that cannot be read is ignored."""
        with contextlib.suppress(*MALFORMED):
            rows = [hangs.from_row(row) for row in values["ranks"]]
            self.take(node, [each._replace(node=node) for each in rows])

    def take(self, node: int, standing: list[Standing]) -> None:
        """Take all ranks of a node that have not moved for long."""
        if self._stop.has_begun:
            return
        self._reports[node] = _Report(self._loop.awake.now_s(), tuple(standing))
        if standing and not self._loop.is_scheduled(_TIMER):
            self._evaluate()

    def _evaluate(self) -> None:
        """Apply the rules to the last reports, and report what has changed."""
        if self._stop.has_begun:
            return
        if self._state.confirmed or any(each.standing for each in self._reports.values()):
            self._loop.schedule(_TIMER, self._node.hang_scale * _PERIOD_S, self._evaluate)
        now_s = self._loop.awake.now_s()
        running = self._running()
        if not running or not self._is_known(now_s):
            return
        reports = [report for report in self._reports.values() if report.standing]
        standing = [
            each._replace(still_s=each.still_s + age_s, late_s=each.late_s + age_s)
            for report in reports
            for age_s in (now_s - report.at_s,)
            for each in report.standing
        ]
        is_moving = bool(running - {each.rank for each in standing})
        verdict = hang_rules.judge(running, standing, self._limits)
        hang = self.hang
        self._state, event = hang_rules.advance(
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
        return all(worker.silent_s < transport.SILENT_S for worker in self._pool.workers)

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
        self._written_s = self._loop.awake.now_s()
        self._journal.add(hang)


class SlowWatch:
    """Watches for slow ranks: each node reports once a minute, and when all have, it judges.

    Args:
        running: Returns the ranks that have started and not ended.
        journal: Where slow ranks are written.
    """

    def __init__(self, running: Callable[[], frozenset[int]], journal: Journal) -> None:
        self._journal = journal
        self._running = running
        self._history: dict[int, deque[RankShare]] = {}
        self._fresh: set[int] = set()
        self._slow: Slow | None = None
        self._messages = 0

    def take_rows(self, node: int, values: dict[str, Any]) -> None:
        """Take the report of a worker; one that cannot be read is ignored."""
        with contextlib.suppress(*MALFORMED):
            rows = [slow.from_row(row) for row in values["ranks"]]
            self.take(node, [each._replace(node=node) for each in rows])

    def take(self, node: int, shares: Sequence[RankShare]) -> None:
        """Take what each rank of a node did in the last minute."""
        running = self._running()
        for each in shares:
            self._history.setdefault(each.rank, deque(maxlen=slow_rules.WINDOWS)).append(each)
            self._fresh.add(each.rank)
        for rank in [rank for rank in self._history if rank not in running]:
            del self._history[rank]
        if running and running <= self._fresh:
            self._fresh.clear()
            self._evaluate(running)

    def _evaluate(self, running: frozenset[int]) -> None:
        before = self._slow
        named = frozenset(before.ranks) if before is not None else frozenset()
        now = slow_rules.judge(running, self._history, named)
        self._slow = now._replace(at=time.time()) if now is not None else None
        if self._slow is not None:
            self._journal.add(self._slow)
            if before is None or before.ranks != self._slow.ranks:
                self._log(f"slow: {slow.headline(self._slow)}")
        elif before is not None:
            self._journal.add(before._replace(at=time.time(), is_over=True))
            self._log(f"no longer slow: {slow.who(before)}")

    def _log(self, text: str) -> None:
        self._messages += 1
        if self._messages <= _MOST_MESSAGES:
            log_message(text)
