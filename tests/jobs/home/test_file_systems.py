"""File systems that lack what cloudjob needs, such as NFS without a lock daemon."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloudjob.home.file_systems import missing_feature
from tests.support.machines import hung_file_system, limited_files

LACKS = {
    f"no-locks={errno.ENOLCK}": "has no locks (No locks available)",
    f"no-locks={errno.ENOSYS}": "has no locks (Function not implemented)",
    f"no-locks={errno.EOPNOTSUPP}": "has no locks (Operation not supported)",
    "no-links": "has no hard links (Operation not permitted)",
    "no-replace": "has no renames that replace a file (File exists)",
    "no-fsync": "has no way to make files durable (fsync) (Invalid argument)",
}


def cloudjob(home: Path, lack: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cloudjob.cli", *arguments],
        env={**os.environ, **limited_files(home, lack), "CLOUDJOB_HOME": str(home)},
        cwd=home.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_usual_file_system_lacks_nothing(tmp_path: Path):
    assert missing_feature(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("inodes", range(2, 6))
def test_a_file_system_without_free_inodes_lacks_nothing(tmp_path: Path, inodes: int):
    argv = ["mount", "-t", "tmpfs", "-o", f"nr_inodes={inodes}", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(argv).returncode:
        pytest.skip("only root may mount")
    try:
        assert missing_feature(tmp_path) is None
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


@pytest.mark.parametrize("lack", LACKS)
def test_commands_and_doctor_name_what_the_file_system_lacks(tmp_path: Path, lack: str):
    home = tmp_path / "home"
    (tmp_path / "train.py").write_text("print()\n")

    for command in (("submit", "--launcher", "python", "train.py"), ("list",)):
        done = cloudjob(home, lack, *command)

        assert done.returncode in (1, 5), done
        error, hint = done.stderr.splitlines()
        assert error.startswith("error: ")
        assert error.endswith(f"its file system {LACKS[lack]}")
        assert hint.startswith("hint: set CLOUDJOB_HOME to a folder on a local disk")
    doctor = cloudjob(home, lack, "doctor")
    assert f"{home}: its file system {LACKS[lack]}" in doctor.stdout
    assert doctor.returncode != 0


def test_a_state_folder_that_loses_its_locks_is_reported_at_once(tmp_path: Path):
    """SQLite calls such a database locked, for which commands would wait a minute."""
    home = tmp_path / "home"
    assert cloudjob(home, "", "list").returncode == 0
    done = cloudjob(home, f"no-locks={errno.ENOLCK}", "list")

    assert done.returncode == 1
    assert "its file system has no locks" in done.stderr
    assert "trying again" not in done.stderr


# ---- a server that is away


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system that answers nothing."""
    with hung_file_system(tmp_path / "hung"):
        yield tmp_path / "hung"


@pytest.mark.parametrize("is_home", [True, False], ids=["home", "store"])
def test_a_command_says_that_a_file_system_does_not_answer(
    tmp_path: Path, hung: Path, *, is_home: bool
):
    home = hung / "home" if is_home else tmp_path / "home"
    more = () if is_home else ("--store", f"file://{hung}/store")
    command = [sys.executable, "-m", "cloudjob.cli", "list", *more]
    environ = {**os.environ, "CLOUDJOB_HOME": str(home)}
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as running:
        try:
            assert running.stderr is not None
            first = running.stderr.readline()
        finally:
            running.kill()

    where = home if is_home else hung / "store"
    assert first == f"the file system of {where} does not answer; waiting for it\n"


def test_doctor_ends_and_names_each_file_system_that_does_not_answer(tmp_path: Path, hung: Path):
    arguments = ("doctor", "--store", f"file://{hung}/store")
    done = subprocess.run(
        [sys.executable, "-m", "cloudjob.cli", *arguments],
        env={**os.environ, "CLOUDJOB_HOME": str(hung / "home")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert f"{hung}/home: its file system does not answer: no answer within " in done.stdout
    assert f"file://{hung}/store: it does not answer: no answer within " in done.stdout
    assert "df" in done.stdout
    assert done.returncode != 0
