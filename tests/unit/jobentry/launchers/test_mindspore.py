"""MindSpore's cluster: the commands and variables of scheduler, msrun, mpirun and ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jobentry.contract.env import MindSpore, NodeEnv, OpenMpi
from jobentry.contract.paths import NodePaths
from jobentry.control.verdict import LaunchEnd, server_ended
from jobentry.launchers import mindspore, mpirun
from jobentry.launchers.common import ArgsError, Mpi, Process, Site
from jobentry.rank import wrapper

PATHS = NodePaths("/h", "/j", "/m", "/l", "/n")
ENTRY = ("/usr/bin/python3", "-I", "/e.pyz")
SCRIPT = ("/py/bin/python", "/e.pyz", "--script", "x.py", "--lr", "1")
SCRIPT_ARGV = ("x.py", "--lr", "1")
SHARED = {
    "MS_WORKER_NUM": "4",
    "RANK_SIZE": "4",
    "MS_SCHED_HOST": "a",
    "MS_SCHED_PORT": "8118",
    "MS_TOPO_TIMEOUT": "600",
    "MS_RETRY_INTERVAL_LOWER": "1",
    "MS_RETRY_INTERVAL_UPPER": "1",
}


def make_site(node: int = 0, environment: dict[str, str] | None = None, **values) -> Site:
    """Return the site of a job of two nodes with two ranks each."""
    env = NodeEnv(job="j", node=node, hosts=("a", "b"), slots=2, **values)
    environment = {"PATH": "/bin", "MS_SCHED_PORT": "8118", **(environment or {})}
    return Site(env, environment, PATHS, "/py/bin/python", ENTRY, Mpi("/usr/bin/mpirun", (4, 1)))


def test_a_dynamic_cluster_has_one_scheduler_and_numbered_ranks():
    """The scheduler runs on the head, beside the head's ranks."""
    scheduler, *wrappers = mindspore.dynamic_cluster(make_site(), SCRIPT_ARGV).processes

    assert scheduler.is_server
    assert scheduler.name == "scheduler"
    assert scheduler.argv == ("/py/bin/python", "/e.pyz", "--scheduler")
    assert scheduler.env == {"PATH": "/bin", "GLOG_v": "3", **SHARED, "MS_ROLE": "MS_SCHED"}
    assert wrappers == [
        Process(
            f"rank {number}",
            (*ENTRY, "--rank", "--address", "MS_SCHED_HOST", "--", *SCRIPT),
            {
                "PATH": "/bin",
                **SHARED,
                "MS_ROLE": "MS_WORKER",
                "MS_NODE_ID": str(number),
                "RANK_ID": str(number),
                "DEVICE_ID": str(number),
                "CLOUDJOB_RANK": str(number),
            },
            is_wrapper=True,
        )
        for number in range(2)
    ]


def test_a_worker_has_ranks_and_no_scheduler():
    """Its rank numbers continue those of the head; its device numbers start at 0."""
    launch = mindspore.dynamic_cluster(make_site(node=1), SCRIPT_ARGV)

    assert launch.ranks == 4
    assert launch.is_everywhere
    assigned = [(p.env["MS_NODE_ID"], p.env["DEVICE_ID"], p.is_server) for p in launch.processes]
    assert assigned == [("2", "0", False), ("3", "1", False)]


@pytest.mark.parametrize(("node", "expected"), [(0, ["0", "2"]), (1, ["1"])])
def test_parameter_servers_are_assigned_to_the_nodes_in_turn(node: int, expected: list[str]):
    launch = mindspore.dynamic_cluster(make_site(node, {"MS_SERVER_NUM": "3"}), SCRIPT_ARGV)
    servers = [process for process in launch.processes if "parameter server" in process.name]

    assert [process.name.rpartition(" ")[2] for process in servers] == expected
    for process in servers:
        assert process.is_server
        assert process.argv == ("/py/bin/python", "/e.pyz", "--parameter-server", *SCRIPT)
        assert process.env["MS_ROLE"] == "MS_PSERVER"
        assert process.env["MS_SCHED_HOST"] == "a"
    assert launch.ranks == 4


def test_an_invalid_number_of_parameter_servers_is_refused():
    with pytest.raises(ArgsError, match="MS_SERVER_NUM='-1' is not a number"):
        mindspore.dynamic_cluster(make_site(environment={"MS_SERVER_NUM": "-1"}), SCRIPT_ARGV)


def test_the_users_timeout_and_log_level_take_precedence():
    """``MS_TOPO_TIMEOUT`` for the cluster, ``GLOG_v`` for the scheduler's log."""
    scheduler, *_ = mindspore.dynamic_cluster(
        make_site(environment={"MS_TOPO_TIMEOUT": "7", "GLOG_v": "1"}), SCRIPT_ARGV
    ).processes

    assert (scheduler.env["MS_TOPO_TIMEOUT"], scheduler.env["GLOG_v"]) == ("7", "1")


@pytest.mark.parametrize(
    ("slots", "environ", "expected"),
    [
        (128, {}, {"MS_RETRY_INTERVAL_LOWER": "1", "MS_RETRY_INTERVAL_UPPER": "1"}),
        (129, {}, {}),
        # With a lower bound above the upper one, MindSpore sleeps for an arbitrary time.
        (2, {"MS_RETRY_INTERVAL_LOWER": "4"}, {"MS_RETRY_INTERVAL_LOWER": "4"}),
        (2, {"MS_RETRY_INTERVAL_UPPER": "9"}, {"MS_RETRY_INTERVAL_UPPER": "9"}),
    ],
)
def test_small_clusters_poll_the_scheduler_more_often(slots, environ, expected):
    place = make_site(environment=environ)
    place = place._replace(node=place.node._replace(slots=slots))

    launches = mindspore.dynamic_cluster(place, SCRIPT_ARGV), mindspore.msrun(place, SCRIPT_ARGV)
    for process in (process for launch in launches for process in launch.processes):
        pauses = {name: value for name, value in process.env.items() if "INTERVAL" in name}
        assert pauses == expected


def test_an_invalid_port_is_refused():
    with pytest.raises(ArgsError, match="MS_SCHED_PORT='x' is not a port"):
        mindspore.dynamic_cluster(make_site(environment={"MS_SCHED_PORT": "x"}), SCRIPT_ARGV)


def test_msrun_gets_the_documented_arguments():
    """The node rank is explicit; with ``--join``, msrun waits for its ranks."""
    scheduler, msrun = mindspore.msrun(make_site(node=0), SCRIPT_ARGV).processes
    (other,) = mindspore.msrun(make_site(node=1), SCRIPT_ARGV).processes

    assert scheduler.is_server
    assert msrun.argv == (
        *("/py/bin/python", "-m", "mindspore.parallel.cluster.run"),
        *("--worker_num=4", "--local_worker_num=2", "--node_rank=0"),
        *("--master_addr=a", "--master_port=8118", "--cluster_time_out=600"),
        *("--log_dir=/n/msrun", "--tail_worker_log=4", "--join=True"),
        *("python3", "/n/msrun-wrapper.py"),
    )
    assert msrun.env["PATH"] == "/py/bin:/bin"
    assert "--node_rank=1" in other.argv


@pytest.mark.parametrize("launcher", [mindspore.msrun, mindspore.dynamic_cluster])
@pytest.mark.parametrize("value", ["/user/config", "/user/config/jobstart_hccl.json"])
def test_a_cluster_does_not_use_the_rank_table_of_the_platform(launcher, value):
    """It is a folder, with a table of a version that MindSpore and HCCL cannot read."""
    environment = {"RANK_TABLE_FILE": value}

    for process in launcher(make_site(environment=environment), SCRIPT_ARGV).processes:
        assert "RANK_TABLE_FILE" not in process.env
    site = make_site(environment=environment, env_names=("RANK_TABLE_FILE",))
    for process in launcher(site, SCRIPT_ARGV).processes:
        assert process.env["RANK_TABLE_FILE"] == value


DUMP = """\
import os, sys
if sys.argv[1:2] == ["--rank"]:
    print(ascii([sys.argv[1:], sorted(os.environ.items())]))
"""
UGLY = ("--worker", "", "a b", "'\"", "%s %%", "\udcff\n", "--", "-I")


def run_wrapper_script(environ: dict[str, str], tmp_path) -> str:
    """Run the program that msrun starts instead of a script, and return its output."""
    folder = tmp_path / "entry"
    folder.mkdir()
    (folder / "__main__.py").write_text(DUMP)
    env = {"PATH": "/bin", "GLOG_v": "1"}
    place = make_site()._replace(entry=(sys.executable, str(folder)), environment=env)
    (file,) = mindspore.msrun(place, ("x", *UGLY)).files
    done = subprocess.run(
        [sys.executable, "-I", "-c", file.text], env=environ, stdout=subprocess.PIPE, check=True
    )
    return done.stdout.decode()


def test_the_wrapper_that_msrun_starts_has_exact_arguments_and_variables(tmp_path):
    """The parser of msrun never sees the script's arguments; changed variables are restored."""
    environment = {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": "3", "PATH": "/changed", "GLOG_v": "3"}

    argv, variables = eval(run_wrapper_script(environment, tmp_path))

    assert argv == ["--rank", "--", "./x", *UGLY]
    assert {**dict(variables), "LC_CTYPE": ""} == {
        "MS_ROLE": "MS_WORKER",
        "MS_NODE_ID": "3",
        "CLOUDJOB_RANK": "3",
        "PATH": "/bin",
        "GLOG_v": "1",
        "LC_CTYPE": "",
    }


def test_a_scheduler_started_by_msrun_exits_at_once(tmp_path):
    assert run_wrapper_script({"MS_ROLE": "MS_SCHED"}, tmp_path) == ""


def test_ranks_of_mpirun_form_a_cluster_on_a_cpu():
    """The scheduler runs beside mpirun, which passes its address; wrappers set rank numbers."""
    node = {"open_mpi": OpenMpi(x_args=""), "mindspore": MindSpore(device_target="CPU")}

    launch = mindspore.mpi(make_site(**node), SCRIPT_ARGV)

    scheduler, started = launch.processes
    assert not launch.is_everywhere
    assert (scheduler.name, scheduler.is_server) == ("scheduler", True)
    assert started.argv[-11:] == (
        *("--rank", "--mpi-cluster", "--address", "MS_SCHED_HOST", "--"),
        *SCRIPT,
    )
    carried = {**SHARED, "MS_ROLE": "MS_WORKER"}
    assert {name: started.env[name] for name in carried} == carried
    for name in carried:
        at = started.argv.index(name)
        assert started.argv[at - 1] == "-x"


@pytest.mark.parametrize("target", ["GPU", "Ascend"])
def test_on_other_devices_mindspore_uses_open_mpi_itself(target):
    place = make_site(open_mpi=OpenMpi(x_args=""), mindspore=MindSpore(device_target=target))

    assert mindspore.mpi(place, SCRIPT_ARGV) == mpirun.launch(place, SCRIPT_ARGV)


# -- the wrapper --------------------------------------------------------------------------------


def test_the_wrapper_resolves_a_host_name():
    """MindSpore accepts only numeric addresses."""
    environment = {"MS_SCHED_HOST": "localhost"}

    assert wrapper._apply_options(["--address", "MS_SCHED_HOST"], environment, 0) == ""

    assert environment == {"MS_SCHED_HOST": "127.0.0.1"}


def test_an_unknown_host_name_is_reported():
    options = ["--address", "MS_SCHED_HOST"]
    problem = wrapper._apply_options(options, {"MS_SCHED_HOST": "no.such.invalid"}, 0)

    assert problem.startswith("looking up the head, no.such.invalid: ")


def test_the_wrapper_under_mpirun_sets_the_rank_and_device():
    environment = {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}

    assert wrapper._apply_options(["--mpi-cluster"], environment, 5) == ""

    assert environment == {
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "MS_NODE_ID": "5",
        "RANK_ID": "5",
        "DEVICE_ID": "1",
    }


# -- a scheduler that ends ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "have_started", "expected"),
    [
        (1, False, (125, "entry", None, "ended with exit code 1 before all ranks had started")),
        (1, True, (1, "user", None, "ended with exit code 1")),
        (-9, True, (137, "platform", 9, "was killed by SIGKILL")),
    ],
)
def test_a_failed_scheduler_is_named(code, have_started, expected):
    outcome = server_ended(LaunchEnd("scheduler", code, ["last"]), 0, "a", have_started)

    failure = outcome.failure
    assert failure is not None
    exit_code, cause, signal, how = expected
    assert (outcome.exit_code, outcome.cause) == (exit_code, cause)
    assert failure.message == f"the scheduler of the ranks {how}"
    assert (failure.node, failure.host, failure.rank, failure.signal) == (0, "a", None, signal)
    assert failure.last_lines == ("last",)
