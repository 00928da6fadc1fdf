"""Limits of a node: real ones, in a process of their own."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobentry.node import limits

CHECK = """
import resource, sys
sys.path[:0] = sys.argv[5:]
from jobentry.contract.env import NodeEnv
from jobentry.errors import EntryError
from jobentry.node import limits
soft, hard, nodes, slots = map(int, sys.argv[1:5])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
hosts = tuple(map(str, range(nodes)))
node = NodeEnv(job="j", node=0, hosts=hosts, slots=slots)
try:
    limits.allow_open_files(node, needs_mpi=True)
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
except EntryError as error:
    print(error, "|", error.hint)
"""


@pytest.mark.parametrize(
    ("soft", "hard", "nodes", "slots", "expected"),
    [
        (64, 64, 2, 2, "64"),
        (1024, 4096, 2, 8, "1024"),
        (64, 4096, 1, 8, "72"),
        (300, 1024, 101, 8, "456"),
        (300, 1024, 400, 1, "1024"),
        (
            64,
            64,
            2,
            40,
            "preparing this node: 64 open files are allowed, but about 266 are needed for 40 ranks"
            " | raise the limit on open files: `ulimit -n`, or that of the container",
        ),
    ],
)
def test_open_files_are_raised_or_refused(
    soft: int, hard: int, nodes: int, slots: int, expected: str
):
    argv = [sys.executable, "-c", CHECK, str(soft), str(hard), str(nodes), str(slots), *sys.path]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=60, check=True)

    assert done.stdout.strip() == expected


def test_a_hint_names_the_folder_of_the_file_and_its_free_space(tmp_path: Path):
    error = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "file"))

    assert limits.hint(error, ["/other"]).startswith(f"free some space in {tmp_path} (")


def test_a_hint_on_a_quota_does_not_name_the_free_space_of_others(tmp_path: Path):
    error = OSError(errno.EDQUOT, "Disk quota exceeded", str(tmp_path / "file"))

    assert limits.hint(error, ["/other"]) == f"free some of your quota in {tmp_path}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk")
def test_a_hint_names_the_full_one_of_several_folders(tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], check=True)
    try:
        with pytest.raises(OSError, match="No space") as caught, (disk / "file").open("wb") as file:
            file.write(b"x" * 100_000)
        hint = limits.hint(caught.value, [str(tmp_path), str(disk)])
    finally:
        subprocess.run(["umount", disk], check=True)

    assert hint == f"free some space in {disk} (0.0 MiB free)"


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.EMFILE, "`ulimit -n`"),
        (errno.EAGAIN, "`ulimit -u`"),
        (errno.EFBIG, "`ulimit -f`"),
        (errno.ENOENT, ""),
    ],
)
def test_a_hint_names_the_limit(number: int, expected: str):
    assert expected in limits.hint(OSError(number, os.strerror(number)), [])


def test_a_limit_of_cpu_time_is_named_after_the_signals_that_enforce_it():
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    assert limits.of_cpu_time(signal.SIGKILL) == ""

    resource.setrlimit(resource.RLIMIT_CPU, (90_000, hard))
    try:
        texts = [limits.of_cpu_time(n) for n in (signal.SIGKILL, signal.SIGXCPU, signal.SIGTERM, 0)]
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))

    assert texts == ["; its limit is 90000 s of CPU time (ulimit -t)"] * 2 + [""] * 2
