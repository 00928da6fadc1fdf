"""A rank that slows a job down is named, and no longer once it does not.

All times are scaled: a window lasts 3 s instead of a minute.
"""

from __future__ import annotations

import json
import time

import pytest

SCRIPT = """
from mpi4py import MPI
comm = MPI.COMM_WORLD
def load(seconds):
    time.sleep(seconds)
def step(number):
    is_slow = rank == 1 and not os.path.exists(f"{results}/even")
    load(.6 if is_slow else .02)
    comm.Barrier()
number = 0
while not comm.allreduce(os.path.exists(f"{results}/end"), op=MPI.LOR):
    step(number)
    number += 1
"""
LIMIT_S = 400


def until(condition, what):
    """Wait longer than other tests do: a busy machine looks less often."""
    deadline = time.monotonic() + LIMIT_S
    while not (result := condition()):
        assert time.monotonic() < deadline, what()
        time.sleep(0.5)
    return result


@pytest.mark.long
def test_the_rank_that_the_others_wait_for_is_named_until_it_is_as_fast_as_they(cloud):
    cloud.write("cloudjob.yaml", "hang: {scale: 0.05}\n")
    job = cloud.detach("--nodes", "2", cloud.script(SCRIPT))

    def log():
        return cloud.cli("logs", job).err.decode()

    def slow_ranks():
        status = cloud.status(job)
        assert status["state"] == "RUNNING", log()
        return status["slow"]

    try:
        slow = until(slow_ranks, log)

        assert (slow["ranks"], slow["nodes"]) == ([1], [1])
        assert slow["cost_percent"] >= 20
        assert slow["place"].startswith("load() at job.py:")
        assert slow["message"].startswith("rank 1 on node 1: the others wait ")
        assert f"slow: {slow['message'].partition(':')[0]}: the others wait " in log()
        printed = cloud.cli("status", job).out.decode()
        assert "\nslow     rank 1 on node 1: the others wait " in printed

        def top():
            return cloud.cli("top", "--once", job, env={"COLUMNS": "160"}).out.decode()

        assert "WAITS" in top()
        # A busy machine may have stopped both ranks in the allreduce just now.
        until(lambda: "barrier at job.py:" in top(), top)

        (cloud.results / "even").touch()
        until(lambda: slow_ranks() is None, log)
        assert "no longer slow: rank 1 on node 1" in log()

        (cloud.results / "end").touch()
        assert cloud.cli("wait", job).code == 0
        assert cloud.status(job)["slow"] is None
    finally:
        cloud.cli("cancel", "--now", job)


def test_without_looks_for_hangs_no_rank_is_slow(cloud):
    cloud.write("cloudjob.yaml", "hang: {scale: 0.03, action: off}\n")
    script = 'write_result("up")\nawait_file("end")\n'
    job = cloud.detach(cloud.script(script))
    cloud.await_results("up")

    status = json.loads(cloud.cli("status", "--json", job).out)

    assert status["slow"] is None
    (cloud.results / "end").touch()
    assert cloud.cli("wait", job).code == 0
