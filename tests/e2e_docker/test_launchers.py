"""Launchers in real containers: those that need no more than the base has."""

from __future__ import annotations

import json
import textwrap

import pytest

from jobentry.contract.launchers import LAUNCHERS

pytestmark = pytest.mark.docker

NAMES = (
    *("mpirun", "python", "command", "pytorch-modelarts"),
    *("tensorflow", "tensorflow-ps", "rank-table"),
)
# A parameter server of TensorFlow's knows no end.
STAYS = """\
import sys, time
if sys.argv[3:5] == ["--job_name", "ps"]:
    time.sleep(600)
"""
SAY = """\
import json, os, sys
rank = next(os.environ[n] for n in ("CLOUDJOB_RANK", "OMPI_COMM_WORLD_RANK") if n in os.environ)
print(json.dumps([rank, os.environ["VC_TASK_INDEX"], sys.argv[1:], os.environ["X"], os.getcwd()]))
"""


@pytest.fixture(params=NAMES)
def launcher(request):
    """The name of a launcher."""
    return request.param


@pytest.fixture
def submit(cloud, launcher):
    """Submit a script with the launcher on two nodes, as many ranks on each as it has room for."""
    ranks = "1" if LAUNCHERS[launcher].is_one_a_node else "2"

    def run(text: str, *words: str):
        cloud.script(STAYS + textwrap.dedent(text))
        extra = ()
        if launcher == "rank-table":
            devices = [f"10.0.0.{node} 0=192.168.0.{node} 1=192.168.1.{node}" for node in (1, 2)]
            table = f"mindspore: {{device_target: Ascend, devices: {devices}}}\n"
            (cloud.source / "job.yaml").write_text(table)
            extra = ("--config", "job.yaml")
        program = ("python3", "train.py") if launcher == "command" else ("train.py",)
        size = ("--nodes", "2", "--procs-per-node", ranks, "--launcher", launcher)
        head = ("submit", "--backend", "docker", *extra, *size, "-e", "X=a;\n'b")
        return cloud.run(*head, *program, *words)

    return run


def test_each_rank_has_what_the_job_says(cloud, submit, launcher):
    """Its number, node, arguments, variables, folder and log."""
    done = submit(SAY, "--lr", "a b", ":", "")

    assert done.code == 0, done
    slots = 1 if LAUNCHERS[launcher].is_one_a_node else 2
    lines = sorted(done.out.splitlines())
    assert len(lines) == 2 * slots, done
    for number, line in enumerate(lines):
        prefix, _, text = line.partition(b" ")
        rank, node, args, value, folder = json.loads(text)
        assert (prefix, int(rank), int(node)) == (b"[%d]" % number, number, number // slots)
        assert args[-4:] == ["--lr", "a b", ":", ""]
        assert value == "a;\n'b"
        assert folder == "/home/ma-user/modelarts/user-job-dir/code"


def test_a_failing_rank_ends_the_job(cloud, submit, launcher):
    """With its exit code, node and rank."""
    done = submit(
        """\
        import os, sys, time
        if os.environ["VC_TASK_INDEX"] == "1":
            sys.exit(9)
        time.sleep(600)
        """
    )

    assert done.code == 9, done
    failure = cloud.status(done.job)["failure"]
    assert (failure["node"], failure["exit_code"]) == (1, 9)
