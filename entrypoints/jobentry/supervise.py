"""Runs the plan of a node to its end: mpirun on the head, waiting for the head on a worker.

Everything that can happen is an event of one loop: a line from a rank, a message from a peer, a
signal, the end of mpirun, a deadline. Nothing relies on mpirun's own time-outs or grace: it has a
fixed grace of less than a second, does not end a start that hangs, and leaves ranks behind when it
is killed (tried on 4.1.4 and 5.0.11).
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import time
from collections import deque
from types import FrameType
from typing import Callable, Deque, Dict, List, NamedTuple, Optional, Tuple

from jobentry import peers
from jobentry.contract import exits
from jobentry.contract.env import NodeEnv
from jobentry.contract.exits import Failure
from jobentry.contract.paths import NodePaths
from jobentry.output import Relay, say
from jobentry.plan import LaunchPlan
from jobentry.ranks import End, Ranks

# How long the other ranks may take to end when one has failed, before they are killed.
ABORT_S = 1.0
# How long a reason may still be on its way when mpirun has ended badly without one.
REASON_S = 1.0
_TICK_S = 0.5
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PASSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_CHILD_SUBREAPER = 36


class Outcome(NamedTuple):
    """How the job ended, as this node knows it."""

    exit_code: int
    cause: str = ""
    failure: Optional[Failure] = None


class NodeLoop:
    """What a head and a worker share: the ranks of this node, their output, and signals."""

    def __init__(self, node: NodeEnv, paths: NodePaths) -> None:
        self.node = node
        self.ranks = Ranks(paths)
        self.relay = Relay(paths.log_dir)
        self.selector = selectors.DefaultSelector()
        self._lines = peers.Lines()
        self._timers: Dict[str, Tuple[float, Callable[[], None]]] = {}
        # Read and write: so the FIFO never ends when a rank closes it.
        self._events = os.open(paths.events, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self.on_end: Callable[[End], None] = lambda end: None
        self.on_start: Callable[[int], None] = lambda rank: None
        self.on_signal: Callable[[int], None] = lambda number: None
        self.selector.register(self._events, selectors.EVENT_READ, self.hear_ranks)
        self._signals: List[int] = []
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
        for key, _ in self.selector.select(wait):
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

    def close(self, keep: Tuple[int, ...] = ()) -> None:
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
        for number in (*_STOP_SIGNALS, *_PASSED_SIGNALS, signal.SIGCHLD):
            signal.signal(number, self._note)

        def hear() -> None:
            os.read(wake, 4096)
            while self._signals:
                self.on_signal(self._signals.pop(0))

        self.selector.register(wake, selectors.EVENT_READ, hear)

    def _note(self, number: int, _frame: Optional[FrameType]) -> None:
        if number != signal.SIGCHLD:
            self._signals.append(number)


class Head:
    """The head: opens a line to every worker, runs mpirun, and finds out how the job ended."""

    def __init__(self, node: NodeEnv, paths: NodePaths, plan: LaunchPlan) -> None:
        self._node = node
        self._plan = plan
        self._loop = NodeLoop(node, paths)
        self._loop.on_end = self._rank_ended
        self._loop.on_start = self._rank_started
        self._loop.on_signal = self._signalled
        self._peers: List[peers.Peer] = []
        self._mpirun: Optional[subprocess.Popen[bytes]] = None
        self._mpirun_lines: Deque[str] = deque(maxlen=40)
        self._mpirun_text = peers.Lines()
        self._started: Dict[int, int] = {}
        self._failures: List[Tuple[float, Failure]] = []
        self._lost_nodes: List[Failure] = []
        self._stopped: Optional[Outcome] = None
        self._is_over = False
        self._has_ended_mpirun = False
        self._was_signalled = False
        self.phases: List[Tuple[int, str, float, float]] = []

    def run(self) -> Outcome:
        """Run the job and return how it ended."""
        adopt_orphans()
        if self._node.timeout_s:
            self._loop.at("timeout", self._node.timeout_s, self._timed_out)
        try:
            begun = time.time()
            refusal = self._open_peers()
            self.phases.append((0, "bring-up", begun, time.time()))
            begun = time.time()
            outcome = refusal or self._run_mpirun()
            self.phases.append((0, "run", begun, time.time()))
            return outcome
        finally:
            self._loop.close(keep=tuple(peer.process for peer in self._peers))

    def end(self, outcome: Outcome) -> None:
        """Tell every worker how the job ended, and wait until each has left."""
        for peer in self._peers:
            peer.tell("end", code=outcome.exit_code)
        deadline = time.monotonic() + self._node.start_timeout_s
        while any(not peer.is_gone for peer in self._peers) and time.monotonic() < deadline:
            self._loop.step()
        for peer in self._peers:
            peer.close(patience_s=1.0)

    # -- workers ------------------------------------------------------------------------------

    def _open_peers(self) -> Optional[Outcome]:
        """Wait until every worker is there; return what stops the job, if anything does."""
        try:
            for index in range(1, self._node.nodes):
                self._open_peer(index)
        except peers.PeerError as error:
            return Outcome(exits.ENTRY_FAILED, "entry", Failure(message=str(error)))
        self._loop.at("start", self._node.start_timeout_s, self._start_is_late)
        while any(not peer.is_ready for peer in self._peers):
            self._loop.step()
            if self._is_over or self._lost_nodes or self._stopped:
                self._is_over = True
                return self._outcome_without_mpirun()
        return None

    def _open_peer(self, index: int) -> None:
        peer = peers.Peer(self._node, index)
        self._peers.append(peer)
        peer.tell("hello")
        self._loop.selector.register(
            peer.fileno(), selectors.EVENT_READ, lambda: self._hear_peer(peer)
        )

    def _hear_peer(self, peer: peers.Peer) -> None:
        messages = peer.hear()
        if messages is None:
            self._loop.selector.unregister(peer.fileno())
            if not self._is_over:
                self._lost(peer)
            return
        for word, values in messages:
            if word == "ready":
                peer.is_ready = True
                peer.clock_ahead_s = values["at_s"] - time.time()
            elif word == "start":
                self._started[values["rank"]] = peer.index
            elif word == "end":
                failure = exits.Failure(**values["failure"])
                failure = failure._replace(node=peer.index, host=peer.host)
                self._failed(values["at_s"] - peer.clock_ahead_s, failure)
            elif word == "signal":
                self._pass_on(values["number"])
            elif word == "idle":
                peer.is_idle = True

    def _lost(self, peer: peers.Peer) -> None:
        message = "node %d (%s) is gone: its remote shell ended" % (peer.index, peer.host)
        say(message)
        code = exits.code_of_signal(signal.SIGKILL)
        self._lost_nodes.append(
            Failure(node=peer.index, host=peer.host, exit_code=code, message=message)
        )
        self._end_ranks()

    def _start_is_late(self) -> None:
        absent = [peer for peer in self._peers if not peer.is_ready]
        if absent:
            text = "waiting for the workers: after %g s there is no sign of %s" % (
                self._node.start_timeout_s,
                ", ".join("node %d (%s)" % (peer.index, peer.host) for peer in absent),
            )
            first = absent[0]
            failure = Failure(node=first.index, host=first.host, message=text)
        else:
            text = "starting the ranks: mpirun started %d in %g s and then hung" % (
                len(self._started),
                self._node.start_timeout_s,
            )
            failure = Failure(message=text)
        say(text)
        self._stopped = Outcome(exits.ENTRY_FAILED, "entry", failure)
        self._is_over = True
        self._abort()

    # -- mpirun -------------------------------------------------------------------------------

    def _run_mpirun(self) -> Outcome:
        self._loop.at("start", self._node.start_timeout_s, self._start_is_late)
        plan = self._plan
        try:
            self._mpirun = subprocess.Popen(
                plan.argv,
                env=dict(plan.env),
                cwd=plan.cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            text = "starting %s: %s" % (plan.argv[0], error.strerror)
            return Outcome(exits.ENTRY_FAILED, "entry", Failure(message=text))
        assert self._mpirun.stdout is not None
        os.set_blocking(self._mpirun.stdout.fileno(), False)
        self._loop.selector.register(
            self._mpirun.stdout, selectors.EVENT_READ, self._hear_mpirun
        )
        while self._mpirun.poll() is None:
            self._loop.step()
            self._end_when_all_have()
        self._hear_mpirun()
        self._wait_for_reason(self._mpirun.returncode)
        self._is_over = True
        return self._outcome(self._mpirun.returncode)

    def _hear_mpirun(self) -> None:
        assert self._mpirun is not None
        assert self._mpirun.stdout is not None
        try:
            data = os.read(self._mpirun.stdout.fileno(), 65536)
        except (BlockingIOError, ValueError):
            return
        if not data:
            with contextlib.suppress(KeyError, ValueError):
                self._loop.selector.unregister(self._mpirun.stdout)
        for line in self._mpirun_text.feed(data):
            text = line.decode("utf-8", "replace").rstrip()
            if text and not re.match(r"-+$", text):
                self._mpirun_lines.append(text)
                # Once a rank has failed, mpirun only tells the same at length.
                if not self._has_reason():
                    say("mpirun: %s" % text)

    def _wait_for_reason(self, code: int) -> None:
        """A worker's word on its rank, or the end of its line, can come after mpirun's end."""
        deadline = time.monotonic() + REASON_S
        while code and not self._has_reason() and time.monotonic() < deadline:
            self._loop.at("reason", 0.05, lambda: None)
            self._loop.step()

    def _has_reason(self) -> bool:
        return bool(self._failures or self._lost_nodes or self._stopped)

    # -- ranks --------------------------------------------------------------------------------

    def _rank_started(self, rank: int) -> None:
        self._started[rank] = 0

    def _rank_ended(self, end: End) -> None:
        if end.is_failure:
            self._failed(end.at_s, self._loop.ranks.failure(end, 0, self._node.host))

    def _failed(self, at_s: float, failure: Failure) -> None:
        if self._stopped:
            return
        if not self._failures:
            say("rank %s on node %s (%s): %s" % (*failure[2:3], *failure[:2], failure.message))
            self._end_ranks()
        self._failures.append((at_s, failure))

    def _end_when_all_have(self) -> None:
        """End mpirun when every rank has ended: it waits for doors that stay, or for its clock."""
        if not self._has_reason() or self._loop.ranks.running:
            return
        if all(peer.is_idle or peer.is_gone for peer in self._peers):
            self._abort()

    # -- stopping -----------------------------------------------------------------------------

    def _signalled(self, number: int) -> None:
        """This node was sent a signal; a second one that ends the job is for the impatient."""
        if number in _STOP_SIGNALS and self._was_signalled:
            say("%s again: ending all ranks now" % signal.Signals(number).name)
            self._abort()
        else:
            self._was_signalled = number in _STOP_SIGNALS
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        """Some node was sent a signal; a platform that ends a job may send it to every node."""
        if number in _PASSED_SIGNALS:
            for peer in self._peers:
                peer.tell("signal", number=number)
            self._loop.ranks.pass_on(number)
        elif not self._stopped:
            code = exits.code_of_signal(number)
            message = "cancelled: the job was sent %s" % signal.Signals(number).name
            failure = Failure(signal=number, exit_code=code, message=message)
            self._stop(Outcome(code, "cancelled", failure))

    def _timed_out(self) -> None:
        message = "time is up: the job ran for %g s" % self._node.timeout_s
        code = exits.TIMED_OUT
        self._stop(Outcome(code, "timeout", Failure(exit_code=code, message=message)))

    def _stop(self, outcome: Outcome) -> None:
        assert outcome.failure is not None
        say("%s; all ranks have %g s to end" % (outcome.failure.message, self._node.grace_s))
        self._stopped = outcome
        for peer in self._peers:
            peer.tell("stop")
        self._loop.ranks.stop()
        self._loop.at("grace", self._node.grace_s, self._grace_is_over)

    def _end_ranks(self) -> None:
        """The job has failed: end the other ranks ourselves, mpirun 4.1 takes seconds for it."""
        for peer in self._peers:
            peer.tell("end-ranks")
        self._loop.ranks.pass_on(signal.SIGTERM)
        self._loop.at("abort", ABORT_S, self._abort)

    def _grace_is_over(self) -> None:
        say("%g s are over: ending the ranks that are left" % self._node.grace_s)
        self._abort()

    def _abort(self) -> None:
        """End everything at once, on every node."""
        for peer in self._peers:
            peer.tell("kill")
        if self._mpirun is not None and self._mpirun.poll() is None:
            # Its daemons on the workers see that it is gone; SIGTERM may not end it (5.0.11).
            self._has_ended_mpirun = True
            with contextlib.suppress(OSError):
                os.killpg(self._mpirun.pid, signal.SIGKILL)
        self._loop.ranks.kill()
        self._loop.ranks.release()

    # -- the end ------------------------------------------------------------------------------

    def _outcome_without_mpirun(self) -> Outcome:
        if self._stopped:
            return self._stopped
        return Outcome(exits.ENTRY_FAILED, "platform", self._lost_nodes[0])

    def _outcome(self, mpirun_code: int) -> Outcome:
        if mpirun_code < 0 and not self._has_ended_mpirun:
            code = exits.code_of_signal(-mpirun_code)
            message = "mpirun was killed by %s" % signal.Signals(-mpirun_code).name
            failure = Failure(
                0, self._node.host, signal=-mpirun_code, exit_code=code, message=message
            )
            return Outcome(code, "platform", failure)
        if self._failures and not self._lost_nodes:
            failure = min(self._failures, key=lambda item: item[0])[1]
            return Outcome(failure.exit_code or 1, "user", failure)
        if self._lost_nodes:
            failure = self._lost_nodes[0]
            return Outcome(failure.exit_code or 1, "platform", failure)
        if self._stopped:
            return self._stopped
        if mpirun_code == 0:
            return Outcome(0)
        return self._outcome_of_mpirun(mpirun_code)

    def _outcome_of_mpirun(self, code: int) -> Outcome:
        """Mpirun failed, and no rank has said why."""
        text = "\n".join(self._mpirun_lines)
        aborted = re.search(r"MPI_ABORT was invoked on rank (\d+)", text)
        all_ran = len(self._started) >= int(self._plan.argv[self._plan.argv.index("-np") + 1])
        exit_code = exits.code_of_signal(-code) if code < 0 else code
        failure = Failure(
            exit_code=exit_code,
            message="mpirun ended with exit code %d" % exit_code,
            last_lines=tuple(self._mpirun_lines)[-20:],
        )
        if aborted:
            rank = int(aborted.group(1))
            index = self._started.get(rank, 0)
            host = self._node.hosts[index]
            message = "called MPI_Abort(%d)" % exit_code
            return Outcome(
                exit_code,
                "user",
                failure._replace(rank=rank, node=index, host=host, message=message),
            )
        if all_ran:
            return Outcome(exit_code, "user", failure)
        return Outcome(
            exits.ENTRY_FAILED,
            "entry",
            failure._replace(
                exit_code=exits.ENTRY_FAILED,
                message="mpirun ended with exit code %d before all ranks had started" % exit_code,
            ),
        )


class Worker:
    """A worker: its ranks are started over the remote shell; it serves until the head says end."""

    def __init__(self, node: NodeEnv, paths: NodePaths) -> None:
        self._node = node
        self._loop = NodeLoop(node, paths)
        self._loop.on_end = self._rank_ended
        self._loop.on_start = lambda rank: self._tell("start", rank=rank)
        self._loop.on_signal = self._signalled
        # Read and write: messages wait in the FIFO until the head's session reads it.
        self._to_head = os.open(paths.to_head, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._from_head = os.open(paths.from_head, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._loop.selector.register(self._from_head, selectors.EVENT_READ, self._hear)
        self._lines = peers.Lines()
        self._code: Optional[int] = None
        self._is_stopping = False

    def run(self) -> int:
        """Serve the head, and return the exit code of the job."""
        adopt_orphans()
        self._loop.at("head", self._node.start_timeout_s, self._head_never_came)
        while self._code is None:
            self._loop.step()
            if self._is_stopping and not self._loop.ranks.running:
                self._is_stopping = False
                self._tell("idle")
        self._loop.close()
        return self._code

    def _tell(self, word: str, **values: object) -> None:
        with contextlib.suppress(OSError):
            os.write(self._to_head, peers.dump(word, **values))

    def _hear(self) -> None:
        self._loop.drop("head")
        data = os.read(self._from_head, 65536)
        if not data and self._code is None:
            say("the head (%s) is gone: ending the ranks of this node" % self._node.hosts[0])
            self._code = exits.ENTRY_FAILED
        for line in self._lines.feed(data):
            self._obey(peers.load(line))

    def _obey(self, message: peers.Message) -> None:
        word, values = message
        if word == "hello":
            # Now, and not when this node was up: the head reads its clock off this.
            self._tell("ready", at_s=time.time())
        elif word == "end":
            self._code = values["code"]
        elif word == "end-ranks":
            self._is_stopping = True
            self._loop.ranks.pass_on(signal.SIGTERM)
        elif word == "stop":
            self._is_stopping = True
            self._loop.ranks.stop()
        elif word == "kill":
            self._loop.ranks.kill()
            self._loop.ranks.release()
        elif word == "signal":
            self._loop.ranks.pass_on(values["number"])

    def _rank_ended(self, end: End) -> None:
        if end.is_failure:
            failure = self._loop.ranks.failure(end, self._node.node, self._node.host)
            self._tell("end", at_s=end.at_s, failure=failure._asdict())

    def _signalled(self, number: int) -> None:
        # The head decides; it tells every node, this one too.
        self._tell("signal", number=number)
        if number in _STOP_SIGNALS:
            self._loop.at("alone", self._node.grace_s + ABORT_S, lambda: self._leave(number))

    def _leave(self, number: int) -> None:
        self._code = exits.code_of_signal(number)

    def _head_never_came(self) -> None:
        say(
            "waiting for the head (%s): nothing in %g s"
            % (self._node.hosts[0], self._node.start_timeout_s)
        )
        self._code = exits.ENTRY_FAILED


def adopt_orphans() -> None:
    """Make this process the parent of what its descendants leave behind, so it can be ended."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass


def sweep(keep: Tuple[int, ...] = ()) -> None:
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


def _children(parent: int) -> List[int]:
    found = []
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        with contextlib.suppress(OSError, IndexError):
            with open("/proc/%s/stat" % name, "rb") as file:
                # The name of a program may hold blanks and brackets; the last bracket ends it.
                if int(file.read().rpartition(b")")[2].split()[1]) == parent:
                    found.append(int(name))
    return found
