"""What a site decides: accounts, QOS and their limits, features and devices of nodes, a database.

This Slurm has a slurmdbd and its database, as sites have.
"""

from __future__ import annotations

import json
import os
import re

import pytest

from tests import slurm
from tests.e2e_slurm.conftest import poll
from tests.e2e_slurm.test_jobs import PRELUDE
from tests.slurm import Slurm

WAITS = PRELUDE + "leave(f'up-{rank}')\nawait_file('go')\n"
ASKS = """\
timeout_min: 9
slurm:
  partition: low
  account: lab
  qos: normal
  constraint: common&only-n2
  gres: nvme:1
  gpus: 1
  cpus_per_rank: 2
  memory_gib: 0.5
  time_min: 7
  exclude: n1
  sbatch: [--comment=mine]
"""


@pytest.fixture(scope="module")
def cluster():
    """A controller, two nodes, and accounts: root's is lab, with a QOS for one job at a time."""
    why = slurm.missing(*slurm.ACCOUNTING)
    if why and os.environ.get("CLOUDJOB_REQUIRE_ALL") == "1":
        pytest.fail(why)
    if why:
        pytest.skip(why)
    with Slurm(nodes=2, has_accounting=True) as value:
        value.run("sacctmgr", "-i", "add", "account", "lab")
        value.run("sacctmgr", "-i", "add", "qos", "single", "MaxJobsPerUser=1")
        value.run("sacctmgr", "-i", "add", "qos", "staff")
        allowed = ("qos=normal,single", "defaultqos=normal")
        value.run("sacctmgr", "-i", "add", "user", "root", "account=lab", *allowed)
        yield value


def test_what_a_job_asks_of_its_site_is_what_slurm_gives(cloud):
    """Partition, account, QOS, time, features, devices, processors, memory; ranks see theirs."""
    cloud.write("job.yaml", ASKS)
    cloud.write(
        "train.py",
        PRELUDE + "leave(f'up-{rank}', [os.environ.get(n) for n in ('CUDA_VISIBLE_DEVICES',"
        " 'MA_NUM_GPUS')])\nawait_file('go')\n",
    )
    job = cloud.detached("--config", "job.yaml", "train.py")
    cloud.await_left("up-0")
    said = cloud.slurm.run("scontrol", "--oneliner", "--details", "show", "job", cloud.number(job))
    (cloud.results / "go").touch()
    done = cloud.run("wait", job)

    given = dict(re.findall(r"(\S+?)=(\S*)", said))
    names = ("Partition", "Account", "QOS", "TimeLimit", "Features", "ExcNodeList", "Comment")
    assert [given[name] for name in names] == [
        *("low", "lab", "normal", "00:07:00", "common&only-n2", "n1", "mine")
    ]
    assert (given["NodeList"], given["CPUs/Task"], given["MinMemoryNode"]) == ("n2", "2", "512M")
    assert given["GRES"] == "gpu:1(IDX:0),nvme(CNT:1)"
    assert (cloud.results / "up-0").read_text() == str(["0", "1"])
    assert done.code == 0, done


def test_a_job_at_the_limit_of_its_qos_waits_and_says_so(cloud):
    """In Slurm's word and ours; it runs when the other one has ended."""
    cloud.write("job.yaml", "slurm: {account: lab, qos: single}\n")
    cloud.write("train.py", WAITS)
    first = cloud.detached("--config", "job.yaml", "train.py")
    cloud.await_left("up-0")
    second = cloud.detached("--config", "job.yaml", "train.py")
    reason = "PENDING (QOSMaxJobsPerUserLimit: its QOS has reached a limit)"
    poll(lambda: cloud.status(second)["native_state"] == reason, lambda: cloud.words())
    (cloud.results / "go").touch()

    assert [cloud.run("wait", job).code for job in (first, second)] == [0, 0]


@pytest.mark.parametrize(
    ("asked", "said"),
    [("account: nobodys", "Invalid account or account/partition"), ("qos: staff", "Invalid qos")],
)
def test_an_account_or_qos_of_others_is_refused_with_what_to_do(cloud, asked, said):
    """Slurm's own words, and the command that lists what is one's own."""
    cloud.write("job.yaml", f"slurm: {{{asked}}}\n")
    cloud.write("train.py", "")
    done = cloud.submit("--config", "job.yaml", "train.py")

    assert done.code == 5, done
    assert said in done.err
    assert "hint: sacctmgr show assoc user=$USER" in done.err
    assert list(cloud.home.glob("slurm/*")) == []


def test_the_database_says_how_a_job_ended_that_slurm_has_forgotten(cloud, cluster):
    """One died with its node, and one was cancelled by hand before it began."""
    cloud.write("train.py", WAITS)
    cloud.write("job.yaml", "slurm: {account: lab, nodelist: n2}\n")
    killed = cloud.detached("--config", "job.yaml", "train.py")
    cloud.await_left("up-0")
    cloud.write("job.yaml", "slurm: {account: lab, sbatch: [--hold]}\n")
    held = cloud.detached("--config", "job.yaml", "train.py")
    numbers = {job: cloud.number(job) for job in (killed, held)}
    cluster.run("scancel", numbers[held])
    cluster.kill_node("n2")
    for number in numbers.values():
        poll(lambda number=number: ended(cluster, number), cloud.words)
    cluster.stop_controller()
    cluster.start_controller(forgets=True)
    cluster.start_node("n2")
    cluster.await_idle()
    forgotten = cluster.run("scontrol", "show", "job", numbers[killed], is_checked=False)
    states = {job: cloud.status(job) for job in numbers}

    assert forgotten == ""
    assert (states[killed]["state"], states[killed]["cause"]) == ("FAILED", "platform")
    assert states[killed]["failure"]["message"].startswith("a node has failed")
    assert (states[held]["state"], states[held]["cause"]) == ("CANCELLED", "cancelled")
    assert states[killed]["ended_at"] is not None
    assert cloud.run("wait", killed).code != 0
    assert {item["job"] for item in json.loads(cloud.run("list", "--json").out)} == set(numbers)


def ended(cluster: Slurm, number: str) -> bool:
    """Whether the database has the end of a job."""
    said = cluster.run("sacct", "-n", "-X", "-P", "-j", number, "-o", "State,End")
    return "|" in said and "Unknown" not in said
