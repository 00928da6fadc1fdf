"""Cancels, timeouts and grace periods: every rank gets its signal and its time, then exits."""

from __future__ import annotations

import os
import pty
import signal
import time
from pathlib import Path

import pytest

# On SIGTERM, saves for two seconds and exits.
SAVES_ON_SIGTERM = """
def on_sigterm(number, frame):
    write_result(f"signalled-{rank}", time.time())
    if rank == EARLY:
        os._exit(0)
    time.sleep(2)
    write_result(f"saved-{rank}", time.time())
    print("saved", rank, flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, on_sigterm)
MPI
print("up", rank, flush=True)
# Now, as a signal may come within a line that is being printed.
write_result(f"up-{rank}")
while True: time.sleep(0.1)
"""
IGNORES_SIGTERM = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
write_result(f"up-{rank}", os.getpid())
while True: time.sleep(0.1)
"""
UP = tuple(f"up-{rank}" for rank in range(4))
SIZE = ("--nodes", "2", "--procs-per-node", "2")


def script_that_saves(cloud, early=-1, *, mpi=False):
    """Write a script that saves on SIGTERM, except for the rank ``early``, which exits at once."""
    text = SAVES_ON_SIGTERM.replace("EARLY", str(early))
    return cloud.script(
        text.replace("MPI", "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()" if mpi else "")
    )


def check_cancelled(cloud, job):
    """Check that the job is cancelled, and return its status."""
    status = cloud.status(job)
    assert (status["state"], status["cause"]) == ("CANCELLED", "cancelled"), status
    return status


@pytest.mark.every_mpi
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_submit_gives_every_rank_its_grace_period(cloud, number):
    """Ctrl-C and SIGTERM reach all four ranks, and the job ends once each rank has saved."""
    running = cloud.start_submit(*SIZE, "--grace-s", "600", script_that_saves(cloud))
    cloud.await_results(*UP)

    running.send(number)
    done = running.end()

    assert done.code in (128 + signal.SIGINT, 128 + signal.SIGTERM), done
    assert len(cloud.results_written("signalled-*")) == 4, done
    assert len(cloud.results_written("saved-*")) == 4, done
    status = check_cancelled(cloud, running.job)
    assert status["exit_code"] == done.code
    for rank in range(4):
        assert b"[%d] saved %d" % (rank, rank) in done.lines, done


@pytest.mark.every_mpi
@pytest.mark.parametrize(
    ("mpi_init", "early"),
    [(False, -1), (False, 0), (False, 3), (True, 0), (True, 3)],
)
def test_cancel_from_another_shell_gives_every_rank_its_grace_period(cloud, early, mpi_init):
    job = cloud.detach(*SIZE, script_that_saves(cloud, early, mpi=mpi_init))
    cloud.await_results(*UP)

    done = cloud.cli("cancel", job)

    assert done.code == 0, done
    assert len(cloud.results_written("signalled-*")) == 4
    saved = [f"saved-{rank}" for rank in range(4) if rank != early]
    assert sorted(cloud.results_written("saved-*")) == saved, cloud.cli("logs", job)
    check_cancelled(cloud, job)
    assert cloud.leftovers() == []


def test_cancel_now_skips_the_grace_period(cloud):
    job = cloud.detach(*SIZE, "--grace-s", "600", cloud.script(IGNORES_SIGTERM))
    cloud.await_results(*UP)

    done = cloud.cli("cancel", "--now", job)

    assert done.code == 0, done
    check_cancelled(cloud, job)


@pytest.mark.every_mpi
def test_a_script_that_ignores_sigterm_is_killed_after_the_grace_period(cloud):
    running = cloud.start_submit(*SIZE, "--grace-s", "1", cloud.script(IGNORES_SIGTERM))
    cloud.await_results(*UP)
    began = time.monotonic()

    running.send(signal.SIGTERM)
    running.end()

    assert time.monotonic() - began > 0.9
    check_cancelled(cloud, running.job)


def test_the_grace_period_is_as_long_as_configured(cloud):
    """A rank that needs 4 s gets them, although Open MPI's own grace period is shorter."""
    script = cloud.script(
        SAVES_ON_SIGTERM.replace("EARLY", "2").replace("MPI", "").replace("sleep(2)", "sleep(4)")
    )
    job = cloud.detach(*SIZE, "--grace-s", "60", script)
    cloud.await_results(*UP)

    cloud.cli("cancel", job)

    assert sorted(cloud.results_written("saved-*")) == ["saved-0", "saved-1", "saved-3"]


def test_a_second_ctrl_c_skips_the_grace_period(cloud):
    running = cloud.start_submit(*SIZE, "--grace-s", "600", cloud.script(IGNORES_SIGTERM))
    cloud.await_results(*UP)

    running.send(signal.SIGINT)
    poll_for(lambda: b"cancelling" in running.err)
    running.send(signal.SIGINT)
    done = running.end()

    assert done.code != 0
    check_cancelled(cloud, running.job)


@pytest.mark.every_mpi
def test_ctrl_c_while_the_job_starts_leaves_nothing_behind(cloud):
    script = cloud.script("time.sleep(60)")
    running = cloud.start_submit("--nodes", "4", script)
    job = running.job

    running.send(signal.SIGINT)
    done = running.end()

    assert done.code != 0, done
    check_cancelled(cloud, job)


# The command line, which sends itself a signal just before or after it starts the controller.
SIGNALS_ITSELF = """
import os, sys
from cloudjob.backends.process import backend
from cloudjob.cli import main

start = backend._start_job

def signalled(*arguments):
    moments = [lambda: os.kill(os.getpid(), {number}), lambda: start(*arguments)]
    return max(moment() or 0 for moment in moments[:: {step}])

backend._start_job = signalled
sys.exit(main(sys.argv[4:]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("step", [1, -1])
@pytest.mark.parametrize("options", [(), ("--detach",)])
def test_a_signal_while_the_job_is_being_submitted_cancels_it(cloud, number, step, options):
    """A submit that is under way cannot be undone, so the job is cancelled once it exists."""
    text = SIGNALS_ITSELF.format(number=int(number), step=step)
    cloud.prefix = (cloud.python, "-c", text)
    done = cloud.submit("--nodes", "2", *options, cloud.script("time.sleep(60)"))
    cloud.prefix = ()

    assert done.code in (130, 143), done
    assert b"cancelling the job once it is sent" in done.err, done
    check_cancelled(cloud, done.job)


def test_ctrl_c_on_a_terminal_cancels_the_job(cloud):
    terminal, tty = pty.openpty()
    running = cloud.start_submit(
        *SIZE,
        script_that_saves(cloud),
        stdin=tty,
        start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, 0x540E, 0),
    )
    os.close(tty)
    cloud.await_results(*UP)

    os.write(terminal, b"\x03")
    done = running.end()
    os.close(terminal)

    assert done.code in (130, 143), done
    assert len(cloud.results_written("saved-*")) == 4
    check_cancelled(cloud, running.job)


def test_a_job_over_its_timeout_ends_with_124(cloud):
    """The cause is timeout, and the ranks get their grace period."""
    done = cloud.submit(*SIZE, "--timeout-min", "0.04", "--grace-s", "60", script_that_saves(cloud))

    assert done.code == 124, done
    status = cloud.status(done.job)
    assert (status["state"], status["cause"]) == ("FAILED", "timeout"), status
    assert "2.4" in status["failure"]["message"], status
    # On a busy host, a rank may not have started before the timeout.
    started = {int(name[3:]) for name in cloud.results_written("up-*")}
    assert started <= {int(name[6:]) for name in cloud.results_written("saved-*")}


def test_a_timeout_that_is_not_reached_changes_nothing(cloud):
    assert cloud.submit("--timeout-min", "1", cloud.script("")).code == 0


def test_cancelling_an_ended_job_changes_nothing(cloud):
    done = cloud.submit(cloud.script("sys.exit(3)"))

    cancelled = cloud.cli("cancel", done.job)

    assert cancelled.code == 0, cancelled
    assert cloud.status(done.job)["state"] == "FAILED"


def test_a_cancelled_job_whose_ranks_succeed_is_cancelled(cloud):
    job = cloud.detach(*SIZE, script_that_saves(cloud))
    cloud.await_results(*UP)

    cloud.cli("cancel", job)

    status = check_cancelled(cloud, job)
    assert status["exit_code"] != 0
    assert (status["failure"] or {}).get("rank") is None


def test_two_cancels_at_once_cancel_the_job_once(cloud):
    """Both commands report success, and the ranks keep their grace period."""
    job = cloud.detach(*SIZE, script_that_saves(cloud))
    cloud.await_results(*UP)

    cancels = [cloud.start("cancel", job) for _ in range(2)]

    assert [run.end().code for run in cancels] == [0, 0]
    check_cancelled(cloud, job)
    # Neither command has --now, so the second one does not cut the grace period short.
    assert len(cloud.results_written("saved-*")) == 4


@pytest.mark.every_mpi
def test_sigusr1_reaches_every_rank(cloud):
    """A signal that cloudjob itself does not use is passed on to the scripts on all nodes."""
    script = cloud.script(
        """
        signal.signal(signal.SIGUSR1, lambda *_: write_result(f"usr1-{rank}"))
        write_result(f"up-{rank}")
        for other in range(size): await_file(f"usr1-{other}")
        """
    )
    job = cloud.detach(*SIZE, script)
    cloud.await_results(*UP)
    head = cloud.state(job)["nodes"][0]["process"]
    children = Path(f"/proc/{head}/task/{head}/children").read_text().split()
    entry = min(int(child) for child in children)

    os.kill(entry, signal.SIGUSR1)

    done = cloud.cli("wait", job)
    assert done.code == 0, done


def poll_for(is_so, limit_s=180):
    """Wait until a condition holds."""
    end = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)
