"""Scripts that no node can run are refused before anything is sent."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import cloudjob
from cloudjob.backends.base import Check
from cloudjob.errors import SpecError
from cloudjob.model.job import JobSpec
from cloudjob.submission import checks


def spec(folder: Path, name: str, text: str, **values: Any) -> JobSpec:
    (folder / name).write_text(text, newline="")
    return JobSpec(source=str(folder), script=name, launcher="python", **values)


def problem(described: JobSpec) -> Check | None:
    return checks.read_script(described).problem


REFUSED = [
    ("train.py", "\n\n<!DOCTYPE html>\n<html>", "train.py is a web page (HTML)"),
    ("run", '<!-- saved -->\n<HTML lang="en">', "run is a web page (HTML)"),
    ("train.py", "import os\nif x\n    y = 1\n", "train.py line 2 is not valid in Python"),
    ("train.py", "def f():\n  x = 1\n    y = 2\n", "unexpected indent: y = 2"),
    ("train.py", "<<<<<<< HEAD\nx = 1\n", "invalid syntax: <<<<<<< HEAD"),
    ("train.py", "x = (1,\nprint(x)\n", "'(' was never closed"),
    ("train.py", "x = 1\0\n", "null bytes"),
    ("train.py", "print 'loss', loss\n", "Missing parentheses in call to 'print'"),
    ("run.sh", "if true; then\n  echo\n", "run.sh line 3: syntax error: unexpected end of file"),
    ("run.sh", "for x in 1 2\r\ndo\r\n  echo\r\ndone\r\n", "run.sh line 2: syntax error"),
    ("run", "#!/usr/bin/env bash\ndone\n", "syntax error near unexpected token `done'"),
    ("run", "#!/bin/sh\nfi\n", "run line 2: "),
]


@pytest.mark.parametrize(("name", "text", "message"), REFUSED)
def test_a_script_that_no_node_can_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str
):
    monkeypatch.setenv("CLOUDJOB_HOME", str(tmp_path / "home"))
    (tmp_path / "source").mkdir()
    described = spec(tmp_path / "source", name, text)

    with pytest.raises(SpecError, match=r"^script: ") as caught:
        cloudjob.submit(described)
    with pytest.raises(SpecError):
        cloudjob.preview(described)

    assert message in caught.value.message
    assert caught.value.message.isprintable()
    assert caught.value.hint
    assert not (tmp_path / "home").exists()


def test_the_hint_names_the_usual_mistake(tmp_path: Path):
    for name, text, expected in (
        ("train.py", "print 'x'\n", "for Python 2"),
        ("run.sh", "if true\r\nthen\r\n  echo\r\nfi\r\n", "Windows line endings"),
        ("train.py", "<html>", "raw file"),
    ):
        mistake = problem(spec(tmp_path, name, text))
        assert mistake is not None
        assert expected in mistake.hint


ACCEPTED = [
    ("train.py", "#!/usr/bin/env python3\n# -*- coding: latin-1 -*-\nprint('<html>')\n"),
    ("train.py", "import re\nre.compile('\\d')\nassert (1, 'warns')\n"),
    ("train.py", ""),
    ("run.sh", "shopt -s extglob\nrm !(kept)\n"),
    ("run.sh", 'cat <<EOF\n<html> if (\nEOF\nexec python train.py "$@"\n'),
    ("run", "<data>"),
    ("run", "#!/usr/bin/perl\nif (1) { print 1 }\n"),
]


@pytest.mark.parametrize(("name", "text"), ACCEPTED)
def test_a_script_that_may_run_is_accepted(tmp_path: Path, name: str, text: str):
    assert problem(spec(tmp_path, name, text)) is None


ELSEWHERE = [
    ("x = (1,\nprint(x)\n", False),
    ("lazily import torch\n", False),
    ("print 'loss', loss\n", True),
    ("def f():\n  x = 1\n    y = 2\n", True),
    ("def f():\nx = 1\n", True),
]


@pytest.mark.parametrize(("text", "is_certain"), ELSEWHERE)
def test_what_a_newer_python_may_accept_is_only_warned_of_for_other_machines(
    tmp_path: Path, text: str, is_certain: bool
):
    elsewhere = problem(spec(tmp_path, "train.py", text, backend="docker"))
    here = problem(spec(tmp_path, "train.py", text))

    assert elsewhere is not None
    assert elsewhere.is_needed is is_certain
    assert ("only a Python newer than" in elsewhere.hint) is not is_certain
    assert here is not None
    assert here.is_needed


@pytest.mark.parametrize("is_valid", [True, False])
def test_the_python_of_the_script_decides_on_this_machine(tmp_path: Path, is_valid: bool):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n[ $(wc -c) = 8 ] && exit {int(not is_valid)}\n")
    python.chmod(0o755)
    described = spec(tmp_path, "train.py", "if x\n 1\n", process={"python": str(python)})

    assert (problem(described) is None) is is_valid


def test_a_shell_script_is_only_warned_of_where_bash_is_as_old_as_that_of_macos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    old = tmp_path / "bin" / "bash"
    old.parent.mkdir()
    refusal = 'echo "$4: line 1: syntax error near unexpected token \\`&\'" >&2; exit 2'
    old.write_text(f'#!/bin/sh\n[ "$1" != -c ] || {{ echo 3; exit; }}\n{refusal}\n')
    old.chmod(0o755)
    described = spec(tmp_path, "run.sh", "python train.py |& tee log\n")

    assert problem(described) is None
    monkeypatch.setenv("PATH", f"{old.parent}:/bin:/usr/bin")
    assert shutil.which("bash") == str(old)
    trouble = problem(described)

    assert trouble is not None
    assert not trouble.is_needed
    assert "older than version 4" in trouble.hint
