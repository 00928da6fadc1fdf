"""Nodes that have ended, as the backend reports them to the head."""

from __future__ import annotations

import os

from jobentry.contract import node_end
from jobentry.contract.env import NodeEnv
from jobentry.contract.exits import Cause, Failure, Outcome

# The longest report that is read: an exit code.
_REPORT_BYTES = 16


def reported_code(node: NodeEnv, index: int) -> int | None:
    """Return the exit code of the node ``index``; None if the backend has reported nothing."""
    if not node.reports_dir:
        return None
    path = os.path.join(node.reports_dir, node_end.file_name(index))
    try:
        # Ranks can write there, too: neither links nor pipes are read, nor much of a file.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            return node_end.load(os.read(descriptor, _REPORT_BYTES))
        finally:
            os.close(descriptor)
    except OSError:
        return None


def reported(node: NodeEnv, index: int) -> Failure | None:
    """Return how the node ``index`` has ended before it joined; None if nothing was reported."""
    code = reported_code(node, index)
    return None if code is None else node_end.failure(index, node.hosts[index], code)


def outcome(failure: Failure) -> Outcome:
    """Return the outcome of a job that has lost such a node: its entry failed, or was killed."""
    code = failure.exit_code or 1
    return Outcome(code, Cause.PLATFORM if code > 128 else Cause.ENTRY, failure)
