"""MindSpore's launchers with a real MindSpore: its Python is $CLOUDJOB_TEST_MINDSPORE."""

from __future__ import annotations

import os

import pytest

pytestmark = [pytest.mark.one_mpi, pytest.mark.mindspore]

LIMIT_S = 240
PRELUDE = """\
import os, sys, time
import numpy as np
import mindspore as ms
from mindspore import Tensor, ops
from mindspore.communication import init, get_rank, get_group_size
ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
init()
rank = get_rank()
results = os.environ["RESULTS"]
def all_sum(value):
    return float(ops.AllReduce()(Tensor(np.array([value], np.float32)))[0])
"""


@pytest.fixture
def submit(cloud):
    """Submit a script under a Python that has MindSpore, and wait for its end."""
    python = os.environ["CLOUDJOB_TEST_MINDSPORE"]

    def run(launcher: str, text: str, *words: str, nodes: int = 2, procs: int = 1):
        cloud.write("train.py", PRELUDE + text)
        cloud.write("job.yaml", f"process: {{python: {python}}}\n")
        size = ("--nodes", str(nodes), "--procs-per-node", str(procs))
        return cloud.submit(
            *("--config", "job.yaml", "--launcher", launcher, "-e", "GLOG_v=3"),
            *(*size, "train.py", *words),
            limit_s=LIMIT_S,
        )

    return run


@pytest.mark.parametrize("launcher", ["msrun", "dynamic-cluster", "mindspore-mpi"])
def test_ranks_of_all_nodes_form_one_cluster(cloud, submit, launcher):
    """They add up, each is who its node says it is, and arguments are exact."""
    args = ("--worker", "--rank_table_file", "a b", "", "-I", "--", "%3A", ":")
    done = submit(
        launcher,
        """
node = int(os.environ["VC_TASK_INDEX"])
print("sum", all_sum(rank + 1), get_group_size(), rank == node, sys.argv[1:])
""",
        *args,
    )

    assert done.code == 0, done
    said = f"sum 3.0 2 True {list(args)}".encode()
    assert [line for line in done.lines if b"sum" in line] == [
        b"[%d] %s" % (rank, said) for rank in range(2)
    ]
    assert cloud.status(done.job)["state"] == "SUCCEEDED"
