"""Bring-up: wait until every worker is ready and compatible; mpirun starts in the meantime."""

from __future__ import annotations

from jobentry.contract import exits
from jobentry.contract.env import NodeEnv
from jobentry.contract.exits import Cause, Failure, Outcome
from jobentry.control import node_table
from jobentry.control.job_context import JobContext
from jobentry.control.run import Run
from jobentry.control.worker_pool import WorkerPool


def bring_up(context: JobContext, run: Run, key: bytes, port: int) -> Outcome | None:
    """Wait until every worker is ready; return an outcome only if the job cannot run.

    Args:
        key: The private key of the job.
        port: Where workers listen.
    """
    loop, pool, elastic, stop = context.loop, context.pool, context.elastic, context.stop

    def workers_are_late() -> None:
        failure = _late(pool, context.node)
        pool.show(failure.message)
        stop.give_up(failure)

    loop.schedule("start", context.node.start_timeout_s, workers_are_late)
    try:
        pool.open(key, port)
        run.start_early()
        if elastic is not None:
            elastic.check()
        while pool.absent and not (elastic is not None and elastic.has_begun):
            loop.step()
            if stop.has_begun:
                return run.outcome()
    finally:
        if elastic is not None:
            elastic.has_begun = True
        pool.stop_waiting(for_good=elastic is None)
    # An elastic job starts without absent nodes.
    unfit = [row for row in pool.unfit() if row.facts or elastic is None]
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
