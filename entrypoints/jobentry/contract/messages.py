"""The messages in the log of an entry: the entry writes them, and the laptop reads them."""

from __future__ import annotations

MARK = "jobentry: "
HINT = "hint: "
_RECORD = "writing the record: "
_AGAIN = "; trying again"


def hint(text: str) -> str:
    """Return a message about what to do."""
    return HINT + text


def retry(problem: str) -> str:
    """Return a message about something that failed and is tried again."""
    return problem + _AGAIN


def unwritten_record(problem: object) -> str:
    """Return a message about a record that could not be written."""
    return f"{_RECORD}{problem}"


def is_reason(line: str) -> bool:
    """Whether a line of a log may be the reason for which an entry failed."""
    is_other = line.startswith((MARK + HINT, MARK + _RECORD)) or line.endswith(_AGAIN)
    return line.startswith(MARK) and not is_other
