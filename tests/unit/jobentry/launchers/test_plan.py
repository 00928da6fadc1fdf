"""The launch plan of a node, which can be shown before anything is started."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jobentry.contract import names
from jobentry.contract.env import NodeEnv, OpenMpi
from jobentry.contract.launchers import LAUNCHERS
from jobentry.contract.paths import NodePaths
from jobentry.launchers import common, plan
from jobentry.launchers.common import ArgsError, File, Launch, Mpi, Process, Site

NODE = NodeEnv(job="j", hosts=("a", "b"), open_mpi=OpenMpi(x_args=""))
PATHS = NodePaths("/h", "/j", "/m", "/l", "/n")


def site(node: NodeEnv, environment: dict[str, str]) -> Site:
    """Return a node with its tools."""
    entry, mpi = ("/usr/bin/python3", "-I", "/e.pyz"), Mpi("/usr/bin/mpirun", (4, 1))
    return Site(node, environment, PATHS, "/usr/bin/python", entry, mpi)


def test_a_worker_of_an_mpirun_job_starts_nothing():
    """Workers serve the head; mpirun's daemon on a worker needs the tune file."""
    launch_plan = plan.make(site(NODE._replace(node=1), {"PWD": "/code", "A": "b"}), ("x.py",))

    assert launch_plan == Launch(
        processes=(),
        ranks=2,
        is_everywhere=False,
        files=(File("/n/tune", 0o600, ""),),
        cwd="/code",
    )


@pytest.mark.parametrize("launcher", ["mpirun", "horovod", "mindspore-mpi"])
@pytest.mark.parametrize(
    "invalid_options",
    [{"mca_args": "-mca btl"}, {"x_args": "-x 'A"}, {"extra_args": "--np 4"}, {"np": 99}],
    ids=str,
)
def test_every_node_refuses_the_same_options(launcher: str, invalid_options: dict[str, Any]):
    node = NODE._replace(launcher=launcher, open_mpi=NODE.open_mpi._replace(**invalid_options))
    refusals = set()
    for index in range(2):
        with pytest.raises(ArgsError) as caught:
            plan.make(site(node._replace(node=index), {"PWD": "/code"}), ("x.py",))
        refusals.add(str(caught.value))

    assert len(refusals) == 1


def test_the_head_starts_mpirun_with_its_files():
    environment = {"PWD": "/code", "MA_VJ_NAME": "j", "A": "b"}

    assert plan.make(site(NODE, environment), ("x.py", "--lr", "1")) == Launch(
        processes=(
            Process(
                "mpirun",
                (
                    *("/usr/bin/mpirun", "-np", "2", "--hostfile", "/n/hostfile"),
                    *("--mca", "plm_rsh_args", "-p 38888", "--tune", "/n/tune"),
                    *("--bind-to", "none", "--map-by", "slot"),
                    *("--mca", "pml", "ob1", "--mca", "btl", "^openib"),
                    *("--mca", "plm_rsh_no_tree_spawn", "true"),
                    *("/usr/bin/python3", "-I", "/e.pyz", "--rank", "--"),
                    *("/usr/bin/python", "/e.pyz", "--script", "x.py", "--lr", "1"),
                ),
                environment,
            ),
        ),
        ranks=2,
        is_everywhere=False,
        files=(
            File("/n/hostfile", 0o600, "a slots=1\nb slots=1\n"),
            File("/n/tune", 0o600, "-x MA_VJ_NAME\n"),
        ),
        cwd="/code",
    )


# The launcher rank-table needs a table of the platform, and has its own tests.
@pytest.mark.parametrize("launcher", sorted(LAUNCHERS.keys() - {"rank-table"}))
def test_every_launcher_makes_a_plan(launcher: str):
    node = NODE._replace(launcher=launcher)
    launch_plan = plan.make(site(node, {"PWD": "/code"}), ("x.py",))

    is_led = LAUNCHERS[launcher].needs_mpi or launcher == "srun"
    assert launch_plan.is_everywhere != is_led
    assert launch_plan.processes


def test_options_that_were_left_out_are_noted():
    node = NODE._replace(open_mpi=OpenMpi(x_args="-x NONE"))

    assert plan.make(site(node, {"PWD": "/"}), ("x.py",)).notes == (
        "-x NONE: left out, as it is not set here",
    )


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("x.py", ("/usr/bin/python", "/e.pyz", "--script", "x.py", "a:b", ":")),
        ("d/x.sh", ("bash", "d/x.sh", "a:b", ":")),
        ("bin/train", ("./bin/train", "a:b", ":")),
        ("/bin/train", ("/bin/train", "a:b", ":")),
        ("x.pyc", ("./x.pyc", "a:b", ":")),
    ],
)
def test_the_suffix_of_the_script_decides_how_it_is_started(script: str, expected: tuple[str, ...]):
    assert common.program(site(NODE, {}), (script, "a:b", ":")) == expected


def test_ranks_have_their_nodes_environment():
    node = NODE._replace(inputs=(("DATA", "s3://b/d"),), outputs=(("MODEL", "s3://b/m"),))

    assert plan.node_environment({"A": "b", "PWD": "/"}, node, PATHS, "/code") == {
        "A": "b",
        "PWD": "/code",
        "CLOUDJOB_NODE_DIR": "/n",
        "DATA": "/m/inputs/DATA_0",
        "MODEL": "/m/outputs/MODEL_0",
    }


def test_ranks_have_the_variables_of_the_first_version_on_request():
    node = NodeEnv(
        node=1,
        hosts=("a", "b"),
        inputs=(("data_url", "s3://b/d"),),
        outputs=(("train_url", "obs://b/m"),),
        first_version=True,
    )
    environ = {"DLS_TASK_NUMBER": "9", "S3_ENDPOINT": "obs.example.com", "CACHE_HOME": "/c"}
    node_environ = plan.node_environment(environ, node, PATHS, "/code")

    assert {
        name: node_environ[name]
        for name in node_environ
        if name.startswith(("DLS_", "BATCH_", "USER_"))
    } == {
        "DLS_TASK_INDEX": "1",
        "DLS_LOCAL_CACHE_PATH": "/c",
        "USER_S3_ENDPOINT": "obs.example.com",
        "DLS_TASK_NUMBER": "9",  # the user's own
        "DLS_DATA_URL": "s3://b/d",
        "DLS_TRAIN_URL": "obs://b/m",
        "BATCH_CURRENT_HOST": "b:6666",
        "BATCH_CUSTOM0_HOSTS": "a:6666",
        "BATCH_CUSTOM1_HOSTS": "b:6666",
    }


def test_the_credentials_of_the_entry_do_not_reach_the_ranks():
    """Keys of the store are removed; the user's own variables stay."""
    environ = {**dict.fromkeys(names.STORE_ACCESS, "k3y"), "AWS_SECRET_ACCESS_KEY": "own"}

    node_environ = plan.node_environment(environ, NODE, PATHS, "/code")

    assert "k3y" not in node_environ.values()
    assert node_environ["AWS_SECRET_ACCESS_KEY"] == "own"


def test_secrets_are_masked():
    description = plan.masked(
        Launch(
            processes=(Process("mpirun", ("mpirun",), {"B": "c", "A": "s"}),),
            ranks=1,
            is_everywhere=False,
            files=(File("/f", 0o600, "t"),),
            cwd="/c",
        ),
        NODE._replace(secret_names=("A",)),
    )

    assert description == {
        "role": "head",
        "argv": ["mpirun"],
        "env": {"A": "***", "B": "c"},
        "files": [{"path": "/f", "mode": "0600", "text": "t"}],
        "cwd": "/c",
    }
    assert json.loads(json.dumps(description)) == description


def test_srun_on_the_head_starts_the_wrappers_of_all_nodes():
    """Variables are passed by name only; per-node variables and secrets are not passed."""
    node = NODE._replace(launcher="srun", slots=2, env_names=("A",), secret_names=("TOKEN",))
    environment = {"PWD": "/code", "A": "b", "TOKEN": "t", "MA_X": "1", "HOME": "/h", "B": "c"}
    launch_plan = plan.make(site(node, environment), ("x.py", "--lr", "1"))
    worker = plan.make(site(node._replace(node=1), environment), ("x.py",))

    (process,) = launch_plan.processes
    assert process.argv == (
        *("srun", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--distribution=block"),
        *("--overlap", "--mpi=pmix", "--export=CLOUDJOB_NODE_DIR,A,MA_X", "--input=none"),
        *("--quiet", "--kill-on-bad-exit=0", "--wait=0", "--chdir=/"),
        *("/usr/bin/python3", "-I", "/e.pyz", "--rank", "--"),
        *("/usr/bin/python", "/e.pyz", "--script", "x.py", "--lr", "1"),
    )
    assert process.env == {name: value for name, value in environment.items() if name != "TOKEN"}
    assert (launch_plan.ranks, worker.ranks, worker.processes) == (4, 4, ())
