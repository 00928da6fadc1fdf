"""Options: which a script mentions, and which only ModelArts' PyTorch presets pass to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cloudjob.cli import main
from cloudjob.model.job import JobSpec
from cloudjob.submission import checks
from cloudjob.submission.checks import read_script as read
from cloudjob.submission.scripts import ScriptFiles
from tests.support.homes import make_used_home

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
    assert checks.is_mentioned(spec(tmp_path, files), option)


@pytest.mark.parametrize(("option", "files"), UNKNOWN)
def test_an_option_that_the_script_does_not_mention_is_not_found(
    tmp_path: Path, option: str, files: dict[str, str]
):
    assert not checks.is_mentioned(spec(tmp_path, files), option)


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
    make_used_home(tmp_path / "home")
    monkeypatch.setenv("CLOUDJOB_HOME", str(tmp_path / "home"))
    (tmp_path / "source").mkdir()
    monkeypatch.chdir(tmp_path / "source")
    Path("run.sh").write_text("python train.py\n")

    assert main(["submit", "--launcher", "python", "--dry-run", *arguments]) == 0
    printed = capsys.readouterr().err

    assert warning in printed
    assert ("warning: " in printed) == bool(warning)


RECIPE = """\
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--init_method", default="")
parser.add_argument("--rank", type=int, default=0)
parser.add_argument("--world_size", type=int, default=8)
args = parser.parse_args()
torch.distributed.init_process_group("gloo", args.init_method, rank=args.rank)
"""


def hint(folder: Path, text: str, **values: Any) -> str:
    (folder / "train.py").write_text(text)
    return checks.preset_hint(
        JobSpec(script="train.py", source=str(folder), **values), ScriptFiles()
    )


@pytest.mark.parametrize("launcher", ["torchrun", "python", "mpirun", "auto"])
def test_a_recipe_of_the_platform_gets_a_hint_at_its_launcher(tmp_path: Path, launcher: str):
    assert hint(tmp_path, RECIPE, launcher=launcher).startswith("--launcher pytorch-modelarts ")


def test_a_recipe_without_an_address_gets_a_hint_at_its_arguments(tmp_path: Path):
    text = RECIPE.replace("init_method", "other")

    assert hint(tmp_path, text) == "pass them after the script"
    text = text.replace("parse_args()", "parse_known_args()[0]")
    assert hint(tmp_path, text).startswith("--launcher ")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (RECIPE, {"launcher": "pytorch-modelarts"}),
        (RECIPE, {"args": ("--rank", "0", "--world_size=1")}),
        (RECIPE + "os.environ.get('WORLD_SIZE')", {}),
        (RECIPE.replace("--rank", "--local_rank"), {}),
        (RECIPE.replace("--world_size", "--size"), {}),
        ("parser.add_argument('--rank')  # no --world_size", {}),
        ("broken (--rank --world_size", {}),
        ("", {}),
    ],
)
def test_a_script_that_gets_or_needs_no_options_has_no_hint(
    tmp_path: Path, text: str, values: dict[str, Any]
):
    assert hint(tmp_path, text, **values) == ""


def test_a_submit_warns_of_the_options(tmp_path: Path):
    (tmp_path / "train.py").write_text(RECIPE)
    spec = JobSpec(script="train.py", source=str(tmp_path), launcher="torchrun")
    warnings = [
        check for check in checks.script_checks(spec, read(spec)) if "--world_size" in check.found
    ]

    assert [(check.is_needed, "pytorch-modelarts" in check.hint) for check in warnings] == [
        (False, True)
    ]
