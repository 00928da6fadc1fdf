"""The options that a script, its modules and the programs that it starts mention."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudjob.cli import main
from cloudjob.model.job import JobSpec
from cloudjob.submission import option_mentions

PARSER = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument({})\n"
MENTIONED = [
    ("--nodes", {"train.py": PARSER.format("'--nodes', type=int")}),
    ("--nodes", {"train.py": "import fire\ndef main(nodes=1): ...\nfire.Fire(main)\n"}),
    ("--dry-run", {"train.py": "@dataclass\nclass Options:\n    dry_run: bool = False\n"}),
    ("--backend", {"train.py": "from tools import options", "tools/options.py": "'--backend'"}),
    ("-n", {"train.py": PARSER.format("'-n'")}),
    ("--nodes", {"run.sh": 'python -u tools/train.py "$@"', "tools/train.py": "'--nodes'"}),
    ("--nodes", {"run.sh": "python -m tools.train $*", "tools/train.py": "'--nodes'"}),
    ("--nodes", {"run.sh": "while getopts ...; do case $1 in --nodes) shift;; esac; done"}),
]
UNKNOWN = [
    ("--nodes", {"train.py": "print('num_nodes', n_nodes, nodeset)\n"}),
    ("-n", {"train.py": "n = 1  # the number n\n"}),
    ("--nodes", {"train.py": "import numpy\n", "other.py": "'--nodes'"}),
    ("--nodes", {"run.sh": "python train.py", "train.py": "import run\nimport train\n"}),
]


def spec(folder: Path, files: dict[str, str]) -> JobSpec:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return JobSpec(source=str(folder), script=next(iter(files)))


@pytest.mark.parametrize(("option", "files"), MENTIONED)
def test_an_option_that_the_script_mentions_is_found(
    tmp_path: Path, option: str, files: dict[str, str]
):
    assert option_mentions.is_mentioned(spec(tmp_path, files), option)


@pytest.mark.parametrize(("option", "files"), UNKNOWN)
def test_an_option_that_the_script_does_not_mention_is_not_found(
    tmp_path: Path, option: str, files: dict[str, str]
):
    assert not option_mentions.is_mentioned(spec(tmp_path, files), option)


COMMAND_LINES = [
    (["run.sh", "--epochs", "3", "--nodes", "3", "-n=2"], "run.sh gets --nodes, -n, which it"),
    (["run.sh", "--lr", "1", "--help", "-h"], ""),
    (["--", "run.sh", "--nodes", "3"], ""),
    (["run.sh", "--", "--nodes", "3"], ""),
    (["--nodes", "2", "run.sh", "nodes"], ""),
]


@pytest.mark.parametrize(("arguments", "warning"), COMMAND_LINES)
def test_an_option_of_submit_after_the_script_is_warned_of(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    warning: str,
):
    monkeypatch.setenv("CLOUDJOB_HOME", str(tmp_path / "home"))
    (tmp_path / "source").mkdir()
    monkeypatch.chdir(tmp_path / "source")
    Path("run.sh").write_text("python train.py\n")

    assert main(["submit", "--launcher", "python", "--dry-run", *arguments]) == 0
    shown = capsys.readouterr().err

    assert warning in shown
    assert ("warning: " in shown) == bool(warning)
