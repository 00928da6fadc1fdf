"""MPICH instead of Open MPI: .ci/mpich installs it to $CLOUDJOB_TEST_MPICH (.ci/run heavy)."""

from __future__ import annotations

import os

import pytest

pytestmark = pytest.mark.mpich

SIZE = ("--nodes", "2", "--procs-per-node", "2")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@pytest.fixture
def submit(cloud):
    """Submit with MPICH's mpirun first on PATH; mpi4py uses MPICH's library, too."""
    folder = os.environ["CLOUDJOB_TEST_MPICH"]
    libraries = ("-e", f"LD_LIBRARY_PATH={folder}/libraries", "-e", "MPI4PY_MPIABI=mpich")

    def run(*arguments: str):
        path = f"{folder}/usr/bin:{SYSTEM_PATH}"
        return cloud.submit(*SIZE, *libraries, *arguments, env={"PATH": path})

    return run


@pytest.mark.surroundings
def test_ranks_of_all_nodes_form_one_world(cloud, submit):
    """An allreduce is right, and each rank has its node's number."""
    cloud.write(
        "job.py",
        """\
from mpi4py import MPI
import os
comm = MPI.COMM_WORLD
name = MPI.Get_library_version().split()[0]
print(name, comm.allreduce(comm.rank), comm.size, os.environ["VC_TASK_INDEX"])
""",
    )

    done = submit("job.py")

    assert done.code == 0, done
    assert sorted(done.lines) == [b"[%d] MPICH 6 4 %d" % (rank, rank // 2) for rank in range(4)]


def test_a_rank_that_raises_in_a_collective_ends_the_job(cloud, submit):
    """The other ranks, which wait for it, are terminated."""
    cloud.write(
        "job.py",
        """\
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 3:
    raise ValueError("that was it")
MPI.COMM_WORLD.Barrier()
""",
    )

    done = submit("job.py")

    assert done.code == 1, done
    failure = cloud.status(done.job)["failure"]
    assert (failure["node"], failure["rank"]) == (1, 3)
    assert failure["message"] == "ValueError: that was it"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("OPENMPI_MCA_ARGS", "-mca btl tcp,self", "mca btl tcp,self"),
        ("OPENMPI_EXTRA_ARGS", "--report-bindings", "report-bindings"),
        ("OPENMPI_BIND_ARGS", "-bind-to core -map-by ppr:1:node", "map-by ppr:1:node"),
    ],
)
def test_an_option_that_only_open_mpi_has_is_refused(cloud, submit, name, options, message):
    cloud.write("job.py", "")

    done = submit("-e", f"{name}={options}", "--launcher", "mpirun", "job.py")

    assert done.code == 125, done
    assert f"{message}: MPICH 4.0 has no such mpirun option" in done.err.decode(), done


def test_options_that_mpich_has_too_are_passed_on(cloud, submit):
    cloud.write("job.py", "import os\nprint(len(os.sched_getaffinity(0)), os.environ['ASKED'])")

    done = submit(
        *("-e", "OPENMPI_BIND_ARGS=-bind-to core -map-by slot"),
        *("-e", "OPENMPI_X_ARGS=-x ASKED=yes", "--launcher", "mpirun", "job.py"),
    )

    assert done.code == 0, done
    assert sorted(done.lines) == [b"[%d] 1 yes" % rank for rank in range(4)]
