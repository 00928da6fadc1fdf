"""What every node watches over: its ranks, their output, and signals, as events of one loop.

Nothing relies on mpirun's own time-outs or grace: it has a fixed grace of less than a second, does
not end a start that hangs, and leaves ranks behind when it is killed (tried on 4.1.4 and 5.0.11).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from types import FrameType
from typing import Callable, Collection

from jobentry import peers
from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths
from jobentry.output import Relay
from jobentry.ranks import End, Ranks

# How long ranks may take to end when the job has failed, before they are killed.
ABORT_S = 1.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PASSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
_TICK_S = 0.5
# So often at most we look for adopted children that have ended.
_REAP_S = 1.0
_PR_SET_CHILD_SUBREAPER = 36


class NodeLoop:
    """What a head and a worker share: the ranks of this node, their output, and signals."""

    def __init__(self, node: NodeEnv, paths: NodePaths) -> None:
        self.node = node
        self.ranks = Ranks(paths)
        self.relay = Relay(paths.log_dir)
        self.selector = selectors.DefaultSelector()
        self._lines = peers.Lines()
        self._timers: dict[str, tuple[float, Callable[[], None]]] = {}
        # Read and write: so the FIFO never ends when a rank closes it.
        self._events = os.open(paths.events, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self.on_end: Callable[[End], None] = lambda end: None
        self.on_start: Callable[[int], None] = lambda rank: None
        self.on_signal: Callable[[int], None] = lambda number: None
        self.selector.register(self._events, selectors.EVENT_READ, self.hear_ranks)
        self._signals: list[int] = []
        # Children that somebody here waits for; all others were adopted.
        self.own: set[int] = set()
        self._has_dead_children = True
        self._reap_at = 0.0
        self._listen()
        self.relay.start()

    def hear_ranks(self) -> None:
        """Take in what the ranks of this node say."""
        try:
            data = os.read(self._events, 65536)
        except BlockingIOError:
            return
        for line in self._lines.feed(data):
            word, end = self.ranks.hear(line.decode("utf-8", "surrogateescape"))
            if end is not None:
                self.on_end(end)
            elif word == "start":
                rank = int(line.split()[1])
                self.relay.add(rank)
                self.on_start(rank)

    def at(self, name: str, after_s: float, action: Callable[[], None]) -> None:
        """Do ``action`` once, ``after_s`` from now, unless ``name`` is set again or dropped."""
        self._timers[name] = (time.monotonic() + after_s, action)

    def drop(self, name: str) -> None:
        """Forget what ``at`` planned under this name."""
        self._timers.pop(name, None)

    def step(self) -> None:
        """Wait for the next thing to happen, and deal with it."""
        now = time.monotonic()
        wait = min([_TICK_S] + [max(0.0, at - now) for at, _ in self._timers.values()])
        ready = self.selector.select(wait)
        # First, so that a signal reaches a rank that has just started, too.
        self.hear_ranks()
        for key, _ in ready:
            key.data()
        now = time.monotonic()
        for name, (at, action) in list(self._timers.items()):
            if at <= now:
                self.drop(name)
                action()
        if self.ranks.missing:
            # What a rank said before it was gone comes first.
            self.hear_ranks()
            for end in self.ranks.lost():
                self.on_end(end)
        if self._has_dead_children and now >= self._reap_at:
            self._has_dead_children = False
            self._reap_at = now + _REAP_S
            reap(self.own)

    def close(self, keep: tuple[int, ...] = ()) -> None:
        """End what is left of the ranks, and show the last of what they wrote."""
        self.ranks.kill()
        self.ranks.release()
        sweep(keep)
        self.relay.finish()

    def _listen(self) -> None:
        wake, self._wake = os.pipe()
        for end in (wake, self._wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wake)
        for number in (*STOP_SIGNALS, *PASSED_SIGNALS, signal.SIGCHLD):
            signal.signal(number, self._note)

        def hear() -> None:
            os.read(wake, 4096)
            while self._signals:
                self.on_signal(self._signals.pop(0))

        self.selector.register(wake, selectors.EVENT_READ, hear)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGCHLD:
            self._has_dead_children = True
        else:
            self._signals.append(number)


def adopt_orphans() -> None:
    """Make this process the parent of what its descendants leave behind, so it can be ended."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass


def reap(own: Collection[int]) -> None:
    """Let those go of our children that have ended, but for our ``own``: others wait for these.

    A script of days that starts programs, which start others and end, would fill the table of
    processes: what they leave is ours (``adopt_orphans``), and not that of the container's init.
    """
    for child in _children(os.getpid()):
        if child not in own:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)


def sweep(keep: tuple[int, ...] = ()) -> None:
    """End what is left of our children and of theirs, but for the processes in ``keep``."""
    for _ in range(100):
        children = [child for child in _children(os.getpid()) if child not in keep]
        if not children:
            return
        for child in children:
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def _children(parent: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
            # The name of a program may hold blanks and brackets; the last bracket ends it.
            if int(file.read().rpartition(b")")[2].split()[1]) == parent:
                found.append(int(name))
    return found
