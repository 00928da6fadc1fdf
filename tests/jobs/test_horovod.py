"""Horovod for torch and Debian's Open MPI; $CLOUDJOB_TEST_HOROVOD is its Python (.ci/run heavy)."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from pathlib import Path

import pytest

pytestmark = pytest.mark.horovod

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZE = ("--nodes", "2", "--procs-per-node", "2")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LIMIT_S = 240
PRELUDE = """\
import os, sys, time
import torch, horovod.torch as hvd
hvd.init()
rank = hvd.rank()
"""


@pytest.fixture(params=["mpi", "gloo"])
def controller(request):
    """The Horovod controller that the ranks use."""
    return request.param


@pytest.fixture
def submit(cloud, controller):
    """Submit with the Python that has Horovod; the launcher is chosen by the imports."""
    # For MPI, PATH has the Open MPI that Horovod is built for; for Gloo, it has no Open MPI.
    path = SYSTEM_PATH if controller == "mpi" else str(cloud.folder)

    def run(*arguments: str, more: str = ""):
        python = os.environ["CLOUDJOB_TEST_HOROVOD"]
        cloud.write("job.yaml", f"process: {{python: {python}}}\n{more}\n")
        chosen = ("-e", "HOROVOD_CONTROLLER=gloo") if controller == "gloo" else ()
        head = ("--config", "job.yaml", *SIZE, *chosen)
        return cloud.submit(*head, *arguments, limit_s=LIMIT_S, env={"PATH": path})

    return run


@pytest.mark.long
def test_the_example_trains_the_same_model_on_all_ranks(cloud, submit, controller):
    """The losses fall and are the same on every rank; timeline and fusion settings apply."""
    shutil.copy(EXAMPLES / "horovod_digits" / "train.py", cloud.source)
    fusion = ("-e", "HOROVOD_FUSION_THRESHOLD=0") if controller == "gloo" else ()

    done = submit("--output", "HOROVOD_TIMELINE=", *fusion, "train.py", "--epochs", "3")

    assert done.code == 0, done
    launcher = {"mpi": b"horovod", "gloo": b"horovod-gloo"}[controller]
    assert b"launcher %s: train.py imports horovod" % launcher in done.err, done
    losses = [float(text) for text in re.findall(rb"epoch +\d+  loss ([0-9.]+)", done.out)]
    assert losses == sorted(losses, reverse=True), done
    assert len(losses) == 3, done
    assert b"identical on all 4 ranks" in done.out, done
    fetched = cloud.cli("outputs", done.job, "--to", "out")
    timeline = json.loads((cloud.source / fetched.out.decode().split("\n")[0]).read_bytes())
    names = {event.get("name") for event in timeline}
    assert {"mpi": "MPI_ALLREDUCE", "gloo": "GLOO_ALLREDUCE"}[controller] in names
    assert ("MEMCPY_IN_FUSION_BUFFER" in names) == (not fusion)


def test_a_script_for_elastic_horovod_runs_with_a_fixed_number_of_ranks(cloud, submit):
    text = """
state = hvd.elastic.TorchState(model=torch.nn.Linear(4, 1), step=0)
@hvd.elastic.run
def train(state):
    while state.step < 5:
        total = float(hvd.allreduce(torch.ones(1), op=hvd.Sum, name="x"))
        state.step += 1
        state.commit()
    print("done", total)
train(state)
"""
    cloud.write("train.py", PRELUDE + text)

    done = submit("train.py")

    assert done.code == 0, done
    assert sorted(done.lines) == [b"[%d] done 4.0" % rank for rank in range(4)]


@pytest.mark.surroundings
def test_ranks_know_their_numbers_on_their_node_and_overall(cloud, submit, controller):
    cloud.write(
        "train.py",
        PRELUDE
        + f"""
for _ in range({1 if controller == "mpi" else 3}):
    hvd.init()
    total = int(hvd.allreduce(torch.ones(1) * (rank + 1), op=hvd.Sum))
    place = hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), hvd.size()
    hvd.shutdown()
print("total", total, place, os.environ["VC_TASK_INDEX"])
""",
    )

    done = submit("train.py")

    assert done.code == 0, done
    assert sorted(done.lines) == [
        b"[%d] total 10 (%d, 2, %d, 2, 4) %d" % (rank, rank % 2, rank // 2, rank // 2)
        for rank in range(4)
    ]


@pytest.mark.parametrize(("how", "code"), [("os._exit(7)", 7), ("raise ValueError('bad')", 1)])
def test_a_rank_that_fails_while_training_ends_the_job_with_its_exit_code(cloud, submit, how, code):
    cloud.write(
        "train.py",
        PRELUDE
        + f"""
for step in range(1000):
    if step == 3 and rank == 2:
        print("that was it", flush=True)
        {how}
    hvd.allreduce(torch.ones(1), name=f"step {{step}}")
""",
    )

    done = submit("train.py")

    assert done.code == code, done
    status = cloud.status(done.job)
    failure = status["failure"]
    assert (status["state"], status["cause"]) == ("FAILED", "user"), status
    assert (failure["node"], failure["rank"], failure["exit_code"]) == (1, 2, code), status
    assert "that was it" in failure["last_lines"], status


@pytest.mark.parametrize("controller", ["gloo"], indirect=True)
def test_a_port_in_use_ends_the_job_at_once(cloud, submit):
    cloud.write("cloudjob.yaml", "process: {isolation: none}\n")
    cloud.write("train.py", PRELUDE)

    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        done = submit("-e", f"MASTER_PORT={port}", "train.py")

    assert done.code == 125, done
    assert b"listening on port %d: Address already in use" % port in done.err, done


@pytest.mark.parametrize("controller", ["mpi"], indirect=True)
def test_ranks_that_wait_for_different_tensors_are_a_deadlock(cloud, submit):
    """Horovod says which ranks miss which tensor; all of them are in its ``synchronize``."""
    cloud.write(
        "job.py",
        PRELUDE
        + """
if rank != 2: hvd.allreduce(torch.ones(1), name="loss")
hvd.allreduce(torch.ones(1), name="accuracy")
""",
    )
    hang = "hang: {scale: 0.02, action: stop, after_min: 0.02}"

    done = submit("-e", "HOROVOD_STALL_CHECK_TIME_SECONDS=2", "job.py", more=hang)

    status = cloud.status(done.job)
    assert (done.code, status["hang"]["rule"]) == (124, "deadlock"), done
    assert "rank 2 on node 1 in synchronize at job.py:7" in status["hang"]["message"], status
