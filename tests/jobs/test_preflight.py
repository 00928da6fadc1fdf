"""Nodes that check each other before the ranks start, in real networks with a fault each."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.networks import Ended, Networks, networks

ADDRESSES = ("10.1.0.1", "10.1.0.2", "10.1.0.3")
BROKEN = 1
SCRIPT = "print('a rank has started')"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Networks]:
    """Three nodes in one network, each with its own name as 127.0.1.1."""
    if os.geteuid() and os.environ.get("CLOUDJOB_REQUIRE_ALL") == "1":
        pytest.fail("these tests make network namespaces, so they must run as root")
    if os.geteuid():
        pytest.skip("only root may make network namespaces")
    with networks(tmp_path, len(ADDRESSES)) as namespaces:
        namespaces.join("data", "net1", [f"{address}/24" for address in ADDRESSES])
        namespaces.name_as_debian(*ADDRESSES)
        yield namespaces


def verdict(ended: list[Ended]) -> str:
    """Return what the head says of the nodes, none of which has started a rank."""
    assert [each.code for each in ended] == [125, 125, 125], ended
    assert all("a rank has started" not in each.out for each in ended), ended
    (line,) = [line for line in ended[0].err.splitlines() if "checking the nodes: node" in line]
    return line.partition("checking the nodes: ")[2]


def test_a_firewall_that_lets_only_the_known_port_through_is_found(nodes: Networks):
    nodes.drop_new_connections(BROKEN, "32768:60999")

    report = verdict(nodes.run(SCRIPT, CLOUDJOB_LAUNCHER="mpirun"))

    assert report == "node 1 (w1): no answer on net1 (tried from nodes 0, 2)"


def test_a_network_that_loses_large_packets_of_one_node_is_found(nodes: Networks):
    """The port of the switch to that node carries 1,500 bytes, and tells nobody."""
    for node in range(len(ADDRESSES)):
        nodes.ip(node, "link", "set", "net1", "mtu", "9000")
        nodes.limit_switch("data", node, 1500 if node == BROKEN else 9000)

    report = verdict(nodes.run(SCRIPT, CLOUDJOB_LAUNCHER="mpirun"))

    assert report.startswith("node 1 (w1): small packets arrive at net1 and large ones do not")


def test_doctor_checks_nodes_and_prints_their_table(cloud):
    done = cloud.cli("doctor", "--nodes", "3", "--json", limit_s=300.0)

    assert done.code == 0, done
    values = json.loads(done.out)
    assert [node["node"] for node in values["nodes"]] == ["0", "1", "2"]
    assert {node["reached"] for node in values["nodes"]} <= {"1/2", "2/2"}
    assert all(node["memory"].endswith("GB/s") for node in values["nodes"])
    assert not [each for each in values["findings"] if each["weight"] == "fault"]
