"""The head: brings the workers up, runs mpirun, and finds out how the job ended."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import time
from collections import deque
from typing import Any

from jobentry import peers
from jobentry.contract import exits
from jobentry.contract.env import NodeEnv
from jobentry.contract.exits import Failure
from jobentry.contract.paths import NodePaths
from jobentry.output import say
from jobentry.plan import LaunchPlan
from jobentry.ranks import End
from jobentry.supervise import (
    ABORT_S,
    PASSED_SIGNALS,
    STOP_SIGNALS,
    NodeLoop,
    adopt_orphans,
)
from jobentry.verdict import Mpirun, Outcome, RankEnd, decide
from jobentry.workers import Workers

# How long a reason may still be on its way when mpirun has ended badly without one.
REASON_S = 1.0
# How long the rank that another was left by may take to end by itself.
CAUSE_S = 0.2


class Head:
    """The head: opens a line to every worker, runs mpirun, and finds out how the job ended."""

    def __init__(
        self, node: NodeEnv, paths: NodePaths, plan: LaunchPlan, facts: dict[str, Any]
    ) -> None:
        self._node = node
        self._plan = plan
        self._facts = facts
        self._ranks = int(plan.argv[plan.argv.index("-np") + 1])
        self._loop = NodeLoop(node, paths)
        self._loop.on_end = self._rank_ended
        self._loop.on_start = lambda rank: self._rank_started(rank, 0)
        self._loop.on_signal = self._signalled
        self._workers = Workers(node, paths, self._loop, self._hear_worker, self._lost)
        self._mpirun: subprocess.Popen[bytes] | None = None
        self._mpirun_lines: deque[str] = deque(maxlen=40)
        self._mpirun_text = peers.Lines()
        self._started: dict[int, int] = {}
        self._ends: dict[int, RankEnd] = {}
        self._has_failed = False
        self._lost_nodes: list[Failure] = []
        self._stopped: Outcome | None = None
        # When the job was cancelled, on the clock that never jumps.
        self.stopped_at: float | None = None
        self._has_ended_mpirun = False
        self._was_signalled = False
        self.phases: list[tuple[int, str, float, float]] = []

    def run(self) -> Outcome:
        """Run the job and return how it ended."""
        adopt_orphans()
        if self._node.timeout_s:
            self._loop.at("timeout", self._node.timeout_s, self._timed_out)
        try:
            begun = time.time()
            refusal = self._bring_up()
            self.phases.append((0, "bring-up", begun, time.time()))
            begun = time.time()
            outcome = refusal or self._run_mpirun()
            self.phases.append((0, "run", begun, time.time()))
            return outcome
        finally:
            self._loop.close(keep=tuple(self._workers.processes))

    def end(self, outcome: Outcome) -> Outcome:
        """Tell every worker how the job ended, wait until each has left; return how it ended now.

        A worker may still fail to leave its outputs.
        """
        patience_s = max(self._node.start_timeout_s, self._node.output_limit_s)
        self._workers.end(outcome.exit_code, patience_s=patience_s)
        troubles = [peer for peer in self._workers.peers if peer.trouble]
        if outcome.exit_code or not troubles:
            return outcome
        peer = troubles[0]
        code = exits.ENTRY_FAILED
        failure = Failure(peer.index, peer.host, exit_code=code, message=peer.trouble)
        return Outcome(code, "entry", failure)

    # -- workers ------------------------------------------------------------------------------

    def _bring_up(self) -> Outcome | None:
        """Wait until every worker is there; return what stops the job, if anything does."""
        self._loop.at("start", self._node.start_timeout_s, self._workers_are_late)
        try:
            self._workers.open()
            while self._workers.absent:
                self._loop.step()
                if self._has_reason():
                    return self._outcome(0)
        except peers.PeerError as error:
            return Outcome(exits.ENTRY_FAILED, "entry", Failure(message=str(error)))
        finally:
            self._workers.stop_looking()
        for warning in self._workers.warnings():
            say(warning)
        differences = self._workers.differences(self._facts)
        for difference in differences:
            say(difference)
        if differences:
            return Outcome(exits.ENTRY_FAILED, "entry", Failure(message=differences[0]))
        return None

    def _hear_worker(self, peer: peers.Peer, message: peers.Message) -> None:
        word, values = message
        if word == "start":
            self._rank_started(values["rank"], peer.index)
        elif word == "end":
            failure = exits.Failure(**values["failure"])
            failure = failure._replace(node=peer.index, host=peer.host)
            at_s = values["at_s"] - peer.clock_ahead_s
            end = RankEnd(at_s, values["was_told"], values["is_said"], failure)
            self._note(values["rank"], end)
        elif word == "signal":
            self._pass_on(values["number"])

    def _lost(self, peer: peers.Peer) -> None:
        message = "node %d (%s) is gone: its remote shell ended" % (peer.index, peer.host)
        say(message)
        code = exits.code_of_signal(signal.SIGKILL)
        self._lost_nodes.append(
            Failure(node=peer.index, host=peer.host, exit_code=code, message=message)
        )
        self._end_ranks()

    def _workers_are_late(self) -> None:
        absent = self._workers.absent
        say(f"the workers after {self._node.start_timeout_s:g} s:")
        for line in self._workers.table():
            say("  " + line)
        names = ", ".join("node %d (%s)" % (peer.index, peer.host) for peer in absent[:8])
        text = "waiting for the workers: after %g s %d of %d have not come up: %s" % (
            self._node.start_timeout_s,
            len(absent),
            len(self._workers.peers),
            names + (" ..." if len(absent) > 8 else ""),
        )
        self._give_up(
            Failure(absent[0].index, absent[0].host, message=text, exit_code=exits.ENTRY_FAILED)
        )

    def _ranks_are_late(self) -> None:
        text = "starting the ranks: mpirun started %d of %d in %g s and then hung" % (
            len(self._started),
            self._ranks,
            self._node.start_timeout_s,
        )
        self._give_up(Failure(message=text, exit_code=exits.ENTRY_FAILED))

    def _give_up(self, failure: Failure) -> None:
        say(failure.message)
        self._stopped = Outcome(exits.ENTRY_FAILED, "entry", failure)
        self._abort()

    # -- mpirun -------------------------------------------------------------------------------

    def _run_mpirun(self) -> Outcome:
        self._loop.at("start", self._node.start_timeout_s, self._ranks_are_late)
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
            text = f"starting {plan.argv[0]}: {error.strerror}"
            return Outcome(exits.ENTRY_FAILED, "entry", Failure(message=text))
        assert self._mpirun.stdout is not None
        os.set_blocking(self._mpirun.stdout.fileno(), False)
        self._loop.selector.register(self._mpirun.stdout, selectors.EVENT_READ, self._hear_mpirun)
        while self._mpirun.poll() is None:
            self._loop.step()
            self._end_when_all_have()
        self._hear_mpirun()
        self._wait_for_reason(self._mpirun.returncode)
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
                    say(f"mpirun: {text}")

    def _wait_for_reason(self, code: int) -> None:
        """A worker's word on its rank, or the end of its line, can come after mpirun's end."""
        deadline = time.monotonic() + REASON_S
        while not self._is_clear(code) and time.monotonic() < deadline:
            self._loop.at("reason", 0.05, lambda: None)
            self._loop.step()

    def _is_clear(self, code: int) -> bool:
        return self._has_reason() or (code == 0 and len(self._ends) >= self._ranks)

    def _has_reason(self) -> bool:
        return bool(self._has_failed or self._lost_nodes or self._stopped)

    # -- ranks --------------------------------------------------------------------------------

    def _rank_started(self, rank: int, node: int) -> None:
        self._started[rank] = node
        if len(self._started) >= self._ranks:
            self._loop.drop("start")

    def _rank_ended(self, end: End) -> None:
        failure = self._loop.ranks.failure(end, 0, self._node.host)
        self._note(end.rank, RankEnd(end.at_s, end.was_told, end.is_said, failure))

    def _note(self, rank: int, end: RankEnd) -> None:
        """Keep how a rank ended; the first that fails ends the others."""
        if rank in self._ends or self._stopped:
            return
        self._ends[rank] = end
        if end.is_failure and not self._has_failed:
            self._has_failed = True
            failure = end.failure
            say(f"rank {rank} on node {failure.node} ({failure.host}): {failure.message}")
            # Our signal must not reach the one to blame while it still writes its backtrace.
            self._loop.at("end-ranks", CAUSE_S if end.is_left_alone else 0.0, self._end_ranks)

    def _end_when_all_have(self) -> None:
        """End mpirun when every rank has ended: it waits for doors that stay, or for its clock."""
        if not self._has_reason() or self._loop.ranks.running:
            return
        if self._workers.are_idle:
            self._abort()

    # -- stopping -----------------------------------------------------------------------------

    def _signalled(self, number: int) -> None:
        """Deal with a signal to this node; a second one that ends the job is for the impatient."""
        if number in STOP_SIGNALS and self._was_signalled:
            say(f"{signal.Signals(number).name} again: ending all ranks now")
            self._abort()
        else:
            self._was_signalled = number in STOP_SIGNALS
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        """Some node was sent a signal; a platform that ends a job may send it to every node."""
        if number in PASSED_SIGNALS:
            self._workers.tell("signal", number=number)
            self._loop.ranks.pass_on(number)
        elif not self._stopped:
            code = exits.code_of_signal(number)
            message = f"cancelled: the job was sent {signal.Signals(number).name}"
            failure = Failure(signal=number, exit_code=code, message=message)
            self.stopped_at = time.monotonic()
            self._stop(Outcome(code, "cancelled", failure))

    def _timed_out(self) -> None:
        message = f"time is up: the job ran for {self._node.timeout_s:g} s"
        code = exits.TIMED_OUT
        self._stop(Outcome(code, "timeout", Failure(exit_code=code, message=message)))

    def _stop(self, outcome: Outcome) -> None:
        assert outcome.failure is not None
        say(f"{outcome.failure.message}; all ranks have {self._node.grace_s:g} s to end")
        self._stopped = outcome
        self._workers.tell("stop")
        self._loop.ranks.stop()
        self._loop.at("grace", self._node.grace_s, self._grace_is_over)

    def _end_ranks(self) -> None:
        """The job has failed: end the other ranks ourselves, mpirun 4.1 takes seconds for it."""
        self._workers.tell("end-ranks")
        self._loop.ranks.pass_on(signal.SIGTERM)
        self._loop.at("abort", ABORT_S, self._abort)

    def _grace_is_over(self) -> None:
        say(f"{self._node.grace_s:g} s are over: ending the ranks that are left")
        self._abort()

    def _abort(self) -> None:
        """End everything at once, on every node."""
        self._workers.tell("kill")
        if self._mpirun is not None and self._mpirun.poll() is None:
            # Its daemons on the workers see that it is gone; SIGTERM may not end it (5.0.11).
            self._has_ended_mpirun = True
            with contextlib.suppress(OSError):
                os.killpg(self._mpirun.pid, signal.SIGKILL)
        self._loop.ranks.kill()
        self._loop.ranks.release()

    # -- the end ------------------------------------------------------------------------------

    def _outcome(self, mpirun_code: int) -> Outcome:
        if mpirun_code < 0 and not self._has_ended_mpirun:
            code = exits.code_of_signal(-mpirun_code)
            message = f"mpirun was killed by {signal.Signals(-mpirun_code).name}"
            failure = Failure(
                0, self._node.host, signal=-mpirun_code, exit_code=code, message=message
            )
            return Outcome(code, "platform", failure)
        if self._lost_nodes:
            failure = self._lost_nodes[0]
            return Outcome(failure.exit_code or 1, "platform", failure)
        if self._stopped:
            return self._stopped
        outcome = decide(
            self._ends, self._started, self._ranks, Mpirun(mpirun_code, self._mpirun_lines)
        )
        if outcome.failure is None or outcome.failure.node is None or outcome.failure.host:
            return outcome
        host = self._node.hosts[outcome.failure.node]
        return outcome._replace(failure=outcome.failure._replace(host=host))
