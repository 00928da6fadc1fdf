"""The run: the head starts the ranks, learns how each ends, and decides the job's outcome.

mpirun starts while the workers come up (``start_early``). ``RemoteCommands`` holds back its
requests, and a file holds back the ranks of the head, until all workers are there. A start that
hangs is ended, and repeated once if no rank had started.
"""

from __future__ import annotations

import os
import signal
import time
from typing import NamedTuple, Sequence

from jobentry.contract import exits, hangs
from jobentry.contract.exits import Cause, Failure, Outcome
from jobentry.contract.hangs import Standing
from jobentry.control import hang_rules, verdict
from jobentry.control.commands import LaunchProcesses, RemoteCommands, remove_sessions
from jobentry.control.loop import NodeLoop, NodeSetup
from jobentry.control.peers import WorkerPool
from jobentry.control.stop import Stop
from jobentry.control.verdict import LaunchEnd, RankEnd
from jobentry.launchers.common import Launch
from jobentry.log import log_message
from jobentry.node.local_ranks import End
from jobentry.system.processes import children, kill_descendants

# Seconds to wait for a rank's report after mpirun has failed without a reason.
REASON_S = 1.0
# Seconds to wait until a worker with a broken connection is found again or given up.
_DOUBT_S = 10.0
# Seconds for a rank to end by itself after another one lost its connection to it.
CAUSE_S = 0.2
# Seconds that the workers have to clean up after a start that hung.
CLEAN_UP_S = 10.0
_LATE_RANK = (
    "starting the ranks: mpirun hung, and a rank started while it was ended: the script may have"
    " begun, so it is not started again"
)


class JobContext(NamedTuple):
    """The objects that the parts of the head share.

    Args:
        launcher: Starts the ranks of this node.
        commands: Runs the launcher's commands on other nodes; None if it has none.
    """

    setup: NodeSetup
    plan: Launch
    loop: NodeLoop
    pool: WorkerPool
    launcher: LaunchProcesses
    commands: RemoteCommands | None
    stop: Stop


class Run:
    """The ranks of the job."""

    def __init__(self, context: JobContext) -> None:
        # The rank whose failure was reported first.
        self._first_failed: int | None = None
        self._journal = context.setup.journal
        self._node = context.setup.node
        self._plan = context.plan
        self._loop = context.loop
        self._pool = context.pool
        self._launcher = context.launcher
        self._commands = context.commands
        self._stop = context.stop
        self._waiting = context.setup.paths.waiting
        # Our child processes before mpirun, and why it could not be started early.
        self._earlier_children: list[int] = []
        self._early_error = ""
        self._started: dict[int, int] = {}
        self._ends: dict[int, RankEnd] = {}
        # The workers whose launcher still runs, and the first launcher failure there.
        self._launching: set[int] = set()
        self._worker_end = LaunchEnd("", 0, ())
        self._has_seen_failure = False
        self._attempt = 1
        self._is_hung = False
        self._cleaning_up: set[int] = set()
        # The workers that were asked, after the end of the launcher, how their ranks have ended.
        self._unreported: set[int] | None = None

    @property
    def running(self) -> frozenset[int]:
        """The ranks that have started, and have not ended."""
        return frozenset(self._started) - frozenset(self._ends)

    @property
    def _are_launching_elsewhere(self) -> bool:
        return bool(self._launching) and not self._stop.is_kill_overdue

    def run(self) -> Outcome:
        """Start the ranks, wait until all have ended, and return how the job ended."""
        if self._commands is not None:
            self._commands.open()
        self._journal.begin("start ranks")
        error = self._start_or_release()
        while not error:
            started = self._launcher.processes
            while self._launcher.are_running or self._are_launching_elsewhere:
                self._loop.step()
                self._check()
            self._launcher.end_servers()
            self._loop.cancel("start")
            if self._launcher.were_killed:
                remove_sessions(started)
            if not (self._is_hung and self._has_cleaned_up()):
                break
            self._attempt += 1
            error = self._start()
        if error:
            return Outcome(exits.ENTRY_FAILED, Cause.ENTRY, Failure(message=error))
        self._wait_for_reason(self._launcher.code or self._worker_end.code)
        return self.outcome()

    # -- starting ---------------------------------------------------------------------------------

    def start_early(self) -> None:
        """Start mpirun while the workers come up, as it must wait for their first answer anyway."""
        if self._commands is None:
            return
        self._earlier_children = children()
        with open(self._waiting, "wb"):
            pass
        self._early_error = self._launcher.start(self._plan.processes, self._plan.cwd)

    def end_early(self) -> None:
        """End the launcher that was started early for a job that does not start."""
        started = self._launcher.processes
        self._launcher.kill()
        remove_sessions(started)

    def _start_or_release(self) -> str:
        """Start the ranks, or release those that were started early; return what went wrong."""
        if not os.path.exists(self._waiting):
            self._earlier_children = children()
            return self._start()
        self._expect_rank()
        os.unlink(self._waiting)
        return self._early_error

    def _start(self) -> str:
        self._is_hung = False
        self._expect_rank()
        if self._plan.is_everywhere:
            self._launching.update(worker.index for worker in self._pool.workers)
            self._pool.send("launch")
        return self._launcher.start(self._plan.processes, self._plan.cwd)

    def _expect_rank(self) -> None:
        """Limit the time until the next rank starts; after that, the start counts as hung."""
        patience_s = self._node.start_timeout_s
        if not self._plan.is_everywhere:
            patience_s = verdict.start_patience_s(self._node.nodes, patience_s, self._attempt)
        self._loop.schedule("start", patience_s, lambda: self._ranks_are_late(patience_s))

    def _ranks_are_late(self, waited_s: float) -> None:
        if self._stop.has_begun:
            return
        failure = verdict.hung_start(
            self._launcher.name,
            self._node,
            self._plan.ranks,
            self._started,
            self._attempt,
            waited_s,
        )
        if self._plan.is_everywhere or not verdict.may_start_again(self._attempt, self._started):
            self._give_up(failure._replace(last_lines=self._launch_end().last_lines))
            return
        log_message(f"{failure.message}: ending it, and starting it again")
        self._is_hung = True
        self._stop.abort()

    def _has_cleaned_up(self) -> bool:
        """Remove what a hung mpirun has left on all nodes; return whether it may be restarted."""
        # Including processes outside mpirun's process group: its daemon here, and its agents.
        kill_descendants(self._earlier_children)
        self._cleaning_up = {worker.index for worker in self._pool.workers}
        self._pool.send("clean-up")
        deadline = time.monotonic() + CLEAN_UP_S
        while self._cleaning_up and not self._stop.has_begun and time.monotonic() < deadline:
            self._loop.step()
        self._loop.read_events()
        may_start = verdict.may_start_again(self._attempt, self._started)
        if not self._stop.has_begun and not may_start:
            self._give_up(Failure(message=_LATE_RANK, exit_code=exits.ENTRY_FAILED))
        return not self._stop.has_begun

    def cleaned_up(self, node: int) -> None:
        """Note that a worker has cleaned up."""
        self._cleaning_up.discard(node)

    def _give_up(self, failure: Failure) -> None:
        log_message(failure.message)
        self._stop.give_up(failure)

    # -- while the ranks run ----------------------------------------------------------------------

    def _check(self) -> None:
        """Check what the loop does not report: the launcher, its commands, and its servers."""
        if self._commands is not None:
            self._commands.check()
        # Otherwise mpirun waits for the wrappers that stay, or for its own timeout.
        have_all_ended = not self._loop.ranks.running and self._pool.are_idle
        if self._stop.has_begun and have_all_ended:
            self._stop.abort()
        server_end = self._launcher.server_end
        if server_end is not None:
            self.server_ended(server_end, 0)
        has_failed = self._launcher.code or self._worker_end.code
        if has_failed and self._plan.is_everywhere and not self._has_seen_failure:
            self._has_seen_failure = True
            # A rank that has failed reports it itself.
            self._loop.schedule("launcher", REASON_S, self._launcher_failed)

    def _launcher_failed(self) -> None:
        """Handle the failure of one node's launcher: the other nodes would wait for its ranks."""
        if not self._stop.has_begun:
            self._stop.outcome = verdict.decide(
                {}, self._started, self._plan.ranks, self._launch_end()
            )
            self._stop.end_ranks()

    def server_ended(self, end: LaunchEnd, node: int) -> None:
        """End the job: without its server (MindSpore's scheduler) no rank can continue."""
        have_started = len(self._started) >= self._plan.ranks
        self._stop.fail(verdict.server_ended(end, node, self._node.hosts[node], have_started))

    def launcher_ended(self, node: int, end: LaunchEnd) -> None:
        """Note that the launcher of a worker has ended."""
        self._launching.discard(node)
        if end.code and not self._worker_end.code:
            self._worker_end = end._replace(name="%s on node %d" % (end.name, node))

    def worker_lost(self, node: int) -> None:
        """Stop waiting for the launcher of a lost worker."""
        self._launching.discard(node)

    def rank_started(self, rank: int, node: int) -> None:
        """Note that a rank has started."""
        self._started[rank] = node
        if len(self._started) >= self._plan.ranks:
            self._journal.end("start ranks")
            self._loop.cancel("start")
        elif not self._stop.has_begun and not self._is_hung:
            self._expect_rank()

    def local_rank_ended(self, end: End) -> None:
        """Note how a rank of this node ended."""
        failure = self._loop.ranks.failure(end, 0, self._node.host)
        self.rank_ended(end.rank, RankEnd.of(end, failure))

    def rank_ended(self, rank: int, end: RankEnd) -> None:
        """Note how a rank ended; the first failure ends the others."""
        if rank in self._ends or self._stop.outcome:
            return
        self._ends[rank] = end
        if not end.is_failure or self._stop.has_rank_failed:
            return
        failure = end.failure
        log_message(f"rank {rank} on node {failure.node} ({failure.host}): {failure.message}")
        self._first_failed = rank
        # Our signal must not reach the rank to blame while it still writes its backtrace.
        after_s = CAUSE_S if end.has_lost_connection else 0.0
        self._stop.rank_failed(after_s, is_leaving=end.is_leaving)

    # -- the end ----------------------------------------------------------------------------------

    def _wait_for_reason(self, code: int) -> None:
        """Wait for a worker's report on its ranks, or its loss, which can come after mpirun's end.

        A worker that is suspended, or on a busy machine, reports later than mpirun ends; it has as
        much time as every silent node. If a worker's connection has ended, it takes some seconds to
        find out whether the worker is dead. mpirun notices that at once, and would otherwise be
        blamed.
        """
        begun = time.monotonic()
        while True:
            is_in_doubt = self._pool.are_in_doubt and not self._stop.outcome
            have_ended = len(self._ends) >= self._plan.ranks
            is_clear = self._stop.has_begun or (code == 0 and have_ended)
            if is_clear and not is_in_doubt:
                break
            if self._unreported is None:
                self._unreported = {worker.index for worker in self._pool.workers}
                self._pool.send("report")
            must_wait = not is_clear and self._are_reports_missing()
            waited_s = time.monotonic() - begun
            if not must_wait and waited_s >= (_DOUBT_S if is_in_doubt else REASON_S):
                break
            self._loop.schedule("reason", 0.05, lambda: None)
            self._loop.step()

    def _are_reports_missing(self) -> bool:
        absent = {worker.index for worker in self._pool.workers if worker.is_absent}
        return bool((self._unreported or set()) - absent)

    def reported(self, node: int) -> None:
        """Note that a worker has reported everything that its ranks had reported to it."""
        if self._unreported is not None:
            self._unreported.discard(node)

    def outcome(self) -> Outcome:
        """Return how the job ended, from everything that is known."""
        launcher, stop = self._launcher, self._stop
        if launcher.signal:
            code = exits.code_of_signal(launcher.signal)
            message = f"{launcher.name} was killed by {signal.Signals(launcher.signal).name}"
            failure = Failure(
                0, self._node.host, signal=launcher.signal, exit_code=code, message=message
            )
            return Outcome(code, Cause.PLATFORM, failure)
        if stop.lost_nodes:
            first = stop.lost_nodes[0]
            return Outcome(first.exit_code or 1, Cause.PLATFORM, first)
        if stop.outcome:
            return stop.outcome
        outcome = verdict.decide(self._ends, self._started, self._plan.ranks, self._launch_end())
        if outcome.failure is None:
            return outcome
        return outcome._replace(failure=self._located(outcome.failure))

    def explained(self, outcome: Outcome, standing: Sequence[Standing]) -> Outcome:
        """Return the outcome with the ranks that a rank to blame has waited for too long.

        Args:
            standing: The ranks that stood still before the job began to end.
        """
        failed = {rank for rank, end in self._ends.items() if end.is_failure}
        others = hang_rules.not_waiting([each for each in standing if each.rank not in failed])
        return verdict.explained(outcome, self._ends, hangs.what_they_do(others))

    def notes(self, outcome: Outcome) -> list[str]:
        """Return what the log does not say yet about the failures of ranks."""
        texts = (
            verdict.correction(outcome, self._first_failed),
            verdict.losses(outcome, self._ends),
        )
        return [text for text in texts if text]

    def _located(self, failure: Failure) -> Failure:
        """Return the failure with both the number and the name of its node, as far as known."""
        hosts = self._node.hosts
        if failure.node is not None:
            return failure._replace(host=failure.host or hosts[failure.node])
        # mpirun names a node without its domain.
        short = [host.partition(".")[0] for host in hosts]
        if failure.host not in short:
            return failure
        node = short.index(failure.host)
        return failure._replace(node=node, host=hosts[node])

    def _launch_end(self) -> LaunchEnd:
        """Return how the launchers ended: with a failure, if there was one on any node."""
        if not self._launcher.code and self._worker_end.code:
            return self._worker_end
        return LaunchEnd(self._launcher.name, self._launcher.code, self._launcher.lines)
