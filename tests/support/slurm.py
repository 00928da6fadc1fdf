"""A real Slurm cluster on this machine, from Debian's packages: each node in its own namespaces.

Every node has its own address, host name, /etc/hosts and /tmp, so names resolve, ports are free and
Open MPI communicates over a network, as between machines. All other folders are shared. The
controller also has its own namespaces and is the login node, where jobs are submitted
(``Slurm.argv``). It needs root, and listens only in these namespaces.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "ip", "nsenter", "unshare")
ACCOUNTING = ("slurmdbd", "mariadbd")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_START_S = 180.0
# A full path, as commands may have any PATH.
NSENTER = "/usr/bin/nsenter"
ROOT = Path(__file__).parents[2]
# Sets the host name, /etc/hosts and a separate /tmp, in which this project keeps its path.
_HOLD = """
hostname "$1"
mount --bind "$2/hosts" /etc/hosts
mkdir -p "$2/root"
mount --bind "$3" "$2/root"
mount -t tmpfs -o mode=1777 tmp /tmp
if [ ! -e "$3" ]; then
    mkdir -p "$3"
    mount --bind "$2/root" "$3"
fi
ip link set lo up
echo ready
exec sleep infinity
"""
_NETWORK = "10.251.7"
LOGIN_ADDRESS = f"{_NETWORK}.1"

_CONF = """\
ClusterName=cloudjob
SlurmctldHost=login({network}.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort=6817
SlurmdPort=6818
{confinement}
SelectType=select/cons_tres
SchedulerParameters=batch_sched_delay=0,sched_min_interval=10000,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=15
InactiveLimit=0
MinJobAge=300
MailProg=/bin/true
Prolog={folder}/prolog
MpiDefault=none
GresTypes=gpu,nvme
{accounting}
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=5
PartitionName=low Nodes=ALL Default=NO MaxTime=60 State=UP PriorityTier=1 GraceTime=20
PartitionName=high Nodes=ALL Default=NO MaxTime=60 State=UP PriorityTier=9
PartitionName=tiny Nodes={first} Default=NO MaxTime=1 State=UP PriorityTier=5
"""

# Files instead of devices: Slurm only counts them and assigns them to jobs.
_GRES = """\
NodeName={nodes} Name=gpu File=/dev/zero
NodeName={nodes} Name=gpu File=/dev/full
NodeName={nodes} Name=gpu File=/dev/random
NodeName={nodes} Name=nvme Count=2
"""
_UNCONFINED = """\
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectTypeParameters=CR_Core
"""
# Fails on a node if the test asks for it (``Slurm.fail_prolog``).
_PROLOG = "#!/bin/sh\n[ ! -e {folder}/no-prolog-$SLURMD_NODENAME ]\n"
# Clusters with the same node names share cgroups, so their jobs must have different ids.
_CONFINED = """\
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
SelectTypeParameters=CR_Core_Memory
DefMemPerNode=900
FirstJobId={number}
"""
_CGROUP = """\
CgroupPlugin=cgroup/v1
ConstrainRAMSpace=yes
"""
_NO_ACCOUNTING = "AccountingStorageType=accounting_storage/none"
_ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=login
AccountingStoragePass={folder}/munge.sock
AccountingStorageEnforce=associations,limits,qos
"""
_DBD = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
DbdHost=login
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={port}
StorageLoc=slurm
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
"""
_DATABASE_PORT = 3306


def missing(*more: str) -> str:
    """Return why Slurm cannot run here, empty if it can.

    Args:
        more: The names of further programs that must exist.
    """
    absent = [name for name in (*PROGRAMS, *more) if shutil.which(name, path=_PATH) is None]
    if absent:
        packages = "slurm-wlm, munge, iproute2, slurmdbd, mariadb-server-core"
        return f"there is no {', '.join(absent)} (Debian: {packages})"
    return "" if os.geteuid() == 0 else "it takes root to make the nodes' namespaces"


def can_confine() -> bool:
    """Whether this machine has cgroups v1, which enforce the memory limits of jobs."""
    return all(
        os.path.ismount(f"/sys/fs/cgroup/{name}") and os.access(f"/sys/fs/cgroup/{name}", os.W_OK)
        for name in ("memory", "freezer", "cpuset")
    )


class Slurm:
    """A controller and its nodes; use it as a context manager.

    Args:
        has_accounting: Whether to run a database of accounts, limits and ended jobs.
        is_confined: Whether cgroups enforce the memory limits of jobs (see ``can_confine``).
    """

    def __init__(
        self, nodes: int = 2, *, has_accounting: bool = False, is_confined: bool = False
    ) -> None:
        # A short path, as it contains Unix sockets; not in /tmp, as each node has its own /tmp.
        self.folder = Path(tempfile.mkdtemp(prefix="cj-slurm-", dir="/var/tmp"))
        self.folder.chmod(0o755)
        self.nodes = tuple(f"n{index}" for index in range(1, nodes + 1))
        self.conf = self.folder / "slurm.conf"
        self._has_accounting = has_accounting
        self._is_confined = is_confined
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Slurm:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of Slurm's commands."""
        return {"SLURM_CONF": str(self.conf), "PATH": _PATH}

    def argv(self, *command: str, node: str = "login") -> list[str]:
        """Return the command that runs ``command`` on a node."""
        holder = str(self._holders[node].pid)
        return [NSENTER, "-t", holder, "-n", "-u", "-m", "--wd=.", *command]

    def run(self, *command: str, node: str = "login", is_checked: bool = True) -> str:
        """Run one of Slurm's commands on the login node and return its output."""
        done = subprocess.run(
            self.argv(*command, node=node),
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
            text=True,
            check=False,
        )
        if done.returncode and is_checked:
            raise RuntimeError(
                f"{command}: exit code {done.returncode}: {done.stderr}{done.stdout}"
            )
        return done.stdout

    def start(self) -> None:
        """Start everything, and wait until every node accepts jobs."""
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (self.folder / name).mkdir()
        hosts = {"login": LOGIN_ADDRESS}
        hosts.update((node, f"{_NETWORK}.{i}") for i, node in enumerate(self.nodes, 11))
        text = "127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for n, a in hosts.items())
        (self.folder / "hosts").write_text(text)
        self._write_conf(hosts)
        for name in hosts:
            self._hold(name)
        self._wire(hosts)
        self._start_munge()
        if self._has_accounting:
            self._start_accounting()
        self.start_controller()
        for node in self.nodes:
            self.start_node(node)
        self.await_idle()

    def start_node(self, node: str) -> None:
        """Start the daemon of a node."""
        self._start(node, "slurmd", "-D", "-N", node)

    def start_controller(self, *, forgets: bool = False) -> None:
        """Start the controller; it restores its jobs unless ``forgets`` is set."""
        self._start("login", "slurmctld", "-D", "-c" if forgets else "-i")

    def stop_controller(self) -> None:
        """Stop the controller; the jobs keep running."""
        daemon = self._daemons.pop("slurmctld")
        daemon.terminate()
        daemon.wait()

    def start_sshd(self, config: Path) -> None:
        """Allow logins to the login node."""
        # Debian's sshd needs it, and only its service creates it.
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        self._start("login", "/usr/sbin/sshd", "-D", "-e", "-f", str(config))

    def stop_sshd(self) -> None:
        """Make every login fail."""
        daemon = self._daemons.pop("sshd")
        daemon.kill()
        daemon.wait()

    def kill_node(self, node: str) -> None:
        """Kill a node's daemon and everything it has started, as a power failure does."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()
        inside = Path(f"/proc/{self._holders[node].pid}/ns/net").readlink()
        for _ in range(100):
            remaining = [pid for pid in _pids() if pid != self._holders[node].pid]
            remaining = [pid for pid in remaining if _net(pid) == inside]
            if not remaining:
                # A node that loses power also loses these files.
                self.run("sh", "-c", "rm -rf /tmp/cloudjob-*", node=node)
                return
            for pid in remaining:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        raise RuntimeError(f"processes of {node} do not end: {remaining}")

    def fail_prolog(self, node: str) -> None:
        """Let the prolog of the next job on a node fail, which drains the node."""
        (self.folder / f"no-prolog-{node}").touch()

    def hide_munge(self, node: str) -> None:
        """Make authentication fail on a node, as without its munged."""
        self.run("mount", "--bind", "/dev/null", str(self.folder / "munge.sock"), node=node)

    def repair(self, node: str) -> None:
        """Undo ``fail_prolog`` and ``hide_munge``, and let the node accept jobs."""
        (self.folder / f"no-prolog-{node}").unlink(missing_ok=True)
        self.run("umount", str(self.folder / "munge.sock"), node=node, is_checked=False)
        self.run("scontrol", "update", f"nodename={node}", "state=resume", is_checked=False)

    def await_idle(self, limit_s: float = _START_S) -> None:
        """Wait until every node is idle."""
        end = time.monotonic() + limit_s
        states = ""
        while time.monotonic() < end:
            with contextlib.suppress(RuntimeError):
                states = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T")
                if sorted(states.split()) == sorted([*self.nodes, *["idle"] * len(self.nodes)]):
                    return
            if any(daemon.poll() is not None for daemon in self._daemons.values()):
                break
            time.sleep(0.1)
        raise RuntimeError(f"the nodes are not idle: {states}\n{self.logs()}")

    def logs(self) -> str:
        """Return the last lines of the daemons' logs."""
        texts = [f"{p.name}: {p.read_text()[-2000:]}" for p in sorted(self.folder.glob("*.log"))]
        return "\n".join(texts)

    def stop(self) -> None:
        """Stop everything and remove all files."""
        for process in (*self._daemons.values(), *self._holders.values()):
            process.kill()
            process.wait()
        inside = {
            pid for pid in _pids() if str(self.folder).encode() in _read(f"/proc/{pid}/environ")
        }
        for pid in inside - {os.getpid()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write_conf(self, hosts: Mapping[str, str]) -> None:
        nodes = "\n".join(
            f"NodeName={node} NodeAddr={hosts[node]} NodeHostname={node} CPUs=4 RealMemory=2000 "
            f"Gres=gpu:3,nvme:2 Feature=common,only-{node} State=UNKNOWN"
            for node in self.nodes
        )
        accounting = _ACCOUNTING if self._has_accounting else _NO_ACCOUNTING
        number = secrets.randbelow(50_000) + 1
        text = _CONF.format(
            confinement=_CONFINED.format(number=number) if self._is_confined else _UNCONFINED,
            folder=self.folder,
            network=_NETWORK,
            accounting=accounting.format(folder=self.folder),
            nodes=nodes,
            first=self.nodes[0],
        )
        self.conf.write_text(text)
        prolog = self.folder / "prolog"
        prolog.write_text(_PROLOG.format(folder=self.folder))
        prolog.chmod(0o755)
        (self.folder / "cgroup.conf").write_text(_CGROUP)
        (self.folder / "gres.conf").write_text(_GRES.format(nodes=",".join(self.nodes)))

    def _hold(self, name: str) -> None:
        """Create the namespaces of a node, which exist as long as this process."""
        holder = subprocess.Popen(
            [
                *("unshare", "-n", "-u", "-m", "--propagation", "private"),
                *("sh", "-ec", _HOLD, "sh", name, str(self.folder), str(ROOT)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={"PATH": _PATH},
        )
        self._holders[name] = holder
        assert holder.stdout is not None
        with holder.stdout as output:
            is_ready = output.readline() == b"ready\n"
        if not is_ready:
            raise RuntimeError(f"this machine makes no namespaces for {name}")

    def _wire(self, hosts: Mapping[str, str]) -> None:
        """Connect all nodes to a bridge in the login node's namespace."""
        ip = ("ip",)
        self.run(*ip, "link", "add", "switch", "type", "bridge")
        self.run(*ip, "addr", "add", f"{hosts['login']}/24", "dev", "switch")
        self.run(*ip, "link", "set", "switch", "up")
        for node in self.nodes:
            to = str(self._holders[node].pid)
            self.run(*ip, "link", "add", f"to-{node}", "type", "veth")
            peer = self.run("sh", "-c", f"ip -o link show to-{node} | sed 's/.*@//; s/:.*//'")
            peer = peer.strip()
            self.run(*ip, "link", "set", peer, "netns", to, "name", "eth0")
            self.run(*ip, "link", "set", f"to-{node}", "master", "switch", "up")
            self.run(*ip, "addr", "add", f"{hosts[node]}/24", "dev", "eth0", node=node)
            self.run(*ip, "link", "set", "eth0", "up", node=node)

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        names = ("key-file", "socket", "pid-file", "log-file", "seed-file")
        files = ("munge.key", "munge.sock", "munge.pid", "munge.log", "munge.seed")
        options = [f"--{n}={self.folder / f}" for n, f in zip(names, files, strict=True)]
        self._start("login", "munged", "--foreground", "--force", *options)
        self._await((self.folder / "munge.sock").exists, "munged")

    def _start_accounting(self) -> None:
        """Start the accounting database and its daemon, which only the login node can reach."""
        data, dbd = self.folder / "database", self.folder / "slurmdbd.conf"
        data.mkdir()
        common = (f"--datadir={data}", "--user=root")
        where: tuple[str, ...] = (
            f"--socket={self.folder}/db.sock",
            f"--pid-file={self.folder}/db.pid",
        )
        where = (*where, "--bind-address=127.0.0.1", f"--port={_DATABASE_PORT}")
        # Without passwords, as only this cluster can reach the database.
        argv = ("mariadbd", "--no-defaults", "--skip-grant-tables", *common, *where)
        self._start("login", *argv, "--innodb-buffer-pool-size=16M")
        dbd.write_text(_DBD.format(folder=self.folder, port=_DATABASE_PORT))
        dbd.chmod(0o600)
        # Otherwise slurmdbd would try again only after five seconds.
        self._await((self.folder / "db.sock").exists, "mariadbd")
        self._start("login", "slurmdbd", "-D")
        add = ("sacctmgr", "-i", "add", "cluster", "cloudjob")
        self._await(lambda: "already exist" in self.run(*add, is_checked=False), "slurmdbd")

    def _await(self, is_up: Callable[[], bool], name: str) -> None:
        end = time.monotonic() + _START_S
        while not is_up():
            if time.monotonic() > end:
                raise RuntimeError(f"{name} does not start: {self.logs()}")
            time.sleep(0.02)

    def _start(self, node: str, *argv: str) -> None:
        name = Path(argv[0]).name
        log = (self.folder / f"{name}-{node}.out.log").open("ab")
        with log:
            process = subprocess.Popen(
                self.argv(*argv, node=node),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._daemons[node if name == "slurmd" else name] = process


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _net(pid: int) -> Path | None:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/ns/net").readlink()
    return None


def _read(path: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(path).read_bytes()
    return b""
