"""Locks show which processes run; folders of killed processes are removed."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cloudjob.errors import BackendError
from cloudjob.home import locks, scratch_folders

HOLD_FOLDER = """
import sys
from pathlib import Path
from cloudjob.home import locks, scratch_folders

with scratch_folders.new(Path(sys.argv[1])) as folder:
    (folder / "layer").write_bytes(b"half")
    print(folder, flush=True)
    sys.stdin.read()
"""


# Checks a held and a free lock many times, and prints the number of wrong results.
WATCH = """
import sys
from pathlib import Path
from cloudjob.home import locks, scratch_folders

held, free, rounds = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
wrong = 0
for _ in range(rounds):
    wrong += not locks.is_held(held)
    wrong += locks.is_held(free)
print(wrong)
"""


def make_old(folder: Path) -> None:
    """Set the times of a folder to two minutes ago."""
    at_s = time.time() - 120
    os.utime(folder, (at_s, at_s))


def test_only_folders_of_killed_processes_are_removed(tmp_path: Path):
    """A process holds the lock of its folder until it ends; the kernel then releases the lock."""
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD_FOLDER, tmp_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        folders = [Path(holder.stdout.readline().strip()) for holder in holders if holder.stdout]
        for folder in folders:
            make_old(folder)
        holders[0].kill()
        holders[0].wait(180)

        with scratch_folders.new(tmp_path) as new_folder:
            assert sorted(tmp_path.iterdir()) == sorted([folders[1], new_folder])
            assert (folders[1] / "layer").read_bytes() == b"half"

        assert list(tmp_path.iterdir()) == [folders[1]]
    finally:
        for holder in holders:
            holder.communicate(timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_a_new_folder_is_not_removed(tmp_path: Path):
    """A folder exists for a moment before it is locked."""
    (tmp_path / "new").mkdir()

    with scratch_folders.new(tmp_path):
        assert (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_created_is_reported_in_one_line(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(BackendError) as caught, scratch_folders.new(tmp_path / "file"):
        raise AssertionError("there is none")

    assert str(caught.value).startswith(f"creating a folder: {tmp_path / 'file'}: ")
    assert "CLOUDJOB_HOME" in caught.value.hint


def test_a_lock_is_held_as_long_as_its_descriptor_is_open(tmp_path: Path):
    path = tmp_path / "lock"
    assert not locks.is_held(path)

    descriptor = locks.acquire(path)

    assert descriptor is not None
    assert locks.is_held(path)
    assert locks.acquire(path) is None
    os.close(descriptor)
    assert not locks.is_held(path)


def test_without_locks_no_process_counts_as_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On a file system without locks, the folder of a running job must not be removed."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    (tmp_path / "lock").touch()
    monkeypatch.setattr(fcntl, "fcntl", refuse)

    with pytest.raises(OSError, match="No locks"):
        locks.is_held(tmp_path / "lock")


def test_checking_a_lock_does_not_block_its_owner_or_a_new_one(tmp_path: Path):
    held, free = tmp_path / "held", tmp_path / "free"
    descriptor = locks.acquire(held)
    free.touch()
    assert descriptor is not None

    watchers = [
        subprocess.Popen(
            [sys.executable, "-c", WATCH, held, free, "3000"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    while any(watcher.poll() is None for watcher in watchers):
        # A separate file, because the watchers expect the other two locks not to change.
        other = locks.acquire(tmp_path / "other")
        assert other is not None
        os.close(other)
    assert [watcher.communicate()[0].strip() for watcher in watchers] == ["0"] * 4
    os.close(descriptor)


def test_a_lock_can_be_taken_while_others_check_it(tmp_path: Path):
    path = tmp_path / "lock"
    path.touch()
    watchers = [
        subprocess.Popen([sys.executable, "-c", WATCH, path, path, "2000"], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    while any(watcher.poll() is None for watcher in watchers):
        descriptor = locks.acquire(path)
        assert descriptor is not None
        os.close(descriptor)
    for watcher in watchers:
        watcher.communicate()


def test_a_new_file_is_locked_when_it_appears(tmp_path: Path):
    descriptor = locks.acquire_new(tmp_path / "job", b"text")

    assert locks.is_held(tmp_path / "job")
    assert (tmp_path / "job").read_bytes() == b"text"
    assert [path.name for path in tmp_path.iterdir()] == ["job"]
    with pytest.raises(FileExistsError):
        locks.acquire_new(tmp_path / "job", b"other")
    os.close(descriptor)
    assert not locks.is_held(tmp_path / "job")


def test_a_lock_that_a_child_inherits_is_held_until_both_have_ended(tmp_path: Path):
    descriptor = locks.acquire_new(tmp_path / "job", b"")
    child = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, pass_fds=(descriptor,))

    os.close(descriptor)
    assert locks.is_held(tmp_path / "job")

    child.communicate()
    assert not locks.is_held(tmp_path / "job")


def test_a_scratch_folder_is_found_by_its_name_while_it_is_used(tmp_path: Path):
    assert not scratch_folders.is_in_use(tmp_path, "train-1")
    with scratch_folders.new(tmp_path, "train-1") as folder:
        assert folder == tmp_path / "train-1"
        assert scratch_folders.is_in_use(tmp_path, "train-1")
    assert not scratch_folders.is_in_use(tmp_path, "train-1")
