"""Read the resource usage of this node from the kernel: CPU, memory, pressure, disk and network.

In a container the files of ``/proc`` show the whole machine; the container's limits and usage are
those of its control group, in version 1 or 2.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from typing import Any, NamedTuple

_MIB = 1024 * 1024
_SECTOR_BYTES = 512
# A control group of version 1 without a limit has a number near 2**63.
_UNLIMITED = 1 << 60
# Whole disks only: their counters include partitions (sda1, nvme0n1p2) and mapped devices.
_DISK = re.compile(rb"(sd[a-z]+|vd[a-z]+|xvd[a-z]+|hd[a-z]+|nvme\d+n\d+|mmcblk\d+)\Z")
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


class Reading(NamedTuple):
    """The counters and gauges at one moment; a list is empty if it cannot be read."""

    at_s: float
    cpu: list[float]
    own_cpu: list[float]
    memory: list[float]
    pressure: list[float]
    oom_kills: int
    disk: list[float]
    network: list[float]
    rdma: list[float]
    space: list[float]


class Resources:
    """Reads the resource usage of this node.

    Args:
        proc: The folder in which the kernel shows processes and the machine.
        sys_: The folder in which it shows devices and control groups.
        folder: A folder on the file system to measure.
    """

    def __init__(self, proc: str = "/proc", sys_: str = "/sys", folder: str = "/") -> None:
        self._proc = proc
        self._folder = folder
        self._group = find_group(proc, sys_)
        self._ports = _rdma_ports(sys_)
        self._first_kills: int | None = None
        self._last: Reading | None = None

    def rates(self) -> dict[str, Any]:
        """Return fields of a ``contract.journal.Sample``: usage since the last call, and limits.

        The first call returns nothing.
        """
        last, now = self._last, self._read()
        self._last = now
        if last is None:
            return {}
        elapsed_s = max(1e-3, now.at_s - last.at_s)
        parts = _increase(last.cpu, now.cpu)
        total = sum(parts)
        return {
            "cpus": os.cpu_count() or 1,
            # Without the idle time.
            "cpu": tuple(100 * part / total for part in parts[:4]) if total else (),
            "own_cpu": tuple(
                100 * part / elapsed_s for part in _increase(last.own_cpu, now.own_cpu)
            ),
            "memory": tuple(now.memory),
            "pressure": tuple(now.pressure),
            "oom_kills": now.oom_kills,
            "disk": _rate(last.disk, now.disk, elapsed_s),
            "network": _rate(last.network, now.network, elapsed_s),
            "rdma": _rate(last.rdma, now.rdma, elapsed_s),
            "space": tuple(now.space),
        }

    def _read(self) -> Reading:
        kills = self._group.oom_kills()
        if kills is None:
            kills = _kills(_text(self._proc + "/vmstat"))
        if self._first_kills is None:
            self._first_kills = kills
        return Reading(
            at_s=time.monotonic(),
            cpu=_cpu(_text(self._proc + "/stat")),
            own_cpu=self._group.cpu(),
            memory=self._group.memory() or _memory(_text(self._proc + "/meminfo")),
            pressure=self._pressure(),
            oom_kills=max(0, kills - self._first_kills),
            disk=_disk(_text(self._proc + "/diskstats")),
            network=_network(_text(self._proc + "/net/dev")),
            rdma=[
                4.0 * sum(_whole(port + "/" + name) for port in self._ports)
                for name in ("port_rcv_data", "port_xmit_data")
            ]
            if self._ports
            else [],
            space=_space(self._folder),
        )

    def _pressure(self) -> list[float]:
        averages: list[float] = []
        for name, kinds in (("cpu", 1), ("memory", 2), ("io", 2)):
            text = self._group.pressure(name) or _text(f"{self._proc}/pressure/{name}")
            numbers = re.findall(rb"avg10=([0-9.]+)", text)[:kinds]
            if len(numbers) < kinds:
                return []
            averages += [float(number) for number in numbers]
        return averages


# ---- control groups ------------------------------------------------------------------------------


class Group:
    """The control group of this process; every part of it may be missing.

    Args:
        folders: The folder of each controller, and ``unified`` for version 2.
    """

    def __init__(self, folders: dict[str, str]) -> None:
        self._folders = folders
        self._memory_folder, self._limit_bytes = self._limit()

    def memory(self) -> list[float]:
        """Return the memory in use and its limit, in MiB; empty without a limit."""
        if not self._limit_bytes:
            return []
        is_new = "unified" in self._folders
        name = "memory.current" if is_new else "memory.usage_in_bytes"
        used = _whole(f"{self._memory_folder}/{name}")
        # Memory that the kernel can drop at once is not in use; the OOM killer does not count it
        # either.
        stat = _text(self._memory_folder + "/memory.stat")
        cached = re.search(rb"^%s (\d+)" % (b"inactive_file" if is_new else b"total_inactive_file"),
                           stat, re.M)  # fmt: skip
        used -= int(cached[1]) if cached else 0
        return [max(0, used) / _MIB, self._limit_bytes / _MIB]

    def cpu(self) -> list[float]:
        """Return the seconds of CPU time used, and the seconds for which the limit throttled it."""
        if "unified" in self._folders:
            text = _text(self._folders["unified"] + "/cpu.stat")
            matches = [re.search(rb"^%s (\d+)" % name, text, re.M)
                     for name in (b"usage_usec", b"throttled_usec")]  # fmt: skip
            # The root group has no limit, and shows the whole machine.
            return [int(match[1]) / 1e6 for match in matches if match] if all(matches) else []
        if "cpuacct" not in self._folders:
            return []
        text = _text(self._folders.get("cpu", "") + "/cpu.stat")
        throttled = re.search(rb"^throttled_time (\d+)", text, re.M)
        used = _whole(self._folders["cpuacct"] + "/cpuacct.usage")
        return [used / 1e9, int(throttled[1]) / 1e9 if throttled else 0.0]

    def pressure(self, name: str) -> bytes:
        """Return the text of a pressure file; empty if there is none."""
        folder = self._folders.get("unified")
        return _text(f"{folder}/{name}.pressure") if folder else b""

    def oom_kills(self) -> int | None:
        """Return how many processes the kernel has killed here; None if it does not count them.

        In version 2, those under the tightest limit.
        """
        if "unified" not in self._folders:
            return self.own_oom_kills()
        return _counted_kills(self._memory_folder + "/memory.events")

    def own_oom_kills(self) -> int | None:
        """Return the same for this group alone; in version 1, no count includes groups below."""
        if "unified" in self._folders:
            return _counted_kills(self._folders["unified"] + "/memory.events")
        return _counted_kills(self._folders.get("memory", "") + "/memory.oom_control")

    def _limit(self) -> tuple[str, int]:
        """Return the folder of the tightest limit on memory, here or above, and the limit."""
        is_new = "unified" in self._folders
        folder = self._folders.get("unified" if is_new else "memory", "")
        name = "memory.max" if is_new else "memory.limit_in_bytes"
        best, limit_bytes = folder, _UNLIMITED
        while folder and os.path.exists(f"{folder}/{name}"):
            own_bytes = _whole(f"{folder}/{name}") or _UNLIMITED
            if own_bytes < limit_bytes:
                best, limit_bytes = folder, own_bytes
            folder = os.path.dirname(folder)
        return best, limit_bytes if limit_bytes < _UNLIMITED else 0


def find_group(proc: str, sys_: str, process: str = "self") -> Group:
    """Return the control group of a process, by default of this one."""
    root = sys_ + "/fs/cgroup"
    folders: dict[str, str] = {}
    for line in _text(f"{proc}/{process}/cgroup").decode("ascii", "replace").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            if os.path.exists(root + "/cgroup.controllers"):
                return Group({"unified": _existing(root, path)})
            continue
        for name in controllers.split(","):
            if os.path.isdir(f"{root}/{name}"):
                folders[name] = _existing(f"{root}/{name}", path)
    return Group(folders)


def _existing(root: str, path: str) -> str:
    """Return the folder of a group; in a container its path can be that of the host."""
    folder = root + path.rstrip("/")
    return folder if os.path.isdir(folder) else root


# ---- files of the kernel -------------------------------------------------------------------------


def _text(path: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read() or b""
    except OSError:
        return b""


def _whole(path: str) -> int:
    """Return the number in a file; 0 if it does not hold one."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else 0


def machine_kills(proc: str) -> int | None:
    """Return how many processes of the machine the kernel has killed; None if it does not count."""
    return _counted_kills(proc + "/vmstat")


def machine_mib(proc: str) -> float:
    """Return the memory of the machine in MiB; 0 if it is unknown."""
    used_and_total = _memory(_text(proc + "/meminfo"))
    return used_and_total[1] if used_and_total else 0.0


def _counted_kills(path: str) -> int | None:
    text = _text(path)
    return _kills(text) if b"oom_kill " in text else None


def _kills(text: bytes) -> int:
    match = re.search(rb"^oom_kill (\d+)", text, re.M)
    return int(match[1]) if match else 0


def _cpu(text: bytes) -> list[float]:
    """Return the seconds of user, system, waiting, stolen and idle time of all CPUs."""
    fields = text.partition(b"\n")[0].split()
    if len(fields) < 9 or fields[0] != b"cpu":
        return []
    user, nice, system, idle, waiting, irq, soft_irq, stolen = (int(field) for field in fields[1:9])
    parts = (user + nice, system + irq + soft_irq, waiting, stolen, idle)
    return [part * _TICK_S for part in parts]


def _memory(text: bytes) -> list[float]:
    sizes = dict(re.findall(rb"^(MemTotal|MemAvailable): +(\d+) kB", text, re.M))
    if len(sizes) < 2:
        return []
    total, free = int(sizes[b"MemTotal"]), int(sizes[b"MemAvailable"])
    return [(total - free) / 1024, total / 1024]


def _disk(text: bytes) -> list[float]:
    rows = [line.split() for line in text.splitlines()]
    rows = [row for row in rows if len(row) > 9 and _DISK.match(row[2])]
    return [float(_SECTOR_BYTES * sum(int(row[at]) for row in rows)) for at in (5, 9) if rows]


def _space(folder: str) -> list[float]:
    try:
        space = os.statvfs(folder)
    except OSError:
        return []
    blocks = (space.f_blocks - space.f_bavail, space.f_blocks)
    return [count * space.f_frsize / _MIB for count in blocks] if space.f_blocks else []


def _network(text: bytes) -> list[float]:
    rows = [line.partition(b":") for line in text.splitlines()[2:]]
    counts = [rest.split() for name, _, rest in rows if name.strip() != b"lo"]
    return [float(sum(int(row[at]) for row in counts)) for at in (0, 8) if text]


def _rdma_ports(sys_: str) -> list[str]:
    ports = []
    top = sys_ + "/class/infiniband"
    with contextlib.suppress(OSError):
        for device in os.listdir(top):
            for port in os.listdir(f"{top}/{device}/ports"):
                folder = f"{top}/{device}/ports/{port}/counters"
                if os.path.exists(folder + "/port_rcv_data"):
                    ports.append(folder)
    return ports


def _increase(last: list[float], now: list[float]) -> list[float]:
    return [max(0.0, after - before) for before, after in zip(last, now)]


def _rate(last: list[float], now: list[float], elapsed_s: float) -> tuple[float, ...]:
    return tuple(part / 1024 / elapsed_s for part in _increase(last, now))
