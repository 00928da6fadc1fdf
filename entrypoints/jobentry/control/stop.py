"""How a job is stopped: on a signal, at its time limit, or because something failed.

Every stop has a reason, and the first one counts. Ranks get SIGTERM first; ``abort`` kills.
"""

from __future__ import annotations

import signal
import time

from jobentry.contract import exits
from jobentry.contract.env import NodeEnv
from jobentry.contract.exits import Cause, Failure, Outcome
from jobentry.control.commands import LaunchProcesses, RemoteCommands
from jobentry.control.loop import ABORT_S, FORWARDED_SIGNALS, NodeLoop
from jobentry.control.peers import WorkerPool
from jobentry.log import log_message

# Seconds that the launcher of a worker may take to end when everything is killed.
_KILLED_S = 2.0


class Stop:
    """Stops the job, and records why.

    Attributes:
        outcome: How the job ends, once something other than a rank has decided it.
        lost_nodes: The nodes that were lost, each with its failure.
        has_rank_failed: Whether a rank has failed that the job cannot continue without.
        requested_at: When the job was cancelled, on the monotonic clock.
        is_kill_overdue: Whether everything was killed so long ago that the head does not wait for
            the launchers of nodes that do not answer.
    """

    def __init__(
        self,
        node: NodeEnv,
        loop: NodeLoop,
        pool: WorkerPool,
        launcher: LaunchProcesses,
        commands: RemoteCommands | None,
    ) -> None:
        self.outcome: Outcome | None = None
        self.lost_nodes: list[Failure] = []
        self.has_rank_failed = False
        self.requested_at: float | None = None
        self.is_kill_overdue = False
        self._is_rank_leaving = False
        self._node = node
        self._loop = loop
        self._pool = pool
        self._launcher = launcher
        self._commands = commands

    @property
    def has_begun(self) -> bool:
        """Whether there is a reason to stop."""
        return bool(self.has_rank_failed or self.lost_nodes or self.outcome)

    # -- reasons ----------------------------------------------------------------------------------

    def handle_signal(self, number: int) -> None:
        """Handle a signal to this node.

        Only the first stop signal counts: a scheduler repeats SIGTERM within the grace period. A
        SIGINT after it comes from a person who does not want to wait.
        """
        if number == signal.SIGINT and self.outcome:
            log_message("SIGINT while the job ends: ending all ranks now")
            self.abort()
        else:
            self.handle_worker_signal(number, self._node.node)

    def handle_worker_signal(self, number: int, node: int) -> None:
        """Handle a signal to any node; a platform that ends a job may send it to every node."""
        if number in FORWARDED_SIGNALS:
            self._pool.send("signal", number=number)
            self._loop.ranks.forward_signal(number)
        elif not self.outcome:
            code = exits.code_of_signal(number)
            message = f"cancelled: the job was sent {signal.Signals(number).name}"
            host = self._node.hosts[node]
            failure = Failure(node, host, signal=number, exit_code=code, message=message)
            self.requested_at = time.monotonic()
            self._end_within_grace(Outcome(code, Cause.CANCELLED, failure))

    def handle_timeout(self) -> None:
        """Handle the time limit of the job."""
        message = f"time limit reached: the job ran for {self._node.timeout_s:g} s"
        code = exits.TIMED_OUT
        failure = Failure(exit_code=code, message=message)
        self._end_within_grace(Outcome(code, Cause.TIMEOUT, failure))

    def handle_hang(self, failure: Failure) -> None:
        """End a job that hangs, unless it has a reason to end already."""
        if not self.has_begun:
            self._end_within_grace(Outcome(exits.TIMED_OUT, Cause.HANG, failure))

    def fail(self, outcome: Outcome) -> None:
        """End the job with this outcome, unless it has a reason to end already."""
        if self.has_begun:
            return
        self.outcome = outcome
        if outcome.failure is not None:
            log_message(outcome.failure.message)
        self.end_ranks()

    def give_up(self, failure: Failure) -> None:
        """Kill a job that the entry could not start."""
        self.outcome = Outcome(exits.ENTRY_FAILED, Cause.ENTRY, failure)
        self.abort()

    def fail_for_lost_node(self, failure: Failure) -> None:
        """End a job that has lost a node."""
        self.lost_nodes.append(failure)
        self.end_ranks()

    def rank_failed(self, after_s: float, *, is_leaving: bool) -> None:
        """End a job whose rank has failed, a moment later if that rank may not be to blame.

        Args:
            is_leaving: Whether its exit handlers still run; the grace period is theirs.
        """
        self.has_rank_failed = True
        self._is_rank_leaving = is_leaving
        self._loop.schedule("end-ranks", after_s, self.end_ranks)

    # -- actions ----------------------------------------------------------------------------------

    def _end_within_grace(self, outcome: Outcome) -> None:
        """Ask the ranks to end; their wrappers stay, so that mpirun ends none of them early."""
        assert outcome.failure is not None
        log_message(f"{outcome.failure.message}; all ranks have {self._node.grace_s:g} s to end")
        self.outcome = outcome
        self._pool.send("stop")
        self._loop.ranks.stop()
        self._loop.schedule("grace", self._node.grace_s, self._grace_is_over)

    def _grace_is_over(self) -> None:
        log_message(f"{self._node.grace_s:g} s are over: ending the remaining ranks")
        self.abort()

    def end_ranks(self) -> None:
        """Send SIGTERM to all ranks, and kill soon after: mpirun 4.1 would take seconds.

        While a failed rank still exits, the wrappers of the others stay, so that mpirun ends none.
        """
        self._pool.send("end-ranks", are_held=self._is_rank_leaving)
        if self._is_rank_leaving:
            self._loop.ranks.stop()
            self._loop.schedule("abort", ABORT_S, self._end_others)
        else:
            self._loop.ranks.forward_signal(signal.SIGTERM)
            self._loop.schedule("abort", ABORT_S, self.abort)

    def _end_others(self) -> None:
        """Kill all ranks but those that have failed and still exit, which get their grace period.

        The job is over as soon as all have ended.
        """
        self._pool.send("kill-others")
        self._loop.ranks.kill_others()
        self._loop.schedule("abort", max(0.0, self._node.grace_s - ABORT_S), self.abort)

    def abort(self) -> None:
        """Kill everything on every node."""
        self._pool.send("kill")
        self._loop.schedule("killed", _KILLED_S, self._kill_is_overdue)
        # Before mpirun ends, as its ranks end with it.
        self._loop.ranks.note_end()
        # mpirun's daemons on the workers notice its end; SIGTERM may not end it (5.0.11).
        self._launcher.kill()
        if self._commands is not None:
            self._commands.kill()
        self._loop.kill_ranks()

    def _kill_is_overdue(self) -> None:
        self.is_kill_overdue = True
