"""Several machines that share one state folder, as login nodes share home folders on NFS."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.conftest import run_dir_of
from tests.support.machines import Machine, NewMachine, limited_files, new_boot

LOGIN1 = "login1"
NUMBERS = itertools.count()
JOB = """
write_result(os.environ["STARTED"])
await_file("go", 300)
"""


@pytest.fixture
def machine() -> Iterator[NewMachine]:
    """Return a function that starts another machine."""
    machines: list[Machine] = []

    def start(*arguments, **options) -> Machine:
        machines.append(Machine(*arguments, **options))
        return machines[-1]

    yield start
    for each in machines:
        each.stop()


@pytest.fixture
def on(cloud, tmp_path: Path, machine: NewMachine):
    """Return a function that moves the command line to another machine with the same files."""
    machines: dict[str, Machine] = {}

    def move(name: str) -> Machine:
        if name not in machines:
            machines[name] = machine(name, new_boot(tmp_path))
        cloud.prefix = machines[name].prefix
        return machines[name]

    return move


def submit(cloud) -> str:
    name = f"started-{next(NUMBERS)}"
    job = cloud.detach("-e", f"STARTED={name}", cloud.script(JOB))
    cloud.await_results(name)
    return job


@pytest.mark.parametrize("are_locks_shared", [True, False])
def test_a_job_of_another_machine_is_never_marked_as_failed(cloud, on, poll, are_locks_shared):
    on(LOGIN1)
    job = submit(cloud)
    on("login2")
    if not are_locks_shared:
        cloud.environ.update(limited_files(cloud.home, "local-locks"))

    status = cloud.status(job)
    listed = json.loads(cloud.cli("list", "--json").out)

    state = "RUNNING" if are_locks_shared else "UNKNOWN"
    assert (status["state"], status["native_state"]) == (state, "runs on login1")
    assert [each["native_state"] for each in listed] == ["runs on login1"]
    (cloud.results / "go").touch()
    poll(lambda: cloud.status(job)["state"] == "SUCCEEDED", "the end of the job")


def test_a_command_names_the_machine_of_a_job_that_it_cannot_reach(cloud, on):
    on(LOGIN1)
    job = submit(cloud)
    on("login2")
    of_login2 = limited_files(cloud.home, "local-locks")
    cloud.environ.update(of_login2)

    for command in ("cancel", "wait", "rm", "logs -f", "attach"):
        done = cloud.cli(*command.split(), job)

        assert done.code == 5, done
        error, hint = done.err.decode().splitlines()[-2:]
        assert re.fullmatch(f"error: .* {job}: it runs on login1, whose processes .*", error), done
        assert hint.startswith("hint: run the command on login1; ")
    (cloud.results / "go").touch()
    on(LOGIN1)
    for name in of_login2:
        del cloud.environ[name]
    done = cloud.cli("wait", job)
    assert done.code == 0, done


def test_a_job_is_cancelled_on_its_machine_and_removed_from_the_other(cloud, on, poll):
    on(LOGIN1)
    job = submit(cloud)
    on("login2")
    refused = cloud.cli("cancel", job)
    on(LOGIN1)
    cancelled = cloud.cli("cancel", job)
    on("login2")
    removed = cloud.cli("rm", job)

    assert (refused.code, cancelled.code, removed.code) == (5, 0, 0), (refused, cancelled, removed)
    assert b"cancelling " in refused.err


def test_a_job_of_a_machine_that_no_longer_exists_is_removed_by_force(cloud, on, poll):
    on(LOGIN1)
    job = submit(cloud)
    on(LOGIN1).stop()
    on("login2")

    assert cloud.status(job)["native_state"] == "runs on login1"
    assert cloud.cli("rm", job).code == 5
    done = cloud.cli("rm", "--force", job)

    assert done.code == 0, done
    assert json.loads(cloud.cli("list", "--json").out) == []
    assert not list((cloud.home / "running").iterdir())
    shutil.rmtree(run_dir_of(job))


def test_a_container_with_the_same_home_sees_its_jobs_and_others_end_them(
    cloud, machine: NewMachine, poll
):
    """The processes of a container are visible outside it, but not in another container."""
    first, second = machine("first"), machine("second")
    cloud.prefix = first.prefix
    jobs = [submit(cloud), submit(cloud)]
    cloud.prefix = second.prefix
    status = cloud.status(jobs[0])
    refused = cloud.cli("cancel", jobs[0])
    cloud.prefix = ()
    cancelled = cloud.cli("cancel", jobs[0])
    first.stop()
    cloud.prefix = second.prefix

    assert (status["state"], status["native_state"]) == ("RUNNING", "runs on first")
    assert refused.code == 5, refused
    assert b"it runs on first" in refused.err
    assert cancelled.code == 0, cancelled
    poll(lambda: cloud.status(jobs[1])["state"] == "FAILED", "the end of the container's job")


def test_a_machine_knows_its_jobs_when_its_name_has_changed(cloud, on, poll):
    login1 = on(LOGIN1)
    job = submit(cloud)
    cloud.prefix = (*login1.prefix, "sh", "-c", 'hostname renamed; exec "$@"', "sh")

    assert cloud.status(job)["native_state"] == "running"
    assert cloud.cli("cancel", job).code == 0


def test_a_submit_of_another_machine_is_not_taken_for_a_killed_one(cloud, on, poll):
    on(LOGIN1)
    submit_forever = (
        "import sys, time; from pathlib import Path; from cloudjob.home import scratch_folders\n"
        "with scratch_folders.new(Path(sys.argv[1]), 'job-1'):\n"
        "    print('ready', flush=True); time.sleep(300)"
    )
    folder = cloud.home / "packing"
    command = [*cloud.prefix, cloud.python, "-c", submit_forever, folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        on("login2")
        cloud.environ.update(limited_files(cloud.home, "local-locks"))

        assert cloud.cli("list").code == 0
        assert [path.name for path in folder.iterdir()] == ["job-1"]
        process.kill()
