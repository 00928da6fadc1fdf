"""Options that ModelArts' PyTorch presets pass, and a plain submit does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cloudjob.model.job import JobSpec
from cloudjob.submission import checks, preset_options

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
    return preset_options.hint(JobSpec(script="train.py", source=str(folder), **values))


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
    found = [check for check in checks.script_checks(spec) if "--world_size" in check.found]

    assert [(check.is_needed, "pytorch-modelarts" in check.hint) for check in found] == [
        (False, True)
    ]
