"""docs/tutorial.md and docs/guides/sweeps.md, followed literally."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

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
    for kind, attribute, text in _BLOCK.findall((DOCS / page).read_text()):
        yield Block(kind, attribute, text)


@pytest.mark.parametrize("page", ["tutorial.md", "guides/sweeps.md"])
def test_a_page_prints_what_it_promises(tmp_path: Path, page: str):
    """Commands run in order; every line of an output block appears, … standing for any text."""
    environ = {**os.environ, "CLOUDJOB_HOME": str(tmp_path / "home")}
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    folder = tmp_path / "project"
    folder.mkdir()
    printed = ""
    checked = 0
    for block in blocks(page):
        name, _, value = block.attribute.partition("=")
        if name == "file":
            (folder / value).write_text(block.text)
        elif block.kind == "sh" and name != "skip":
            done = subprocess.run(
                ["bash", "-ec", block.text],
                cwd=folder,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=300,
                check=False,
            )
            printed = done.stdout
            assert done.returncode == int(value or 0), f"{block.text}\n{printed}"
        elif block.kind == "output":
            for line in block.text.splitlines():
                pattern = ".*".join(map(re.escape, line.split("…")))
                assert re.search(f"^{pattern}$", printed, re.MULTILINE), f"{line}\n---\n{printed}"
                checked += 1

    assert checked >= 10
