"""Time limits, drained and dead nodes, requeued and preempted jobs, controller restarts."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e_slurm.conftest import poll
from tests.e2e_slurm.test_jobs import PRELUDE, SAVES_ON_SIGTERM, SIZE

pytestmark = pytest.mark.long

RANKS = range(4)
# Waits for SIGTERM on its first run, and runs to its end on the second.
RUNS_TWICE = (
    PRELUDE
    + """
again = os.path.exists(f"{results}/up-{rank}")
def end(number, frame):
    write_result(f"saved-{rank}")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
write_result(f"again-{rank}" if again else f"up-{rank}")
if not again:
    time.sleep(300)
"""
)


@pytest.fixture
def nodes(cluster):
    """The cluster; the fixture resumes all nodes whose state the test has changed."""
    yield cluster
    for node in cluster.nodes:
        cluster.repair(node)


def result_names(*ranks: int, prefix: str = "up") -> list[str]:
    """Return the names of the files that these ranks write, by default all ranks."""
    return [f"{prefix}-{rank}" for rank in (ranks or RANKS)]


def test_a_job_near_its_time_limit_gets_time_to_save(cloud):
    """Slurm's warning reaches every rank; the job's grace period counts; the cause is timeout."""
    cloud.write("train.py", SAVES_ON_SIGTERM)
    cloud.write("job.yaml", "slurm: {partition: tiny, time_min: 1}\n")
    done = cloud.submit("--config", "job.yaml", "--procs-per-node", "2", "train.py")
    status = cloud.status(done.job)

    assert done.code == 124, done
    assert (status["state"], status["cause"]) == ("FAILED", "timeout")
    assert "the job reached its time limit on Slurm (slurm.time_min" in status["failure"]["message"]
    assert {path.name for path in cloud.results.glob("saved-*")} == {"saved-0", "saved-1"}


def test_a_node_that_is_drained_finishes_its_job(cloud, nodes):
    """The job continues; the next one waits, and its status shows why."""
    cloud.write("train.py", PRELUDE + "write_result(f'up-{rank}')\nawait_file('go')\n")
    first = cloud.detach(*SIZE, "train.py")
    cloud.await_results(*result_names())
    nodes.run("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
    second = cloud.detach(*SIZE, "train.py")
    native = cloud.status(second)["native_state"]
    state = cloud.status(first)["state"]
    (cloud.results / "go").touch()
    done = cloud.run("wait", first)
    nodes.run("scontrol", "update", "nodename=n2", "state=resume")
    again = cloud.run("wait", second)

    assert (state, done.code, again.code) == ("RUNNING", 0, 0), f"{done}\n{again}"
    assert native.startswith("PENDING (")
    assert "waits" in native or "drained" in native


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_job_whose_node_dies_has_failed(cloud, nodes, node):
    """Slurm reports the dead node after a while; the job does not count as cancelled."""
    cloud.write("train.py", SAVES_ON_SIGTERM)
    job = cloud.detach(*SIZE, "train.py")
    cloud.await_results(*result_names())
    nodes.kill_node(node)
    done = cloud.run("wait", job)
    status = cloud.status(job)
    nodes.start_node(node)
    nodes.await_idle()

    assert done.code != 0, done
    assert (status["state"], status["cause"]) == ("FAILED", "platform"), status
    assert node in status["failure"]["message"]


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_job_whose_prolog_fails_was_not_cancelled(cloud, nodes, node):
    """Slurm cancels it, but nobody else did."""
    cloud.write("train.py", "print('never')\n")
    nodes.fail_prolog(node)
    done = cloud.submit("--nodes", "2", "train.py")
    status = cloud.status(done.job)

    assert done.code == 125, done
    assert (status["state"], status["cause"]) == ("FAILED", "platform")
    assert f"Slurm's prolog failed on {node} (sinfo -R" in status["failure"]["message"]


def test_a_node_that_cannot_start_its_part_is_named_with_sruns_error(cloud, nodes):
    """Here, munge fails on that node."""
    cloud.write("train.py", "print('never')\n")
    cloud.write("job.yaml", "slurm: {sbatch: [--hold]}\n")
    job = cloud.detach("--config", "job.yaml", "--nodes", "2", "train.py")
    # The controller declares the node down after 10 s.
    nodes.hide_munge("n2")
    nodes.run("scontrol", "release", cloud.number(job))
    done = cloud.run("wait", job)
    failure = cloud.status(job)["failure"]

    assert done.code == 125, done
    assert failure["node"] == 1
    assert failure["message"].startswith("Slurm could not start node 1 (n2): ")
    assert failure["message"].endswith("(does munged run on n2, with the cluster's key?)")


def test_a_killed_batch_script_leaves_nothing_on_the_nodes(cloud, nodes):
    """Slurm then ends the nodes' processes; ranks get their grace period, at most its own."""
    cloud.write("train.py", SAVES_ON_SIGTERM.replace("time.sleep(3)", "time.sleep(300)"))
    job = cloud.detach("--grace-s", "600", *SIZE, "train.py")
    cloud.await_results(*result_names())
    nodes.run("scancel", "--batch", "--signal=KILL", cloud.number(job))
    done = cloud.run("wait", job)

    assert done.code != 0, done
    assert cloud.status(job)["state"] == "FAILED"


@pytest.mark.parametrize("by", ["hand", "a dead node"])
def test_a_job_that_is_requeued_runs_again(cloud, nodes, by):
    cloud.write("train.py", RUNS_TWICE)
    cloud.write("job.yaml", "slurm: {requeue: true}\n")
    job = cloud.detach("--config", "job.yaml", *SIZE, "train.py")
    cloud.await_results(*result_names())
    number = cloud.number(job)
    if by == "hand":
        nodes.run("scontrol", "requeue", number)
    else:
        nodes.kill_node("n2")
        nodes.start_node("n2")
    done = cloud.run("wait", job)
    status = cloud.status(job)

    assert (done.code, status["state"]) == (0, "SUCCEEDED"), f"{done}\n{cloud.logs()}"
    assert {path.name for path in cloud.results.glob("again-*")} == set(
        result_names(prefix="again")
    )
    assert "Restarts=1" in nodes.run("scontrol", "show", "job", number)


def test_a_preempted_job_saves_and_runs_again(cloud, nodes):
    """Ranks get their full grace period although Slurm sends SIGTERM again after its own.

    The job's time is nearly over as well, but that is not why it must end.
    """
    saves = (
        "    write_result(f'saving-{rank}')\n    await_file('go')\n"
        "    write_result(f'saved-{rank}')\n"
    )
    cloud.write("train.py", RUNS_TWICE.replace('    write_result(f"saved-{rank}")\n', saves))
    cloud.write("low.yaml", "grace_s: 60\nslurm: {partition: low, requeue: true, time_min: 3}\n")
    cloud.write("high.yaml", "slurm: {partition: high, exclusive: true}\n")
    cloud.write("short.py", "")
    job = cloud.detach("--config", "low.yaml", *SIZE, "train.py")
    cloud.await_results(*result_names())
    waiting = cloud.detach("--config", "high.yaml", "--nodes", "2", "short.py")
    cloud.await_results(*result_names(prefix="saving"))
    for name in ("CONT", "TERM"):
        nodes.run("scancel", "--batch", f"--signal={name}", cloud.number(job))
    (cloud.results / "go").touch()
    other = cloud.run("wait", waiting)
    done = cloud.run("wait", job, limit_s=180)

    assert other.code == 0, other
    assert done.code == 0, done
    names = {path.name for path in cloud.results.iterdir()}
    assert names >= {*result_names(prefix="saved"), *result_names(prefix="again")}


def test_a_restart_of_the_controller_does_not_end_a_wait(cloud, nodes):
    """The job and the commands that follow it continue without the controller."""
    cloud.write(
        "train.py", PRELUDE + "write_result(f'up-{rank}')\nawait_file('go')\nprint('done')\n"
    )
    following = cloud.start(
        "submit", "--backend", "slurm", "-e", f"RESULTS={cloud.results}", "train.py"
    )
    cloud.await_results("up-0")
    nodes.stop_controller()
    alone = cloud.run("status", "train")
    time.sleep(3)  # longer than the follower waits before it asks the controller again
    ended_early = following.poll()
    nodes.start_controller()
    (cloud.results / "go").touch()
    out, err = following.communicate(timeout=60)

    assert alone.code == 5, alone
    assert "error: asking Slurm for train-" in alone.err
    assert ended_early is None
    assert (following.returncode, out) == (0, b"[0] done\n"), err


@pytest.mark.parametrize("node", [0, 1])
def test_a_killed_entry_leaves_no_process_on_its_node(cloud, node):
    """Slurm's own tracking by process tree (linuxproc) does not find a rank's orphans."""
    cloud.write(
        "train.py",
        PRELUDE
        + """
import subprocess
for command in (["sleep", "7777"], ["setsid", "sleep", "7778"]):
    process = subprocess.Popen(command)
write_result(f"up-{rank}")
time.sleep(300)
""",
    )
    job = cloud.detach("--nodes", "2", "train.py")
    cloud.await_results("up-0", "up-1")
    # Other tests run such jobs at the same time.
    entries = [
        pid
        for pid in processes("jobentry.pyz\0train.py\0")
        if f"\0VC_TASK_INDEX={node}\0" in (environ := read(pid, "environ")) and job in environ
    ]
    for pid in entries:
        os.kill(pid, signal.SIGKILL)
    done = cloud.run("wait", job)

    assert entries
    assert done.code != 0, done
    poll(lambda: not processes("sleep\x007777\0") + processes("sleep\x007778\0"), cloud.logs)


def processes(text: str) -> list[int]:
    """Return the processes whose command line contains a text."""
    numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [pid for pid in numbers if text in read(pid, "cmdline")]


def read(pid: int, name: str) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    return ""
