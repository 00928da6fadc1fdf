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
        ("torchrun", "torch_digits", 2),
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


ELASTIC = """\
import os, time
import torch, horovod.torch as hvd
hvd.init()
node = int(os.environ["VC_TASK_INDEX"])
mark = "/tmp/was-here"
is_newcomer = os.path.exists(mark)
open(mark, "w").close()
state = hvd.elastic.TorchState(step=0)
@hvd.elastic.run
def train(state):
    begun, newcomers = state.step, 0
    print(f"{hvd.size()} go on with step {begun}", flush=True)
    while not (newcomers and state.step - begun >= 5):
        newcomers = int(hvd.allreduce(torch.ones(1) * is_newcomer, op=hvd.Sum, name="newcomers"))
        time.sleep(0.1)
        state.step += 1
        state.commit()
        if state.step - begun in (5, 120):
            print(f"{hvd.size()} made {state.step - begun} steps", flush=True)
train(state)
print(f"node {node} is done with {hvd.size()} at step {state.step}", flush=True)
"""


def test_an_elastic_job_survives_a_lost_container_and_takes_it_back(cloud, image):
    cloud.script(ELASTIC)
    done = cloud.run(
        *("submit", "--backend", "docker", "--image", image, "--detach"),
        *("--nodes", "3", "--min-nodes", "2", "--procs-per-node", "1"),
        *("-e", "HOROVOD_GLOO_TIMEOUT_SECONDS=20", "--launcher", "horovod-elastic", "train.py"),
    )
    assert done.code == 0, done
    job = done.job

    cloud.await_log(job, b"3 made 5 steps", limit_s=LIMIT_S)
    lost = cloud.containers(job)[1]["Id"]

    cloud.engine.kill(lost, "SIGKILL")
    # Longer than a job of another launcher may run without one of its nodes.
    cloud.await_log(job, b"2 made 120 steps", limit_s=LIMIT_S)
    cloud.engine.start(lost)

    waited = cloud.run("wait", job, limit_s=LIMIT_S)
    assert waited.code == 0, waited
    log = cloud.run("logs", job)
    ends = re.findall(rb"node (\d) is done with (\d) at step (\d+)", log.out)
    assert sorted((node, size) for node, size, _ in ends) == [(b"%d" % n, b"3") for n in range(3)]
    assert len({step for _, _, step in ends}) == 1, log
    assert int(ends[0][2]) >= 130, log
