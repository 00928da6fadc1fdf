"""Resource usage of a node, read from the kernel's files of this machine or from made-up files."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import pytest

from jobentry.node.resources import Resources

GIB = 1024**3


class Node:
    """A folder with files like those of /proc and /sys."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def resources(self) -> Resources:
        return Resources(f"{self.folder}/proc", f"{self.folder}/sys", f"{self.folder}/disk")


PROC = {
    "proc/stat": "cpu  100 0 50 800 20 0 0 30 0 0\ncpu0 0\n",
    "proc/meminfo": "MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 6291456 kB\n",
    "proc/vmstat": "nr_free_pages 1\noom_kill 7\n",
    "proc/diskstats": " 8 0 sda 1 0 100 0 1 0 200 0 0 0 0\n 8 1 sda1 1 0 100 0 1 0 200 0 0 0 0\n",
    "proc/net/dev": "x\nx\n lo: 9 0 0 0 0 0 0 0 9 0\neth0: 1000 0 0 0 0 0 0 0 2000 0\n",
}
PRESSURE = "some avg10=1.50 avg60=0 avg300=0 total=1\nfull avg10=0.50 avg60=0 avg300=0 total=1\n"


def test_rates_are_means_since_the_last_reading(tmp_path: Path):
    node = Node(tmp_path)
    node.write(PROC)
    resources = node.resources()
    assert resources.rates() == {}
    node.write({
        "proc/stat": "cpu  150 0 70 820 25 0 0 35 0 0\n",
        "proc/vmstat": "oom_kill 9\n",
        "proc/net/dev": "x\nx\n lo: 99 0 0 0 0 0 0 0 99 0\neth0: 1001000 0 0 0 0 0 0 0 2000 0\n",
    })  # fmt: skip
    used = resources.rates()

    assert used["cpu"] == pytest.approx((50.0, 20.0, 5.0, 5.0))
    assert used["memory"] == (2048.0, 8192.0)
    assert used["oom_kills"] == 2
    assert used["network"][0] > 0
    assert used["network"][1] == used["disk"][0] == used["disk"][1] == 0
    assert used["pressure"] == used["own_cpu"] == used["rdma"] == ()


def test_a_container_of_version_2_has_its_own_limit_and_pressure(tmp_path: Path):
    """The tightest limit applies; Slurm sets it on a parent of the step's cgroup."""
    node = Node(tmp_path)
    group = "sys/fs/cgroup/job/step"
    node.write({
        **PROC,
        "proc/self/cgroup": "0::/job/step\n",
        "sys/fs/cgroup/cgroup.controllers": "cpu memory\n",
        f"{group}/memory.max": "max\n",
        f"{group}/memory.current": str(GIB),
        "sys/fs/cgroup/job/memory.max": str(4 * GIB),
        "sys/fs/cgroup/job/memory.current": str(3 * GIB),
        "sys/fs/cgroup/job/memory.stat": f"anon 1\ninactive_file {GIB}\n",
        "sys/fs/cgroup/job/memory.events": "oom 3\noom_kill 2\noom_group_kill 0\n",
        f"{group}/cpu.stat": "usage_usec 1000000\nuser_usec 1\nthrottled_usec 500000\n",
        f"{group}/cpu.pressure": PRESSURE.splitlines()[0] + "\n",
        f"{group}/memory.pressure": PRESSURE,
        f"{group}/io.pressure": PRESSURE,
    })  # fmt: skip
    resources = node.resources()
    resources.rates()
    node.write({"sys/fs/cgroup/job/memory.events": "oom 3\noom_kill 3\n"})
    used = resources.rates()

    assert used["memory"] == (2048.0, 4096.0)
    assert used["oom_kills"] == 1
    assert used["pressure"] == (1.5, 1.5, 0.5, 1.5, 0.5)
    assert used["own_cpu"] == (0.0, 0.0)


def test_a_container_of_version_1_has_its_own_limit(tmp_path: Path):
    """A path that exists only on the host stands for the container's own cgroup."""
    node = Node(tmp_path)
    memory = "sys/fs/cgroup/memory"
    node.write({
        **PROC,
        "proc/self/cgroup": "4:memory:/docker/abc\n2:cpu,cpuacct:/\n",
        f"{memory}/memory.limit_in_bytes": str(2 * GIB),
        f"{memory}/memory.usage_in_bytes": str(GIB),
        f"{memory}/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}\n",
        f"{memory}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n",
        "sys/fs/cgroup/cpuacct/cpuacct.usage": "1000000000\n",
    })  # fmt: skip
    resources = node.resources()
    resources.rates()
    node.write({f"{memory}/memory.oom_control": "oom_kill_disable 0\noom_kill 4\n"})
    used = resources.rates()

    assert used["memory"] == (512.0, 2048.0)
    assert used["oom_kills"] == 4
    assert used["own_cpu"] == (0.0, 0.0)


def test_a_node_that_shows_nothing_has_empty_values(tmp_path: Path):
    resources = Node(tmp_path).resources()
    resources.rates()
    used = resources.rates()

    assert {name for name, value in used.items() if value} == {"cpus"}


def test_a_full_disk_is_sampled_as_having_no_free_space(tmp_path: Path):
    folder = tmp_path / "disk"
    folder.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder]
    if os.geteuid() or subprocess.run(argv, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        resources = Resources(folder=str(folder))
        resources.rates()
        assert resources.rates()["space"] == (0.0, 2.0)
        with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        assert resources.rates()["space"] == (2.0, 2.0)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
    assert Resources(folder=str(tmp_path / "missing")).rates() == {}


def test_this_machine_has_cpu_and_memory():
    resources = Resources()
    resources.rates()
    used = resources.rates()

    in_use, limit = used["memory"]
    assert 0 < in_use < limit
    assert used["oom_kills"] == 0
