"""The network of a node: its interfaces, and the way to the other nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobentry.contract.env import NodeEnv
from jobentry.node import network
from jobentry.node.network import Interface, Route

LO = Interface("lo", ("127.0.0.1",), is_loopback=True)
ETH0 = Interface("eth0", ("10.0.0.5", "10.0.1.5"))
FAR = NodeEnv(hosts=("no.invalid", "neither.invalid"))


def test_the_loopback_interface_is_detected():
    interface_of = {item.name: item for item in network.detect(NodeEnv(), {}).interfaces}

    assert interface_of["lo"].is_loopback
    assert "127.0.0.1" in interface_of["lo"].addresses
    # The kernel also lists interfaces that are down or have no address.
    assert set(interface_of) <= {path.name for path in Path("/sys/class/net").iterdir()}


def test_the_loopback_leads_to_nodes_on_this_machine():
    assert network.detect(NodeEnv(hosts=("w.invalid", "localhost")), {}).route == Route(
        "lo", "127.0.0.1"
    )


def test_a_hosts_file_that_gives_another_node_a_loopback_address_does_not_choose_the_loopback():
    """As on a copy of another machine, whose hosts file still has that one's 127.0.1.1."""
    outward = network.detect(NodeEnv(), {}).outward
    if not outward:
        pytest.skip("this machine has only a loopback")
    route = Route(outward[-1].name, outward[-1].addresses[0])
    node = NodeEnv(hosts=("w.invalid", "localhost"))

    assert network.detect(node, {"MA_CURRENT_IP": route.address}).route == route


def test_emulated_nodes_do_not_look_up_names():
    """Each has the address that it was given; without namespaces, no name resolves."""
    node = FAR._replace(control_dir="/run")

    assert network.detect(node, {"MA_CURRENT_IP": "127.0.3.4"}).route == Route("lo", "127.0.3.4")


def test_an_unknown_name_leaves_the_way_out_of_the_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(network, "_PATIENCE_S", 0.5)
    node_network = network.detect(FAR, {"MA_CURRENT_IP": "x"})

    assert node_network.route.interface in {
        item.name for item in node_network.outward or node_network.interfaces
    }


@pytest.mark.parametrize(
    ("address", "expected"),
    [("10.0.0.5", "eth0"), ("10.0.1.5", "eth0"), ("127.0.9.9", "lo"), ("10.0.0.6", ""), ("", "")],
)
def test_an_address_belongs_to_its_interface(address: str, expected: str):
    assert network.interface_with(address, (LO, ETH0)) == expected


def test_parameters_in_open_mpis_files_are_found(tmp_path: Path):
    """They are those beside mpirun and those of the user."""
    for name, text in (
        ("etc/openmpi-mca-params.conf", "# btl = self\nbtl_tcp_if_exclude = lo,eth7\n"),
        (".openmpi/mca-params.conf", "oob_tcp_if_include=eth1\n"),
    ):
        path = tmp_path / name
        path.parent.mkdir()
        path.write_text(text)
    mpirun = tmp_path / "bin" / "mpirun"
    mpirun.parent.mkdir()
    mpirun.write_text("")
    mpirun.chmod(0o755)
    environ = {"PATH": str(mpirun.parent), "HOME": str(tmp_path)}

    assert network.detect(NodeEnv(hosts=("a", "localhost")), environ).open_mpi_parameters == {
        "btl_tcp_if_exclude",
        "oob_tcp_if_include",
    }


def test_the_kernel_says_how_large_a_packet_of_an_interface_may_be():
    assert network.mtu_bytes("lo") >= 1500
    assert network.mtu_bytes("none0") == 0
