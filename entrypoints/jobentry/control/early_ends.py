"""Nodes that ended before they joined the job, as the backend reports them to the head."""

from __future__ import annotations

import os

from jobentry.contract import node_end
from jobentry.contract.env import NodeEnv
from jobentry.contract.exits import Failure


def reported(node: NodeEnv, index: int) -> Failure | None:
    """Return how the node ``index`` has ended; None if the backend has reported nothing."""
    if not node.reports_dir:
        return None
    try:
        with open(os.path.join(node.reports_dir, node_end.file_name(index)), "rb") as file:
            code = node_end.load(file.read())
    except OSError:
        return None
    if code is None:
        return None
    host = node.hosts[index]
    ended = "node %d (%s) ended with exit code %d" % (index, host, code)
    message = "%s %s" % (ended, node_end.BEFORE_JOINING)
    return Failure(index, host, exit_code=code, message=message)


def cause_of(failure: Failure) -> str:
    """Return the cause of such a failure: the entry, or a signal to it."""
    return "platform" if (failure.exit_code or 0) > 128 else "entry"
