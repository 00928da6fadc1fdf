"""Jobs whose arguments and variables exceed the limits of Linux for one program."""

from __future__ import annotations

from typing import Any

import pytest

from cloudjob.errors import SpecError
from cloudjob.model import sizes
from cloudjob.model.job import JobSpec
from cloudjob.model.submission import (
    StoredCode,
    Submission,
    host_names,
    node_env,
    variables,
)

LONG = {f"V{number}": "x" * 130_000 for number in range(15)}


def check(**values: Any) -> None:
    """Check a job with the variables of its head."""
    spec = JobSpec(**{"script": "train.py", "launcher": "mpirun", **values})
    code, outputs = StoredCode("file:///s/code.json", "sha256:0"), tuple(spec.outputs.items())
    job = Submission(spec, "train-1", code, "", outputs)
    node = node_env(job, 0, host_names(job))
    sizes.check(spec, variables(job, node, home="/home/ma-user", address="0.0.0.0"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"env": LONG, "args": ("--text", "é" * 65_000)},
            "of which 130004 in env.V10; allowed 2000000)",
        ),
        ({"env": LONG, "secrets": {"KEY": "x" * 131_000}}, "of which 131004 in secrets.KEY;"),
        ({"args": ("a",) * 210_000}, "too long for Linux to start a rank (given 21"),
        ({"env": {f"{'N' * 60}{n}": "" for n in range(2500)}}, "env: too many (given 16"),
        (
            {"outputs": {f"OUT_{n}": f"s3://bucket/{'x' * 100}/{n}" for n in range(1200)}},
            "outputs: too many (given ",
        ),
    ],
)
def test_a_job_that_is_too_long_for_linux_is_refused_with_its_largest_value(
    values: dict[str, Any], message: str
):
    with pytest.raises(SpecError) as caught:
        check(**values)

    [problem] = caught.value.problems
    assert message in problem
    assert "xxx" not in problem + caught.value.hint


def test_a_job_just_below_the_limit_is_accepted():
    check(env=LONG, args=("'" * 31_000, "--epochs", "3"))
