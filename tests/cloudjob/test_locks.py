"""What lives has its lock; what was killed leaves a folder to the next one."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cloudjob import locks
from cloudjob.errors import BackendError

HOLD = """
import sys
from pathlib import Path
from cloudjob import locks

with locks.scratch(Path(sys.argv[1])) as folder:
    (folder / "layer").write_bytes(b"half")
    print(folder, flush=True)
    sys.stdin.read()
"""


def grown_old(folder: Path) -> None:
    """Let a folder look as if it had been made two minutes ago."""
    at_s = time.time() - 120
    os.utime(folder, (at_s, at_s))


def test_a_folder_of_a_process_that_was_killed_goes_and_that_of_a_living_one_stays(tmp_path: Path):
    """The lock tells them apart, and the system gives it back however a process ends."""
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD, tmp_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        folders = [Path(holder.stdout.readline().strip()) for holder in holders if holder.stdout]
        for folder in folders:
            grown_old(folder)
        holders[0].kill()
        holders[0].wait(10)

        with locks.scratch(tmp_path) as own:
            assert sorted(tmp_path.iterdir()) == sorted([folders[1], own])
            assert (folders[1] / "layer").read_bytes() == b"half"

        assert list(tmp_path.iterdir()) == [folders[1]]
    finally:
        for holder in holders:
            holder.communicate(timeout=10)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_made_just_now_is_nobody_s_leftover(tmp_path: Path):
    """Its lock is taken a moment after it was made."""
    (tmp_path / "new").mkdir()

    with locks.scratch(tmp_path):
        assert (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path):
    """With what to do."""
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(BackendError) as caught, locks.scratch(tmp_path / "file"):
        raise AssertionError("there is none")

    assert str(caught.value).startswith(f"making a folder: {tmp_path / 'file'}: ")
    assert "CLOUDJOB_HOME" in caught.value.hint


def test_a_lock_is_held_as_long_as_its_descriptor_is_open(tmp_path: Path):
    """And it is no other's in between."""
    path = tmp_path / "lock"
    assert not locks.is_held(path)

    taken = locks.take(path)

    assert taken is not None
    assert locks.is_held(path)
    assert locks.take(path) is None
    os.close(taken)
    assert not locks.is_held(path)


def test_where_there_are_no_locks_nobody_is_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A file system without them must not have a living job swept away."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    (tmp_path / "lock").touch()
    monkeypatch.setattr(fcntl, "flock", refuse)

    with pytest.raises(OSError, match="No locks"):
        locks.is_held(tmp_path / "lock")
