"""Nodes with networks of their own, without containers: Linux namespaces joined by bridges.

Each node has its own interfaces, host name and /etc/hosts, and shares this machine's files. The
entry is started by hand on each of them, as a platform does.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import cloudjob
from cloudjob.backends.delivery import new_ssh_key
from jobentry.contract.paths import ENTRY

ROOT = Path(cloudjob.__file__).parent
_LIMIT_S = 150
# What each namespace that is not a node's own shares with this machine.
_HOLDER = ("unshare", "--net", "--uts", "--mount", "sh", "-c", "echo ready; exec sleep 900")


class Ended(NamedTuple):
    """How the entry of a node ended."""

    code: int
    out: str
    err: str


class Networks:
    """Nodes ``w0``, ``w1`` … and the switches between them.

    Args:
        nodes: The number of nodes.
    """

    def __init__(self, folder: Path, nodes: int = 2) -> None:
        self.folder = folder
        self.hosts = [f"w{node}" for node in range(nodes)]
        self._holders: list[subprocess.Popen[bytes]] = []
        self._nodes = [self._holder() for _ in self.hosts]
        self._switch = self._holder()
        home = self.folder / "home"
        home.mkdir()
        for pid, host in zip(self._nodes, self.hosts, strict=True):
            home_of_host = self.folder / f"home-{host}"
            for name in ("tmp", "code"):
                (home_of_host / name).mkdir(parents=True)
            self._in(pid, "mount", "--bind", str(home_of_host), str(home))
            self._in(pid, "hostname", host)
            self._in(pid, "ip", "link", "set", "lo", "up")

    def _holder(self) -> int:
        holder = subprocess.Popen(_HOLDER, stdout=subprocess.PIPE, start_new_session=True)
        self._holders.append(holder)
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        return holder.pid

    def _in(self, pid: int, *command: str) -> None:
        subprocess.run(["nsenter", "-t", str(pid), "-n", "-u", "-m", *command], check=True)

    def ip(self, node: int, *arguments: str) -> None:
        """Run ``ip`` on a node."""
        self._in(self._nodes[node], "ip", *arguments)

    def join(self, switch: str, interface: str, addresses: Sequence[str]) -> None:
        """Give every node an interface on a network, each with its addresses (``10.0.0.1/24``).

        Args:
            addresses: One text for each node, with its addresses separated by blanks.
        """
        self._in(self._switch, "ip", "link", "add", switch, "type", "bridge")
        self._in(self._switch, "ip", "link", "set", switch, "up")
        for node, texts in enumerate(addresses):
            end = f"{switch}-{node}"
            pid = self._nodes[node]
            name = interface.split(",")[node % len(interface.split(","))]
            self.ip(node, "link", "add", name, "type", "veth", "peer", end)
            self.ip(node, "link", "set", end, "netns", str(self._switch))
            self._in(self._switch, "ip", "link", "set", end, "master", switch, "up")
            self._in(pid, "ip", "link", "set", name, "up")
            for address in texts.split():
                self.ip(node, "addr", "add", address, "dev", name, *_without_detection(address))

    def alone(self, interface: str, address: str) -> None:
        """Give every node a bridge of its own, all with the same name and address."""
        for node in range(len(self.hosts)):
            self.ip(node, "link", "add", interface, "type", "bridge")
            self.ip(node, "addr", "add", address, "dev", interface)
            self.ip(node, "link", "set", interface, "up")

    def swallow(self, switch: str, address: str) -> None:
        """Give every node a default route to a router that drops every packet in silence."""
        self._in(self._switch, "ip", "addr", "add", address, "dev", switch)
        self._in(self._switch, "sysctl", "-qw", "net.ipv4.ip_forward=0")
        for node in range(len(self.hosts)):
            self.ip(node, "route", "add", "default", "via", address.partition("/")[0])

    def drop_new_connections(self, node: int, ports: str) -> None:
        """Have a node drop in silence what asks it for a connection to these ports."""
        rule = ("-p", "tcp", "--syn", "--dport", ports, "!", "-i", "lo", "-j", "DROP")
        # The control port is in the range of ports that the kernel gives to programs.
        control = ("-p", "tcp", "--dport", "38888", "-j", "ACCEPT")
        self._in(self._nodes[node], "iptables", "-A", "INPUT", *control)
        self._in(self._nodes[node], "iptables", "-A", "INPUT", *rule)

    def limit_switch(self, switch: str, node: int, mtu: int) -> None:
        """Set the largest packet that a switch carries to and from a node."""
        self._in(self._switch, "ip", "link", "set", f"{switch}-{node}", "mtu", str(mtu))

    def name(self, node: int, text: str) -> None:
        """Set /etc/hosts of a node."""
        path = self.folder / f"hosts-{node}"
        path.write_text(f"127.0.0.1 localhost\n{text}", encoding="ascii")
        self._in(self._nodes[node], "mount", "--bind", str(path), "/etc/hosts")

    def name_as_debian(self, *addresses: str) -> None:
        """Set the hosts files as Debian's and Ubuntu's installers do: its own name is loopback."""
        for node, name in enumerate(self.hosts):
            lines = [
                f"{address} {host}\n" for address, host in zip(addresses, self.hosts, strict=True)
            ]
            lines[node] = f"127.0.1.1 {name}\n"
            self.name(node, "".join(lines))

    def run(self, script: str, **environ: str) -> list[Ended]:
        """Run a script on all nodes; return how the entry of each node ended."""
        key = self.folder / "key"
        if not key.exists():
            key.write_bytes(new_ssh_key())
            key.chmod(0o600)
        started = [self._start(node, script, environ) for node in range(len(self.hosts))]
        ended = []
        for process in started:
            try:
                out, err = process.communicate(timeout=_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
            ended.append(Ended(process.returncode, out.decode(), err.decode()))
        return ended

    def _start(self, node: int, script: str, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        home = self.folder / "home"
        code = self.folder / f"home-{self.hosts[node]}" / "code"
        (code / "train.py").write_text(script, encoding="utf-8")
        variables = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "MA_HOME": str(home),
            "TMPDIR": str(home / "tmp"),
            "MA_SCRIPT_INTERPRETER": sys.executable,
            "VC_WORKER_HOSTS": ",".join(self.hosts),
            "VC_TASK_INDEX": str(node),
            "MA_NUM_GPUS": "1",
            "CLOUDJOB_SSH_KEY": str(self.folder / "key"),
            "CLOUDJOB_TIMEOUT_S": "90",
            "CLOUDJOB_START_TIMEOUT_S": "60",
            "OMPI_MCA_mpi_yield_when_idle": "1",
            **environ,
        }
        argv = ["nsenter", "-t", str(self._nodes[node]), "-n", "-u", "-m"]
        argv += ["env", "-i", "-C", str(home / "code")]
        argv += [f"{name}={value}" for name, value in variables.items()]
        argv += [sys.executable, "-I", "-S", str(ROOT / ENTRY), "train.py"]
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def close(self) -> None:
        """Remove the namespaces, and with them the interfaces."""
        for holder in self._holders:
            holder.kill()
            holder.wait()
            assert holder.stdout is not None
            holder.stdout.close()


def _without_detection(address: str) -> tuple[str, ...]:
    # IPv6 could not be used for seconds, until the kernel knows that no other node has it.
    return ("nodad",) if ":" in address else ()


@contextlib.contextmanager
def networks(folder: Path, nodes: int = 2) -> Iterator[Networks]:
    """Nodes that are removed at the end."""
    namespaces = Networks(folder, nodes)
    try:
        yield namespaces
    finally:
        namespaces.close()
