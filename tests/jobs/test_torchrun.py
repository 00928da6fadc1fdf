"""PyTorch's torchrun with a real torch: the interpreter is $CLOUDJOB_TEST_TORCH (.ci/run heavy)."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZE = ("--launcher", "torchrun", "--nodes", "2", "--procs-per-node", "2")
LIMIT_S = 180
PRELUDE = """\
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
results = os.environ["RESULTS"]
"""


@pytest.fixture
def submit(cloud):
    """Submit a script under a Python that has torch, and wait for its end."""
    python = os.environ["CLOUDJOB_TEST_TORCH"]

    def run(text: str, *arguments: str):
        cloud.write("train.py", PRELUDE + text)
        cloud.write("job.yaml", f"process: {{python: {python}}}\n")
        return cloud.submit("--config", "job.yaml", *SIZE, "train.py", *arguments, limit_s=LIMIT_S)

    return run


@pytest.mark.surroundings
def test_ranks_of_all_nodes_form_one_world(cloud, submit):
    """An allreduce is right, each rank has its own log, and arguments arrive unchanged."""
    done = submit(
        """
total = torch.ones(1) * (rank + 1)
dist.all_reduce(total)
print("total", int(total), dist.get_world_size(), sys.argv[1:], os.getcwd() == sys.path[0])
dist.destroy_process_group()
""",
        "--lr",
        "a b",
        "",
    )

    assert done.code == 0, done
    expected = b"total 10 4 ['--lr', 'a b', ''] True"
    # PyTorch also warns of hosts whose addresses no server can name.
    totals = sorted(line for line in done.lines if b"total" in line)
    assert totals == [b"[%d] %s" % (rank, expected) for rank in range(4)]
    assert cloud.status(done.job)["state"] == "SUCCEEDED"


@pytest.mark.parametrize(
    ("how", "code"), [("os._exit(7)", 7), ("sys.exit(9)", 9), ("os.kill(os.getpid(), 9)", 137)]
)
def test_a_failing_rank_ends_the_job(cloud, submit, how, code):
    done = submit(f"""
if rank == 3:
    print("that was it", flush=True)
    {how}
dist.barrier()
time.sleep(600)
""")

    assert done.code == code, done
    status = cloud.status(done.job)
    failure = status["failure"]
    assert (status["state"], status["cause"]) == ("FAILED", "user"), status
    assert (failure["rank"], failure["exit_code"]) == (3, code), status
    assert failure["last_lines"][-1] == "that was it", status


@pytest.mark.parametrize("leave", ["", "atexit.register(time.sleep, 5)"])
def test_a_rank_that_leaves_early_is_to_blame_and_not_those_that_lose_it(cloud, submit, leave):
    """Its connections are closed by an exit handler, before it has exited."""
    done = submit(f"""
import atexit
dist.barrier()
if rank == 1:
    {leave}
    atexit.register(dist.destroy_process_group)
    sys.exit(0)
total = torch.ones(1)
while True: dist.all_reduce(total)
""")

    assert done.code == 1, done
    failure = cloud.status(done.job)["failure"]
    assert (failure["rank"], failure["signal"]) == (1, None), failure
    assert failure["message"] == "ended with exit code 0 while other ranks continued", failure
    assert re.search(rb"ranks? [0-9, ]+ lost rank 1, which had ended ", done.err), done


def test_the_line_at_which_a_worker_of_a_data_loader_crashes_is_in_the_message(cloud, submit):
    done = submit("""
import ctypes
class Crashing(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return ctypes.string_at(index)
dist.barrier()
if rank == 3:
    for batch in torch.utils.data.DataLoader(Crashing(), num_workers=1): pass
total = torch.ones(1)
while True: dist.all_reduce(total)
""")

    assert done.code == 1, done
    failure = cloud.status(done.job)["failure"]
    assert failure["rank"] == 3, failure
    assert re.search(
        r"its process \d+: Segmentation fault in __getitem__\(\) at train.py:\d+:"
        r" def __getitem__\(self, index\): return ctypes.string_at\(index\)$",
        failure["message"],
    ), failure
    # PyTorch's own message stays.
    assert b"Unexpected segmentation fault encountered in worker" in done.out, done


def test_a_rank_that_others_wait_for_in_backward_is_named(cloud):
    """DistributedDataParallel waits in C++ at the end of backward(), where no line says so."""
    cloud.write(
        "train.py",
        PRELUDE + "from torch.nn.parallel import DistributedDataParallel\n"
        "model = DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "for step in range(3):\n"
        "    if step == 2 and rank == 3:\n"
        "        time.sleep(600)\n"
        "    model(torch.ones(2, 4)).sum().backward()\n",
    )
    python = os.environ["CLOUDJOB_TEST_TORCH"]
    hang = "hang: {scale: 0.1, action: stop, after_min: 0}"
    cloud.write("job.yaml", f"process: {{python: {python}}}\n{hang}\n")
    done = cloud.submit("--config", "job.yaml", *SIZE, "train.py", limit_s=LIMIT_S)

    assert done.code == 124, done
    assert b"rank 3 on node 1 is stuck at train.py:" in done.err + done.out, done


def test_cancel_reaches_every_rank(cloud):
    """The agents of torchrun pass SIGTERM on and respect the grace period."""
    python = os.environ["CLOUDJOB_TEST_TORCH"]
    text = """
import signal
def end(number, frame):
    open(f"{results}/bye-{rank}", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
open(f"{results}/up-{rank}", "w").close()
while True: time.sleep(0.05)
"""
    cloud.write("train.py", PRELUDE + text)
    cloud.write("job.yaml", f"process: {{python: {python}}}\n")
    job = cloud.detach("--config", "job.yaml", *SIZE, "train.py")
    cloud.await_results(*(f"up-{rank}" for rank in range(4)), limit_s=LIMIT_S)

    assert cloud.cli("cancel", job).code == 0

    assert cloud.status(job)["state"] == "CANCELLED"
    assert len(cloud.results_written("bye-*")) == 4


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "ranks"), [("", 2), ("pytorch-modelarts", 1)])
def test_the_example_trains_the_same_model_on_all_ranks(cloud, launcher, ranks):
    """The losses fall and all ranks have the same model; by default, torchrun is chosen."""
    python = os.environ["CLOUDJOB_TEST_TORCH"]
    shutil.copy(EXAMPLES / "torch_digits" / "train.py", cloud.source)
    cloud.write("job.yaml", f"process: {{python: {python}}}\n")
    size = ("--nodes", "2", "--procs-per-node", str(ranks))
    chosen = ("--launcher", launcher) if launcher else ()
    arguments = ("--config", "job.yaml", *size, *chosen, "--output", "model=")

    done = cloud.submit(*arguments, "train.py", "--epochs", "3", limit_s=LIMIT_S)

    assert done.code == 0, done
    if not launcher:
        assert b"launcher torchrun: train.py imports torch.distributed" in done.err, done
    losses = [float(text) for text in re.findall(rb"epoch +\d+  loss ([0-9.]+)", done.out)]
    assert losses == sorted(losses, reverse=True), done
    assert len(losses) == 3, done
    assert b"identical on all %d ranks" % (2 * ranks) in done.out, done
    assert cloud.cli("outputs", done.job).out == b"model/digits.pt\n"


def test_a_rank_whose_data_loader_hangs_is_named_with_the_line_of_the_loader(cloud, poll):
    """The real loader, whose process opens a pipe that nobody writes to."""
    cloud.write(
        "train.py",
        PRELUDE
        + """
class Data(torch.utils.data.Dataset):
    def __len__(self): return 100
    def __getitem__(self, n):
        if rank == 2 and n == 5:
            os.mkfifo(f"{results}/pipe")
            return len(open(f"{results}/pipe").read())
        return n
for batch in torch.utils.data.DataLoader(Data(), num_workers=1):
    dist.all_reduce(batch)
""",
    )
    python = os.environ["CLOUDJOB_TEST_TORCH"]
    cloud.write("job.yaml", f"process: {{python: {python}}}\nhang: {{scale: 0.05}}\n")
    job = cloud.detach("--config", "job.yaml", *SIZE, "train.py")

    def report():
        # On a busy machine, a slow start is reported, too.
        hang = cloud.status(job)["hang"]
        return hang if hang and hang["rule"] == "one-idle" else None

    hang = poll(report, "the report of a hang")
    cloud.cli("cancel", "--now", job)

    assert hang["ranks"] == [2]
    assert re.search(
        r"is stuck at train\.py:14 \(waiting for data of its loader; its process \d+ is in "
        r"__getitem__\(\) at train\.py:12, opening a pipe",
        hang["message"],
    ), hang
