"""A real mpirun that hangs while starting is killed, restarted once, and reported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

# A wrapper before the real mpirun on PATH. In its first calls, it gives mpirun a remote shell that
# never responds, like a hung sshd. Open MPI 4.1 and 5.0 both wait for that forever.
WRAPPER = """\
#!{python} -IS
import os, sys
arguments = sys.argv[1:]
if arguments != ["--version"]:
    agents = ("plm_rsh_agent", "plm_ssh_agent")
    at = next(i for i, argument in enumerate(arguments) if argument in agents)
    name = os.environ["RESULTS"] + "/mpirun-%d"
    count = sum(os.path.exists(name % i) for i in (1, 2, 3))
    open(name % (count + 1), "w").close()
    if count < {hangs}:
        arguments[at + 1] = {silent!r}
os.execv({mpirun!r}, [{mpirun!r}, *arguments])
"""
SOON_S = 300.0


def hang(cloud, times):
    """Make mpirun hang this number of times."""
    folder = cloud.folder / "bin"
    folder.mkdir()
    silent = folder / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    wrapper = folder / "mpirun"
    wrapper.write_text(
        WRAPPER.format(
            python=sys.executable, hangs=times, silent=str(silent), mpirun=str(cloud.mpi.mpirun)
        )
    )
    for path in (silent, wrapper):
        path.chmod(0o755)
    cloud.environ["PATH"] = f"{folder}:{cloud.mpi.path}"


@pytest.mark.every_mpi
def test_a_job_of_one_node_runs_on_a_machine_without_ssh(cloud):
    folder = cloud.folder.with_name(cloud.folder.name + "-programs")
    folder.mkdir()
    for place in cloud.mpi.path.split(":"):
        for program in Path(place).glob("*"):
            link = folder / program.name
            if program.name not in ("ssh", "rsh") and not os.path.lexists(link):
                link.symlink_to(program)
    cloud.environ["PATH"] = str(folder)
    script = cloud.script("""
        from mpi4py import MPI
        print("sum", MPI.COMM_WORLD.allreduce(rank))
        """)

    done = cloud.submit("--procs-per-node", "2", script)

    assert done.code == 0, done
    assert sorted(done.lines) == [b"[0] sum 1", b"[1] sum 1"]


@pytest.mark.every_mpi
def test_a_start_that_hangs_once_is_repeated(cloud):
    """The second mpirun starts every rank once, and the log reports the restart."""
    hang(cloud, 1)
    script = cloud.script("""
        from mpi4py import MPI
        write_result(f"run-{rank}-{os.getpid()}")
        print("sum", MPI.COMM_WORLD.allreduce(rank))
        """)

    done = cloud.submit("--nodes", "2", "--procs-per-node", "2", script, limit_s=SOON_S)

    assert done.code == 0, done
    assert sorted(done.lines) == [b"[%d] sum 6" % rank for rank in range(4)]
    assert (
        b"starting the ranks: mpirun started 0 of 4 and then hung for 22 s; without a rank: node 0"
    ) in done.err
    assert b"ending it, and starting it again" in done.err
    assert len(cloud.results_written("run-*")) == 4
    assert sorted(cloud.results_written("mpirun-*")) == ["mpirun-1", "mpirun-2"]
    assert cloud.status(done.job)["failure"] is None


@pytest.mark.lengthy
def test_a_start_that_hangs_twice_ends_the_job(cloud):
    hang(cloud, 9)
    script = cloud.script("write_result(f'run-{rank}')")

    done = cloud.submit("--nodes", "2", script, limit_s=SOON_S)

    assert done.code == 125, done
    status = cloud.status(done.job)
    host = f"ma-job-{done.job}-worker-%d.ma-job-{done.job}"
    assert status["cause"] == "entry"
    assert status["failure"]["message"] == (
        "starting the ranks: mpirun started 0 of 2 and then hung for 44 s, at the second try, too; "
        f"without a rank: node 0 ({host % 0}), node 1 ({host % 1})"
    )
    assert sorted(cloud.results_written()) == ["mpirun-1", "mpirun-2"]
