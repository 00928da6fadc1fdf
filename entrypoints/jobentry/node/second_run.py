"""Whether a node whose container was started again can run, and how it ends if not.

It cannot: the other nodes have ended with its first run, or wait for no one.
"""

from __future__ import annotations

import os
import signal

from jobentry.contract import exits
from jobentry.contract.env import NodeEnv
from jobentry.log import log_message
from jobentry.node import record

# The file in the folder of delivered files that says which job has run.
MARK = "has-run"


def may_run(node: NodeEnv) -> bool:
    """Whether the node runs for the first time, or can run again; note that it has run."""
    return not node.delivered_dir or _mark(node)


def _mark(node: NodeEnv) -> bool:
    """Note that the job has run in this container; return whether it had not before."""
    path = os.path.join(node.delivered_dir, MARK)
    try:
        with open(path, "a+", encoding="utf-8") as file:
            file.seek(0)
            # The image may have been made from a container of another job.
            is_first = file.read() != node.job
            if is_first:
                file.truncate(0)
                file.write(node.job)
            return is_first
    except (OSError, ValueError):
        return True


def refuse(node: NodeEnv) -> int:
    """Record that the node was started again, unless its first run has left a record; its code."""
    code = exits.code_of_signal(signal.SIGKILL)
    message = "node %d (%s) was stopped or killed, and started again" % (node.node, node.host)
    log_message(f"{message}: the job has ended with its first run")
    if node.is_head and not record.exists(node.record_uri):
        failure = exits.Failure(node.node, node.host, exit_code=code, message=message)
        record.write_failure(node.job, failure, exits.Cause.PLATFORM, node.record_uri)
    return code
