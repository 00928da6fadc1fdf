"""Site settings: accounts, QOS and their limits, and features and devices of nodes.

This Slurm has a slurmdbd with a database, as sites do.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

import pytest

from tests.e2e_slurm.conftest import poll
from tests.e2e_slurm.test_jobs import PRELUDE
from tests.support import slurm
from tests.support.slurm import Slurm

WAITS_FOR_GO = PRELUDE + "write_result(f'up-{rank}')\nawait_file('go')\n"
RESOURCE_OPTIONS = """\
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


@contextlib.contextmanager
def with_accounts() -> Iterator[Slurm]:
    """Start Slurm with accounts: root's is lab, and its QOS ``single`` allows one job at a time."""
    why = slurm.missing(*slurm.ACCOUNTING)
    if why and os.environ.get("CLOUDJOB_REQUIRE_ALL") == "1":
        pytest.fail(why)
    if why:
        pytest.skip(why)
    with Slurm(nodes=2, has_accounting=True, is_confined=slurm.can_confine()) as value:
        value.run("sacctmgr", "-i", "add", "account", "lab")
        value.run("sacctmgr", "-i", "add", "qos", "single", "MaxJobsPerUser=1")
        value.run("sacctmgr", "-i", "add", "qos", "one", "MaxSubmitJobsPerUser=1")
        value.run("sacctmgr", "-i", "add", "qos", "staff")
        allowed = ("qos=normal,single,one", "defaultqos=normal")
        value.run("sacctmgr", "-i", "add", "user", "root", "account=lab", *allowed)
        yield value


@pytest.fixture(scope="session")
def cluster():
    """A cluster with accounts for all tests of this file."""
    with with_accounts() as value:
        yield value


def test_slurm_gives_a_job_the_resources_that_it_requests(cloud):
    """Slurm's record of the job has all requested values, and the rank sees its GPU."""
    cloud.write("job.yaml", RESOURCE_OPTIONS)
    cloud.write(
        "train.py",
        PRELUDE + "write_result(f'up-{rank}', [os.environ.get(n) for n in ('CUDA_VISIBLE_DEVICES',"
        " 'MA_NUM_GPUS')])\nawait_file('go')\n",
    )
    job = cloud.detach("--config", "job.yaml", "train.py")
    cloud.await_results("up-0")
    text = cloud.slurm.run("scontrol", "--oneliner", "--details", "show", "job", cloud.number(job))
    (cloud.results / "go").touch()
    done = cloud.run("wait", job)

    fields = dict(re.findall(r"(\S+?)=(\S*)", text))
    names = ("Partition", "Account", "QOS", "TimeLimit", "Features", "ExcNodeList", "Comment")
    assert [fields[name] for name in names] == [
        *("low", "lab", "normal", "00:07:00", "common&only-n2", "n1", "mine")
    ]
    assert (fields["NodeList"], fields["CPUs/Task"], fields["MinMemoryNode"]) == ("n2", "2", "512M")
    assert fields["GRES"] == "gpu:1(IDX:0),nvme(CNT:1)"
    assert (cloud.results / "up-0").read_text() == str(["0", "1"])
    assert done.code == 0, done


@pytest.mark.skipif(not slurm.can_confine(), reason="this machine has no cgroups for memory")
def test_a_rank_that_used_too_much_memory_is_reported_with_the_limit(cloud):
    """The kernel's counter confirms a lack of memory, and Slurm's log names the key to raise."""
    cloud.write("job.yaml", "slurm: {account: lab, memory_gib: 0.3}\n")
    cloud.write("train.py", "kept = []\nwhile True:\n    kept.append(b'x' * (1 << 24))\n")
    done = cloud.submit("--config", "job.yaml", "train.py")
    message = cloud.status(done.job)["failure"]["message"]

    assert done.code == 137, done
    assert re.fullmatch(
        r"killed by SIGKILL: out of memory \(limit \d+ MiB; rank 0: \d+ MiB\)"
        r" \(the job used more on n[12] than Slurm allows it;"
        r" slurm.memory_gib requests more\)",
        message,
    )


def test_a_job_at_the_limit_of_its_qos_waits_and_is_reported(cloud):
    """The status has Slurm's reason and our explanation; the job runs after the other one."""
    cloud.write("job.yaml", "slurm: {account: lab, qos: single}\n")
    cloud.write("train.py", WAITS_FOR_GO)
    first = cloud.detach("--config", "job.yaml", "train.py")
    cloud.await_results("up-0")
    second = cloud.detach("--config", "job.yaml", "train.py")
    reason = "PENDING (QOSMaxJobsPerUserLimit: its QOS has reached a limit)"
    poll(lambda: cloud.status(second)["native_state"] == reason, lambda: cloud.logs())
    (cloud.results / "go").touch()

    assert [cloud.run("wait", job).code for job in (first, second)] == [0, 0]


def test_a_job_beyond_the_limit_of_its_qos_is_refused_with_what_to_do(cloud):
    """The message mentions time limits, but the number of jobs is the limit."""
    cloud.write("job.yaml", "slurm: {account: lab, qos: one, sbatch: [--hold]}\n")
    cloud.write("train.py", "")
    job = cloud.detach("--config", "job.yaml", "train.py")
    done = cloud.submit("--config", "job.yaml", "train.py")
    cloud.run("cancel", job)

    assert done.code == 5, done
    assert "QOSMaxSubmitJobPerUserLimit" in done.err
    assert "hint: your QOS or account allows no more jobs at once" in done.err


@pytest.mark.parametrize(
    ("options", "message"),
    [("account: nobodys", "Invalid account or account/partition"), ("qos: staff", "Invalid qos")],
)
def test_an_account_or_qos_of_others_is_refused_with_what_to_do(cloud, options, message):
    """The error has Slurm's message, and the command that lists the user's own values."""
    cloud.write("job.yaml", f"slurm: {{{options}}}\n")
    cloud.write("train.py", "")
    done = cloud.submit("--config", "job.yaml", "train.py")

    assert done.code == 5, done
    assert message in done.err
    assert "hint: sacctmgr show assoc user=$USER" in done.err
    assert list(cloud.home.glob("slurm/*")) == []
