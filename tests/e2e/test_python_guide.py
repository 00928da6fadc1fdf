"""docs/guides/python.md, followed literally."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "python.md"
_BLOCK = re.compile(r"^```(\w+)(?: +(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LIMIT_S = 300.0


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the files of the page."""
    for kind, attribute, text in _BLOCK.findall(GUIDE.read_text()):
        if attribute.startswith("file="):
            assert kind in ("python", "yaml")
            (tmp_path / attribute.removeprefix("file=")).write_text(text)
    return tmp_path


def run(folder: Path, *words: str) -> str:
    environ = {**os.environ, "CLOUDJOB_HOME": str(folder / "home")}
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    done = subprocess.run(
        words, cwd=folder, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_cells_run_and_print_what_the_page_shows(project: Path):
    """Each cell runs in the namespace of the last one, and its last expression has a table."""
    found = _BLOCK.findall(GUIDE.read_text())
    cells = [text for kind, attribute, text in found if (kind, attribute) == ("python", "")]
    (project / "cells.py").write_text(
        "import ast\n"
        "names = {}\n"
        f"for cell in {cells!r}:\n"
        "    tree = ast.parse(cell)\n"
        "    exec(compile(tree, 'cell', 'exec'), names)\n"
        "    last = getattr(tree.body[-1], 'value', None)\n"
        "    if isinstance(last, ast.Name):\n"
        "        print(names[last.id]._repr_html_())\n"
    )
    printed = run(project, sys.executable, "cells.py").splitlines()

    assert printed[0].startswith("<table>")
    shown = [line for kind, _, text in found if kind == "output" for line in text.splitlines()]
    assert len(shown) >= 5
    assert [line for line in shown if line not in printed] == []
    assert (project / "results" / "MODEL" / "weights.txt").is_file()


def test_the_pytest_recipe_passes_as_the_workflow_runs_it(project: Path):
    workflow = yaml.safe_load((project / "workflow.yaml").read_text())
    [train] = workflow["jobs"].values()
    *_, command = [step["run"] for step in train["steps"] if "run" in step]

    assert "2 passed" in run(project, *command.split(), "-p", "no:cacheprovider")
