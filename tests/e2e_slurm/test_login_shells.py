"""A remote login node whose users have other login shells, with startup files that make trouble.

Each user is a real one, with a home and a shell of its own, and logs in through a real sshd.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e_slurm.conftest import Cloud, poll
from tests.support.slurm import Slurm

pytestmark = pytest.mark.long

_NOISE = "echo Welcome to the cluster; echo Quota: 93% used"
_LOUD = f"{_NOISE}; sh -c 'echo a warning >&2'"
# Login shell -> its startup file, which also runs for a command over ssh.
STARTUP = {
    "bash": (".bashrc", _LOUD),
    "dash": (None, ""),
    "zsh": (".zshenv", _LOUD),
    "tcsh": (".cshrc", _LOUD),
    "fish": (".config/fish/config.fish", _LOUD),
    "ksh": (None, ""),
}
# What else a startup file of bash may do -> whether commands work.
TROUBLE = {
    "reads a line": ("read -r -p 'Project? ' project", True),
    "endless output": ("yes", False),
    "ends with an error": ("echo no licence; exit 3", False),
    "another shell": ("exec /bin/false", False),
}
_SSHD = """\
Port 2222
ListenAddress 127.0.0.1
HostKey {folder}/host-key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
Banner {folder}/banner
PrintMotd yes
SetEnv SLURM_CONF={conf}
Match User cj-forced
    ForceCommand echo This account is for git only
"""
_CLIENT = """\
Host login-*
    HostName 127.0.0.1
    Port 2222
    User cj-%n
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known
    StrictHostKeyChecking accept-new
    RemoteCommand tmux attach
    RequestTTY force
    PermitLocalCommand yes
    LocalCommand echo a local command
"""


@pytest.fixture(scope="module")
def users(cluster: Slurm) -> Iterator[Callable[[str, str], Path]]:
    """A function that creates a user with a login shell and returns the home folder."""
    names: list[str] = []
    base = cluster.folder / "homes"
    base.mkdir()

    def create(name: str, shell: str) -> Path:
        program = shutil.which(shell)
        assert program, shell
        home = base / name
        # sshd refuses an account without a password as locked, unless that is "*".
        command = ["useradd", "--no-log-init", "--password", "*", "--create-home"]
        command += ["--home-dir", str(home)]
        subprocess.run([*command, "--shell", program, name], check=True, capture_output=True)
        names.append(name)
        home.chmod(0o755)
        return home

    yield create
    for name in names:
        subprocess.run(["userdel", "--force", name], check=True, capture_output=True)


@pytest.fixture
def laptop(cloud: Cloud, cluster: Slurm) -> Iterator[Cloud]:
    """A command line that reaches ``login-NAME`` as the user ``cj-NAME``."""
    folder = cloud.folder / "ssh"
    folder.mkdir()
    for name in ("key", "host-key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
    (folder / "banner").write_text("Authorised use only\n")
    values = {"folder": folder, "conf": cluster.conf}
    (folder / "sshd").write_text(_SSHD.format(**values))
    ssh = cloud.folder / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F "{folder}/config" "$@"\n')
    ssh.chmod(0o755)
    cloud.environ["PATH"] = f"{ssh.parent}:/usr/bin:/bin"
    cloud.environ["SLURM_CONF"] = "/nowhere"
    cluster.start_sshd(folder / "sshd")
    answers = ("bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/2222 && head -c 3 <&3")
    poll(lambda: cluster.run(*answers, is_checked=False) == "SSH", cluster.logs)
    yield cloud
    cluster.stop_sshd()


def as_user(laptop: Cloud, name: str) -> None:
    """Let the job file and ssh use the account of ``cj-NAME``."""
    folder = laptop.folder / "ssh"
    text = _CLIENT.format(folder=folder).replace("%n", name)
    (folder / "config").write_text(text)
    laptop.write("job.yaml", f"slurm: {{host: login-{name}, python: /usr/bin/python3}}\n")


@pytest.mark.parametrize("shell", STARTUP)
def test_every_command_works_with_any_login_shell_and_its_noise(laptop, users, shell):
    """A job is submitted, listed, followed, cancelled and removed."""
    home = users(f"cj-{shell}", shell)
    name, text = STARTUP[shell]
    if name:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(f"{text}\n")
    as_user(laptop, shell)
    laptop.write("train.py", "import time\nprint('up')\ntime.sleep(300)\n")
    job = laptop.detach("--config", "job.yaml", "train.py")
    poll(lambda: b"up" in laptop.run("logs", job).out, lambda: str(laptop.run("status", job)))
    listed = json.loads(laptop.run("list", "--json").out)
    cancelled = laptop.run("cancel", job)
    done = laptop.run("wait", job)
    owner = (home / ".cloudjob" / "slurm" / job).owner()
    removed = laptop.run("rm", job)

    assert [item["state"] for item in listed] == ["RUNNING"]
    assert (cancelled.code, cancelled.err.count("Welcome")) == (0, 0), cancelled
    assert done.code == 143, done
    assert owner == f"cj-{shell}"
    assert removed.code == 0, removed
    assert not (home / ".cloudjob" / "slurm" / job).exists()


@pytest.mark.parametrize("trouble", TROUBLE)
def test_a_startup_file_that_makes_trouble_is_named(laptop, users, trouble):
    """Either commands work, or they fail at once with what the login shell printed."""
    text, works = TROUBLE[trouble]
    name = f"t{list(TROUBLE).index(trouble)}"
    home = users(f"cj-{name}", "bash")
    (home / ".bashrc").write_text(f"{text}\n")
    as_user(laptop, name)
    laptop.write("train.py", "print('hello')\n")
    done = laptop.submit("--config", "job.yaml", "train.py")

    assert "Traceback" not in done.err
    if works:
        assert (done.code, done.out) == (0, b"[0] hello\n"), done
        return
    assert done.code == 5, done
    assert f"on login-{name}" in done.err
    assert f"hint: `ssh -T login-{name} /bin/sh -c true` must end without a question" in done.err
    if trouble.startswith("ends"):
        assert "ended with exit code 3 and did not run it: no licence" in done.err


def test_an_account_with_a_forced_command_is_named(laptop, users):
    users("cj-forced", "bash")
    as_user(laptop, "forced")
    laptop.write("train.py", "")
    done = laptop.submit("--config", "job.yaml", "train.py")

    assert done.code == 5, done
    assert "did not run it: This account is for git only" in done.err


def test_a_long_folder_for_temporary_files_does_not_matter(laptop, users):
    """The path of the socket of a shared connection would be too long there."""
    users("cj-long", "bash")
    as_user(laptop, "long")
    folder = laptop.folder / ("with a blank and " + "long" * 20)
    folder.mkdir()
    laptop.environ["TMPDIR"] = str(folder)
    laptop.write("train.py", "print('hello')\n")
    done = laptop.submit("--config", "job.yaml", "train.py")

    assert (done.code, done.out) == (0, b"[0] hello\n"), done
