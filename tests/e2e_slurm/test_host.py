"""A remote login node: everything goes through one ssh connection, without shared disks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e_slurm.test_jobs import PRELUDE, SAVES_ON_SIGTERM, SIZE

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
def remote(cloud, cluster):
    """The command line of a laptop whose ssh reaches ``login``, where HOME is another folder."""
    folder = cloud.folder / "ssh"
    home = cloud.folder / "far home"
    for path in (folder, home):
        path.mkdir()
    for name in ("key", "host-key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
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


def remote_folder(remote, job: str) -> Path:
    """Return the folder of a job on the login node."""
    return remote.folder / "far home" / ".cloudjob" / "slurm" / job


def test_a_job_runs_on_another_host_and_its_outputs_are_copied_back(remote):
    """Code and secrets are sent to the host; the record, log and outputs are copied back."""
    remote.environ["TOKEN"] = "s3cr3t"
    remote.write(
        "train.py",
        PRELUDE
        + """
with open(os.path.join(os.environ["MODEL"], f"of {rank}.txt"), "w") as file:
    file.write(os.environ["TOKEN"])
print("hello", rank)
sys.exit(4 if rank == 2 else 0)
""",
    )
    options = ("--config", "job.yaml", "--secret", "TOKEN", "--output", "MODEL=")
    done = remote.submit(*SIZE, *options, "train.py")
    status = remote.status(done.job)
    fetched = remote.folder / "fetched"
    got = remote.run("outputs", done.job, "--to", str(fetched))
    log = remote.run("logs", done.job)
    remote_names = {path.name for path in remote_folder(remote, done.job).iterdir()}
    removed = remote.run("rm", "--force", done.job)

    assert done.code == 4, done
    assert (status["state"], status["failure"]["rank"]) == ("FAILED", 2)
    assert got.code == 0, got
    assert sorted(path.name for path in fetched.rglob("*.txt")), got
    assert {path.read_text() for path in fetched.rglob("*.txt")} == {"s3cr3t"}
    assert b"[2] hello 2\n" in log.out
    assert {"job.sh", "state", "code", "layers"} <= remote_names
    assert not {"env", "ssh-key"} & remote_names
    assert removed.code == 0, removed
    assert not remote_folder(remote, done.job).exists()


def test_a_job_on_another_host_can_be_followed_and_cancelled(remote):
    remote.write("train.py", SAVES_ON_SIGTERM)
    job = remote.detach("--config", "job.yaml", *SIZE, "train.py")
    remote.await_results("up-3")
    listed = json.loads(remote.run("list", "--json").out)
    state = remote.status(job)["state"]
    remote.run("cancel", job)
    done = remote.run("wait", job)

    assert state == "RUNNING"
    assert [item["state"] for item in listed] == ["RUNNING"]
    assert done.code == 143, done
    assert remote.status(job)["state"] == "CANCELLED"
    assert len(list(remote.results.glob("saved-*"))) == 4


def test_a_command_runs_on_a_node_behind_another_host(remote):
    remote.write("train.py", PRELUDE + 'write_result(f"up-{rank}", "")\nawait_file("go")\n')
    job = remote.detach("--config", "job.yaml", "--nodes", "2", "train.py")
    remote.await_results("up-0", "up-1")
    program = 'cat; printf "%s|" "$OMPI_COMM_WORLD_RANK" "it\'s $(( 40 + 2 ))!"; exit 7'

    words = ("exec", "--node", "1", job, "sh", "-c", program)
    command = remote.start(*words, stdin=subprocess.PIPE)
    out, err = command.communicate(b"in\xff", timeout=60)

    assert (command.returncode, out) == (7, b"in\xff1|it's 42!|"), err
    (remote.results / "go").touch()
    assert remote.run("wait", job).code == 0


def test_an_unreachable_host_is_reported_in_one_line(remote):
    remote.write("train.py", "")
    remote.write("job.yaml", "slurm: {host: nowhere.invalid}\n")
    done = remote.submit("--config", "job.yaml", "train.py")

    assert done.code == 5, done
    assert "error: connecting to nowhere.invalid with ssh: " in done.err
    assert "hint: try: ssh -o BatchMode=yes nowhere.invalid sinfo" in done.err
    assert "Traceback" not in done.err
    assert {path.name for path in (remote.home / "store").iterdir()} <= {"claims", "jobs", "layers"}
