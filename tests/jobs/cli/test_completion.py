"""Tests of command-line completion, requested as shells do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
COMPLETE_WITH_BASH = """
eval "$(cloudjob completion bash)"
COMP_LINE=$1 COMP_POINT=${#1} COMP_TYPE=9
_python_argcomplete cloudjob
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def environ(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("data").mkdir()
    return {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "CLOUDJOB_HOME": str(home)}


@pytest.mark.parametrize(
    ("line", "candidates"),
    [
        ("sub", ["submit"]),
        ("submit --laun", ["--launcher"]),
        ("submit --launcher horovod-", ["horovod-gloo"]),
        ("submit --backend s", ["slurm"]),
        ("submit tr", ["train.py"]),
        ("submit -n 2 train.py --lau", []),
        ("logs bad-", ["bad-3", "bad-4"]),
        ("wait good-2 bad-3 bad-4", ["bad-4"]),
        ("store gc --dry", ["--dry-run"]),
        ("docs fail", ["failures"]),
        ("example mind", ["mindspore_quickstart"]),
        ("completion z", ["zsh"]),
    ],
)
def test_bash_completes_commands_options_values_and_jobs(
    line: str, candidates: list[str], environ: dict[str, str]
):
    done = subprocess.run(
        ["bash", "-c", COMPLETE_WITH_BASH, "bash", f"cloudjob {line}"],
        env=environ, capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert (
        sorted(candidate.strip() for candidate in done.stdout.split("\n") if candidate.strip())
        == candidates
    )


@pytest.mark.parametrize(
    ("line", "candidates"),
    [("submit train.py --x tr", ["train.py"]), ("logs good", ["good-2"])],
)
def test_fish_is_answered_with_files_for_the_script_and_jobs(
    line: str, candidates: list[str], environ: dict[str, str], tmp_path: Path
):
    line = f"cloudjob {line}"
    completion_env = {
        "_ARGCOMPLETE": "1", "_ARGCOMPLETE_SHELL": "fish", "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answer"),
        "COMP_LINE": line, "COMP_POINT": str(len(line)),
    }  # fmt: skip
    subprocess.run([BIN / "cloudjob"], env={**environ, **completion_env}, check=True)

    assert [
        candidate.strip() for candidate in (tmp_path / "answer").read_text().split("\n")
    ] == candidates


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_names_the_command(shell: str, environ: dict[str, str]):
    done = subprocess.run(
        [BIN / "cloudjob", "completion", shell], env=environ, capture_output=True, check=True
    )

    assert (
        b"complete --command cloudjob" if shell == "fish" else b"#compdef cloudjob"
    ) in done.stdout
