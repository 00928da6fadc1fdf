"""Messages between head and workers: a kind and values, as one line of JSON."""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class Message(NamedTuple):
    """A message: its kind and its values."""

    kind: str
    values: dict[str, Any]


def dump(kind: str, **values: Any) -> bytes:
    """Return the line of a message, with its newline."""
    return json.dumps({"word": kind, **values}).encode("ascii") + b"\n"


def load(line: bytes) -> Message:
    """Return the message of a line."""
    values = json.loads(line.decode("ascii"))
    return Message(values.pop("word"), values)


class Lines:
    """Splits a stream of bytes into lines.

    Args:
        limit_bytes: The longest line; what was received of a longer one is dropped. 0 for no limit.
    """

    def __init__(self, limit_bytes: int = 0) -> None:
        self._rest = b""
        self._limit_bytes = limit_bytes

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that ``data`` completes."""
        *found, self._rest = (self._rest + data).split(b"\n")
        if 0 < self._limit_bytes < len(self._rest):
            self._rest = b""
        return found
