"""The commands for MPICH's and Intel MPI's mpirun."""

from __future__ import annotations

import pytest

from jobentry.contract import launchers
from jobentry.contract.env import NodeEnv, OpenMpi
from jobentry.contract.paths import NodePaths
from jobentry.launchers import plan
from jobentry.launchers.common import ArgsError, File, Mpi, Site

NODE = NodeEnv(
    job="j", hosts=("a", "b"), slots=2, secret_names=("TOKEN",), open_mpi=OpenMpi(x_args="")
)
PATHS = NodePaths("/h", "/j", "/m", "/l", "/n")
MPICH = Mpi("/opt/mpi/mpirun", (4, 0), "MPICH")
INTEL = Mpi("/opt/mpi/mpirun", (2021, 19), launchers.INTEL_MPI)
RANK = ("python3", "/e.pyz", "--rank", "--", "python", "/e.pyz", "--script", "x.py")


def make(mpi, script_argv=("x.py",), environment=(), **node):
    """Return the plan of the head."""
    environ = {"PWD": "/code", "MA_X": "a b", "TOKEN": "s", **dict(environment)}
    here = NODE._replace(**node)
    return plan.make(Site(here, environ, PATHS, "python", ("python3", "/e.pyz"), mpi), script_argv)


def test_mpich_starts_ranks_over_ssh():
    """The host file has MPICH's format, variables are passed by name, and ssh gets its options."""
    environ = {"OMPI_MCA_plm_rsh_args": "-q"}
    launch = make(MPICH, ssh_key="file:///key", environment=environ)

    (process,) = launch.processes
    assert process.argv == (
        *("/opt/mpi/mpiexec.hydra", "-n", "4", "-f", "/n/hostfile", "-localhost", "a"),
        *("-launcher", "ssh", "-bind-to", "none", "-genvlist", "MA_X", *RANK),
    )
    assert process.env["HYDRA_LAUNCHER_EXTRA_ARGS"] == "-F /n/ssh-config -p 38888"
    assert "TOKEN" not in process.env
    assert launch.files == (File("/n/hostfile", 0o600, "a:2\nb:2\n"),)
    assert (launch.ranks, launch.is_everywhere) == (4, False)


def test_intel_mpi_starts_ranks_over_the_control_connection():
    """It starts its daemons with cloudjob's agent; a variable configures pinning."""
    launch = make(INTEL, ssh_key="/key", env_names=("SEED",), environment={"SEED": "=;"})

    (process,) = launch.processes
    assert process.argv == (
        *("/opt/mpi/mpiexec.hydra", "-n", "4", "-f", "/n/hostfile", "-localhost", "a"),
        *("-launcher", "rsh", "-launcher-exec", "/bin/sh"),
        *("-genvlist", "MA_X,SEED,I_MPI_PIN", *RANK),
    )
    assert process.env["I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"] == "/n/agent"
    assert [file.path for file in launch.files] == ["/n/hostfile", "/n/agent"]
    assert (process.env["SEED"], process.env["I_MPI_PIN"]) == ("=;", "off")
    assert make(INTEL, environment={"I_MPI_PIN": "on"}).processes[0].env["I_MPI_PIN"] == "on"


def test_the_default_variables_of_the_platform_are_carried():
    """The defaults of ``OPENMPI_X_ARGS`` apply, as with Open MPI."""
    (process,) = make(MPICH, open_mpi=OpenMpi()).processes

    at = process.argv.index("-genvlist")
    assert process.argv[at + 1].startswith("MA_X,HOROVOD_MPI_THREADS_DISABLE,NCCL_DEBUG,")
    assert process.env["NCCL_SOCKET_FAMILY"] == "AF_INET"


def test_a_colon_argument_is_encoded():
    (process,) = make(MPICH, ("x.py", ":", "50%")).processes

    assert process.argv[-4:] == ("--script", "x.py", "%3A", "50%25")


@pytest.mark.parametrize(
    ("mpi", "options", "message"),
    [
        (MPICH, {"mca_args": "-mca btl self"}, ["mca btl self: MPICH 4.0 has no such"]),
        (MPICH, {"bind_args": "--map-by core"}, ["map-by core: MPICH 4.0"]),
        (INTEL, {"bind_args": "--bind-to core"}, ["bind-to core: Intel MPI 2021.19"]),
        (
            MPICH,
            {"extra_args": "--display-map", "mca_args": "--mca a b"},
            ["mca a b: MPICH", "display-map: MPICH"],
        ),
    ],
)
def test_options_without_an_equivalent_are_refused(mpi, options, message):
    with pytest.raises(ArgsError) as caught:
        make(mpi, open_mpi=OpenMpi(x_args="", **options))

    assert len(caught.value.problems) == len(message)
    assert all(map(str.startswith, caught.value.problems, message))


def test_more_ranks_than_slots_are_refused():
    with pytest.raises(ArgsError, match="room for 4"):
        make(MPICH, open_mpi=OpenMpi(x_args="", np=5))
