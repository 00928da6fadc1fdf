"""The head: brings the workers up, has the ranks started, and finds out how the job ended."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from jobentry.contract import exits
from jobentry.contract.env import NodeEnv
from jobentry.contract.exits import Failure
from jobentry.contract.paths import NodePaths
from jobentry.control import early_ends, startup_timeout
from jobentry.control.event_loop import (
    ABORT_S,
    PASSED_SIGNALS,
    STOPPED_LIMIT_S,
    NodeLoop,
    adopt_orphans,
    children,
    is_late,
    remove_sessions,
    sweep,
)
from jobentry.control.launcher_processes import Starters
from jobentry.control.local_ranks import BadEnd, End
from jobentry.control.messages import Message
from jobentry.control.verdict import (
    Outcome,
    RankEnd,
    Starter,
    correction,
    decide,
    decide_elastic,
    served_no_more,
)
from jobentry.control.worker_link import Peer
from jobentry.control.worker_pool import Workers
from jobentry.errors import EntryError
from jobentry.log import say
from jobentry.plan import LaunchPlan

if TYPE_CHECKING:
    from jobentry.control.elastic_hosts import Members
    from jobentry.control.node_table import Row
    from jobentry.control.remote_commands import Desk
    from jobentry.staging.outputs import Outputs

# How long a reason may still be on its way when mpirun has ended badly without one.
REASON_S = 1.0
# How long it waits for a worker whose connection has ended to be found again or given up.
_DOUBT_S = 10.0
# How long the rank that another was left by may take to end by itself.
CAUSE_S = 0.2
# How long the workers may take to clean up after a start that hung.
CLEAN_UP_S = 10.0
# How long an elastic job that has enough nodes waits for the others before it begins.
GATHER_S = 10.0
# A node of a job that was stopped is not waited for when it has missed a sign of life.
_SILENT_S = 7.0
# How long what starts the ranks of a worker may take to end when everything is killed.
_KILLED_S = 2.0
_CUT_SHORT = "cancelled: the job was stopped while its outputs were stored, and some are missing"
_LATE_RANK = (
    "starting the ranks: mpirun hung, and a rank started while it was ended: the script may have"
    " begun, so it is not started again"
)


class WorkersAt(NamedTuple):
    """How workers are reached: the private key of the job, and the port on which they listen."""

    key: bytes
    port: int


class Head:
    """The head: it brings the workers up, has the ranks started, and finds how the job ended.

    Args:
        at: How the workers are reached.
        facts: What the workers must have in common with it.
        own: The children of this process that somebody else waits for.
    """

    def __init__(
        self,
        node: NodeEnv,
        paths: NodePaths,
        plan: LaunchPlan,
        facts: dict[str, Any],
        at: WorkersAt,
        own: tuple[int, ...] = (),
    ) -> None:
        self._node = node
        self._plan = plan
        self._ranks = plan.ranks
        self._loop = NodeLoop(node, paths)
        self._loop.own.update(own)
        self._loop.on_end = self._rank_ended
        self._loop.on_start = lambda rank: self._rank_started(rank, 0)
        self._loop.on_signal = self._signalled
        self._at = at
        self._workers = Workers(node, self._loop, facts, self._hear_worker, self._lost)
        self._desk = _desk(node, plan, paths, self._loop, self._workers)
        self._waiting = paths.waiting
        # Our children before mpirun, and why it could not be started early.
        self._before: list[int] = []
        self._early = ""
        # Once a rank has failed, mpirun only tells the same at length.
        self._starters = Starters(self._loop, is_quiet=self._has_reason)
        # The workers on which something that starts ranks still runs, and the first bad end there.
        self._away: set[int] = set()
        self._away_end = Starter("", 0, ())
        self._is_in_doubt = False
        self._started: dict[int, int] = {}
        self._ends: dict[int, RankEnd] = {}
        self._has_failed = False
        # The rank whose failure was heard of first.
        self._named: int | None = None
        self._lost_nodes: list[Failure] = []
        self._stopped: Outcome | None = None
        self._attempt = 1
        self._is_hung = False
        self._members: Members | None = _members(node, paths)
        self._has_begun = False
        self._dirty: set[int] = set()
        # When the job was cancelled, on the clock that never jumps.
        self.stopped_at: float | None = None
        self.phases: list[tuple[int, str, float, float]] = []

    @property
    def bad_end(self) -> BadEnd | None:
        """How ranks of this node ended badly; None when none did."""
        return self._loop.ranks.bad_end

    def attach(self, outputs: Outputs) -> None:
        """Let ``outputs`` know when ranks of this node are ended."""
        self._loop.ranks.before_end = outputs.look_for_writers

    def run(self) -> Outcome:
        """Run the job and return how it ended."""
        adopt_orphans()
        if self._node.timeout_s:
            self._loop.at("timeout", self._node.timeout_s, self._timed_out)
        try:
            begun = time.time()
            refusal = self._bring_up()
            if refusal:
                self._end_early()
            self.phases.append((0, "bring-up", begun, time.time()))
            begun = time.time()
            outcome = refusal or self._run_ranks()
            text = correction(outcome, self._named)
            if text:
                say(text)
            self.phases.append((0, "run", begun, time.time()))
            return outcome
        finally:
            self._loop.close()

    def aside(self, work: Callable[[], str]) -> str:
        """Run ``work`` while the head goes on to hear its workers, and return what it returned.

        Raises:
            EntryError: The job was cancelled meanwhile, and the work was not done in time.
        """
        try:
            return self._loop.run_aside(work, lambda: is_late(self.stopped_at, self._node))
        except TimeoutError as error:
            code = exits.code_of_signal(signal.SIGTERM)
            raise EntryError(_CUT_SHORT, code, cause="cancelled") from error

    def end(self, outcome: Outcome) -> Outcome:
        """Tell every worker how the job ended, wait until each has left; return how it ended now.

        The job has failed when a worker cannot store its outputs, or does not confirm that it has.
        """
        patience_s = max(self._node.start_timeout_s, self._node.output_limit_s)
        if self.stopped_at is not None:
            patience_s = max(STOPPED_LIMIT_S, self._node.grace_s) + CLEAN_UP_S
        unconfirmed = self._workers.end(
            outcome.exit_code,
            is_over=outcome.is_over,
            patience_s=patience_s,
            reason=outcome.failure.message if outcome.failure else "",
            silent_limit_s=_SILENT_S if self.stopped_at is not None else float("inf"),
        )
        for peer in unconfirmed:
            say("node %d (%s) %s" % (peer.index, peer.host, _unconfirmed(peer, patience_s)))
        troubles = [peer for peer in self._workers.peers if peer.trouble]
        if outcome.exit_code or not (troubles or unconfirmed):
            return outcome
        if unconfirmed:
            peer, code, cause = unconfirmed[0], exits.code_of_signal(signal.SIGKILL), "platform"
            message = _unconfirmed(peer, patience_s)
        else:
            peer, code, cause = troubles[0], exits.ENTRY_FAILED, "entry"
            message = peer.trouble
        failure = Failure(peer.index, peer.host, exit_code=code, message=message)
        return Outcome(code, cause, failure)

    def call_off(self, reason: str, patience_s: float) -> None:
        """End a job that this node cannot start: tell the workers why.

        Args:
            patience_s: How long those that have not come up may take to be told.
        """
        self._loop.at("patience", patience_s, lambda: None)
        try:
            self._workers.open(self._at.key, self._at.port)
            while self._workers.absent and self._loop.is_planned("patience"):
                self._loop.step()
                if self._has_reason():
                    break
            self._workers.end(
                exits.ENTRY_FAILED, is_over=False, patience_s=CLEAN_UP_S, reason=reason
            )
        finally:
            self._loop.close()

    # -- workers ------------------------------------------------------------------------------

    def _bring_up(self) -> Outcome | None:
        """Wait until every worker is there; return what stops the job, if anything does."""
        self._loop.at("start", self._node.start_timeout_s, self._workers_are_late)
        try:
            self._workers.open(self._at.key, self._at.port)
            self._start_early()
            self._gather()
            while self._workers.absent and not self._has_begun:
                self._loop.step()
                if self._has_reason():
                    return self._outcome()
        finally:
            self._has_begun = True
            self._workers.stop_looking(for_good=self._members is None)
        for warning in self._workers.warnings():
            say(warning)
        unfit = [row for row in self._workers.unfit() if row.facts or self._members is None]
        return self._refused(unfit[0]) if unfit else None

    def _refused(self, row: Row) -> Outcome:
        """Do not start a job whose nodes do not fit together."""
        text = "node %d (%s) has %s" % (row.node, row.host, row.trouble)
        self._workers.show(text)
        failure = Failure(row.node, row.host, message=text, exit_code=exits.ENTRY_FAILED)
        return Outcome(exits.ENTRY_FAILED, "entry", failure)

    def _hear_worker(self, peer: Peer, message: Message) -> None:
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
            self._pass_on(values["number"], peer.index)
        elif word == "cleaned-up":
            self._dirty.discard(peer.index)
        elif word == "ready" and self._members is not None:
            self._came(peer.index)
        else:
            self._hear_of_programs(peer, word, values)

    def _hear_of_programs(self, peer: Peer, word: str, values: dict[str, Any]) -> None:
        if word == "over":
            self._ended_away(peer.index, Starter(**values))
        elif word == "ran" and self._desk is not None:
            self._desk.answered(**values)
        elif word == "served-no-more":
            self._served_no_more(Starter(**values), peer.index)

    def _lost(self, peer: Peer) -> None:
        if peer.early_end is not None:
            self._ended_early(peer.early_end)
            return
        message = "node %d (%s) is gone: %s" % (peer.index, peer.host, peer.reason)
        say(message)
        self._away.discard(peer.index)
        code = exits.code_of_signal(signal.SIGKILL)
        failure = Failure(node=peer.index, host=peer.host, exit_code=code, message=message)
        if self._members is not None:
            self._members.go(peer.index)
            self._workers.look_again(peer)
            self._gather(failure)
            return
        self._lost_nodes.append(failure)
        self._end_ranks()

    def _ended_early(self, failure: Failure) -> None:
        """A worker has ended before it joined the job; its own log says why."""
        if self._has_reason():
            return
        say(failure.message)
        self._stopped = Outcome(failure.exit_code or 1, early_ends.cause_of(failure), failure)
        self._end_ranks()

    def _workers_are_late(self) -> None:
        absent = [row for row in self._workers.unfit() if not row.facts]
        names = ", ".join("node %d (%s)" % (row.node, row.host) for row in absent[:8])
        text = "waiting for the workers: after %g s %d of %d have not come up: %s: %s" % (
            self._node.start_timeout_s,
            len(absent),
            len(self._workers.peers),
            names + (" ..." if len(absent) > 8 else ""),
            absent[0].trouble,
        )
        self._workers.show(text)
        failure = Failure(
            absent[0].node, absent[0].host, message=text, exit_code=exits.ENTRY_FAILED
        )
        self._stopped = Outcome(exits.ENTRY_FAILED, "entry", failure)
        self._abort()

    # -- nodes that come and go ---------------------------------------------------------------

    def _came(self, index: int) -> None:
        """A worker is there: one of an elastic job may come at any time."""
        assert self._members is not None
        row = next((row for row in self._workers.unfit() if row.node == index), None)
        if row is not None and self._has_begun:
            say("node %d (%s) takes no part: it has %s" % (index, row.host, row.trouble))
            return
        self._members.come(index)
        if self._has_begun:
            say("node %d (%s) takes part" % (index, self._node.hosts[index]))
        self._gather()

    def _gather(self, lost: Failure | None = None) -> None:
        """See whether an elastic job has the nodes to begin or to go on."""
        members = self._members
        if members is None:
            return
        if members.are_enough:
            self._loop.drop("too-few")
            if not self._has_begun and not self._loop.is_planned("begin"):
                self._loop.at("begin", GATHER_S, self._begin)
        elif lost is not None and self._has_begun:
            patience_s = self._node.start_timeout_s
            self._loop.at("too-few", patience_s, lambda: self._too_few(lost, patience_s))

    def _can_go_on_without(self, node: int | None) -> bool:
        """Whether the job goes on although a rank of that node has failed: it is used no more."""
        if self._members is None or node is None:
            return False
        self._members.strike(node)
        return self._members.are_enough

    def _begin(self) -> None:
        assert self._members is not None
        self._has_begun = self._members.are_enough

    def _too_few(self, lost: Failure, waited_s: float) -> None:
        assert self._members is not None
        text = "waiting for nodes: after %g s %d of %d are there, and the job needs %d (min_nodes)"
        counts = (waited_s, self._members.count, self._node.nodes, self._node.min_nodes)
        message = "%s; %s" % (text % counts, lost.message)
        say(message)
        self._lost_nodes.append(lost._replace(message=message))
        self._end_ranks()

    def _give_up(self, failure: Failure) -> None:
        say(failure.message)
        self._stopped = Outcome(exits.ENTRY_FAILED, "entry", failure)
        self._abort()

    # -- what starts the ranks ----------------------------------------------------------------

    def _start_early(self) -> None:
        """Start mpirun while the workers come up: it has to wait for the first answer of a worker.

        The desk holds back what it wants of them, and a file each rank that begins here all the
        same, until every worker is there and fits.
        """
        if self._desk is None or self._members is not None:
            return
        self._before = children()
        with open(self._waiting, "wb"):
            pass
        self._early = self._starters.start(self._plan.processes, self._plan.cwd)

    def _end_early(self) -> None:
        """End what was started early for a job that does not begin."""
        started = self._starters.processes
        self._starters.kill()
        remove_sessions(started)

    def _begin_early(self) -> Outcome | None:
        """Let what was started early go on; return what stops the job, if anything does."""
        self._await_ranks()
        os.unlink(self._waiting)
        return self._faulty(self._early)

    def _run_ranks(self) -> Outcome:
        if self._desk is not None:
            self._desk.open()
        if os.path.exists(self._waiting):
            refusal = self._begin_early()
        else:
            self._before = children()
            refusal = self._start()
        while refusal is None:
            started = self._starters.processes
            while self._starters.are_running or self._away:
                self._loop.step()
                self._end_when_all_have()
                self._see_servers()
                self._see_starters()
            self._starters.end_servers()
            self._loop.drop("start")
            if self._starters.were_killed:
                remove_sessions(started)
            if not (self._is_hung and self._has_cleaned_up()):
                break
            self._attempt += 1
            refusal = self._start()
        if refusal is not None:
            return refusal
        code = self._starters.code or self._away_end.code
        self._wait_for_reason(code)
        return self._outcome()

    def _start(self) -> Outcome | None:
        """Start what starts the ranks; return what stops the job, if anything does."""
        self._is_hung = False
        self._await_ranks()
        if self._plan.is_everywhere:
            self._away = {peer.index for peer in self._workers.peers}
            self._workers.tell("launch")
        return self._faulty(self._starters.start(self._plan.processes, self._plan.cwd))

    def _faulty(self, fault: str) -> Outcome | None:
        if not fault:
            return None
        return Outcome(exits.ENTRY_FAILED, "entry", Failure(message=fault))

    def _see_servers(self) -> None:
        """Without what serves them the ranks cannot go on: MindSpore's scheduler, for one."""
        end = self._starters.server_end
        if end is not None:
            self._served_no_more(end, 0)

    def _served_no_more(self, end: Starter, node: int) -> None:
        if self._has_reason():
            return
        have_started = len(self._started) >= self._ranks
        self._stopped = served_no_more(end, node, self._node.hosts[node], have_started)
        assert self._stopped.failure is not None
        say(self._stopped.failure.message)
        self._end_ranks()

    def _see_starters(self) -> None:
        """See whether what starts the ranks of one node has failed: the others wait for those."""
        if self._desk is not None:
            self._desk.look()
        failed = self._starters.code or self._away_end.code
        if failed and self._plan.is_everywhere and not self._is_in_doubt:
            self._is_in_doubt = True
            # A rank that has failed says so itself.
            self._loop.at("starter", REASON_S, self._starter_failed)

    def _starter_failed(self) -> None:
        if not self._has_reason():
            self._stopped = decide({}, self._started, self._ranks, self._starter_end())
            self._end_ranks()

    def _ended_away(self, node: int, end: Starter) -> None:
        """What starts the ranks of a worker has ended there."""
        self._away.discard(node)
        if end.code and not self._away_end.code:
            self._away_end = end._replace(name="%s on node %d" % (end.name, node))

    def _await_ranks(self) -> None:
        """Expect the next rank soon: a start in which nothing happens hangs."""
        patience_s = self._node.start_timeout_s
        if not self._plan.is_everywhere:
            patience_s = startup_timeout.patience_s(self._node.nodes, patience_s, self._attempt)
        self._loop.at("start", patience_s, lambda: self._ranks_are_late(patience_s))

    def _ranks_are_late(self, waited_s: float) -> None:
        if self._has_reason():
            return
        node = self._node
        failure = startup_timeout.hung(
            self._starters.name,
            node,
            self._ranks,
            self._started,
            self._attempt,
            waited_s,
        )
        may_not = self._plan.is_everywhere or self._members is not None
        if may_not or not startup_timeout.may_try_again(self._attempt, self._started):
            self._give_up(failure._replace(last_lines=tuple(self._starters.lines)[-20:]))
            return
        say(f"{failure.message}: ending it, and starting it once more")
        self._is_hung = True
        self._abort()

    def _has_cleaned_up(self) -> bool:
        """Take away what a hung mpirun has left on all nodes; return whether it may start again."""
        # Also what has left mpirun's process group: its daemon here, and its agents.
        sweep(self._before)
        self._dirty = {peer.index for peer in self._workers.peers}
        self._workers.tell("clean-up")
        deadline = time.monotonic() + CLEAN_UP_S
        while self._dirty and not self._has_reason() and time.monotonic() < deadline:
            self._loop.step()
        self._loop.hear_ranks()
        if not self._has_reason() and not startup_timeout.may_try_again(
            self._attempt, self._started
        ):
            self._give_up(Failure(message=_LATE_RANK, exit_code=exits.ENTRY_FAILED))
        return not self._has_reason()

    def _wait_for_reason(self, code: int) -> None:
        """Wait for a worker's report on its rank, or its loss, which can come after mpirun's end.

        A worker whose connection has ended may be dead, which takes some seconds to find out:
        mpirun notices at once, and would be blamed in its place.
        """
        begun = time.monotonic()
        while True:
            is_in_doubt = self._workers.are_in_doubt and not self._stopped
            waited_s = time.monotonic() - begun
            if waited_s >= (_DOUBT_S if is_in_doubt else REASON_S):
                break
            if self._is_clear(code) and not is_in_doubt:
                break
            self._loop.at("reason", 0.05, lambda: None)
            self._loop.step()

    def _is_clear(self, code: int) -> bool:
        have_ended = len(self._ends) >= (self._ranks if self._members is None else 0)
        return self._has_reason() or (code == 0 and have_ended)

    def _has_reason(self) -> bool:
        return bool(self._has_failed or self._lost_nodes or self._stopped)

    # -- ranks --------------------------------------------------------------------------------

    def _rank_started(self, rank: int, node: int) -> None:
        self._started[rank] = node
        if self._members is not None:
            # From now on its driver sees to that.
            self._ends.pop(rank, None)
            self._loop.drop("start")
        elif len(self._started) >= self._ranks:
            self._loop.drop("start")
        elif not self._has_reason() and not self._is_hung:
            self._await_ranks()

    def _rank_ended(self, end: End) -> None:
        failure = self._loop.ranks.failure(end, 0, self._node.host)
        self._note(end.rank, RankEnd(end.at_s, end.was_told, end.is_said, failure))

    def _note(self, rank: int, end: RankEnd) -> None:
        """Keep how a rank ended; the first that fails ends the others."""
        if rank in self._ends or self._stopped:
            return
        self._ends[rank] = end
        if end.is_failure and not self._has_failed:
            failure = end.failure
            say(f"rank {rank} on node {failure.node} ({failure.host}): {failure.message}")
            self._named = rank
            self._has_failed = not self._can_go_on_without(failure.node)
            if not self._has_failed:
                return
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
        """Handle a signal to this node.

        Only the first stop signal counts: a scheduler repeats SIGTERM within the grace period. A
        SIGINT after it comes from a person who does not want to wait.
        """
        if number == signal.SIGINT and self._stopped:
            say("SIGINT while the job ends: ending all ranks now")
            self._abort()
        else:
            self._pass_on(number, self._node.node)

    def _pass_on(self, number: int, node: int) -> None:
        """Handle a signal to any node; a platform that ends a job may send it to every node."""
        if number in PASSED_SIGNALS:
            self._workers.tell("signal", number=number)
            self._loop.ranks.pass_on(number)
        elif not self._stopped:
            code = exits.code_of_signal(number)
            message = f"cancelled: the job was sent {signal.Signals(number).name}"
            host = self._node.hosts[node]
            failure = Failure(node, host, signal=number, exit_code=code, message=message)
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
        # A node that does not answer is not waited for.
        self._loop.at("killed", _KILLED_S, self._away.clear)
        # Before mpirun: it takes its ranks with it.
        self._loop.ranks.note_end()
        # Daemons of mpirun on the workers see that it is gone; SIGTERM may not end it (5.0.11).
        self._starters.kill()
        if self._desk is not None:
            self._desk.kill()
        self._loop.ranks.kill()
        self._loop.ranks.release()

    # -- the end ------------------------------------------------------------------------------

    def _outcome(self) -> Outcome:
        starters = self._starters
        if starters.signal:
            code = exits.code_of_signal(starters.signal)
            message = f"{starters.name} was killed by {signal.Signals(starters.signal).name}"
            failure = Failure(
                0, self._node.host, signal=starters.signal, exit_code=code, message=message
            )
            return Outcome(code, "platform", failure)
        if self._lost_nodes:
            failure = self._lost_nodes[0]
            return Outcome(failure.exit_code or 1, "platform", failure)
        if self._stopped:
            return self._stopped
        if self._members is not None:
            return decide_elastic(self._ends, self._starter_end())
        outcome = decide(self._ends, self._started, self._ranks, self._starter_end())
        if outcome.failure is None or outcome.failure.node is None or outcome.failure.host:
            return outcome
        host = self._node.hosts[outcome.failure.node]
        return outcome._replace(failure=outcome.failure._replace(host=host))

    def _starter_end(self) -> Starter:
        """How what starts the ranks ended, where it ended badly if it did anywhere."""
        starters = self._starters
        if not starters.code and self._away_end.code:
            return self._away_end
        return Starter(starters.name, starters.code, starters.lines)


def _unconfirmed(peer: Peer, waited_s: float) -> str:
    if peer.is_gone:
        return "ended before it confirmed that its outputs are stored"
    return f"did not confirm in {waited_s:g} s that its outputs are stored"


def _desk(
    node: NodeEnv, plan: LaunchPlan, paths: NodePaths, loop: NodeLoop, workers: Workers
) -> Desk | None:
    """Return what runs the launcher's commands on the workers; None where it has none."""
    if not any(file.path == paths.agent for file in plan.files):
        return None
    from jobentry.control.remote_commands import Desk

    return Desk(paths, loop, node.hosts[0], workers.peers)


def _members(node: NodeEnv, paths: NodePaths) -> Members | None:
    """Return who takes part in an elastic job, the head alone at first; None for other jobs."""
    if not node.min_nodes:
        return None
    from jobentry.control.elastic_hosts import Members

    members = Members(node, paths)
    members.come(node.node)
    return members
