"""The event loop of a node: ranks, their output, and signals.

Nothing relies on mpirun's own timeouts or grace period: its grace period is fixed at less than a
second, it does not end a start that hangs, and it leaves ranks behind when it is killed (tried on
4.1.4 and 5.0.11).
"""

from __future__ import annotations

import contextlib
import heapq
import os
import re
import selectors
import signal
import threading
import time
from collections import deque
from types import FrameType
from typing import TYPE_CHECKING, Callable

from jobentry.contract import hang_actions
from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths
from jobentry.control.messages import Lines
from jobentry.log import Relay
from jobentry.node.journal import Journal
from jobentry.node.local_ranks import End, LocalRanks
from jobentry.node.rank_output import RankOutput
from jobentry.system import processes

if TYPE_CHECKING:
    from jobentry.contract.hangs import Standing
    from jobentry.contract.slow import RankShare
    from jobentry.node.standing import StandingRanks

# Seconds that ranks have to end after the job has failed, before they are killed.
ABORT_S = 1.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FORWARDED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
# Minimum seconds to store outputs of a stopped job, and extra seconds for the last ones.
STOPPED_LIMIT_S = 10.0
_LAST_S = 2.0
_TICK_S = 0.5
# A rank writes lines of 2,000 bytes at most; a script may write anything.
_EVENT_LIMIT_BYTES = 16 * 1024
# Written to wake the loop; it is not the number of a signal.
_WAKE = 0
# Seconds between two checks for adopted children that have ended.
_REAP_S = 1.0


class NodeLoop:
    """The loop that head and worker share: the ranks of this node, their output, and signals."""

    def __init__(self, node: NodeEnv, paths: NodePaths) -> None:
        self.node = node
        self.ranks = LocalRanks(paths)
        self.relay = Relay(paths.log_dir)
        self.outputs = RankOutput(paths.log_dir, self.relay)
        self._node_dir = paths.node_dir
        self.selector = selectors.DefaultSelector()
        self._lines = Lines(_EVENT_LIMIT_BYTES)
        self._timers: dict[str, tuple[float, Callable[[], None]]] = {}
        # When each timer is due; an entry whose timer was rescheduled or cancelled is skipped.
        self._due: list[tuple[float, str]] = []
        self._posted: deque[Callable[[], None]] = deque()
        # Opened for reading and writing, so that there is no end of file when a rank closes it.
        self._events = os.open(paths.events, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self.on_end: Callable[[End], None] = lambda end: None
        self.on_start: Callable[[int], None] = lambda rank: None
        self.on_signal: Callable[[int], None] = lambda number: None
        self.selector.register(self._events, selectors.EVENT_READ, self.read_events)
        # Children that other code waits for; all others were adopted.
        self.own_children: set[int] = set()
        self._on_first_rank: Callable[[], object] = _nothing
        self._has_dead_children = True
        self._reap_at = 0.0
        self._listen()
        self.relay.start()

    def attach_journal(self, journal: Journal, paths: NodePaths) -> None:
        """Record in ``journal`` what the ranks of this node do."""
        journal.watch(self.ranks, paths)
        self._on_first_rank = lambda: journal.begin("first output")
        self.relay.on_output = lambda: journal.end("first output")
        self.relay.before_write = journal.mark_time

    def look_for_hangs(
        self,
        journal: Journal,
        paths: NodePaths,
        on_change: Callable[[list[Standing]], None],
        on_shares: Callable[[list[RankShare]], None],
    ) -> None:
        """Have the thread of ``journal`` look for ranks of this node that do not move, or are slow.

        Args:
            on_change: Called in this loop, with all that do not move, if that has changed.
            on_shares: Called in this loop, once a minute, with what all ranks did.
        """
        if self.node.hang_action == hang_actions.OFF:
            return

        def changed(standing: list[Standing]) -> None:
            self.post(lambda: on_change(standing))

        def shared(shares: list[RankShare]) -> None:
            self.post(lambda: on_shares(shares))

        def make() -> StandingRanks:
            from jobentry.node.standing import StandingRanks

            scale = self.node.hang_scale
            node = self.node.node
            return StandingRanks(self.ranks, paths, node, changed, scale, shared)

        journal.look_for_hangs(make)

    def read_events(self) -> None:
        """Read what the ranks of this node report."""
        try:
            data = os.read(self._events, 65536)
        except BlockingIOError:
            return
        for line in self._lines.feed(data):
            kind, end = self.ranks.handle_event(line.decode("utf-8", "surrogateescape"))
            if end is not None:
                self._rank_ended(end)
            elif kind == "output":
                self._take_output(line)
            elif kind == "start":
                rank = int(line.split()[1])
                self._watch(self.ranks.wrappers[rank])
                self._on_first_rank()
                self._on_first_rank = _nothing
                self.on_start(rank)

    def _rank_ended(self, end: End) -> None:
        # The report on the rank has the last lines of its log.
        self.outputs.settle(end.rank)
        self.on_end(end)

    def _take_output(self, line: bytes) -> None:
        """Copy the output of a rank, which waits for this; scripts can write such lines, too."""
        match = re.match(rb"output (\d{1,9}) (\d{1,9})$", line)
        if match is None:
            return
        rank = int(match[1])
        self.relay.add(rank)
        path = os.path.join(self._node_dir, "output-%d-%d" % (rank, int(match[2])))
        self.outputs.take(rank, path)

    def schedule(self, name: str, after_s: float, action: Callable[[], None]) -> None:
        """Run ``action`` once, ``after_s`` from now, unless it is rescheduled or cancelled."""
        due = time.monotonic() + after_s
        self._timers[name] = (due, action)
        heapq.heappush(self._due, (due, name))

    def cancel(self, name: str) -> None:
        """Cancel the action that is scheduled under this name, if there is one."""
        self._timers.pop(name, None)

    def is_scheduled(self, name: str) -> bool:
        """Whether an action is scheduled under this name."""
        return name in self._timers

    def post(self, action: Callable[[], None]) -> None:
        """Run ``action`` in the loop; other threads may call this."""
        self._posted.append(action)
        # A full pipe wakes the loop as well.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, bytes([_WAKE]))

    def step(self) -> None:
        """Wait for the next event, and handle it."""
        ready = self.selector.select(self._wait_s())
        # Read events first, so that a signal also reaches a rank that has just started.
        self.read_events()
        for key, _ in ready:
            key.data()
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            due, name = heapq.heappop(self._due)
            if name in self._timers and self._timers[name][0] == due:
                self._timers.pop(name)[1]()
        while self._posted:
            self._posted.popleft()()
        self.handle_lost_ranks()
        self.ranks.note_memory()
        if self._has_dead_children and now >= self._reap_at:
            self._has_dead_children = False
            self._reap_at = now + _REAP_S
            processes.reap(self.own_children)

    def handle_lost_ranks(self) -> None:
        """Handle the ends of ranks whose wrapper is gone without having reported one."""
        if self.ranks.missing:
            # A rank may have reported its own end, which counts more than its disappearance.
            self.read_events()
            for end in self.ranks.lost():
                self._rank_ended(end)

    def run_in_thread(self, work: Callable[[], str], is_late: Callable[[], bool]) -> str:
        """Run ``work`` in a thread while the loop continues, and return its result.

        Args:
            is_late: Whether to stop waiting for it.

        Raises:
            TimeoutError: ``is_late`` was true before the work had finished.
            Exception: What ``work`` raised.
        """
        answers: list[str] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                answers.append(work())
            except BaseException as error:  # noqa: BLE001 (raised again below)
                errors.append(error)
            finally:
                os.write(self._wake, bytes([_WAKE]))

        thread = threading.Thread(target=run, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # No thread can be started: blocking the loop is better than storing nothing.
            return work()
        while thread.is_alive() and not answers and not errors:
            if is_late():
                raise TimeoutError
            self.step()
        if errors:
            raise errors[0]
        return answers[0]

    def _wait_s(self) -> float:
        """Return how long to wait for events: until the next timer is due, and no longer."""
        while self._due:
            due, name = self._due[0]
            if name in self._timers and self._timers[name][0] == due:
                return min(_TICK_S, max(0.0, due - time.monotonic()))
            heapq.heappop(self._due)
        return _TICK_S

    def close(self, keep: tuple[int, ...] = ()) -> None:
        """End the remaining ranks, and show their last output."""
        self.ranks.kill()
        self.ranks.release()
        processes.sweep(keep)
        self.outputs.finish()
        self.relay.finish()

    def _watch(self, wrapper: int) -> None:
        """Have a wrapper's end wake the loop: mpirun kills the others a moment after the first."""
        try:
            ended: int = getattr(os, "pidfd_open")(wrapper)  # noqa: B009 (Python 3.8 has none)
        except (AttributeError, OSError):
            return

        def forget() -> None:
            self.selector.unregister(ended)
            os.close(ended)

        self.selector.register(ended, selectors.EVENT_READ, forget)

    def _listen(self) -> None:
        wake, self._wake = os.pipe()
        for end in (wake, self._wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wake)
        for number in (*STOP_SIGNALS, *FORWARDED_SIGNALS, signal.SIGCHLD):
            signal.signal(number, _wake_only)

        def read_signals() -> None:
            # The bytes are the signal numbers. A handler may run only after its byte was written
            # (seen on PyPy), and then nothing would wake the loop for what it noted.
            for number in os.read(wake, 4096):
                if number == signal.SIGCHLD:
                    self._has_dead_children = True
                elif number != _WAKE:
                    self.on_signal(number)

        self.selector.register(wake, selectors.EVENT_READ, read_signals)


def is_late(stopped_at: float | None, node: NodeEnv) -> bool:
    """Whether to stop waiting for the outputs of a job that was stopped at that time."""
    if stopped_at is None:
        return False
    return time.monotonic() > stopped_at + max(STOPPED_LIMIT_S, node.grace_s) + _LAST_S


def _nothing() -> None:
    """Do nothing."""


def _wake_only(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: without a handler no byte would be written."""
