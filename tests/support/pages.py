"""Pages of the manual, as tests follow them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"^```(\w+)(?: +(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block of the page.

    Args:
        kind: ``sh``, ``output``, or the language of a file.
        attribute: ``skip``, ``exit=CODE``, ``file=NAME`` or nothing.
    """

    kind: str
    attribute: str
    text: str


def blocks(page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    for kind, attribute, text in _BLOCK.findall((DOCS / page).read_text()):
        yield Block(kind, attribute, text)
