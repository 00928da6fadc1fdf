"""The code blocks of the documentation, which tests run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(
    r'^(?:<!-- (?P<note>\S+) -->\n)?```(?P<kind>\w+)(?: title="(?P<file>\S+)")?\n'
    r"(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A fenced block of the page.

    Args:
        kind: ``sh``, ``output``, or the language of a file.
        attribute: ``skip`` or ``exit=CODE`` from a comment above the block, ``file=NAME`` from its
            title, or nothing.
    """

    kind: str
    attribute: str
    text: str


def blocks(page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    for match in _BLOCK.finditer((DOCS / page).read_text()):
        file = match["file"]
        yield Block(match["kind"], f"file={file}" if file else match["note"] or "", match["text"])
