"""The event loop of a node: ranks, their output, signals, and child processes.

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
import subprocess
import threading
import time
from collections import deque
from types import FrameType
from typing import TYPE_CHECKING, Callable, Mapping, NamedTuple, Sequence

from jobentry.contract import hang_actions
from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths
from jobentry.log import Relay
from jobentry.node.journal import Journal
from jobentry.node.local_ranks import End, LocalRanks
from jobentry.node.rank_output import RankOutput
from jobentry.system import processes
from jobentry.system.awake import AwakeClock

if TYPE_CHECKING:
    from jobentry.contract.hangs import Standing
    from jobentry.contract.slow import RankShare
    from jobentry.node.standing import StandingRanks
    from jobentry.preflight.node import NodePreflight
    from jobentry.staging.outputs import Outputs

# Seconds that ranks have to end after the job has failed, before they are killed.
ABORT_S = 1.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FORWARDED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
# Minimum seconds to store outputs of a stopped job, and extra seconds for the last ones.
STOPPED_LIMIT_S = 10.0
_LAST_S = 2.0
_TICK_S = 0.5
# The period of a clock. If the loop was blocked, a tick counts at most this many seconds: meanwhile
# it has read nothing from the other side.
_CLOCK_S = 1.0
_MAX_TICK_S = 3.0
# A rank writes lines of 2,000 bytes at most; a script may write anything.
_EVENT_LIMIT_BYTES = 16 * 1024
# How much of a child's output is read at once.
_READ_BYTES = 65536
# Written to wake the loop; it is not the number of a signal.
_WAKE = 0
# Seconds between two checks for adopted children that have ended.
_REAP_S = 1.0


class NodeSetup(NamedTuple):
    """What the entry has set up on this node before its part of the job begins.

    Args:
        journal: What this node does and uses.
        outputs: Notified before ranks are ended; None if the job has no outputs to upload.
        child_ids: The children of this process that other code waits for, and ends.
        preflight: This node's part of the check before the ranks start; None if there is none.
    """

    node: NodeEnv
    paths: NodePaths
    journal: Journal
    outputs: Outputs | None = None
    child_ids: tuple[int, ...] = ()
    preflight: NodePreflight | None = None


class NodeEvents(NamedTuple):
    """What a loop calls when something happens on its node; by default, nothing.

    Args:
        rank_started: Called with the rank.
        rank_ended: Called with how a rank ended.
        signalled: Called with the number of a signal to this process.
        ranks_stand: Called with all ranks of this node that do not move, if that has changed.
        ranks_share: Called once a minute, with what each rank did.
    """

    rank_started: Callable[[int], None] = lambda rank: None
    rank_ended: Callable[[End], None] = lambda end: None
    signalled: Callable[[int], None] = lambda number: None
    ranks_stand: Callable[[list[Standing]], None] = lambda standing: None
    ranks_share: Callable[[list[RankShare]], None] = lambda shares: None


class NodeLoop:
    """The loop that head and worker share: the ranks of this node, their output, and signals.

    Args:
        now_s: The clock of all timers.
    """

    def __init__(
        self,
        setup: NodeSetup,
        events: NodeEvents,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.now_s = now_s
        self.awake = AwakeClock(now_s)
        # Other threads read that one, so it does not show that the loop was blocked; this one does.
        self.turns = AwakeClock(now_s)
        node, paths, journal = setup.node, setup.paths, setup.journal
        self._node = node
        self._on = events
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
        self.selector.register(self._events, selectors.EVENT_READ, self.read_events)
        # Children that other code waits for; all others were adopted.
        self.own_children = set(setup.child_ids)
        self._has_dead_children = True
        self._reap_at = 0.0
        self._listen()
        journal.watch(self.ranks, paths)
        self.ranks.device_errors = journal.device_errors
        self._on_first_rank: Callable[[], object] = lambda: journal.begin("first output")
        self.relay.on_output = lambda: journal.end("first output")
        self.relay.before_write = journal.mark_time
        if node.hang_action != hang_actions.OFF:
            journal.look_for_hangs(lambda: self._standing_ranks(paths, journal))
        if setup.outputs is not None:
            self.ranks.before_end = setup.outputs.note_open_files
        self.relay.start()

    def _standing_ranks(self, paths: NodePaths, journal: Journal) -> StandingRanks:
        """Return what looks for ranks of this node that do not move, or are slow, in a thread."""
        from jobentry.node.standing import Devices, Pace, Reports, StandingRanks

        def changed(standing: list[Standing]) -> None:
            self.post(lambda: self._on.ranks_stand(standing))

        def shared(shares: list[RankShare]) -> None:
            self.post(lambda: self._on.ranks_share(shares))

        node = self._node
        reports, devices = Reports(changed, shared), Devices(lambda: journal.devices)
        pace = Pace(node.hang_scale, self.awake.now_s)
        return StandingRanks(self.ranks, paths, node.node, reports, pace, devices)

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
                self._on.rank_started(rank)

    def _rank_ended(self, end: End) -> None:
        # The report on the rank has the last lines of its log.
        self.outputs.settle(end.rank)
        self._on.rank_ended(end)

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
        due = self.now_s() + after_s
        self._timers[name] = (due, action)
        heapq.heappush(self._due, (due, name))

    def cancel(self, name: str) -> None:
        """Cancel the action that is scheduled under this name, if there is one."""
        self._timers.pop(name, None)

    def is_scheduled(self, name: str) -> bool:
        """Whether an action is scheduled under this name."""
        return name in self._timers

    def start_clock(self, tick: Callable[[float], None]) -> None:
        """Call ``tick`` about once a second with the seconds since the last time.

        A suspended node knows nothing about the other side, so that time does not count.
        """
        begun_s = self.awake.now_s()

        def run() -> None:
            self.start_clock(tick)
            tick(min(self.awake.now_s() - begun_s, _MAX_TICK_S))

        self.schedule("clock", _CLOCK_S, run)

    def stop_clock(self) -> None:
        """Stop calling the function of ``start_clock``."""
        self.cancel("clock")

    def post(self, action: Callable[[], None]) -> None:
        """Run ``action`` in the loop; other threads may call this."""
        self._posted.append(action)
        # A full pipe wakes the loop as well.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, bytes([_WAKE]))

    def step(self) -> None:
        """Wait for the next event, and handle it."""
        ready = self.selector.select(self._wait_s())
        self.awake.now_s()
        self.turns.now_s()
        # Read events first, so that a signal also reaches a rank that has just started.
        self.read_events()
        for key, _ in ready:
            key.data()
        now = self.now_s()
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

    def run_in_thread(self, work: Callable[[], str], stopped_at: Callable[[], float | None]) -> str:
        """Run ``work`` in a thread while the loop continues, and return its result.

        Args:
            stopped_at: Returns when the job was stopped, on the monotonic clock; None if it was
                not. The work of a stopped job is not waited for without end.

        Raises:
            TimeoutError: The job was stopped, and the work then took too long.
            Exception: What ``work`` raised.
        """
        results: list[tuple[str, BaseException | None]] = []

        def run() -> None:
            try:
                results.append((work(), None))
            except BaseException as error:  # noqa: BLE001 (raised again below)
                results.append(("", error))
            self.post(_nothing)

        try:
            threading.Thread(target=run, daemon=True).start()
        except RuntimeError:
            # No thread can be started: blocking the loop is better than storing nothing.
            return work()
        limit_s = max(STOPPED_LIMIT_S, self._node.grace_s) + _LAST_S
        while not results:
            stopped_s = stopped_at()
            if stopped_s is not None and time.monotonic() > stopped_s + limit_s:
                raise TimeoutError
            self.step()
        answer, failure = results[0]
        if failure is not None:
            raise failure
        return answer

    def _wait_s(self) -> float:
        """Return how long to wait for events: until the next timer is due, and no longer."""
        while self._due:
            due, name = self._due[0]
            if name in self._timers and self._timers[name][0] == due:
                return min(_TICK_S, max(0.0, due - self.now_s()))
            heapq.heappop(self._due)
        return _TICK_S

    def kill_ranks(self) -> None:
        """End all ranks of this node at once."""
        self.ranks.kill()
        self.ranks.release()

    def close(self, keep: tuple[int, ...] = ()) -> None:
        """End the remaining ranks, and show their last output."""
        self.kill_ranks()
        processes.kill_descendants(keep)
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
                    self._on.signalled(number)

        self.selector.register(wake, selectors.EVENT_READ, read_signals)


def _nothing() -> None:
    """Do nothing."""


def _wake_only(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: without a handler no byte would be written."""


class ChildProcess:
    """A started child.

    Args:
        on_lines: Called with the lines that it writes to standard output and standard error.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(
        self,
        loop: NodeLoop,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        on_lines: Callable[[list[str]], None],
    ) -> None:
        self._loop = loop
        self._on_lines = on_lines
        self._lines = Lines()
        self._process = subprocess.Popen(
            argv,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._stdout = self._process.stdout
        self.id = self._process.pid
        os.set_blocking(self._stdout.fileno(), False)
        loop.own_children.add(self.id)
        loop.selector.register(self._stdout, selectors.EVENT_READ, self._read_lines)

    def end(self) -> tuple[int, list[str]] | None:
        """Return the exit code (negative for a signal) and the last lines; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        lines = self._read()
        self._unregister()
        self._stdout.close()
        self._loop.own_children.discard(self.id)
        return code, lines

    @property
    def is_running(self) -> bool:
        """Whether the child is still running."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill its process group, which may outlive the child."""
        with contextlib.suppress(OSError):
            os.killpg(self.id, signal.SIGKILL)

    def _read_lines(self) -> None:
        lines = self._read()
        if lines:
            self._on_lines(lines)

    def _read(self) -> list[str]:
        try:
            data = os.read(self._stdout.fileno(), _READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            # The child has closed its output but still runs, as a daemon may.
            self._unregister()
        return [line.decode("utf-8", "replace") for line in self._lines.feed(data)]

    def _unregister(self) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._loop.selector.unregister(self._stdout)


class Lines:
    """Splits a stream of bytes into lines.

    Args:
        limit_bytes: The longest line; what was received of a longer one is dropped. 0 for no limit.
    """

    def __init__(self, limit_bytes: int = 0) -> None:
        self._rest = b""
        self._limit_bytes = limit_bytes

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that ``data`` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if 0 < self._limit_bytes < len(self._rest):
            self._rest = b""
        return lines
