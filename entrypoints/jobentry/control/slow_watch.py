"""The head's watch for slow ranks: what the nodes count goes to the rules, and a result to the log.

Each node reports once a minute. A job is judged when every node has reported again.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import Any, Callable, Sequence

from jobentry.contract import slow
from jobentry.contract.slow import RankShare, Slow
from jobentry.control.slow_rules import WINDOWS, judge
from jobentry.log import log_message
from jobentry.node.journal import Journal

# After a rank was reported, a job that changes its mind all the time is reported no more than so
# often; each view still shows how it is.
_MOST_MESSAGES = 10


class SlowWatch:
    """Watches for slow ranks.

    Args:
        running: Returns the ranks that have started and not ended.

    Attributes:
        journal: Where they are written.
    """

    def __init__(self, running: Callable[[], frozenset[int]]) -> None:
        self.journal = Journal()
        self._running = running
        self._history: dict[int, deque[RankShare]] = {}
        self._fresh: set[int] = set()
        self._slow: Slow | None = None
        self._messages = 0

    def take_rows(self, node: int, values: dict[str, Any]) -> None:
        """Take the report of a worker; one that cannot be read is ignored."""
        with contextlib.suppress(LookupError, TypeError, ValueError):
            rows = [slow.from_row(row) for row in values["ranks"]]
            self.take(node, [each._replace(node=node) for each in rows])

    def take(self, node: int, shares: Sequence[RankShare]) -> None:
        """Take what each rank of a node did in the last minute."""
        running = self._running()
        for each in shares:
            self._history.setdefault(each.rank, deque(maxlen=WINDOWS)).append(each)
            self._fresh.add(each.rank)
        for rank in [rank for rank in self._history if rank not in running]:
            del self._history[rank]
        if running and running <= self._fresh:
            self._fresh.clear()
            self._evaluate(running)

    def _evaluate(self, running: frozenset[int]) -> None:
        before = self._slow
        named = frozenset(before.ranks) if before is not None else frozenset()
        found = judge(running, self._history, named)
        self._slow = found._replace(at=time.time()) if found is not None else None
        if self._slow is not None:
            self.journal.add(self._slow)
            if before is None or before.ranks != self._slow.ranks:
                self._log(f"slow: {slow.headline(self._slow)}")
        elif before is not None:
            self.journal.add(before._replace(at=time.time(), is_over=True))
            self._log(f"no longer slow: {slow.who(before)}")

    def _log(self, text: str) -> None:
        self._messages += 1
        if self._messages <= _MOST_MESSAGES:
            log_message(text)
