"""Gathers what a node knows about itself: limits, space, versions, and its way to the others."""

from __future__ import annotations

import contextlib
import glob
import os
import queue
import re
import resource
import threading
import time
from typing import Mapping, Sequence

from jobentry.contract import names
from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths
from jobentry.contract.preflight import (
    UNKNOWN,
    UNLIMITED,
    Disk,
    Endpoint,
    Library,
    Limits,
    Name,
    NodeFacts,
)
from jobentry.node.interfaces import parse
from jobentry.node.network import Interface, NodeNetwork, interface_with, mtu_bytes
from jobentry.system.addresses import addresses_of

_SHM = "/dev/shm"
# ST_RDONLY of sys/statvfs.h, which PyPy's ``os`` lacks.
_READ_ONLY = 1
_CAP_IPC_LOCK = 1 << 14
_CAPABILITIES = re.compile(r"^CapEff:\s*([0-9a-f]+)", re.MULTILINE)
_DRIVER = "/sys/module/nvidia/version"
# The folder of a wheel names its version, so nothing needs to be imported.
_WHEELS = re.compile(r"/(torch|nvidia_nccl_cu\d+|nvidia_cuda_runtime_cu\d+)-([^/-]+)\.dist-info$")
_WHEEL_NAMES = {"torch": "torch", "nvidia_nccl": "NCCL", "nvidia_cuda": "CUDA"}
_NCCL_FILES = ("/usr/lib/*/libnccl.so.2.*", "/usr/lib64/libnccl.so.2.*")
# Parts of the names of variables that restrict the ports of Open MPI's ranks and daemons.
_PORT_LIMITS = ("_port_min_v", "_dynamic_ipv4_ports", "_static_ipv4_ports", "_port_range")
# Names are looked up at the same time, as one that does not resolve takes seconds.
_LOOK_UP_THREADS = 8


def gather(node: NodeEnv, node_paths: NodePaths, environ: Mapping[str, str]) -> NodeFacts:
    """Return what this node knows without the others; nothing here waits for the network."""
    return NodeFacts(
        node=node.node,
        host=node.host,
        disks=_disks(node_paths, environ),
        limits=_limits(),
        shm_bytes=_shm_bytes(),
        versions=_versions(environ),
        gpus=len(glob.glob("/dev/nvidia[0-9]*")),
        has_infiniband=bool(glob.glob("/sys/class/infiniband/*")),
        has_limited_ports=_has_limited_ports(environ),
        is_emulated=bool(node.control_dir),
    )


def _has_limited_ports(environ: Mapping[str, str]) -> bool:
    arguments = (environ.get(names.OPENMPI_MCA_ARGS, ""), environ.get(names.OPENMPI_EXTRA_ARGS, ""))
    return any(part in text for text in (*environ, *arguments) for part in _PORT_LIMITS)


def endpoints(network: NodeNetwork, environ: Mapping[str, str], port: int) -> tuple[Endpoint, ...]:
    """Return where others reach this node: on the interface of each library, each only once.

    The first is the way to the other nodes, which is the interface of all libraries unless the
    user or the platform has chosen another for one of them.
    """
    addresses = {
        Library.OTHER: network.route.address,
        Library.MPI: _chosen(environ.get(names.OMPI_TCP_INCLUDE, ""), network),
        Library.NCCL: _chosen_for_nccl(environ.get(names.NCCL_SOCKET_IFNAME, ""), network),
        Library.GLOO: _chosen(environ.get(names.GLOO_SOCKET_IFNAME, ""), network),
    }
    users: dict[str, list[Library]] = {}
    for library, address in addresses.items():
        users.setdefault(address or network.route.address, []).append(library)
    return tuple(
        Endpoint(name, address, port, mtu_bytes(name), tuple(libraries))
        for address, libraries in users.items()
        for name in (interface_with(address, network.interfaces),)
        if address
    )


def _chosen(value: str, network: NodeNetwork) -> str:
    """Return the address of the first interface in a list of exact names; empty for none."""
    for name in value.split(","):
        for interface in network.interfaces:
            if interface.name == name:
                return _address(interface, network)
    return ""


def _chosen_for_nccl(value: str, network: NodeNetwork) -> str:
    """Return the address of the first interface that NCCL's list selects."""
    selected = parse(value)
    for interface in network.outward if value else ():
        if selected.has(interface.name):
            return _address(interface, network)
    return ""


def _address(interface: Interface, network: NodeNetwork) -> str:
    if interface.name == network.route.interface:
        return network.route.address
    return interface.addresses[0]


def resolve(node: NodeEnv, others: Sequence[int], limit_s: float) -> tuple[Name, ...]:
    """Return the addresses of these nodes' names; those not looked up in time are left out."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    answers: queue.SimpleQueue[Name] = queue.SimpleQueue()
    for each in others:
        waiting.put(each)

    def look_up() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                number = waiting.get_nowait()
                addresses: list[str] = []
                with contextlib.suppress(OSError):
                    addresses = addresses_of(node.hosts[number])
                answers.put(Name(number, tuple(dict.fromkeys(addresses))))

    for _ in range(min(_LOOK_UP_THREADS, len(others))):
        threading.Thread(target=look_up, daemon=True).start()
    deadline_s = time.monotonic() + limit_s
    results: list[Name] = []
    with contextlib.suppress(queue.Empty):
        while len(results) < len(others):
            results.append(answers.get(timeout=max(0.0, deadline_s - time.monotonic())))
    return tuple(sorted(results))


# -- this node ------------------------------------------------------------------------------------


def _disks(node_paths: NodePaths, environ: Mapping[str, str]) -> tuple[Disk, ...]:
    """Return the space in the folders that a job writes to, each file system once."""
    needed = (node_paths.log_dir, node_paths.node_dir)
    folders = (*needed, environ.get("TMPDIR") or "/tmp", environ.get("PWD") or "/")
    disks: dict[int, Disk] = {}
    for folder in folders:
        with contextlib.suppress(OSError):
            device = os.stat(folder).st_dev
            space = os.statvfs(folder)
            if device in disks or space.f_flag & _READ_ONLY or not space.f_blocks:
                continue
            blocks = space.f_bfree if os.geteuid() == 0 else space.f_bavail
            # File systems without a table of files, such as btrfs, report none at all.
            files = space.f_favail if space.f_files else UNKNOWN
            disks[device] = Disk(folder, blocks * space.f_frsize, files, folder in needed)
    return tuple(disks.values())


def _limits() -> Limits:
    return Limits(
        _limit(resource.RLIMIT_NOFILE),
        _limit(resource.RLIMIT_MEMLOCK),
        _limit(resource.RLIMIT_STACK),
        # The superuser is not bound by it.
        UNLIMITED if os.geteuid() == 0 else _limit(resource.RLIMIT_NPROC),
        can_lock=_can_lock(_read("/proc/self/status")),
    )


def _limit(number: int) -> int:
    soft = resource.getrlimit(number)[0]
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _can_lock(status: str) -> bool:
    match = _CAPABILITIES.search(status)
    return match is not None and bool(int(match.group(1), 16) & _CAP_IPC_LOCK)


def _shm_bytes() -> int:
    try:
        space = os.statvfs(_SHM)
    except FileNotFoundError:
        return 0
    except OSError:
        return UNKNOWN
    return space.f_blocks * space.f_frsize


def _versions(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    versions = {"driver": _read(_DRIVER).strip()}
    for path in _installed(environ):
        match = _WHEELS.search(path)
        if match:
            name = next(
                text
                for start, text in _WHEEL_NAMES.items()
                if match.group(1)[: len(start)] == start
            )
            versions[name] = match.group(2)
    if "NCCL" not in versions:
        files = sorted(path for pattern in _NCCL_FILES for path in glob.glob(pattern))
        versions["NCCL"] = files[-1].partition(".so.")[2] if files else ""
    versions.setdefault("CUDA", environ.get("CUDA_VERSION", ""))
    return tuple((name, text[:80]) for name, text in sorted(versions.items()) if text)


def _installed(environ: Mapping[str, str]) -> list[str]:
    """Return the folders of installed wheels of the first Python on PATH."""
    for folder in environ.get("PATH", os.defpath).split(os.pathsep):
        if os.path.isfile(os.path.join(folder, "python3")):
            prefix = os.path.dirname(folder)
            return glob.glob(f"{prefix}/lib/python3*/site-packages/*.dist-info")
    return []


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(100_000)
    except OSError:
        return ""
