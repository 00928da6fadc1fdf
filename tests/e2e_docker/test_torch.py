"""PyTorch and Horovod in real containers, whose network is that of several machines.

The image is ``$CLOUDJOB_TEST_TORCH_IMAGE``, kept by ``.ci/torch-image`` (.ci/run heavy).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.docker, pytest.mark.torch]

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 300.0


@pytest.fixture(scope="module")
def image(with_entry):
    """The image with both, and in it the entry of today."""
    return with_entry(os.environ["CLOUDJOB_TEST_TORCH_IMAGE"])


@pytest.mark.parametrize(
    ("launcher", "example"),
    [
        ("torchrun", "torch_digits"),
        ("horovod", "horovod_digits"),
        ("horovod-gloo", "horovod_digits"),
    ],
)
def test_the_example_trains_the_same_model_on_all_ranks(cloud, image, launcher, example):
    """Two nodes with addresses of their own and two ranks on each; the losses fall."""
    size = ("--nodes", "2", "--procs-per-node", "2")
    words = ("--backend", "docker", "--image", image, "--source", EXAMPLES / example)

    done = cloud.run(
        *("submit", *words, *size, "--launcher", launcher, "train.py", "--epochs", "3"),
        limit_s=LIMIT_S,
    )

    assert done.code == 0, done
    losses = [float(text) for text in re.findall(rb"epoch +\d+  loss ([0-9.]+)", done.out)]
    assert len(losses) == 3, done
    assert losses == sorted(losses, reverse=True), done
    assert b"identical on all 4 ranks" in done.out, done
