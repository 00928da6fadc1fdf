"""Which interpreter runs a script, and what it lacks that another one has."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from cloudjob.backends import interpreters
from cloudjob.model.job import JobSpec
from cloudjob.submission import checks
from cloudjob.submission.scripts import ScriptFiles


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ``python`` that is first on PATH and has a module ``of_the_other``."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "of_the_other.py").write_text("")
    program = tmp_path / "bin" / "python"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/site exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    return program


def found(tmp_path: Path, text: str, **section: str) -> list[tuple[str, str]]:
    """Return the warnings for a script."""
    (tmp_path / "train.py").write_text(text)
    spec = JobSpec(source=str(tmp_path), script="train.py", process=section)
    return [(check.found, check.hint) for check in checks.python_checks(spec, ScriptFiles())]


def test_modules_that_only_the_python_on_path_has_are_reported(tmp_path: Path, other: Path):
    text = "import os, of_the_other.nn, own, nowhere\n"
    (tmp_path / "own.py").write_text("")

    assert found(tmp_path, text) == [
        (
            f"scripts run with {sys.executable} (the one that runs cloudjob); it has no"
            f" of_the_other, but {other} has",
            f"process: {{python: {other}}} in a job file, or activate its environment",
        )
    ]


@pytest.mark.parametrize(
    "text",
    [
        "import os\n",
        "import nowhere\n",
        "try:\n    import of_the_other\nexcept ImportError:\n    pass\n",
        "def main():\n    import of_the_other\n",
        "import of_the_other as (\n",
    ],
)
def test_other_imports_are_not_reported(tmp_path: Path, other: Path, text: str):
    """What neither has is the script's own affair, and so is what it may do without."""
    assert found(tmp_path, text) == []


def test_a_configured_interpreter_is_used_without_a_warning(tmp_path: Path, other: Path):
    assert found(tmp_path, "import of_the_other\n", python=str(other)) == []


def test_a_stale_environment_is_reported(
    tmp_path: Path, other: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("VIRTUAL_ENV", "/gone")

    assert found(tmp_path, "import os\n") == [
        (
            f"VIRTUAL_ENV=/gone has no bin/python; scripts run with {sys.executable} (the one that"
            " runs cloudjob)",
            "",
        )
    ]


def test_the_active_environment_is_used(tmp_path: Path, other: Path, monkeypatch):
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))

    chosen = interpreters.choose("", "process.python")
    assert (chosen.path, chosen.why, chosen.stale) == (str(other), "VIRTUAL_ENV", "")
