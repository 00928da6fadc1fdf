"""`cloudjob profile` shows where a rank spends its time, and disturbs none."""

from __future__ import annotations

import pytest

RANKS = ("--nodes", "2", "--procs-per-node", "1")
SCRIPT = """
from mpi4py import MPI
comm = MPI.COMM_WORLD
def augment():
    return sum(i * i for i in range(20_000))
def step():
    if rank == 1:
        for _ in range(20): augment()
    comm.Barrier()
def main():
    while not comm.allreduce(os.path.exists(f"{results}/end"), op=MPI.LOR):
        step()
        write_result(f"up-{rank}")
main()
"""


@pytest.fixture
def job(cloud):
    """A job with two ranks, of which the second computes; it is cancelled at the end."""
    job_id = cloud.detach(*RANKS, cloud.script(SCRIPT))
    cloud.await_results("up-0", "up-1")
    yield job_id
    cloud.cli("cancel", "--now", job_id)


def test_a_profile_is_a_page_with_the_calls_of_the_rank(cloud, job, tmp_path):
    page = tmp_path / "profile.html"

    done = cloud.cli("profile", job, "--rank", "1", "--seconds", "6", "-o", str(page))

    assert done.code == 0, done
    assert done.out.decode().strip() == str(page)
    text = page.read_text()
    assert f"<h1>{job}, rank 1 on node 1</h1>" in text
    assert "augment() at job.py:" in text
    assert "step() at job.py:" in text
    assert "neither stopped nor signalled" in text
    # The rank of the other node waits for this one.
    other = cloud.cli("profile", job, "--seconds", "1", "-o", str(page))
    assert other.code == 0, other
    assert "waits for other ranks" in other.err.decode()
    assert "rank 0 on node 0" in page.read_text()
    (cloud.results / "end").touch()
    assert cloud.cli("wait", job).code == 0


def test_a_job_that_ends_meanwhile_has_a_shorter_profile(cloud, poll, job, tmp_path):
    page = tmp_path / "profile.html"
    profiling = cloud.start("profile", job, "--seconds", "600", "-o", str(page))
    poll(lambda: b"looking at rank 0" in profiling.err, "the begin of a profile")
    (cloud.results / "end").touch()

    done = profiling.end()

    # It may also end before the first piece of the profile has arrived.
    assert done.code in (0, 2, 5), done
    assert (done.code == 0) == page.exists()
    assert b"Traceback" not in done.err
    assert cloud.cli("wait", job).code == 0
    refused = cloud.cli("profile", job)
    assert refused.code == 2
    assert f"profiling rank 0 of {job}: it is SUCCEEDED" in refused.err.decode()


REFUSED = {
    ("--rank", "2"): "it has 2 ranks",
    ("--seconds", "0"): "for 0 s",
    ("--seconds", "601"): "for 601 s",
}


def test_what_cannot_be_profiled_is_refused(cloud):
    job = cloud.detach(*RANKS, cloud.script("write_result(f'up-{rank}')\nawait_file('end')"))
    cloud.await_results("up-0", "up-1")

    for options, message in REFUSED.items():
        done = cloud.cli("profile", job, *options)

        assert done.code == 2
        assert message in done.err.decode()
        assert b"Traceback" not in done.err
    (cloud.results / "end").touch()
    assert cloud.cli("wait", job).code == 0


def test_secrets_in_names_are_masked(cloud, tmp_path):
    secret = "hunter2hunter2"
    cloud.write("cloudjob.yaml", "secrets: [TOKEN]\n")
    script = f"""
    def work_{secret}():
        while not os.path.exists(f"{{results}}/end"): write_result("up")
    work_{secret}()
    """
    job = cloud.detach(cloud.script(script), env={"TOKEN": secret})
    cloud.await_results("up")
    page = tmp_path / "profile.html"
    try:
        done = cloud.cli("profile", job, "--seconds", "1", "-o", str(page))
    finally:
        cloud.cli("cancel", "--now", job)

    assert done.code == 0, done
    assert "work_***()" in page.read_text()
    assert secret not in page.read_text()
    assert secret.encode() not in done.err
