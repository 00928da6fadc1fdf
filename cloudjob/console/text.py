"""Makes texts of jobs safe to show on a page."""

from __future__ import annotations

import re

from cloudjob.model import bars

# Terminal sequences and control characters, which have no meaning on a page, and marks that change
# the direction of the following text.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]?|\x1b[]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b."
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)


def displayable(text: str) -> str:
    """Return a text without terminal sequences and without marks that change its direction.

    Bytes that are not UTF-8, which arguments, file names and messages may contain, are escaped,
    because NiceGUI refuses them.
    """
    return _CONTROL.sub("", text.encode("utf-8", "backslashreplace").decode("utf-8"))


def displayable_line(line: bytes) -> str:
    """Return the final state of a log line on a terminal."""
    shown = bars.last_state(line).rstrip(b"\r\n")
    return displayable(shown.decode("utf-8", "replace"))
