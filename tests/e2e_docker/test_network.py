"""What nodes say to each other, and over which of their interfaces."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import docker
import pytest

from cloudjob.backends.docker.delivery import new_key

pytestmark = pytest.mark.docker

OPEN_MPI_5 = ("--ca-bundle", os.environ.get("PIP_CERT") or "/etc/ssl/certs/ca-certificates.crt")


@pytest.fixture(autouse=True)
def _root() -> None:
    """Look into the networks of containers, which only root may."""
    if os.geteuid() and os.environ.get("CLOUDJOB_REQUIRE_ALL") == "1":
        pytest.fail("these tests look into other network namespaces, so they must run as root")
    if os.geteuid():
        pytest.skip("only root may look into other network namespaces")


class Nodes:
    """A job started by hand, as on the platform, on nodes whose networks can be changed before.

    The network of a node is that of a container which only sleeps, and the node itself joins it.
    """

    def __init__(self, engine: docker.APIClient, image: str) -> None:
        self._engine = engine
        self._image = image
        self._name = f"cloudjob-test-{os.urandom(4).hex()}"
        self._made: list[str] = []
        self._hosts = [f"{self._name}-{index}" for index in range(2)]
        self._network = engine.create_network(self._name)["Id"]
        self._sleepers = [self._sleeper(host) for host in self._hosts]

    def _sleeper(self, host: str) -> str:
        engine = self._engine
        made = engine.create_container(
            self._image,
            entrypoint=["sleep", "600"],
            hostname=host,
            networking_config=engine.create_networking_config(
                {self._network: engine.create_endpoint_config(aliases=[host])}
            ),
        )["Id"]
        self._made.append(made)
        engine.start(made)
        return str(made)

    def ip(self, node: int, *words: str) -> None:
        """Run ``ip`` in the network of a node."""
        process = self._engine.inspect_container(self._sleepers[node])["State"]["Pid"]
        subprocess.run(["nsenter", "-t", str(process), "-n", "ip", *words], check=True)

    def rename(self, node: int, name: str) -> None:
        """Give the one interface of a node another name."""
        self.ip(node, "link", "set", "eth0", "down")
        self.ip(node, "link", "set", "eth0", "name", name)
        self.ip(node, "link", "set", name, "up")

    def run(self, script: str, **environ: str) -> list[tuple[int, str, str]]:
        """Run a script on one rank a node; return how each entry ended, and what it wrote."""
        key = new_key()
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
        made = self._engine.create_container(
            self._image,
            ["train.py"],
            environment=variables,
            host_config=self._engine.create_host_config(
                network_mode=f"container:{self._sleepers[index]}"
            ),
        )["Id"]
        self._made.append(made)
        self._engine.put_archive(made, "/home/ma-user", _archive(train=script.encode(), key=key))
        self._engine.start(made)
        return str(made)

    def close(self) -> None:
        for made in reversed(self._made):
            self._engine.remove_container(made, force=True, v=True)
        self._engine.remove_network(self._network)


def _archive(*, train: bytes, key: bytes) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as members:
        for name, mode, text in (("train.py", 0o644, train), ("key", 0o400, key)):
            member = tarfile.TarInfo(name)
            member.mode, member.uid, member.gid, member.size = mode, 1000, 100, len(text)
            members.addfile(member, io.BytesIO(text))
    return data.getvalue()


@pytest.fixture
def nodes(engine: docker.APIClient, base_image: str) -> Iterator[Nodes]:
    """Two nodes of the base image."""
    nodes = Nodes(engine, base_image)
    yield nodes
    nodes.close()


def test_each_node_chooses_an_interface_that_it_has(nodes):
    """Where the documented names are not there, NCCL is told of the one that leads to the others.

    Each node decides for itself, and the head's choice does not overwrite the worker's.
    """
    for node, name in enumerate(("net1", "ens7")):
        nodes.rename(node, name)
        # What another node is never reached on, though it comes before in the alphabet.
        nodes.ip(node, "link", "add", "docker0", "type", "bridge")
        nodes.ip(node, "addr", "add", "172.29.0.1/16", "dev", "docker0")
        nodes.ip(node, "link", "set", "docker0", "up")

    ended = nodes.run(
        "import os; print(os.environ['NCCL_SOCKET_IFNAME'], os.environ['NCCL_IB_HCA'])",
        NCCL_SOCKET_IFNAME="bond0,eth0",
        NCCL_IB_HCA="^mlx5_bond_0",
    )

    assert [code for code, _, _ in ended] == [0, 0], ended
    for node, name in enumerate(("net1", "ens7")):
        assert ended[node][1] == f"[{node}] {name} ^mlx5_bond_0\n", ended
        assert (
            "choosing the network: NCCL_SOCKET_IFNAME=bond0,eth0: no such network interface on"
            f" node {node} "
        ) in ended[node][2]
        assert f", which has lo, {name}; using {name}\n" in ended[node][2]


def test_a_users_interface_that_is_not_there_is_said(cloud):
    """It stays as it is, and every node says so before the run."""
    cloud.script("import os; print(os.environ['NCCL_SOCKET_IFNAME'])")

    done = cloud.submit("--nodes", "2", "-e", "NCCL_SOCKET_IFNAME=none7")

    assert done.code == 0, done
    assert sorted(done.out.splitlines()) == [b"[0] none7", b"[1] none7"]
    for node in (0, 1):
        assert f"NCCL_SOCKET_IFNAME=none7: no such network interface on node {node} " in done.err
