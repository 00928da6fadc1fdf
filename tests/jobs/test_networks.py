"""Nodes whose networks are those of other people's machines: real mpirun and torch between them.

Every node has a hosts file as Debian and Ubuntu write it, in which its own name is 127.0.1.1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.networks import Networks, networks

ALLREDUCE = """\
import os
from mpi4py import MPI
for size in (1, 1000, 1000000):
    assert len(MPI.COMM_WORLD.allreduce(b"x" * size)) == 2 * size
print(os.environ["MA_CURRENT_IP"], os.environ["NCCL_SOCKET_IFNAME"])
"""
GLOO = """\
import datetime, os, sys
import torch, torch.distributed as dist
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
arguments = {
    "init_method": options["--init_method"],
    "rank": int(options["--rank"]),
    "world_size": int(options["--world_size"]),
} if options else {}
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60), **arguments)
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print("total", int(total), os.environ["GLOO_SOCKET_IFNAME"])
"""
MINDSPORE = """\
import os
import numpy as np
import mindspore as ms
from mindspore import Tensor, ops
from mindspore.communication import init, get_rank
ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
init()
total = ops.AllReduce()(Tensor(np.array([get_rank() + 1.0], np.float32)))
print("total", int(float(total[0])), os.environ["MS_SCHED_HOST"])
"""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Networks]:
    """Two nodes without a network."""
    if os.geteuid() and os.environ.get("CLOUDJOB_REQUIRE_ALL") == "1":
        pytest.fail("these tests make network namespaces, so they must run as root")
    if os.geteuid():
        pytest.skip("only root may make network namespaces")
    with networks(tmp_path) as namespaces:
        yield namespaces


def crowd(nodes: Networks) -> None:
    """Give the nodes many networks, of which only 10.1.0.0/24 leads to the other node.

    Packets to ``mgmt0`` of the other node are lost on the way, and nobody says so.
    """
    nodes.join("mgmt", "mgmt0", ["10.9.0.1/24", "10.8.0.1/24"])
    nodes.alone("docker0", "172.17.0.1/16")
    nodes.join("data", "net1,ens7", ["10.1.0.1/24", "10.1.0.2/24"])
    nodes.join("vlan", "net1.100,ens7.100", ["10.5.0.1/24", "10.6.0.2/24"])
    nodes.alone("vboxnet0", "192.168.56.1/24")
    nodes.swallow("data", "10.1.0.254/24")
    nodes.name_as_debian("10.1.0.1", "10.1.0.2")


def libraries_of(mpi) -> dict[str, str]:
    """Return the variables with which mpi4py uses the library of an mpirun."""
    prefix = mpi.mpirun.parent.parent
    libraries = [*prefix.glob("lib/libmpi.so.40"), *prefix.glob("lib/*/libmpi.so.40")]
    return {"PATH": mpi.path, "MPI4PY_LIBMPI": str(libraries[0])}


def test_ranks_of_mpirun_meet_over_the_route_between_the_nodes(nodes, mpi):
    """Neither ranks nor mpirun's daemons try another network, which would hang for minutes.

    Each node decides for itself, and the head's choice does not overwrite the worker's.
    """
    crowd(nodes)

    ended = nodes.run(ALLREDUCE, **libraries_of(mpi))

    assert [end.code for end in ended] == [0, 0], ended
    for node, name in enumerate(("net1", "ens7")):
        ip = f"10.1.0.{node + 1}"
        assert ended[node].out == f"[{node}] {ip} ={name}\n", ended
        assert (
            f"choosing the network: node {node} (w{node}): {name} ({ip}) leads to the other nodes,"
            f" so ranks do not use mgmt0, docker0, {name}.100, vboxnet0\n"
        ) in ended[node].err


def test_a_second_address_of_an_interface_may_be_that_of_the_name(nodes, mpi):
    """Libraries know the first address of an interface only, so the log names it."""
    nodes.join("data", "eth0", ["10.7.0.1/24 10.1.0.1/24", "10.7.0.2/24 10.1.0.2/24"])
    nodes.name_as_debian("10.1.0.1", "10.1.0.2")

    ended = nodes.run(ALLREDUCE, **libraries_of(mpi))

    assert [end.code for end in ended] == [0, 0], ended
    for node in (0, 1):
        assert ended[node].out == f"[{node}] 10.1.0.{node + 1} eth0\n"
        assert (
            f"(w{node}): eth0 (10.1.0.{node + 1}) leads to the other nodes, but libraries use the"
            f" first address of eth0, 10.7.0.{node + 1}\n"
        ) in ended[node].err


def test_nodes_whose_names_have_ipv6_addresses_too_use_ipv4(nodes, mpi):
    """The addresses of IPv6 lead nowhere."""
    nodes.join("data", "eth0", ["10.1.0.1/24", "10.1.0.2/24"])
    nodes.join("v6", "eth1", ["fd00:1::1/64", "fd00:2::2/64"])
    for node in (0, 1):
        nodes.name(node, "fd00:1::1 w0\n10.1.0.1 w0\nfd00:2::2 w1\n10.1.0.2 w1\n")

    ended = nodes.run(ALLREDUCE, **libraries_of(mpi))

    assert [end.code for end in ended] == [0, 0], ended
    assert [end.out for end in ended] == ["[0] 10.1.0.1 eth0\n", "[1] 10.1.0.2 eth0\n"]


@pytest.mark.parametrize("kind", ["loopback", "its own address"])
def test_a_stale_hosts_file_that_names_this_node_does_not_choose_the_network(nodes, mpi, kind):
    """The machines are copies with a VirtualBox NAT, whose address is equal on all of them.

    The worker's hosts file, which is still that of the head, gives the head an address of the
    worker, and the route to an address of this node is always ``lo``.
    """
    nodes.alone("enp0s3", "10.0.2.15/24")
    nodes.join("trunk", "bond0", ["10.3.0.1/24", "10.4.0.2/24"])
    nodes.join("data", "bond0.100", ["10.1.0.1/24", "10.1.0.2/24"])
    for node in (0, 1):
        nodes.ip(node, "route", "add", "default", "dev", "bond0.100")
    nodes.name(0, "127.0.1.1 w0\n10.1.0.2 w1\n")
    stale = {"loopback": "127.0.1.1", "its own address": "10.0.2.15"}[kind]
    nodes.name(1, f"{stale} w0\n10.1.0.2 w1\n")

    ended = nodes.run(ALLREDUCE, **libraries_of(mpi))

    assert [end.code for end in ended] == [0, 0], ended
    assert [end.out for end in ended] == [
        "[0] 10.1.0.1 bond0.100\n",
        "[1] 10.1.0.2 bond0.100\n",
    ]


@pytest.mark.parametrize(
    ("addresses", "problem"),
    [
        (("10.1.0.1", "10.1.0.1"), "its name has an address of the head, 10.1.0.1"),
        (
            ("fe80::1", "fe80::2"),
            "its name has only the link-local address fe80::2, which no library can use",
        ),
    ],
)
def test_a_name_that_cannot_be_that_of_another_node_is_told_at_once(nodes, addresses, problem):
    """A first table of the nodes says so, long before the one at the end of the wait."""
    nodes.join("data", "eth0", [f"{address}/24" for address in addresses])
    for node in (0, 1):
        nodes.name(node, "".join(f"{item} w{n}\n" for n, item in enumerate(addresses)))

    head, _ = nodes.run("", CLOUDJOB_START_TIMEOUT_S="8")

    assert head.err.count(problem) == 3
    assert head.err.count("jobentry: the nodes after ") == 2
    assert "hint: node 1: correct its address in the name server, or in /etc/hosts" in head.err


@pytest.mark.torch
@pytest.mark.parametrize("launcher", ["torchrun", "pytorch-modelarts"])
def test_ranks_of_torch_meet_over_the_route_between_the_nodes(nodes, launcher):
    crowd(nodes)

    python = os.environ["CLOUDJOB_TEST_TORCH"]
    ended = nodes.run(GLOO, CLOUDJOB_LAUNCHER=launcher, MA_SCRIPT_INTERPRETER=python)

    assert [end.code for end in ended] == [0, 0], ended
    for node, name in enumerate(("net1", "ens7")):
        assert f"[{node}] total 3 {name}\n" in ended[node].out


@pytest.mark.torch
def test_ranks_of_torch_meet_over_ipv6(nodes):
    nodes.join("data", "eth0", ["fd00:1::1/64", "fd00:1::2/64"])
    nodes.alone("docker0", "172.17.0.1/16")
    nodes.name_as_debian("fd00:1::1", "fd00:1::2")

    python = os.environ["CLOUDJOB_TEST_TORCH"]
    ended = nodes.run(GLOO, CLOUDJOB_LAUNCHER="torchrun", MA_SCRIPT_INTERPRETER=python)

    assert [end.code for end in ended] == [0, 0], ended


@pytest.mark.mindspore
@pytest.mark.parametrize("launcher", ["msrun", "dynamic-cluster", "mindspore-mpi"])
def test_the_scheduler_of_mindspore_listens_where_all_nodes_reach_it(nodes, launcher):
    crowd(nodes)

    python = os.environ["CLOUDJOB_TEST_MINDSPORE"]
    ended = nodes.run(
        MINDSPORE,
        CLOUDJOB_LAUNCHER=launcher,
        MA_SCRIPT_INTERPRETER=python,
        GLOG_v="3",
        PATH="/usr/bin:/bin",
    )

    assert [end.code for end in ended] == [0, 0], ended
    for node in (0, 1):
        assert f"[{node}] total 3 10.1.0.1\n" in ended[node].out
