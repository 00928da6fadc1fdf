"""How a backend reports to the head that a node has ended: a file with the node's exit code."""

from __future__ import annotations

from jobentry.contract.exits import Failure

# Ends the message of the failure that the head records for such a node.
_BEFORE_JOINING = "before it joined the job"


def file_name(node: int) -> str:
    """Return the name of the file that reports the end of ``node``."""
    return "ended-%d" % node


def dump(exit_code: int) -> bytes:
    """Return the content of the file."""
    return b"%d\n" % exit_code


def load(data: bytes) -> int | None:
    """Return the exit code in a file; None if the file has no such content."""
    text = data[:-1]
    return int(text) if data.endswith(b"\n") and text.isdigit() else None


def failure(node: int, host: str, exit_code: int) -> Failure:
    """Return the failure that the head records for a node that ended before it joined the job."""
    ended = "node %d (%s) ended with exit code %d" % (node, host, exit_code)
    return Failure(node, host, exit_code=exit_code, message="%s %s" % (ended, _BEFORE_JOINING))


def is_before_joining(failure: Failure) -> bool:
    """Whether this is such a failure: its last lines are only in the log of that node."""
    return failure.message.endswith(_BEFORE_JOINING)
