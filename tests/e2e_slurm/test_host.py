"""A remote login node: everything goes through one ssh connection, without shared disks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e_slurm.test_jobs import PRELUDE, SAVES, SIZE

_SSHD = """\
Port 2222
ListenAddress 127.0.0.1
HostKey {folder}/host-key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
SetEnv SLURM_CONF={conf} HOME={home} PATH=/usr/bin:/bin:/usr/sbin:/sbin
"""
_CLIENT = """\
Host login
    HostName 127.0.0.1
    Port 2222
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known
    StrictHostKeyChecking accept-new
"""


@pytest.fixture
def far(cloud, cluster):
    """The command line of a laptop whose ssh reaches ``login``, where HOME is another folder."""
    folder = cloud.folder / "ssh"
    home = cloud.folder / "far home"
    for path in (folder, home):
        path.mkdir()
    for name in ("key", "host-key"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(words, check=True)
    # SetEnv of sshd accepts no blank in a value, so HOME is a symbolic link without one.
    (cloud.folder / "far").symlink_to(home)
    values = {"folder": folder, "conf": cluster.conf, "home": cloud.folder / "far"}
    (folder / "sshd").write_text(_SSHD.format(**values))
    (folder / "config").write_text(_CLIENT.format(**values))
    ssh = cloud.folder / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F "{folder}/config" "$@"\n')
    ssh.chmod(0o755)
    # A laptop has no Slurm, so PATH contains only ssh and a few basic tools.
    cloud.environ["PATH"] = f"{ssh.parent}:{_without_slurm(cloud.folder / 'tools')}"
    cloud.environ["SLURM_CONF"] = "/nowhere"
    cluster.start_sshd(folder / "sshd")
    cloud.write("job.yaml", "slurm: {host: login, python: /usr/bin/python3}\n")
    yield cloud
    cluster.stop_sshd()


def _without_slurm(folder: Path) -> Path:
    folder.mkdir()
    for name in ("sh", "env", "cat"):
        (folder / name).symlink_to(f"/usr/bin/{name}")
    return folder


def far_folder(far, job: str) -> Path:
    """Return the folder of a job on the login node."""
    return far.folder / "far home" / ".cloudjob" / "slurm" / job


def test_a_job_runs_on_another_host_and_its_outputs_are_copied_back(far):
    """Code and secrets are sent to the host; the record, log and outputs are copied back."""
    far.environ["TOKEN"] = "s3cr3t"
    far.write(
        "train.py",
        PRELUDE
        + """
with open(os.path.join(os.environ["MODEL"], f"of {rank}.txt"), "w") as file:
    file.write(os.environ["TOKEN"])
print("hello", rank)
sys.exit(4 if rank == 2 else 0)
""",
    )
    words = ("--config", "job.yaml", "--secret", "TOKEN", "--output", "MODEL=")
    done = far.submit(*SIZE, *words, "train.py")
    status = far.status(done.job)
    fetched = far.folder / "fetched"
    got = far.run("outputs", done.job, "--to", str(fetched))
    log = far.run("logs", done.job)
    there = {path.name for path in far_folder(far, done.job).iterdir()}
    removed = far.run("rm", "--force", done.job)

    assert done.code == 4, done
    assert (status["state"], status["failure"]["rank"]) == ("FAILED", 2)
    assert got.code == 0, got
    assert sorted(path.name for path in fetched.rglob("*.txt")), got
    assert {path.read_text() for path in fetched.rglob("*.txt")} == {"s3cr3t"}
    assert b"[2] hello 2\n" in log.out
    assert {"job.sh", "state", "code", "layers"} <= there
    assert not {"env", "ssh-key"} & there
    assert removed.code == 0, removed
    assert not far_folder(far, done.job).exists()


def test_a_job_on_another_host_can_be_followed_and_cancelled(far):
    far.write("train.py", SAVES)
    job = far.detached("--config", "job.yaml", *SIZE, "train.py")
    far.await_left("up-3")
    listed = json.loads(far.run("list", "--json").out)
    state = far.status(job)["state"]
    far.run("cancel", job)
    done = far.run("wait", job)

    assert state == "RUNNING"
    assert [item["state"] for item in listed] == ["RUNNING"]
    assert done.code == 143, done
    assert far.status(job)["state"] == "CANCELLED"
    assert len(list(far.results.glob("saved-*"))) == 4


def test_an_unreachable_host_is_reported_in_one_line(far):
    far.write("train.py", "")
    far.write("job.yaml", "slurm: {host: nowhere.invalid}\n")
    done = far.submit("--config", "job.yaml", "train.py")

    assert done.code == 5, done
    assert "error: connecting to nowhere.invalid with ssh: " in done.err
    assert "hint: try: ssh -o BatchMode=yes nowhere.invalid sinfo" in done.err
    assert "Traceback" not in done.err
    assert {path.name for path in (far.home / "store").iterdir()} <= {"claims", "jobs", "layers"}
