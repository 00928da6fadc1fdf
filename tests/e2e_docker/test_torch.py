"""PyTorch and Horovod in real containers, which are networked like separate hosts.

``.ci/torch-image`` (.ci/run heavy) builds the image ``$CLOUDJOB_TEST_TORCH_IMAGE``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.docker, pytest.mark.torch, pytest.mark.long]

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 300.0


@pytest.fixture(scope="module")
def image(with_entry):
    """The image of PyTorch and Horovod with the current entry added."""
    return with_entry(os.environ["CLOUDJOB_TEST_TORCH_IMAGE"])


@pytest.mark.parametrize(
    ("launcher", "example", "ranks"),
    [
        pytest.param("torchrun", "torch_digits", 2, marks=pytest.mark.surroundings),
        ("pytorch-modelarts", "torch_digits", 1),
        ("horovod", "horovod_digits", 2),
        ("horovod-gloo", "horovod_digits", 2),
    ],
)
def test_the_example_trains_the_same_model_on_all_ranks(cloud, image, launcher, example, ranks):
    """Two nodes with their own addresses and the same number of ranks; the losses fall."""
    size = ("--nodes", "2", "--procs-per-node", str(ranks))
    options = ("--backend", "docker", "--image", image, "--source", EXAMPLES / example)

    done = cloud.run(
        *("submit", *options, *size, "--launcher", launcher, "train.py", "--epochs", "3"),
        limit_s=LIMIT_S,
    )

    assert done.code == 0, done
    losses = [float(text) for text in re.findall(rb"epoch +\d+  loss ([0-9.]+)", done.out)]
    assert len(losses) == 3, done
    assert losses == sorted(losses, reverse=True), done
    assert b"identical on all %d ranks" % (2 * ranks) in done.out, done
