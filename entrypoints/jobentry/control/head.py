"""The head: brings the workers up, runs the ranks, and ends the job on every node.

Start reading at ``Head.run``; ``bring_up``, ``run`` and ``stop`` hold the three parts.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, Callable, Iterable, Sequence

from jobentry.contract import exits
from jobentry.contract.env import NodeEnv
from jobentry.contract.exits import Cause, Failure, Outcome
from jobentry.contract.journal import Phase
from jobentry.contract.paths import NodePaths
from jobentry.control import early_ends
from jobentry.control.bring_up import bring_up
from jobentry.control.elastic_hosts import ElasticHosts
from jobentry.control.event_loop import STOPPED_LIMIT_S, NodeLoop, is_late
from jobentry.control.hang_watch import HangWatch
from jobentry.control.job_context import JobContext
from jobentry.control.launch_processes import LaunchProcesses
from jobentry.control.messages import Message
from jobentry.control.preflight import Check
from jobentry.control.remote_commands import RemoteCommands
from jobentry.control.remote_worker import RemoteWorker
from jobentry.control.run import CLEAN_UP_S, Run
from jobentry.control.slow_watch import SlowWatch
from jobentry.control.stack_requests import StackRequests
from jobentry.control.stop import Stop
from jobentry.control.verdict import LaunchEnd, RankEnd, correction
from jobentry.control.worker_pool import WorkerPool
from jobentry.errors import EntryError
from jobentry.launchers.plan import LaunchPlan
from jobentry.log import log_message
from jobentry.node.journal import Journal
from jobentry.node.local_ranks import RankFailure
from jobentry.system.processes import adopt_orphans

if TYPE_CHECKING:
    from jobentry.contract.hangs import Hang
    from jobentry.preflight.node import NodePreflight
    from jobentry.staging.outputs import Outputs

# After a stop, the head does not wait for a node that has been silent for this long.
_SILENT_S = 7.0
# The exit code of a job that has lost a node.
_KILLED = exits.code_of_signal(signal.SIGKILL)
_CUT_SHORT = "cancelled: the job was stopped while its outputs were stored, and some are missing"


class Head:
    """The head of a job.

    Args:
        facts: Facts that must be the same on the workers.
        own: The children of this process that other code waits for.
    """

    def __init__(
        self,
        node: NodeEnv,
        paths: NodePaths,
        plan: LaunchPlan,
        facts: dict[str, Any],
        own: tuple[int, ...] = (),
    ) -> None:
        # The phases of the workers, by the clock of this node.
        self.worker_phases: list[tuple[int, Phase]] = []
        self._node = node
        self._journal = Journal()
        self._loop = NodeLoop(node, paths)
        self._loop.own_children.update(own)
        self._pool = WorkerPool(node, self._loop, facts, self._worker_sent, self._worker_lost)
        self._requests = StackRequests(node, paths, self._loop, self._pool)
        # Once a rank has failed, mpirun only reports that again at length.
        launcher = LaunchProcesses(self._loop, is_quiet=lambda: self._stop.has_begun)
        self._commands: RemoteCommands | None = None
        if any(file.path == paths.agent for file in plan.files):
            workers = self._pool.workers
            self._commands = RemoteCommands(paths, self._loop, node.hosts[0], workers)
        self._stop = Stop(node, self._loop, self._pool, launcher, self._commands)
        self._elastic: ElasticHosts | None = None
        if node.min_nodes:
            self._elastic = ElasticHosts(node, paths, self._loop, self._pool, self._stop)
        self._context = JobContext(
            node=node,
            paths=paths,
            plan=plan,
            loop=self._loop,
            pool=self._pool,
            launcher=launcher,
            commands=self._commands,
            stop=self._stop,
            elastic=self._elastic,
        )
        self._run = Run(self._context)
        self._check: Check | None = None
        self._hangs = HangWatch(node, self._loop, self._pool, self._stop, lambda: self._run.running)
        self._slow = SlowWatch(lambda: self._run.running)
        # What takes a message with the number of its node, by kind.
        self._takers: dict[str, Callable[[int, dict[str, Any]], None]] = {
            "stacks-are": self._requests.answered,
            "profile-is": self._requests.profiled,
            "ranks-stand": self._hangs.take_rows,
            "ranks-share": self._slow.take_rows,
        }
        self._loop.on_end = self._run.local_rank_ended
        self._loop.on_start = lambda rank: self._run.rank_started(rank, 0)
        self._loop.on_signal = self._stop.handle_signal

    @property
    def rank_failure(self) -> RankFailure | None:
        """How ranks of this node failed; None if none did."""
        return self._loop.ranks.rank_failure

    @property
    def hang(self) -> Hang | None:
        """How the job hangs, or hung when it was ended; None if it does not."""
        return self._hangs.hang

    @property
    def stopped_at(self) -> float | None:
        """When the job was cancelled, on the monotonic clock."""
        return self._stop.requested_at

    def attach(self, journal: Journal, outputs: Outputs | None) -> None:
        """Write to ``journal``, and notify ``outputs`` before ranks of this node are ended."""
        self._journal = self._run.journal = journal
        self._hangs.journal = self._slow.journal = journal
        self._loop.attach_journal(journal, self._context.paths)
        self._loop.look_for_hangs(
            journal,
            self._context.paths,
            lambda standing: self._hangs.take(0, standing),
            lambda shares: self._slow.take(0, shares),
        )
        if outputs is not None:
            self._loop.ranks.before_end = outputs.note_open_files

    def check_with(self, here: NodePreflight) -> None:
        """Check the nodes before the ranks start; ``here`` is this node's part."""
        self._check = Check(self._context, here)
        self._takers["preflight-is"] = self._check.take

    def run(self, key: bytes, port: int) -> Outcome:
        """Run the job and return how it ended.

        Args:
            key: The private key of the job.
            port: Where workers listen.
        """
        adopt_orphans()
        if self._node.timeout_s:
            self._loop.schedule("timeout", self._node.timeout_s, self._stop.handle_timeout)
        try:
            with self._journal.during("bring-up"):
                refusal = bring_up(self._context, self._run, key, port)
                if refusal is None and self._check is not None:
                    refusal = self._check.run()
                if refusal is None and self._stop.has_begun:
                    refusal = self._run.outcome()
                if refusal:
                    self._run.end_early()
            with self._journal.during("run"):
                outcome = refusal or self._run.run()
            notes = (correction(outcome, self._run.first_failed), self._run.losses(outcome))
            for text in filter(None, notes):
                log_message(text)
            return outcome
        finally:
            self._loop.close()

    def call_off(self, key: bytes, port: int, reason: str, patience_s: float) -> None:
        """End a job that this node cannot start, and send the reason to the workers.

        Args:
            patience_s: How long to wait for workers that have not come up.
        """
        self._loop.schedule("patience", patience_s, lambda: None)
        try:
            self._pool.open(key, port)
            while self._pool.absent and self._loop.is_scheduled("patience"):
                self._loop.step()
                if self._stop.has_begun:
                    break
            self._pool.end(exits.ENTRY_FAILED, is_over=False, patience_s=CLEAN_UP_S, reason=reason)
        finally:
            self._loop.close()

    # -- messages ---------------------------------------------------------------------------------

    def _worker_sent(self, worker: RemoteWorker, message: Message) -> None:
        kind, values = message
        if kind == "rank-started":
            self._run.rank_started(values["rank"], worker.index)
        elif kind == "rank-ended":
            self._run.rank_ended(values["rank"], _rank_end(worker, values))
        elif kind == "signal":
            self._stop.handle_worker_signal(values["number"], worker.index)
        elif kind == "cleaned-up":
            self._run.cleaned_up(worker.index)
        elif kind == "reported":
            self._run.reported(worker.index)
        elif kind == "left":
            self.worker_phases += _phases_of(worker, values.get("phases", ()))
        elif kind == "ready" and self._elastic is not None:
            self._elastic.worker_joined(worker.index)
        else:
            self._worker_answered(worker, kind, values)

    def _worker_answered(self, worker: RemoteWorker, kind: str, values: dict[str, Any]) -> None:
        if kind == "launcher-ended":
            self._run.launcher_ended(worker.index, LaunchEnd(**values))
        elif kind == "command-output" and self._commands is not None:
            self._commands.answered(**values)
        elif kind == "server-ended":
            self._run.server_ended(LaunchEnd(**values), worker.index)
        elif kind in self._takers:
            self._takers[kind](worker.index, values)

    def _worker_lost(self, worker: RemoteWorker) -> None:
        if worker.early_end is not None:
            # The reason is in the log of that node.
            self._stop.fail(early_ends.outcome(worker.early_end))
            return
        message = "node %d (%s) is gone: %s" % (worker.index, worker.host, worker.reason)
        log_message(message)
        self._run.worker_lost(worker.index)
        failure = Failure(worker.index, worker.host, exit_code=_KILLED, message=message)
        if self._elastic is not None:
            self._elastic.worker_lost(worker, failure)
        else:
            self._stop.fail_for_lost_node(failure)

    # -- the end ----------------------------------------------------------------------------------

    def run_in_thread(self, work: Callable[[], str]) -> str:
        """Run ``work`` while the head continues to serve its workers, and return its result.

        Raises:
            EntryError: The job was cancelled during the work, which then took too long.
        """
        try:
            return self._loop.run_in_thread(work, lambda: is_late(self.stopped_at, self._node))
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


def _rank_end(worker: RemoteWorker, values: dict[str, Any]) -> RankEnd:
    failure = Failure(**values["failure"])._replace(node=worker.index, host=worker.host)
    at_s = values["at_s"] - worker.clock_ahead_s
    return RankEnd(
        at_s, values["was_asked_to_end"], values["is_reported"], failure, values["is_leaving"]
    )


def _phases_of(worker: RemoteWorker, rows: Iterable[Sequence[Any]]) -> list[tuple[int, Phase]]:
    """Return the phases of a worker by the clock of this node."""
    ahead_s = worker.clock_ahead_s
    found = []
    for name, started_at, ended_at in rows:
        end = None if ended_at is None else ended_at - ahead_s
        found.append((worker.index, Phase(name, started_at - ahead_s, end)))
    return found


def _unconfirmed(worker: RemoteWorker, waited_s: float) -> str:
    if worker.is_gone:
        return "ended before it confirmed that its outputs are stored"
    return f"did not confirm in {waited_s:g} s that its outputs are stored"
