"""Jobs that Slurm's controller no longer knows, but its accounting database does.

A controller that has lost its state no longer knows the users' accounts either, so this test has
its own cluster.
"""

from __future__ import annotations

import json

import pytest

from tests.e2e_slurm.conftest import poll
from tests.e2e_slurm.test_accounting import WAITS_FOR_GO, with_accounts
from tests.support.slurm import Slurm

pytestmark = pytest.mark.long


@pytest.fixture
def cluster():
    """A cluster with accounts."""
    with with_accounts() as value:
        yield value


def test_accounting_has_the_end_of_a_job_that_slurm_has_forgotten(cloud, cluster):
    """One job died with its node; the other was cancelled by hand before it started."""
    cloud.write("train.py", WAITS_FOR_GO)
    cloud.write("job.yaml", "slurm: {account: lab, nodelist: n2}\n")
    killed = cloud.detach("--config", "job.yaml", "train.py")
    cloud.await_results("up-0")
    cloud.write("job.yaml", "slurm: {account: lab, sbatch: [--hold]}\n")
    held = cloud.detach("--config", "job.yaml", "train.py")
    numbers = {job: cloud.number(job) for job in (killed, held)}
    cluster.run("scancel", numbers[held])
    cluster.kill_node("n2")
    for number in numbers.values():
        poll(lambda number=number: ended(cluster, number), cloud.logs)
    cluster.stop_controller()
    cluster.start_controller(forgets=True)
    cluster.start_node("n2")
    cluster.await_idle()
    forgotten = cluster.run("scontrol", "show", "job", numbers[killed], is_checked=False)
    states = {job: cloud.status(job) for job in numbers}

    assert forgotten == ""
    assert (states[killed]["state"], states[killed]["cause"]) == ("FAILED", "platform")
    assert states[killed]["failure"]["message"].startswith("n2 has failed")
    assert (states[held]["state"], states[held]["cause"]) == ("CANCELLED", "cancelled")
    assert states[killed]["ended_at"] is not None
    assert cloud.run("wait", killed).code != 0
    assert {item["job"] for item in json.loads(cloud.run("list", "--json").out)} == set(numbers)


def ended(cluster: Slurm, number: str) -> bool:
    """Whether the database has recorded the end of a job."""
    output = cluster.run("sacct", "-n", "-X", "-P", "-j", number, "-o", "State,End")
    return "|" in output and "Unknown" not in output
