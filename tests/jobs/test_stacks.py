"""`cloudjob stacks` shows what the ranks of a running job execute, and disturbs none of them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

# Rank 2 opens a pipe that nobody writes to; the others wait for it.
ONE_RANK_HANGS = """
from mpi4py import MPI
def load(path):
    with open(path) as file:
        return file.read()
def train_step(step):
    if rank == 2 and step == 1:
        write_result("up-2", os.getpid())
        load(f"{results}/pipe")
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, bytearray(8))
    write_result(f"step-{rank}-{step}")
os.path.exists(f"{results}/pipe") or rank == 2 and os.mkfifo(f"{results}/pipe")
train_step(0)
train_step(1)
"""
HANGS = ("step-0-0", "step-1-0", "step-3-0", "up-2")
FOUR_RANKS = ("--nodes", "2", "--procs-per-node", "2")


@pytest.fixture
def start(cloud):
    """A function that submits a job, which is cancelled at the end of the test."""
    jobs = []

    def submit(*arguments, **more):
        jobs.append(cloud.detach(*arguments, **more))
        return jobs[-1]

    yield submit
    for job in jobs:
        cloud.cli("cancel", "--now", job)


IN_C = """
#include <mpi.h>
#include <unistd.h>
__attribute__((noinline)) int read_input(void) { return pause(); }
int main(int count, char **arguments) {
    int rank, result = 0;
    MPI_Init(&count, &arguments);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (rank == 1) result = read_input() + 1;
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Finalize();
    return result;
}
"""


def stacks(cloud, job, *options):
    """Return the answer of `cloudjob stacks --json`."""
    done = cloud.cli("stacks", "--json", job, *options)
    assert done.code == 0, done
    return json.loads(done.out)


def functions(group):
    return [frame["function"] for frame in group["frames"]]


@pytest.mark.every_mpi
def test_the_rank_that_others_wait_for_is_named_with_its_line(cloud, start, poll):
    job = start(*FOUR_RANKS, cloud.script(ONE_RANK_HANGS))
    cloud.await_results(*HANGS)
    poll(lambda: stacks(cloud, job)["waiting_ranks"] == [0, 1, 3], "three ranks that wait")

    done = cloud.cli("stacks", job)

    assert done.code == 0, done
    lines = done.out.decode().splitlines()
    assert lines[0].startswith(f"{job}: 4 ranks on 2 nodes, ")
    assert lines[2] == "rank 2 on node 1: opening a pipe that no other process has opened"
    assert lines[3].split(maxsplit=2)[0] == "load()"
    assert lines[3].endswith("with open(path) as file:")
    assert [line.split()[0] for line in lines[4:6]] == ["train_step()", "<module>()"]
    assert lines[7] == "ranks 0-1,3: waiting for other ranks"
    assert lines[8].endswith("MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, bytearray(8))")
    assert lines[-1] == "Ranks 0-1,3 wait for others; rank 2 does not."
    # The ranks go on when the pipe has a writer, so reading their stacks has disturbed none.
    poll(lambda: _write_to(cloud.results / "pipe"), "a reader of the pipe")
    assert cloud.cli("wait", job).code == 0


def test_a_rank_that_is_stopped_and_one_that_runs_are_told_apart(cloud, start, poll):
    script = """
    write_result(f"up-{rank}", os.getpid())
    def spin():
        while not os.path.exists(f"{results}/go"): pass
    spin()
    """
    job = start("--procs-per-node", "2", cloud.script(script))
    cloud.await_results("up-0", "up-1")
    os.kill(int(cloud.results_written("up-1")["up-1"]), signal.SIGSTOP)

    def states():
        return {tuple(group["ranks"]): group["does"] for group in stacks(cloud, job)["groups"]}

    poll(lambda: states() == {(0,): "running", (1,): "stopped by a signal"}, "a stopped rank")


def test_threads_and_processes_of_ranks_are_shown(cloud, start, poll):
    script = """
    import multiprocessing, threading
    def load(lock): lock.acquire()
    def in_thread(event): event.wait()
    if __name__ == "__main__":
        lock = multiprocessing.get_context("fork").Lock()
        lock.acquire()
        child = multiprocessing.get_context("fork").Process(target=load, args=[lock])
        child.start()
        thread = threading.Thread(target=in_thread, args=[threading.Event()], daemon=True)
        thread.start()
        write_result(f"up-{rank}", child.pid)
        child.join()
    """
    job = start("--procs-per-node", "2", cloud.script(script))
    cloud.await_results("up-0", "up-1")
    children = sorted(int(text) for text in cloud.results_written("up-*").values())

    def child():
        groups = stacks(cloud, job)["groups"]
        return next((g for g in groups if sorted(g["processes"]) == children), None)

    poll(lambda: child() and functions(child())[0] == "load", "children that wait for a lock")

    assert child()["ranks"] == [0, 1]
    assert child()["does"] == "waiting for a lock or another thread"
    assert not any("in_thread" in functions(g) for g in stacks(cloud, job)["groups"])
    (thread,) = [
        group
        for group in stacks(cloud, job, "--threads", "--rank", "1")["groups"]
        if "in_thread" in functions(group)
    ]
    assert (thread["ranks"], thread["is_main"]) == ([1], False)


def test_secrets_in_lines_and_commands_are_masked(cloud, start, poll):
    script = """
    import subprocess
    child = [sys.executable, "-c", "import time; time.sleep(600)", os.environ["TOKEN"]]
    subprocess.Popen(child)
    write_result("up")
    time.sleep(600 if "8fk2-secret-value" else 0)
    """
    arguments = ("--procs-per-node", "1", "--secret", "TOKEN", cloud.script(script))
    job = start(*arguments, env={"TOKEN": "8fk2-secret-value"})
    cloud.await_results("up")

    poll(lambda: b"time.sleep(600 if" in cloud.cli("stacks", job).out, "its line")

    printed = cloud.cli("stacks", job).out + cloud.cli("stacks", "--json", job).out
    assert b"8fk2-secret-value" not in printed
    assert b'time.sleep(600 if "***" else 0)' in printed


def test_a_program_without_python_is_shown_with_its_functions(cloud, start):
    cloud.write("job.sh", "touch $RESULTS/up\nsleep 600\n")
    job = start("--procs-per-node", "1", "job.sh")
    cloud.await_results("up")

    done = cloud.cli("stacks", job)

    assert done.code == 0, done
    text = done.out.decode()
    assert "rank 0 on node 0: waiting for a child process\n    wait4 " in text
    assert "(sleep 600): sleeping\n    clock_nanosleep " in text


def test_a_node_that_does_not_answer_is_named(cloud, start, poll):
    script = cloud.script("write_result(f'up-{rank}')\nawait_file('go')")
    job = start(*FOUR_RANKS, script)
    cloud.await_results("up-0", "up-1", "up-2", "up-3")
    entry = cloud.entry(job, 1)
    os.kill(entry, signal.SIGSTOP)
    try:
        values = stacks(cloud, job)
    finally:
        os.kill(entry, signal.SIGCONT)

    assert values["silent_nodes"] == [1]
    assert sorted(rank for group in values["groups"] for rank in group["ranks"]) == [0, 1]
    poll(lambda: stacks(cloud, job)["silent_nodes"] == [], "an answer of node 1")


def test_other_requests_do_no_harm(cloud, start, poll):
    job = start(
        "--procs-per-node",
        "1",
        cloud.script("write_result('up', os.environ['CLOUDJOB_NODE_DIR'])\nawait_file('go')"),
    )
    cloud.await_results("up")
    folder = Path(tempfile.gettempdir(), f"cloudjob-{job.rpartition('-')[2]}")
    path = folder / "0" / "node" / "requests"
    assert path.stat().st_mode & 0o777 == 0o600
    streams = []
    for text in (
        b"",
        b"\n",
        b"{}\n",
        b"[" * 9000,
        b'{"kind": "stacks"}\n',
        b"\xff\n",
        b'{"kind": "rm"}\n',
    ):
        stream = socket.socket(socket.AF_UNIX)
        stream.connect(str(path))
        stream.sendall(text)
        streams.append(stream)

    assert [group["ranks"] for group in stacks(cloud, job)["groups"]] == [[0]]

    for stream in streams:
        stream.close()
    (cloud.results / "go").touch()
    assert cloud.cli("wait", job).code == 0


def test_a_job_that_does_not_run_has_no_stacks(cloud):
    job = cloud.submit("--procs-per-node", "1", cloud.script("pass")).job

    done = cloud.cli("stacks", job)

    assert done.code == 2, done
    assert done.err.decode().splitlines()[0] == (
        f"error: reading the stacks of {job}: it is SUCCEEDED"
    )


def _write_to(path):
    try:
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    os.close(pipe)
    return True


def test_a_program_in_c_that_hangs_in_mpi_is_shown_with_its_functions(cloud, start, poll):
    compiler = cloud.mpi.mpirun.with_name("mpicc")
    source = cloud.source / "hang.c"
    source.write_text(IN_C)
    subprocess.run([compiler, "-o", cloud.source / "hang", source], check=True, timeout=180)
    job = start("--nodes", "2", "--launcher", "mpirun", "hang")

    def groups_now():
        groups = {tuple(group["ranks"]): group for group in stacks_or_none(cloud, job)}
        if groups.keys() != {(0,), (1,)}:
            return None
        # Before, one of them or both may still be in MPI_Init.
        functions = [call["function"] for call in groups[1,]["native"]]
        is_stuck = functions[-2:] == ["read_input", "main"]
        return groups if is_stuck and "MPI_Barrier" in groups[0,]["does"] else None

    groups = poll(groups_now, lambda: f"one rank that waits: {cloud.cli('stacks', job)}")
    assert [groups[rank,]["waits_for_ranks"] for rank in (0, 1)] == [True, False]
    assert [call["function"] for call in groups[1,]["native"]] == ["pause", "read_input", "main"]
    assert "waiting for other ranks (" in groups[0,]["does"]


def test_native_calls_of_python_ranks_are_shown_on_request(cloud, start, poll):
    job = start(*FOUR_RANKS, cloud.script(ONE_RANK_HANGS))
    cloud.await_results(*HANGS)
    poll(lambda: stacks(cloud, job)["waiting_ranks"] == [0, 1, 3], "three ranks that wait")

    groups = stacks(cloud, job, "--native")["groups"]

    odd = next(group for group in groups if group["ranks"] == [2])
    assert any("open" in call["function"] for call in odd["native"]), odd
    waiting = next(group for group in groups if 0 in group["ranks"])
    assert any(call["function"].endswith("MPI_Allreduce") for call in waiting["native"]), waiting
    assert not any(group["native"] for group in stacks(cloud, job)["groups"])


def stacks_or_none(cloud, job):
    done = cloud.cli("stacks", "--json", job)
    return json.loads(done.out)["groups"] if done.code == 0 else []
