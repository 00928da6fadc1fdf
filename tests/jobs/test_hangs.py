"""Jobs that hang are reported with the rank and the line that the others wait for; others are not.

All times are scaled: ranks wait for each other for 3.6 s instead of two minutes.
"""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

SCALE = 0.03
RANKS = ("--nodes", "2", "--procs-per-node", "2")
MPI = "from mpi4py import MPI\ncomm = MPI.COMM_WORLD\n"
# After one step, rank 2 calls ``stuck`` instead of going on, and the others wait for it.
ONE_RANK_IS_STUCK = """
def step(n):
    if rank == 2 and n == 1:
        stuck()
    comm.Barrier()
step(0)
write_result(f"up-{rank}", os.getpid())
step(1)
"""


@pytest.fixture
def start(cloud):
    """A function that submits a job, which is cancelled at the end of the test."""
    jobs = []

    def submit(*arguments, hang=f"scale: {SCALE}"):
        cloud.write("cloudjob.yaml", f"hang: {{{hang}}}\n")
        jobs.append(cloud.detach(*arguments))
        return jobs[-1]

    yield submit
    for job in jobs:
        cloud.cli("cancel", "--now", job)


def messages(cloud, job):
    """Return what the entry has written about hangs so far."""
    done = cloud.cli("logs", job)
    lines = done.err.decode().splitlines()
    return [line.partition("jobentry: ")[2] for line in lines if "jobentry: " in line]


def await_report(cloud, poll, job):
    """Return the messages from the report of a hang on."""

    def report():
        lines = messages(cloud, job)
        starts = [n for n, line in enumerate(lines) if line.startswith("the job ")]
        return lines[starts[0] :] if starts and len(lines) > starts[0] + 1 else []

    poll(report, lambda: f"the report of a hang in {messages(cloud, job)}")
    return report()


def test_the_rank_that_is_stuck_is_named_with_its_line_until_the_job_moves(cloud, start, poll):
    stuck = """
import threading
def bar():
    while True: print(".", flush=True); time.sleep(.3)
def stuck():
    threading.Thread(target=bar, daemon=True).start()
    open(f"{results}/pipe")
"""
    os.mkfifo(cloud.results / "pipe")
    more = 'await_file("end")\n'
    job = start(*RANKS, cloud.script(MPI + stuck + ONE_RANK_IS_STUCK + more))
    headline, waiting = await_report(cloud, poll, job)[:2]

    assert headline.startswith("the job hangs: rank 2 on node 1 is stuck in stuck() at job.py:")
    assert "(opening a pipe that no other process has opened" in headline
    line = int(headline.partition("job.py:")[2].split()[0])
    source = (cloud.source / "job.py").read_text().splitlines()[line - 1]
    assert source.strip() == 'open(f"{results}/pipe")'
    assert waiting.strip().startswith("ranks 0-1,3 wait for that in barrier at job.py:")
    hang = cloud.status(job)["hang"]
    assert (hang["rule"], hang["confidence"], hang["ranks"]) == ("one-idle", "high", [2])
    assert hang["message"].startswith("rank 2 on node 1 is stuck in stuck() at job.py:")
    printed = cloud.cli("status", job).out.decode()
    assert f"hang     {hang['message'].rpartition(',')[0]}" in printed

    os.close(os.open(cloud.results / "pipe", os.O_RDWR))
    poll(
        lambda: any(line.startswith("the job moves again") for line in messages(cloud, job)),
        lambda: f"it moves again: {messages(cloud, job)}",
    )
    poll(lambda: cloud.status(job)["hang"] is None, "a status without a hang")
    (cloud.results / "end").touch()
    assert cloud.cli("wait", job).code == 0
    assert cloud.status(job)["hang"] is None


def test_a_stopped_rank_is_named(cloud, start, poll):
    stuck = "def stuck(): os.kill(os.getpid(), signal.SIGSTOP)\n"
    job = start("--procs-per-node", "3", cloud.script(MPI + stuck + ONE_RANK_IS_STUCK))

    headline = await_report(cloud, poll, job)[0]

    expected = "the job hangs: rank 2 on node 0 is stopped by a signal in stuck() at job.py:"
    assert headline.startswith(expected)


ALL_WAIT = {
    "different collectives": (
        "comm.Barrier()\nif rank % 2:\n    comm.Barrier()\nelse:\n    comm.allreduce(1)",
        "deadlock: ranks 0,2 in allreduce at job.py:",
    ),
    "one has left its script, and waits in MPI_Finalize": (
        "comm.Barrier()\nif rank == 2:\n    sys.exit(0)\ncomm.Barrier()",
        "deadlock: rank 2 on node 1 in finalize after its script, ranks 0-1,3 in barrier at job.py",
    ),
    "each waits for a message of the other, or sends it a large one first": (
        "if rank < 2:\n    comm.recv(source=rank ^ 1)\n"
        "else:\n    comm.Send(bytearray(10_000_000), dest=rank ^ 1)",
        "all ranks wait for each other",
    ),
}


@pytest.mark.parametrize(("script", "expected"), ALL_WAIT.values(), ids=ALL_WAIT)
def test_ranks_that_wait_for_each_other_are_no_culprits(cloud, start, poll, script, expected):
    job = start(*RANKS, cloud.script(MPI + script))

    headline = await_report(cloud, poll, job)[0]

    assert headline.startswith(f"the job hangs: {expected}")


def test_a_rank_that_does_not_join_is_named(cloud, start, poll):
    script = cloud.script(f"if rank == 1:\n    time.sleep(600)\n{MPI}")
    job = start("--nodes", "2", script)

    headline = await_report(cloud, poll, job)[0]

    assert headline.startswith("the job hangs: rank 1 on node 1 is stuck at job.py:")


def test_a_rank_that_computes_for_ever_is_only_called_busy(cloud, start, poll):
    script = f"{MPI}def stuck():\n    while True: pass\n{ONE_RANK_IS_STUCK}"
    job = start("--procs-per-node", "3", cloud.script(script), hang="scale: 0.015, action: stop")

    headline, _, hint = await_report(cloud, poll, job)[:3]

    assert headline.startswith("the job may hang: rank 2 on node 0 is busy in stuck() at job.py:")
    assert "perhaps only slow" in headline
    assert hint.endswith("this is not certain enough to end the job")


def test_a_single_rank_without_mpi_is_named(cloud, start, poll):
    cloud.write("job.py", "import queue\nqueue.Queue().get()\n")
    job = start("--launcher", "python", "job.py", hang="scale: 0.015")

    headline = await_report(cloud, poll, job)[0]

    assert headline.startswith("the job hangs: rank 0 on node 0 is stuck at job.py:2")


def test_a_job_that_hangs_is_ended_if_its_job_file_says_so(cloud, poll):
    cloud.write("cloudjob.yaml", f"hang: {{scale: {SCALE}, action: stop, after_min: 0.02}}\n")
    script = f"{MPI}def stuck(): time.sleep(600)\n{ONE_RANK_IS_STUCK}"

    done = cloud.submit(*RANKS, cloud.script(script))

    assert done.code == 124, done
    status = cloud.status(done.job)
    assert (status["state"], status["cause"], status["exit_code"]) == ("FAILED", "hang", 124)
    assert (status["failure"]["rank"], status["failure"]["node"]) == (2, 1)
    assert status["failure"]["message"].startswith(
        "ended because it hangs: rank 2 on node 1 is stuck in stuck() at job.py:"
    )
    assert status["hang"]["rule"] == "one-idle"
    record = json.loads((cloud.home / "store" / done.job / "record" / "exit.json").read_bytes())
    assert record["hang"]["groups"][0]["ranks"] == "2"


QUIET = {
    # Rank 0 computes for three times as long as an idle rank may take.
    "an evaluation on rank 0": """
end = time.monotonic() + 11
while rank == 0 and time.monotonic() < end:
    sum(range(100_000))
comm.Barrier()
""",
    "a checkpoint that rank 0 writes slowly": """
with open(f"{results}/checkpoint", "wb") as file:
    for part in range(80 if rank == 0 else 0):
        file.write(bytes(1_000_000)); time.sleep(0.1)
comm.Barrier()
""",
    "a long epoch without output, and a step that took as long before": """
for step in range(120):
    time.sleep(0.1)
    comm.Barrier()
for seconds in (2.5, 9):
    if rank == 1: time.sleep(seconds)
    comm.Barrier()
""",
}


@pytest.mark.long
@pytest.mark.parametrize("script", QUIET.values(), ids=QUIET)
def test_a_job_that_is_only_slow_is_not_reported(cloud, script):
    """The rules' own tests have more kinds of such jobs."""
    cloud.write("cloudjob.yaml", f"hang: {{scale: {SCALE}}}\n")

    done = cloud.submit("--nodes", "2", cloud.script(MPI + script))

    assert done.code == 0, done
    assert b"hang" not in done.err, done.err.decode()


def test_a_suspended_job_is_not_reported(cloud, start, poll):
    script = f"""{MPI}
def stuck(): await_file("go", 600)
{ONE_RANK_IS_STUCK}"""
    job = start(*RANKS, cloud.script(script), hang="scale: 0.1")
    cloud.await_results("up-0", "up-1", "up-2", "up-3")
    processes = [pid for pid in cloud.processes() if pid != os.getpid()]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in processes:
            os.kill(pid, number)
        if number == signal.SIGSTOP:
            poll(_after(14), "the end of a suspension that is longer than any limit")
    (cloud.results / "go").touch()

    assert cloud.cli("wait", job).code == 0
    assert not any("hang" in line for line in messages(cloud, job))


def _after(seconds):
    """Return a condition that holds after some seconds, in which something must not happen."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def test_nothing_is_reported_if_the_job_file_says_off(cloud, start, poll):
    script = f"{MPI}def stuck(): await_file('go', 600)\n{ONE_RANK_IS_STUCK}"
    ranks = ("--procs-per-node", "3")
    job = start(*ranks, cloud.script(script), hang=f"scale: {SCALE}, action: off")
    cloud.await_results("up-0", "up-1", "up-2")
    poll(_after(8), "twice the time after which a job counts as hung")
    (cloud.results / "go").touch()

    assert cloud.cli("wait", job).code == 0
    assert not any("hang" in line for line in messages(cloud, job))
