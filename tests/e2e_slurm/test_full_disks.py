"""Jobs whose home is full, out of quota or read-only when they end: a failure is never a success.

The home is a small disk of its own, mounted before the nodes exist, so that all of them see it.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e_slurm.conftest import Cloud, poll
from tests.e2e_slurm.test_jobs import PRELUDE
from tests.support import slurm
from tests.support.slurm import Slurm

pytestmark = pytest.mark.long

# Each breaks the disk at $CLOUDJOB_HOME.
FAULTS = {
    "no space": "dd if=/dev/zero of=filler bs=64k 2>/dev/null; dd if=/dev/zero of=rest bs=1 || :",
    "no inodes": "i=0; while : >many-$i; do i=$((i + 1)); done",
    # A disk with open files cannot be remounted.
    "read-only": "chattr -R +i home",
}


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    """A disk of 24 MB with 2000 inodes."""
    why = slurm.missing()
    if why and os.environ.get("CLOUDJOB_REQUIRE_ALL") == "1":
        pytest.fail(why)
    if why:
        pytest.skip(why)
    # Not in /tmp, as each node has its own.
    folder = Path(tempfile.mkdtemp(prefix="cj-small-", dir="/var/tmp"))
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m,nr_inodes=2000", "small", folder], check=True
    )
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)
    folder.rmdir()


@pytest.fixture(scope="module")
def cluster(disk: Path) -> Iterator[Slurm]:
    """A cluster whose nodes see the small disk."""
    with Slurm(nodes=2) as value:
        yield value


@pytest.fixture
def full(cloud: Cloud, disk: Path) -> Iterator[Cloud]:
    """The command line with its home on the small disk, which is repaired after the test."""
    cloud.environ["CLOUDJOB_HOME"] = str(disk / "home")
    yield cloud
    repair(disk)
    subprocess.run(["rm", "-rf", disk / "home"], check=True)


def repair(disk: Path) -> None:
    """Make the disk writable again."""
    subprocess.run(["chattr", "-R", "-i", disk], check=True)
    for path in disk.iterdir():
        if path.name.startswith(("filler", "rest", "many-")):
            path.unlink()


def books(cloud: Cloud, number: str) -> tuple[str, str]:
    """Return the state and the exit code of a job in Slurm's own books."""
    text = cloud.slurm.run("scontrol", "--oneliner", "show", "job", number)
    fields = dict(re.findall(r"(\S+?)=(\S*)", text))
    return fields["JobState"], fields["ExitCode"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("size", [1, 2])
def test_a_job_that_fails_while_its_home_is_full_has_failed(full, disk, fault, size):
    """Slurm's books show the failure as well, so that jobs that depend on it do not run."""
    text = f"subprocess.run({FAULTS[fault]!r}, shell=True, cwd={str(disk)!r}, stderr=-3)"
    full.write(
        "train.py",
        PRELUDE + f"import subprocess\nawait_file('go')\nif rank == 0:\n    {text}\n    sys.exit(7)"
        "\nawait_file('never')\n",
    )
    job = full.detach("--nodes", str(size), "train.py")
    number = (disk / "home" / "slurm" / job / "id").read_text().strip()
    after = full.slurm.run(
        *("sbatch", "--parsable", f"--dependency=afterok:{number}", "--output=/dev/null"),
        *("--wrap", f"touch {full.results}/after"),
    ).strip()
    (full.results / "go").touch()
    poll(lambda: books(full, number)[0] not in ("PENDING", "RUNNING", "COMPLETING"), full.logs)
    state = books(full, number)
    never = "PENDING DependencyNeverSatisfied\n"
    poll(lambda: full.slurm.run("squeue", "-h", "-j", after, "-o", "%T %r") == never, full.logs)
    repair(disk)
    done = full.run("wait", job)
    status = full.status(job)

    assert state == ("FAILED", "7:0"), full.logs()
    assert not (full.results / "after").exists()
    assert done.code == 7, done
    assert (status["state"], status["exit_code"]) == ("FAILED", 7)
    message = status["failure"]["message"]
    assert "and could not note it in the job's folder" in message, message


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("size", [1, 2])
def test_a_job_whose_home_is_full_before_it_starts_ends_and_has_failed(full, disk, fault, size):
    """Nothing waits for what could not be written, and nothing is started again without end."""
    full.write("job.yaml", "slurm: {requeue: true, sbatch: [--hold]}\nretries: 1\n")
    full.write("train.py", "")
    job = full.detach("--config", "job.yaml", "--nodes", str(size), "train.py")
    number = (disk / "home" / "slurm" / job / "id").read_text().strip()
    subprocess.run(["sh", "-c", FAULTS[fault]], cwd=disk, stderr=subprocess.DEVNULL, check=False)
    full.slurm.run("scontrol", "release", number)
    poll(lambda: books(full, number)[0] not in ("PENDING", "RUNNING", "COMPLETING"), full.logs)
    state, code = books(full, number)
    repair(disk)
    done = full.run("wait", job)
    status = full.status(job)

    assert state == "FAILED", full.logs()
    assert code != "0:0"
    assert done.code != 0, done
    assert status["state"] == "FAILED"
    assert "full, out of quota or read-only" in status["failure"]["message"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_success_that_cannot_be_noted_is_none(full, disk, fault):
    """Slurm's books and ours agree."""
    full.write(
        "train.py",
        f"import subprocess\nsubprocess.run({FAULTS[fault]!r}, shell=True, cwd={str(disk)!r},"
        " stderr=-3)\n",
    )
    job = full.detach("--nodes", "2", "train.py")
    number = (disk / "home" / "slurm" / job / "id").read_text().strip()
    poll(lambda: books(full, number)[0] not in ("PENDING", "RUNNING", "COMPLETING"), full.logs)
    state, code = books(full, number)
    repair(disk)
    status = full.status(job)

    assert (state, code) == ("FAILED", "125:0")
    assert (status["state"], status["exit_code"]) == ("FAILED", 125)
    assert "could not note it in the job's folder" in status["failure"]["message"]


def test_a_full_disk_of_a_node_is_named(full):
    """There, the node has only empty folders, which it removes again."""
    folder = full.folder / "scratch"
    folder.mkdir()
    full.slurm.run("mount", "-t", "tmpfs", "-o", "size=4k", "tiny", str(folder), node="n1")
    full.slurm.run("sh", "-c", f"head -c 4096 /dev/zero >{folder}/filler", node="n1")
    full.write("job.yaml", f"slurm: {{nodelist: n1, scratch: {folder}}}\n")
    full.write("train.py", "")
    done = full.submit("--config", "job.yaml", "train.py")
    left = full.slurm.run("ls", str(folder), node="n1").split()
    full.slurm.run("umount", str(folder), node="n1")

    assert done.code == 125, done
    assert f"writing to {folder}/cloudjob-" in done.err
    assert "on n1 failed: is that disk full?" in done.err
    assert left == ["filler"]
