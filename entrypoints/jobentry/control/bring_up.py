"""Bring-up: the head waits until every worker is ready and compatible; mpirun starts meanwhile."""

from __future__ import annotations

from jobentry.contract import exits
from jobentry.contract.exits import Failure
from jobentry.control import early_ends
from jobentry.control.job_context import JobContext
from jobentry.control.run import Run
from jobentry.control.verdict import Outcome
from jobentry.log import log_message

_NAMED = 8


class BringUp:
    """Waits for the workers."""

    def __init__(self, context: JobContext, run: Run) -> None:
        self._node = context.node
        self._loop = context.loop
        self._pool = context.pool
        self._elastic = context.elastic
        self._stop = context.stop
        self._run = run

    def wait(self, key: bytes, port: int) -> Outcome | None:
        """Wait until every worker is ready; return what prevents the job, if anything does.

        Args:
            key: The private key of the job.
            port: Where workers listen.
        """
        elastic = self._elastic
        self._loop.at("start", self._node.start_timeout_s, self._workers_are_late)
        try:
            self._pool.open(key, port)
            self._run.start_early()
            if elastic is not None:
                elastic.check()
            while self._pool.absent and not (elastic is not None and elastic.has_begun):
                self._loop.step()
                if self._stop.has_begun:
                    return self._run.outcome()
        finally:
            if elastic is not None:
                elastic.has_begun = True
            self._pool.stop_looking(for_good=elastic is None)
        return self._compare()

    def _compare(self) -> Outcome | None:
        """Compare the nodes; an incompatible one prevents the job."""
        for warning in self._pool.warnings():
            log_message(warning)
        unfit = [row for row in self._pool.unfit() if row.facts or self._elastic is None]
        if not unfit:
            return None
        text = "node %d (%s) has %s" % (unfit[0].node, unfit[0].host, unfit[0].trouble)
        return self._prevented(unfit[0].node, unfit[0].host, text)

    def _workers_are_late(self) -> None:
        absent = [row for row in self._pool.unfit() if not row.facts]
        names = ", ".join("node %d (%s)" % (row.node, row.host) for row in absent[:_NAMED])
        text = "waiting for the workers: after %g s %d of %d have not come up: %s: %s" % (
            self._node.start_timeout_s,
            len(absent),
            len(self._pool.workers),
            names + (" ..." if len(absent) > _NAMED else ""),
            absent[0].trouble,
        )
        outcome = self._prevented(absent[0].node, absent[0].host, text)
        assert outcome.failure is not None
        self._stop.give_up(outcome.failure)

    def _prevented(self, node: int, host: str, text: str) -> Outcome:
        self._pool.show(text)
        failure = Failure(node, host, message=text, exit_code=exits.ENTRY_FAILED)
        return Outcome(exits.ENTRY_FAILED, "entry", failure)

    def worker_ended_early(self, failure: Failure) -> None:
        """Handle a worker that has ended before it joined the job; its own log says why."""
        self._stop.fail(Outcome(failure.exit_code or 1, early_ends.cause_of(failure), failure))
