"""Bring-up: wait until every worker is ready and compatible; mpirun starts in the meantime."""

from __future__ import annotations

from jobentry.contract import exits
from jobentry.contract.env import NodeEnv
from jobentry.contract.exits import Cause, Failure, Outcome
from jobentry.control import node_table
from jobentry.control.peers import WorkerPool
from jobentry.control.run import JobContext, Run


def bring_up(context: JobContext, run: Run) -> Outcome | None:
    """Wait until every worker is ready; return an outcome only if the job cannot run."""
    node, loop, pool = context.setup.node, context.loop, context.pool
    stop = context.stop

    def workers_are_late() -> None:
        failure = _late(pool, node)
        pool.show(failure.message)
        stop.give_up(failure)

    loop.schedule("start", node.start_timeout_s, workers_are_late)
    try:
        pool.open()
        run.start_early()
        while pool.absent:
            loop.step()
            if stop.has_begun:
                return run.outcome()
    finally:
        pool.stop_waiting()
    unfit = pool.unfit()
    if not unfit:
        return None
    row = unfit[0]
    message = "node %d (%s) has %s" % (row.node, row.host, row.problem)
    pool.show(message)
    failure = Failure(row.node, row.host, message=message, exit_code=exits.ENTRY_FAILED)
    return Outcome(exits.ENTRY_FAILED, Cause.ENTRY, failure)


def _late(pool: WorkerPool, node: NodeEnv) -> Failure:
    """Return the failure of a job whose workers have not come up in time."""
    absent = [row for row in pool.unfit() if not row.facts]
    message = "waiting for the workers: after %g s %d of %d have not come up: %s: %s" % (
        node.start_timeout_s,
        len(absent),
        len(pool.workers),
        node_table.named([row.node for row in absent], node.hosts),
        absent[0].problem,
    )
    code = exits.ENTRY_FAILED
    return Failure(absent[0].node, absent[0].host, message=message, exit_code=code)
