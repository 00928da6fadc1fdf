"""docs/tutorial.md and docs/guides/sweeps.md, followed literally."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import blocks


@pytest.mark.parametrize("page", ["tutorial.md", "guides/sweeps.md"])
def test_the_commands_of_a_page_print_the_output_that_it_shows(tmp_path: Path, page: str):
    """The commands run in order and print every line of their output block; … is any text."""
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
