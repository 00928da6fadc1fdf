"""How a backend reports to the head that a node has ended: a file with the node's exit code."""

from __future__ import annotations

# Ends the message of the failure that the head records for such a node.
BEFORE_JOINING = "before it joined the job"


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
