"""If a process of a job is killed, the job ends or continues, reports it and leaves nothing."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import time
from pathlib import Path

import pytest

WAITS_FOR_GO = """
print("up", rank, flush=True)
write_result(f"up-{rank}", os.getpid())
while not os.path.exists(f"{results}/go"): time.sleep(0.05)
print("bye", rank)
"""
UP = tuple(f"up-{rank}" for rank in range(4))
SIZE = ("--nodes", "2", "--procs-per-node", "2")
MPI = "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()\n"


@pytest.fixture
def job(cloud, request):
    """A detached job whose four ranks are all running."""
    script = cloud.script((MPI if getattr(request, "param", "") == "mpi" else "") + WAITS_FOR_GO)
    value = cloud.detach(*SIZE, script)
    cloud.await_results(*UP)
    return value


# More can go wrong if the ranks use MPI than if they do not.
with_and_without_mpi = pytest.mark.parametrize(
    "job", [pytest.param("plain", marks=pytest.mark.lengthy), "mpi"], indirect=True
)


def check_failed(cloud, job, cause):
    """Check that the job ends by itself with a message, and return its status."""
    waited = cloud.cli("wait", job)
    status = cloud.status(job)
    assert waited.code not in (0, None), (waited, status)
    assert status["state"] == "FAILED", status
    assert status["cause"] == cause, status
    assert status["failure"]["message"], status
    return status


@pytest.mark.every_mpi
@with_and_without_mpi
def test_killing_a_workers_keeper_ends_the_job_and_names_the_node(cloud, job):
    os.kill(cloud.state(job)["nodes"][1]["process"], signal.SIGKILL)

    status = check_failed(cloud, job, "platform")

    assert status["failure"]["node"] == 1, status
    assert "worker-1" in status["failure"]["message"] + status["failure"]["host"], status


@pytest.mark.every_mpi
@with_and_without_mpi
def test_killing_the_daemon_of_mpirun_on_a_worker_ends_the_job_and_names_the_node(cloud, job):
    daemons = [
        pid
        for pid in cloud.processes()
        if Path(f"/proc/{pid}/comm").read_text() in ("orted\n", "prted\n")
    ]
    for pid in daemons:
        os.kill(pid, signal.SIGKILL)

    status = check_failed(cloud, job, "platform")

    assert daemons
    assert (status["failure"]["node"], status["failure"]["rank"]) == (1, None), status
    assert "mpirun lost its daemon" in status["failure"]["message"], status


@pytest.mark.every_mpi
@with_and_without_mpi
def test_killing_the_heads_keeper_ends_the_job(cloud, job):
    """No head is left to write a record, so the backend reports the end to the workers."""
    os.kill(cloud.state(job)["nodes"][0]["process"], signal.SIGKILL)

    status = check_failed(cloud, job, "platform")

    assert status["failure"]["node"] == 0, status


@with_and_without_mpi
def test_killing_the_controller_ends_its_nodes(cloud, job):
    os.kill(cloud.state(job)["controller"], signal.SIGKILL)

    check_failed(cloud, job, "platform")


@pytest.mark.every_mpi
def test_killing_controller_and_keepers_ends_the_ranks(cloud, job):
    state = cloud.state(job)
    for pid in (state["controller"], *(node["process"] for node in state["nodes"])):
        os.kill(pid, signal.SIGKILL)

    check_failed(cloud, job, "platform")


@pytest.mark.every_mpi
@with_and_without_mpi
def test_killing_mpirun_ends_all_ranks(cloud, job):
    """The ranks that mpirun 5.0 leaves on the head end, too."""
    for pid in cloud.mpiruns():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)

    waited = cloud.cli("wait", job)

    status = cloud.status(job)
    assert waited.code != 0, (waited, status)
    assert status["state"] == "FAILED", status
    assert "mpirun" in status["failure"]["message"], status


@pytest.mark.every_mpi
@pytest.mark.parametrize("rank", [1, 3], ids=["head", "worker"])
def test_killing_a_rank_wrapper_ends_its_program_and_names_the_rank(cloud, job, rank):
    os.kill(cloud.wrappers()[rank], signal.SIGKILL)

    status = check_failed(cloud, job, "user")

    assert status["exit_code"] == 137, status
    assert (status["failure"]["rank"], status["failure"]["signal"]) == (rank, 9), status
    assert status["failure"]["node"] == rank // 2, status


@pytest.mark.parametrize("rank", [0, 2], ids=["head", "worker"])
def test_killing_the_program_of_a_rank_names_the_rank(cloud, job, rank):
    os.kill(int(cloud.results_written(f"up-{rank}")[f"up-{rank}"]), signal.SIGKILL)

    status = check_failed(cloud, job, "user")

    assert status["exit_code"] == 137, status
    assert (status["failure"]["rank"], status["failure"]["signal"]) == (rank, 9), status
    assert f"up {rank}" in status["failure"]["last_lines"], status


@pytest.mark.parametrize("rank", [1, 3], ids=["head", "worker"])
def test_killing_the_process_group_of_a_rank_names_the_rank(cloud, job, rank):
    os.killpg(os.getpgid(int(cloud.results_written(f"up-{rank}")[f"up-{rank}"])), signal.SIGKILL)

    status = check_failed(cloud, job, "user")

    assert (status["failure"]["rank"], status["failure"]["signal"]) == (rank, 9), status


@pytest.mark.every_mpi
@pytest.mark.parametrize("node", [0, 1], ids=["head", "worker"])
def test_killing_the_entry_ends_its_node(cloud, job, node):
    """The entry is the node's first process, so the node ends with it."""
    os.kill(cloud.entry(job, node), signal.SIGKILL)

    check_failed(cloud, job, "platform")


def test_a_worker_that_is_killed_while_it_stores_its_outputs_fails_the_job(cloud, poll):
    # A sparse file of 64 GiB takes no disk space, but many seconds to read.
    sparse_output = "if node: open(os.environ['OUT'] + '/big', 'wb').truncate(2**36)\n"
    job = cloud.detach(*SIZE, "--output", "OUT=", cloud.script(sparse_output + WAITS_FOR_GO))
    cloud.await_results(*UP)
    node = cloud.entry(job, 1)
    (cloud.results / "go").touch()
    poll(lambda: not cloud.mpiruns(), "end of mpirun")
    poll(lambda: is_open(node, "big"), "worker that reads its output")

    os.kill(node, signal.SIGKILL)

    status = check_failed(cloud, job, "platform")
    assert status["failure"]["node"] == 1
    assert "ended before it confirmed that its outputs are stored" in status["failure"]["message"]


def is_open(pid, name):
    """Return whether a process has a file of this name open."""
    try:
        return any(path.readlink().name == name for path in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


@pytest.mark.every_mpi
@with_and_without_mpi
def test_killing_mpiruns_daemon_on_a_worker_ends_the_job(cloud, job):
    daemons = cloud.find(lambda _, argv: bool(argv) and Path(argv[0]).name in ("orted", "prted"))
    assert daemons

    for pid in daemons:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)

    waited = cloud.cli("wait", job)
    status = cloud.status(job)
    assert waited.code != 0, status
    assert status["state"] == "FAILED"
    assert status["failure"]["message"], status


def test_a_job_outlives_its_killed_submit(cloud):
    """The job continues, and other shells can query, follow and wait for it."""
    running = cloud.start_submit(*SIZE, cloud.script(WAITS_FOR_GO))
    cloud.await_results(*UP)
    job = running.job
    running.send(signal.SIGKILL)
    running.process.wait()

    assert cloud.status(job)["state"] == "RUNNING"
    following = cloud.start("logs", "-f", job)
    poll_for(lambda: all(b"[%d] up %d" % (rank, rank) in following.out for rank in range(4)))
    (cloud.results / "go").touch()
    followed, waited = following.end(), cloud.cli("wait", job)

    assert waited.code == 0, waited
    assert followed.code == 0
    assert sorted(line for line in followed.lines if b"bye" in line) == [
        b"[%d] bye %d" % (rank, rank) for rank in range(4)
    ]


def test_a_job_with_a_killed_submit_can_be_cancelled(cloud):
    running = cloud.start_submit(*SIZE, cloud.script(WAITS_FOR_GO))
    cloud.await_results(*UP)
    job = running.job
    running.send(signal.SIGKILL)
    running.process.wait()

    assert cloud.cli("cancel", job).code == 0
    assert cloud.status(job)["state"] == "CANCELLED"


@pytest.mark.parametrize("options", [(), ("--detach",)], ids=["attached", "detached"])
def test_a_job_outlives_the_terminal_of_its_submit(cloud, options):
    terminal, tty = pty.openpty()
    running = cloud.start_submit(
        *options,
        *SIZE,
        cloud.script(WAITS_FOR_GO),
        stdin=tty,
        stdout=tty,
        stderr=tty,
        start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, 0x540E, 0),
    )
    os.close(tty)
    cloud.await_results(*UP)

    os.close(terminal)
    running.process.wait(180)

    (job,) = cloud.jobs()
    assert cloud.status(job)["state"] == "RUNNING"
    (cloud.results / "go").touch()
    assert cloud.cli("wait", job).code == 0


def test_a_job_outlives_the_reader_of_its_log(cloud):
    """The job continues after `submit | head -1`."""
    read, write = os.pipe()
    running = cloud.start_submit(*SIZE, cloud.script(WAITS_FOR_GO), stdout=write)
    os.close(write)
    cloud.await_results(*UP)
    os.close(read)

    (cloud.results / "go").touch()
    done = running.end()

    assert cloud.status(running.job)["state"] == "SUCCEEDED"
    assert b"Traceback" not in done.err, done


def test_a_worker_stopped_by_sigstop_does_not_outlive_a_cancel(cloud):
    job = cloud.detach(*SIZE, "--grace-s", "1", cloud.script(WAITS_FOR_GO))
    cloud.await_results(*UP)
    os.kill(int(cloud.results_written("up-3")["up-3"]), signal.SIGSTOP)

    done = cloud.cli("cancel", job)

    assert done.code == 0, done
    assert cloud.status(job)["state"] == "CANCELLED"


@pytest.mark.parametrize("node", [0, 1], ids=["head", "worker"])
def test_a_cancelled_job_whose_entry_is_frozen_ends_with_143(cloud, node):
    job = cloud.detach(*SIZE, "--grace-s", "1", cloud.script(WAITS_FOR_GO))
    cloud.await_results(*UP)
    os.kill(cloud.entry(job, node), signal.SIGSTOP)

    assert cloud.cli("cancel", job).code == 0
    assert cloud.cli("wait", job).code == 143
    status = cloud.status(job)
    assert (status["state"], status["cause"], status["exit_code"]) == (
        "CANCELLED",
        "cancelled",
        143,
    )


@pytest.mark.parametrize("code", [0, 3])
def test_an_entry_that_is_suspended_while_its_ranks_end_still_reports_them(cloud, code):
    """Whether they end well or badly; the suspension lasts seconds longer than mpirun."""
    job = cloud.detach(*SIZE, cloud.script(WAITS_FOR_GO + f"sys.exit({code} if rank == 3 else 0)"))
    cloud.await_results(*UP)
    suspended = cloud.entry(job, 1)
    os.kill(suspended, signal.SIGSTOP)
    try:
        (cloud.results / "go").touch()
        poll_for(lambda: not cloud.mpiruns())
        # Longer than a head waits for the reason of a failed launcher.
        time.sleep(4)
        assert cloud.status(job)["state"] == "RUNNING"
    finally:
        os.kill(suspended, signal.SIGCONT)

    assert cloud.cli("wait", job).code == code
    status = cloud.status(job)
    assert status["state"] == ("FAILED" if code else "SUCCEEDED"), status
    if code:
        assert (status["failure"]["node"], status["failure"]["rank"]) == (1, 3)


def poll_for(condition, limit_s=180):
    """Wait until a condition holds."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
