"""Whether a node whose container was started again can run, and how it ends if not.

A container that is killed or restarted alone cannot run its part: the other nodes have ended with
its first run. If all of them were started again, the job runs again.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import time

from jobentry.contract import exits
from jobentry.contract.env import NodeEnv
from jobentry.log import log_message
from jobentry.node import record

# The file in the folder of delivered files that says which job has run.
MARK = "has-run"
# Seconds in which the other containers must be up, too; after 10 s the backend ends a head whose
# worker has failed.
_PATIENCE_S = 8.0
_POLL_S = 0.5
_CONNECT_S = 2.0
# What a host that is up answers for a port on which nobody listens.
_IS_UP = (0, errno.ECONNREFUSED)


def may_run(node: NodeEnv) -> bool:
    """Whether the node runs for the first time, or can run again; note that it has run."""
    if not node.delivered_dir or node.min_nodes or _mark(node):
        return True
    # A worker waits for the head, which decides.
    return not node.is_head or _others_are_up(node)


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


def _others_are_up(node: NodeEnv) -> bool:
    deadline = time.monotonic() + _PATIENCE_S
    missing = [host for host in node.hosts if host != node.host]
    while True:
        missing = [host for host in missing if not _is_up(host, node.sshd_port)]
        if not missing or time.monotonic() > deadline:
            return not missing
        time.sleep(_POLL_S)


def _is_up(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_S):
            return True
    except OSError as error:
        return error.errno in _IS_UP


def refuse(node: NodeEnv) -> int:
    """Record that the node was started again, unless its first run has left a record; its code."""
    code = exits.code_of_signal(signal.SIGKILL)
    message = "node %d (%s) was stopped or killed, and started again" % (node.node, node.host)
    log_message(f"{message}: the job has ended with its first run")
    if node.is_head and not record.exists(node.record_uri):
        failure = exits.Failure(node.node, node.host, exit_code=code, message=message)
        ended_at = record.rfc3339(time.time())
        ended = exits.ExitRecord(node.job, code, "platform", failure, ended_at=ended_at)
        record.write(ended, node.record_uri)
    return code
