"""The traffic between nodes, and the interfaces that it uses."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import struct
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from cloudjob.backends.delivery import new_ssh_key
from cloudjob.emulator.docker_nodes import bridge_address
from tests.support.tls import Authority, front

pytestmark = pytest.mark.docker

BIN = Path(sys.executable).parent


@pytest.fixture(autouse=True)
def _root() -> None:
    """Require root, as only root may enter the network namespaces of containers."""
    if os.geteuid() and os.environ.get("CLOUDJOB_REQUIRE_ALL") == "1":
        pytest.fail("these tests look into other network namespaces, so they must run as root")
    if os.geteuid():
        pytest.skip("only root may look into other network namespaces")


class Nodes:
    """A job started by hand, as on the platform, on nodes whose networks can be changed first.

    A sleeping container owns the network namespace of each node; the node's container joins it.
    """

    def __init__(self, engine: docker.APIClient, image: str) -> None:
        self._engine = engine
        self._image = image
        self._name = f"cloudjob-test-{os.urandom(4).hex()}"
        self._containers: list[str] = []
        self._hosts = [f"{self._name}-{index}" for index in range(2)]
        self._network = engine.create_network(self._name)["Id"]
        self._sleepers = [self._sleeper(host) for host in self._hosts]

    def _sleeper(self, host: str) -> str:
        engine = self._engine
        container_id = engine.create_container(
            self._image,
            entrypoint=["sleep", "600"],
            hostname=host,
            networking_config=engine.create_networking_config(
                {self._network: engine.create_endpoint_config(aliases=[host])}
            ),
        )["Id"]
        self._containers.append(container_id)
        engine.start(container_id)
        return str(container_id)

    def ip(self, node: int, *arguments: str) -> None:
        """Run ``ip`` in the network of a node."""
        process = self._engine.inspect_container(self._sleepers[node])["State"]["Pid"]
        subprocess.run(["nsenter", "-t", str(process), "-n", "ip", *arguments], check=True)

    def rename(self, node: int, name: str) -> None:
        """Rename the only interface of a node."""
        self.ip(node, "link", "set", "eth0", "down")
        self.ip(node, "link", "set", "eth0", "name", name)
        self.ip(node, "link", "set", name, "up")

    def run(self, script: str, **environ: str) -> list[tuple[int, str, str]]:
        """Run a script with one rank per node; return each entry's exit code, stdout and stderr."""
        key = new_ssh_key()
        nodes = [self._node(index, script, key, environ) for index in range(2)]
        ended = []
        for node in nodes:
            code = self._engine.wait(node, timeout=120)["StatusCode"]
            out, err = (
                self._engine.logs(node, stdout=is_out, stderr=not is_out).decode()
                for is_out in (True, False)
            )
            ended.append((code, out, err))
        return ended

    def _node(self, index: int, script: str, key: bytes, environ: dict[str, str]) -> str:
        variables = {
            "VC_WORKER_HOSTS": ",".join(self._hosts),
            "VC_TASK_INDEX": str(index),
            "MA_NUM_GPUS": "1",
            "CLOUDJOB_SSH_KEY": "/home/ma-user/key",
            "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
            **environ,
        }
        container_id = self._engine.create_container(
            self._image,
            ["train.py"],
            environment=variables,
            host_config=self._engine.create_host_config(
                network_mode=f"container:{self._sleepers[index]}"
            ),
        )["Id"]
        self._containers.append(container_id)
        self._engine.put_archive(
            container_id, "/home/ma-user", _archive(train=script.encode(), key=key)
        )
        self._engine.start(container_id)
        return str(container_id)

    def close(self) -> None:
        for container_id in reversed(self._containers):
            self._engine.remove_container(container_id, force=True, v=True)
        self._engine.remove_network(self._network)


def _archive(*, train: bytes, key: bytes) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as members:
        for name, mode, text in (("train.py", 0o644, train), ("key", 0o400, key)):
            member = tarfile.TarInfo(name)
            member.mode, member.uid, member.gid, member.size = mode, 1000, 100, len(text)
            members.addfile(member, io.BytesIO(text))
    return data.getvalue()


@pytest.fixture(params=["examples_image", "open_mpi_5_image"])
def nodes(engine: docker.APIClient, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    """Two nodes with mpi4py and Open MPI 4.1 or 5.0."""
    nodes = Nodes(engine, request.getfixturevalue(request.param))
    yield nodes
    nodes.close()


ALLREDUCE = """\
import os
from mpi4py import MPI
for size in (1, 1000, 1000000):
    ours = MPI.COMM_WORLD.allreduce(b"x" * size)
    assert len(ours) == 2 * size
print(os.environ["NCCL_SOCKET_IFNAME"], os.environ["NCCL_IB_HCA"])
"""


def test_each_node_chooses_an_existing_interface(nodes):
    """If the documented interfaces do not exist, NCCL gets the one that leads to the other nodes.

    Each node decides for itself, and the head's choice does not overwrite the worker's.
    Open MPI must not use a node-local network that has the same address on every node: an
    allreduce would hang.
    """
    for node, name in enumerate(("net1", "ens7")):
        nodes.rename(node, name)
        nodes.ip(node, "link", "add", "docker0", "type", "bridge")
        nodes.ip(node, "addr", "add", "172.29.0.1/16", "dev", "docker0")
        nodes.ip(node, "link", "set", "docker0", "up")

    ended = nodes.run(
        ALLREDUCE,
        NCCL_SOCKET_IFNAME="bond0,eth0",
        NCCL_IB_HCA="^mlx5_bond_0",
        CLOUDJOB_TIMEOUT_S="60",
    )

    assert [code for code, _, _ in ended] == [0, 0], ended
    for node, name in enumerate(("net1", "ens7")):
        assert ended[node][1] == f"[{node}] {name} ^mlx5_bond_0\n", ended
        assert (
            "choosing the network: NCCL_SOCKET_IFNAME=bond0,eth0: no such network interface on"
            f" node {node} "
        ) in ended[node][2]
        assert f", which has lo, {name}, docker0; using {name}\n" in ended[node][2]
        assert f"{name} (" in ended[node][2]
        assert "leads to the other nodes, so ranks do not use docker0\n" in ended[node][2]


def test_a_missing_interface_set_by_the_user_is_reported_and_kept(cloud):
    cloud.script("import os; print(os.environ['NCCL_SOCKET_IFNAME'])")

    done = cloud.submit("--nodes", "2", "-e", "NCCL_SOCKET_IFNAME=none7")

    assert done.code == 0, done
    assert sorted(done.out.splitlines()) == [b"[0] none7", b"[1] none7"]
    for node in (0, 1):
        assert f"NCCL_SOCKET_IFNAME=none7: no such network interface on node {node} " in done.err


# -- certificates ---------------------------------------------------------------------------------


def test_containers_trust_the_authority_of_the_store(cloud, seaweedfs, new_bucket, tmp_path):
    """The image does not know the authority, and no file of this machine is in the containers."""
    bridge = bridge_address(cloud.engine.inspect_network("bridge"))
    bucket = new_bucket(seaweedfs)
    authority = Authority(tmp_path)
    cloud.environ.update({**seaweedfs.environ, "AWS_CA_BUNDLE": str(authority.bundle)})
    cloud.script("import os; open(os.environ['model'] + '/weights', 'w').write('1')")
    with front(authority, seaweedfs.port, bridge) as server:
        cloud.environ["AWS_ENDPOINT_URL"] = server.endpoint
        done = cloud.submit("--store", f"s3://{bucket}/jobs", "--nodes", "2", "--output", "model=")
        listed = cloud.run("outputs", done.job)

    assert done.code == 0, done
    assert b"weights" in listed.out, listed


# -- secrets ------------------------------------------------------------------------------------

WAIT = """\
import os, time
print("ready", len(os.environ["TOKEN"]), flush=True)
end = time.monotonic() + 100
while time.monotonic() < end and not os.path.exists("/tmp/go"):
    time.sleep(0.05)
"""


class Capture:
    """Captures every packet on the networks of this host, including those of containers."""

    def __init__(self, *texts: str) -> None:
        self.seen: set[str] = set()
        self.packets = 0
        self.dropped = 0
        self._end_s = 0.0
        self._texts = [text.encode() for text in texts]
        # The end of the last packet of each connection, as a text may span two packets.
        self._packet_ends: dict[bytes, bytes] = {}
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
        # Only root may force this size. Packets wait here while Python is busy; none is dropped.
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 256 << 20)
        self._socket.settimeout(0.2)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        # Drain the queue at the end, but only until _end_s, as other traffic may never pause.
        while not self._is_over.is_set() or self._end_s > time.monotonic():
            try:
                packet, address = self._socket.recvfrom(1 << 17)
            except TimeoutError:
                if self._is_over.is_set():
                    return
                continue
            self._search(packet, str(address[0]).encode())

    def _search(self, packet: bytes, device: bytes) -> None:
        self.packets += 1
        # Addresses and ports of IPv4 without options, on this device.
        connection = device + packet[26:38]
        text = self._packet_ends.get(connection, b"") + packet[54:]
        self._packet_ends[connection] = text[-100:]
        self.seen.update(needle.decode() for needle in self._texts if needle in text)

    def close(self) -> None:
        """Drain the queue of packets and stop."""
        self._end_s = time.monotonic() + 20
        self._is_over.set()
        self._thread.join()
        counts = self._socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8)
        self.dropped = struct.unpack("II", counts)[1]
        self._socket.close()


# From linux/if_ether.h, asm-generic/socket.h and linux/if_packet.h.
_ALL = 3
_SO_RCVBUFFORCE = 33
_SOL_PACKET, _PACKET_STATISTICS = 263, 6


class Processes:
    """Polls the process list of this host, which includes its containers, for a text."""

    def __init__(self, text: str) -> None:
        self.in_argv: set[str] = set()
        self.in_environment: set[str] = set()
        self.polls = 0
        self._text = text.encode()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._is_over.wait(0.02):
            self.polls += 1
            for folder in Path("/proc").iterdir():
                if folder.name.isdecimal():
                    with contextlib.suppress(OSError):
                        self._search((folder / "cmdline").read_bytes(), folder)

    def _search(self, cmdline: bytes, folder: Path) -> None:
        printable = cmdline.replace(b"\0", b" ").decode("utf-8", "replace")[:300]
        if self._text in cmdline:
            self.in_argv.add(printable)
        if self._text in (folder / "environ").read_bytes():
            self.in_environment.add(printable)

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()


@pytest.mark.parametrize("name", ["base_image", "open_mpi_5_image"])
def test_a_secret_is_neither_on_the_network_nor_in_a_process_list(cloud, request, name):
    """Watch the network between the nodes and the processes of every node during the whole job.

    A variable that is not secret crosses Open MPI's own channel in the clear, which proves that
    the capture would show a secret sent that way. The ranks have the secret in their environment,
    which proves that the process list is read.
    """
    secret, visible = os.urandom(20).hex(), os.urandom(20).hex()
    image = request.getfixturevalue(name)
    cloud.environ["TOKEN"] = secret
    cloud.script(WAIT)
    processes, capture = Processes(secret), Capture(secret, visible)
    try:
        options = ("--nodes", "2", "--image", image, "--secret", "TOKEN", "-e", f"MARK={visible}")
        job = cloud.detach(*options)
        cloud.await_log(job, b"[1] ready %d" % len(secret))
        for container in cloud.containers(job):
            started = cloud.engine.exec_create(container["Id"], ["touch", "/tmp/go"])
            cloud.engine.exec_start(started["Id"])
        done = cloud.run("wait", job)
    finally:
        processes.close()
        capture.close()

    assert done.code == 0, done
    assert processes.polls > 10
    assert processes.in_argv == set()
    # The ranks and, on this host, the `submit` command have it, but no other program.
    holders = {
        cmdline for cmdline in processes.in_environment if str(BIN / "cloudjob") not in cmdline
    }
    assert any("train.py" in cmdline for cmdline in holders), processes.in_environment
    assert [cmdline for cmdline in holders if "train.py" not in cmdline] == []
    assert capture.dropped == 0
    assert visible in capture.seen, f"{capture.packets} packets, and none of Open MPI's own channel"
    assert secret not in capture.seen
