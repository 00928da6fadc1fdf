"""A real TensorFlow: its Python is $CLOUDJOB_TEST_TENSORFLOW (.ci/run heavy)."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.tensorflow, pytest.mark.long]

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 240


@pytest.fixture
def submit(cloud):
    """Submit a script on two nodes, under a Python that has TensorFlow."""

    def run(launcher: str, text: str, *more: str):
        python = os.environ["CLOUDJOB_TEST_TENSORFLOW"]
        cloud.write("train.py", text)
        cloud.write("job.yaml", f"process: {{python: {python}}}\n")
        options = ("--config", "job.yaml", "--nodes", "2", "--launcher", launcher)
        quiet_options = ("-e", "TF_CPP_MIN_LOG_LEVEL=3", "-e", "CUDA_VISIBLE_DEVICES=")
        return cloud.submit(*options, *quiet_options, *more, "train.py", limit_s=LIMIT_S)

    return run


@pytest.mark.surroundings
def test_the_example_trains_one_model_on_all_workers(cloud, submit):
    """Each worker has its share of the data, and all have the same losses and weights."""
    text = (EXAMPLES / "tensorflow_workers" / "train.py").read_text()

    done = submit("tensorflow", text, "--output", "model=")

    assert done.code == 0, done
    losses = {0: [], 1: []}
    for node, loss in re.findall(rb"\[(\d)\] step +\d+ of worker \1 of 2  loss ([\d.]+)", done.out):
        losses[int(node)].append(float(loss))
    assert len(losses[0]) == 60, done
    assert losses[0] == losses[1], done
    assert losses[0] == sorted(losses[0], reverse=True), done
    assert sorted(re.findall(rb"worker \d has .*", done.out)) == [
        b"worker %d has [1.0, 2.0, 3.0, 4.0]" % worker for worker in range(2)
    ]
    assert cloud.cli("outputs", done.job).out == b"model/weights.txt\n"


def test_workers_share_variables_on_parameter_servers(submit):
    done = submit(
        "tensorflow-ps",
        """
import argparse, time
import tensorflow.compat.v1 as tf
parser = argparse.ArgumentParser()
for name in ("job_name", "ps_hosts", "worker_hosts"):
    parser.add_argument("--" + name)
parser.add_argument("--task_index", type=int)
args = parser.parse_args()
tf.disable_eager_execution()
cluster = tf.train.ClusterSpec(
    {"ps": args.ps_hosts.split(","), "worker": args.worker_hosts.split(",")}
)
server = tf.train.Server(cluster, job_name=args.job_name, task_index=args.task_index)
if args.job_name == "ps":
    server.join()
place = tf.train.replica_device_setter(
    cluster=cluster, worker_device=f"/job:worker/task:{args.task_index}"
)
with tf.device(place):
    first, second = tf.Variable(0.0, name="first"), tf.Variable(0.0, name="second")
    add = [first.assign_add(1.0 + args.task_index), second.assign_add(10.0)]
    step = tf.train.get_or_create_global_step()
# Sessions that ignore the other workers, so that one may end before the others.
alone = tf.ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{args.task_index}"])
with tf.train.MonitoredTrainingSession(
    master=server.target, is_chief=args.task_index == 0, config=alone
) as session:
    session.run(add)
    end = time.monotonic() + 120
    while session.run([first, second]) != [3.0, 20.0] and time.monotonic() < end:
        time.sleep(0.05)
    sums = [*map(float, session.run([first, second]))]
    print("sums", sums, first.device, second.device, flush=True)
""",
    )

    assert done.code == 0, done
    expected = b"sums [3.0, 20.0] /job:ps/task:0 /job:ps/task:1"
    lines = [line for line in done.lines if b"sums" in line]
    assert sorted(lines) == [b"[0] " + expected, b"[1] " + expected], done
