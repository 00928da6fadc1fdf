"""The head: brings the workers up, runs the ranks, and ends the job on every node.

Start reading at ``Head.run``; ``bring_up``, ``run`` and ``stop`` hold the three parts.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, Callable, Iterable, Mapping, Sequence

from jobentry.contract import exits
from jobentry.contract.exits import Cause, CutLog, Failure, Outcome
from jobentry.contract.journal import Phase
from jobentry.control import transport
from jobentry.control.bring_up import bring_up
from jobentry.control.commands import LaunchProcesses, RemoteCommands
from jobentry.control.handshake import Access, Resolver
from jobentry.control.insight import InsightRequests
from jobentry.control.loop import STOPPED_LIMIT_S, NodeEvents, NodeLoop, NodeSetup
from jobentry.control.peers import RemoteWorker, WorkerPool
from jobentry.control.preflight import Check, close_ports
from jobentry.control.run import CLEAN_UP_S, JobContext, Run
from jobentry.control.stop import Stop
from jobentry.control.transport import Message
from jobentry.control.verdict import LaunchEnd, RankEnd
from jobentry.control.watch import HangWatch, SlowWatch
from jobentry.errors import EntryError
from jobentry.launchers.common import Launch
from jobentry.log import log_message
from jobentry.node import early_ends
from jobentry.node.local_ranks import RankFailure
from jobentry.system.processes import adopt_orphans

if TYPE_CHECKING:
    from jobentry.contract.hangs import Hang

# After a stop, the head does not wait for a node that has been silent for this long.
_SILENT_S = 7.0
# The exit code of a job that has lost a node.
_KILLED = exits.code_of_signal(signal.SIGKILL)
_CUT_SHORT = "cancelled: the job was stopped while its outputs were stored, and some are missing"


class Head:
    """The head of a job.

    Args:
        facts: Facts that must be the same on the workers.
        key: The private key of the job.
        port: Where workers listen.
    """

    def __init__(
        self, setup: NodeSetup, plan: Launch, facts: dict[str, Any], key: bytes, port: int
    ) -> None:
        node, paths = setup.node, setup.paths
        # The phases of the workers, by the clock of this node.
        self.worker_phases: list[tuple[int, Phase]] = []
        self._cut_logs: list[CutLog] = []
        self._node = node
        self._journal = setup.journal
        # These are called while the loop runs, and it runs when everything below is there.
        events = NodeEvents(
            rank_started=lambda rank: self._run.rank_started(rank, 0),
            rank_ended=lambda end: self._run.local_rank_ended(end),
            signalled=lambda number: self._stop.handle_signal(number),
            ranks_stand=lambda standing: self._hangs.take(0, standing),
            ranks_share=lambda shares: self._slow.take(0, shares),
        )
        self._loop = loop = NodeLoop(setup, events)
        access = Access(transport.secret(key), transport.nonce(), port, Resolver(loop))
        self._pool = pool = WorkerPool(
            node, loop, facts, access, self._worker_sent, self._worker_lost
        )
        self._requests = InsightRequests(setup, loop, pool)
        # Once a rank has failed, mpirun only reports that again at length.
        launcher = LaunchProcesses(loop, is_quiet=lambda: self._stop.has_begun)
        has_agent = any(file.path == paths.agent for file in plan.files)
        self._commands = (
            RemoteCommands(paths, loop, node.hosts[0], pool.workers) if has_agent else None
        )
        self._stop = stop = Stop(node, loop, pool, launcher, self._commands)
        self._context = JobContext(
            setup=setup,
            plan=plan,
            loop=loop,
            pool=pool,
            launcher=launcher,
            commands=self._commands,
            stop=stop,
        )
        self._run = run = Run(self._context)
        self._check = Check(self._context, setup.preflight) if setup.preflight else None
        self._hangs = HangWatch(node, loop, pool, stop, lambda: run.running, setup.journal)
        self._slow = SlowWatch(lambda: run.running, setup.journal)

    @property
    def rank_failure(self) -> RankFailure | None:
        """How ranks of this node failed; None if none did."""
        return self._loop.ranks.rank_failure

    @property
    def hang(self) -> Hang | None:
        """How the job hangs, or hung when it was ended; None if it does not."""
        return self._hangs.hang

    @property
    def cut_logs(self) -> tuple[CutLog, ...]:
        """The logs of nodes that have ended whose last output could not be written."""
        relay = self._loop.relay
        here = CutLog(self._node.node, relay.missing_bytes, relay.reason)
        return ((here,) if here.missing_bytes else ()) + tuple(self._cut_logs)

    @property
    def stopped_at(self) -> float | None:
        """When the job was cancelled, on the monotonic clock."""
        return self._stop.requested_at

    def run(self) -> Outcome:
        """Run the job and return how it ended."""
        adopt_orphans()
        if self._node.timeout_s:
            self._loop.schedule("timeout", self._node.timeout_s, self._stop.handle_timeout)
        try:
            with self._journal.during("bring-up"):
                refusal = bring_up(self._context, self._run)
                if refusal is None and self._check is not None:
                    refusal = self._check.run()
                elif self._check is None:
                    # This node takes no part, but others may have opened their ports.
                    close_ports(self._pool)
                if refusal is None and self._stop.has_begun:
                    refusal = self._run.outcome()
                if refusal:
                    self._run.end_early()
            with self._journal.during("run"):
                outcome = refusal or self._run.run()
            outcome = self._run.explained(outcome, self._hangs.standing)
            for text in self._run.notes(outcome):
                log_message(text)
            return outcome
        finally:
            self._loop.close()

    def call_off(self, reason: str, patience_s: float) -> None:
        """End a job that this node cannot start, and send the reason to the workers.

        Args:
            patience_s: How long to wait for workers that have not come up.
        """
        self._loop.schedule("patience", patience_s, lambda: None)
        try:
            self._pool.open()
            while self._pool.absent and self._loop.is_scheduled("patience"):
                self._loop.step()
                if self._stop.has_begun:
                    break
            self._pool.end(exits.ENTRY_FAILED, is_over=False, patience_s=CLEAN_UP_S, reason=reason)
            self.dismiss(exits.ENTRY_FAILED)
        finally:
            self._loop.close()

    # -- messages ---------------------------------------------------------------------------------

    def _worker_sent(self, worker: RemoteWorker, message: Message) -> None:
        kind, values = message
        node, run = worker.index, self._run
        actions: dict[str, Callable[..., None]] = {
            "rank-started": lambda rank: run.rank_started(rank, node),
            "rank-ended": lambda rank, end: run.rank_ended(rank, _rank_end(worker, end)),
            "signal": lambda number: self._stop.handle_worker_signal(number, node),
            "cleaned-up": lambda: run.cleaned_up(node),
            "reported": lambda: run.reported(node),
            "launcher-ended": lambda **end: run.launcher_ended(node, LaunchEnd(**end)),
            "server-ended": lambda **end: run.server_ended(LaunchEnd(**end), node),
            "command-output": self._command_answered,
            "answer": lambda number, answer: self._requests.answered(node, number, answer),
            "preflight-is": lambda **answer: self._checked(node, answer),
            "ranks-stand": lambda **rows: self._hangs.take_rows(node, rows),
            "ranks-share": lambda **rows: self._slow.take_rows(node, rows),
            "left": lambda trouble, **left: self._worker_left(worker, **left),
        }
        if kind in actions:
            actions[kind](**values)

    def _checked(self, node: int, answer: dict[str, Any]) -> None:
        if self._check is not None:
            self._check.take(node, answer)

    def _command_answered(self, number: int, lines: list[str], code: int | None) -> None:
        if self._commands is not None:
            self._commands.answered(number, lines, code)

    def _worker_left(
        self,
        worker: RemoteWorker,
        phases: Iterable[Sequence[Any]] = (),
        log: Mapping[str, Any] | None = None,
    ) -> None:
        """Note the phases of a worker by the clock of this node, and whether its log is whole."""
        if log and log["missing_bytes"]:
            self._cut_logs.append(CutLog(worker.index, **log))
        ahead_s = worker.clock_ahead_s
        for name, started_at, ended_at in phases:
            end = None if ended_at is None else ended_at - ahead_s
            self.worker_phases.append((worker.index, Phase(name, started_at - ahead_s, end)))

    def _worker_lost(self, worker: RemoteWorker) -> None:
        if worker.early_end is not None:
            # The reason is in the log of that node.
            self._stop.fail(early_ends.outcome(worker.early_end))
            return
        message = "node %d (%s) is gone: %s" % (worker.index, worker.host, worker.reason)
        index, host = worker.index, worker.host
        suspended_s = self._loop.turns.suspended_s()
        stall_s = self._node.stall_s
        # The worker's time began with the last message before the suspension.
        if suspended_s > max(stall_s / 2, stall_s - transport.SILENT_S):
            index, host = self._node.node, self._node.hosts[self._node.node]
            suspended = "node %d (%s) was suspended for %.0f s" % (index, host, suspended_s)
            message = "%s: %s" % (suspended, message)
        log_message(message)
        self._run.worker_lost(worker.index)
        failure = Failure(index, host, exit_code=_KILLED, message=message)
        self._stop.fail_for_lost_node(failure)

    # -- the end ----------------------------------------------------------------------------------

    def run_in_thread(self, work: Callable[[], str]) -> str:
        """Run ``work`` while the head continues to serve its workers, and return its result.

        Raises:
            EntryError: The job was cancelled during the work, which then took too long.
        """
        try:
            return self._loop.run_in_thread(work, lambda: self.stopped_at)
        except TimeoutError as error:
            code = exits.code_of_signal(signal.SIGTERM)
            raise EntryError(_CUT_SHORT, code, cause=Cause.CANCELLED) from error

    def end(self, outcome: Outcome) -> Outcome:
        """Report the end of the job to every worker, wait until each has left, return the outcome.

        The job has failed if a worker cannot store its outputs, or does not confirm that it has.
        """
        patience_s = max(self._node.start_timeout_s, self._node.output_limit_s)
        if self.stopped_at is not None:
            patience_s = max(STOPPED_LIMIT_S, self._node.grace_s) + CLEAN_UP_S
        unconfirmed = self._pool.end(
            outcome.exit_code,
            is_over=outcome.is_over,
            patience_s=patience_s,
            reason=outcome.failure.message if outcome.failure else "",
            silent_limit_s=_SILENT_S if self.stopped_at is not None else float("inf"),
        )
        for worker in unconfirmed:
            log_message(
                "node %d (%s) %s" % (worker.index, worker.host, _unconfirmed(worker, patience_s))
            )
        with_problems = [worker for worker in self._pool.workers if worker.problem]
        if outcome.exit_code or not (with_problems or unconfirmed):
            return outcome
        if unconfirmed:
            worker, code, cause = unconfirmed[0], _KILLED, Cause.PLATFORM
            message = _unconfirmed(worker, patience_s)
        else:
            worker, code, cause = with_problems[0], exits.ENTRY_FAILED, Cause.ENTRY
            message = worker.problem
        failure = Failure(worker.index, worker.host, exit_code=code, message=message)
        return Outcome(code, cause, failure)

    def dismiss(self, code: int) -> None:
        """Let the workers end that wait for the exit code of this node."""
        self._pool.dismiss(code)


def _rank_end(worker: RemoteWorker, values: dict[str, Any]) -> RankEnd:
    """Return how a rank of a worker ended, by the clock of this node."""
    end = RankEnd.from_values(values)
    failure = end.failure._replace(node=worker.index, host=worker.host)
    return end._replace(at_s=end.at_s - worker.clock_ahead_s, failure=failure)


def _unconfirmed(worker: RemoteWorker, waited_s: float) -> str:
    if worker.is_gone:
        return "ended before it confirmed that its outputs are stored"
    return f"did not confirm in {waited_s:g} s that its outputs are stored"
