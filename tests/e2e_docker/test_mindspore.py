"""MindSpore in real containers, which are networked like separate hosts.

``.ci/mindspore-image`` (.ci/run heavy) builds the image ``$CLOUDJOB_TEST_MINDSPORE_IMAGE``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.docker, pytest.mark.mindspore, pytest.mark.long]

EXAMPLE = Path(__file__).parents[2] / "examples" / "mindspore_quickstart"
LIMIT_S = 300.0


@pytest.fixture(scope="module")
def image(with_entry):
    """The MindSpore image with the current entry added."""
    return with_entry(os.environ["CLOUDJOB_TEST_MINDSPORE_IMAGE"])


@pytest.mark.parametrize("launcher", ["msrun", "dynamic-cluster", "mindspore-mpi"])
def test_the_quick_start_runs_in_containers(cloud, image, launcher):
    """On two nodes with their own addresses, all ranks have the same, falling losses."""
    options = ("--config", EXAMPLE / "job.yaml", "--source", EXAMPLE, "--image", image)

    done = cloud.run(
        *("submit", "--backend", "docker", *options),
        *("--launcher", launcher, "--procs-per-node", "1", "train.py"),
        limit_s=LIMIT_S,
    )

    assert done.code == 0, done
    losses: dict[int, list[float]] = {}
    for line in done.out.splitlines():
        match = re.match(rb"\[(\d)\] rank \1 of 2 epoch \d step \d loss ([\d.]+)", line)
        if match:
            losses.setdefault(int(match[1]), []).append(float(match[2]))
    assert sorted(losses) == [0, 1], done
    assert losses[0] == losses[1]
    assert losses[0][0] > 0.37
    assert losses[0][-1] < 0.24
