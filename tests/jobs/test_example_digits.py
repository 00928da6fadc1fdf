"""The example trains the same model with any number of ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

TRAIN = Path(__file__).parents[2] / "examples" / "digits" / "train.py"
ENV = {
    "PATH": os.environ["PATH"],
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


def train(folder: Path, *mpirun: str) -> tuple[str, np.ndarray]:
    """Run the example, and return what it printed and the weights it saved."""
    folder.mkdir()
    done = subprocess.run(
        [*mpirun, sys.executable, TRAIN, "--epochs", "12", "--of-another-program", "x"],
        # Without HOME, Open MPI 5.0.11 fails in MPI_Init.
        env={**ENV, "HOME": str(folder), "TMPDIR": str(folder), "model": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    with np.load(folder / "digits.npz") as model:
        return done.stdout, model["weights"]


def mpirun(ranks: int) -> tuple[str, ...]:
    """Return the command that starts this number of ranks on this host."""
    program = Path(sysconfig.get_path("scripts"), "mpirun")
    arguments = ("--oversubscribe", "--mca", "btl_tcp_if_include", "lo", "-n", str(ranks))
    return (str(program) if program.exists() else "mpirun", *arguments)


def accuracy(printed: str) -> float:
    """Return the accuracy that rank 0 printed."""
    return float(re.findall(r"^held-out accuracy (.*)$", printed, re.MULTILINE)[0])


@pytest.mark.lengthy
@pytest.mark.e2e
def test_four_ranks_train_the_model_that_one_trains(tmp_path: Path):
    """The weights agree within rounding without mpirun, with one rank and with four."""
    alone, weights_alone = train(tmp_path / "alone")
    one, weights_one = train(tmp_path / "one", *mpirun(1))
    four, weights_four = train(tmp_path / "four", *mpirun(4))

    assert alone == one
    assert np.array_equal(weights_alone, weights_one)
    assert np.max(np.abs(weights_one - weights_four)) < 1e-9
    assert accuracy(one) == accuracy(four) > 0.95
    assert four.count("held-out accuracy") == 1
    assert re.search(r"^weights sha256 [0-9a-f]{64} identical on all 4 ranks$", four, re.MULTILINE)
    assert re.search(r"^weights sha256 [0-9a-f]{64}$", one, re.MULTILINE)


def test_missing_packages_are_reported_with_the_install_command():
    done = subprocess.run(
        [sys.executable, "-S", TRAIN], capture_output=True, text=True, check=False
    )

    assert done.returncode == 1
    assert done.stderr == "No module named 'numpy': run pip install 'cloudjob[examples]'\n"


def test_without_an_output_nothing_is_saved(tmp_path: Path):
    """The model goes to the output named model, and nowhere else."""
    subprocess.run(
        [sys.executable, TRAIN, "--epochs", "1"],
        env={**ENV, "HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=120,
    )

    assert not list(tmp_path.rglob("*.npz"))
