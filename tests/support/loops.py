"""The event loop of a node in the test process."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths
from jobentry.control.loop import FORWARDED_SIGNALS, STOP_SIGNALS, NodeEvents, NodeLoop, NodeSetup
from jobentry.node.journal import Journal
from jobentry.system.processes import children

_NUMBERS = (*STOP_SIGNALS, *FORWARDED_SIGNALS, signal.SIGCHLD)


def make_loop(
    node: NodeEnv,
    paths: NodePaths,
    events: NodeEvents | None = None,
    now_s: Callable[[], float] = time.monotonic,
) -> NodeLoop:
    """Return the loop of a node, with the FIFO that it reads.

    The children of the test process, such as servers of other tests, are not its own to end.
    """
    if not Path(paths.events).exists():
        os.mkfifo(paths.events)
    setup = NodeSetup(node, paths, Journal(), child_ids=tuple(children()))
    return NodeLoop(setup, events or NodeEvents(), now_s)


class Clock:
    """A clock that a test moves.

    Args:
        base_s: The clock that it is ahead of; one that stands still by default.
    """

    def __init__(self, base_s: Callable[[], float] = lambda: 0.0) -> None:
        self._base_s = base_s
        self.ahead_s = 0.0

    def now_s(self) -> float:
        """Return the time."""
        return self._base_s() + self.ahead_s

    def advance(self, loop: NodeLoop, seconds: float) -> None:
        """Move on, and have the loop of this clock run what is due by then."""
        self.ahead_s += seconds
        # A posted action wakes the loop, which would otherwise wait for an event.
        loop.post(lambda: None)
        loop.step()


def paths_in(folder: Path) -> NodePaths:
    """Return the paths of a node all of which are in one folder."""
    return NodePaths(*[str(folder)] * 5)


@contextlib.contextmanager
def signals_restored() -> Iterator[None]:
    """Restore the signal handlers of the test process, which a loop replaces."""
    before = {number: signal.getsignal(number) for number in _NUMBERS}
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
