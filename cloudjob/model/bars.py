"""Progress bars in the log of a rank: carriage returns, and the cursor movements of nested bars.

A nested bar, as tqdm writes it, begins on a new line and ends by moving the cursor up, where the
outer bar is drawn next. So in a log with nested bars, most lines are overwritten by the next one.
"""

from __future__ import annotations

# Moves the cursor up.
UP = b"\x1b[A"


def is_overwritten(line: bytes) -> bool:
    """Whether a line shows nested bars, which a terminal would overwrite with the next bar."""
    head, up, tail = line.rstrip(b"\r\n").rpartition(UP)
    return bool(up) and b"\r" in head and (not tail or tail.startswith(b"\r"))


def reduced(text: bytes) -> bytes:
    """Return the part of an unfinished line that is still visible; more may be appended to it."""
    body = text.rstrip(b"\r\n")
    end = text[len(body) :]
    head, up, tail = body.rpartition(UP)
    if is_overwritten(text):
        return _from_last_return(head) + up + _from_last_return(tail) + end
    return _from_last_return(tail if b"\r" in head else body) + end


def last_state(text: bytes) -> bytes:
    """Return the final state of a line on a terminal, with the line's own ending."""
    text = reduced(text)
    if is_overwritten(text):
        text = text.replace(UP, b"")
    body = text.rstrip(b"\r\n")
    return body.rpartition(b"\r")[2] + text[len(body) :]


def _from_last_return(text: bytes) -> bytes:
    return text[max(0, text.rfind(b"\r")) :]
