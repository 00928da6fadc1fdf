"""Network interfaces: NCCL's lists, the choice for each node, and the messages."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobentry.contract.env import NodeEnv, OpenMpi
from jobentry.node import interfaces
from jobentry.node.interfaces import Choice, Interface, Names, NodeNetwork, parse

LO = Interface("lo", ("127.0.0.1",), is_loopback=True)
ETH0 = Interface("eth0", ("10.0.0.5",))
NET1 = Interface("net1", ("10.1.0.5",))
DOCKER0 = Interface("docker0", ("172.17.0.1",))
ONE = NodeEnv()
TWO = NodeEnv(node=1, hosts=("a", "b"))
DEFAULT = "ib0,bond0,eth0"


def network(
    *found: Interface, route_interface: str = "", devices: tuple[str, ...] = ()
) -> NodeNetwork:
    """Return the network of a node with the loopback and the given interfaces."""
    return NodeNetwork((LO, *found), devices, route_interface)


def choose(node: NodeEnv, found: NodeNetwork, **environ: str) -> Choice:
    """Return the variables and messages that are chosen for a node and its environment."""
    return interfaces.choose(node, environ, found)


# -- lists as NCCL reads them -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("eth", Names((("eth", ""),))),
        ("eth0,ib0", Names((("eth0", ""), ("ib0", "")))),
        ("=eth0", Names((("eth0", ""),), is_exact=True)),
        ("^docker0,lo", Names((("docker0", ""), ("lo", "")), is_exclude=True)),
        ("^=eth0", Names((("eth0", ""),), is_exact=True, is_exclude=True)),
        ("=^eth0", Names((("^eth0", ""),), is_exact=True)),
        ("mlx5_0:1,mlx5_1:2", Names((("mlx5_0", "1"), ("mlx5_1", "2")))),
        (",eth0,,", Names((("eth0", ""),))),
        ("", Names(())),
        ("^", Names((), is_exclude=True)),
    ],
)
def test_a_list_of_interfaces_is_parsed(text: str, expected: Names):
    """``^`` precedes ``=``; a port is not part of a name; empty names are ignored."""
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("eth", "eth0", True),
        ("eth0", "eth01", True),
        ("=eth0", "eth01", False),
        ("=eth0", "eth0", True),
        ("^eth", "eth0", False),
        ("^eth", "ib0", True),
        ("^=eth", "eth0", True),
        ("", "eth0", True),
        ("^", "eth0", True),
        ("mlx5_0:1", "mlx5_0", True),
        ("ETH", "eth0", False),
    ],
)
def test_a_list_of_interfaces_matches_names(text: str, name: str, expected: bool):
    """Names match by their start, or exactly after ``=``."""
    assert parse(text).has(name) is expected


LETTERS = st.text("ab0_^=:,", max_size=8)


def as_nccl_does(text: str, name: str) -> bool:
    """Return whether NCCL's own parser would select an interface."""
    is_not = text[:1] == "^"
    text = text[1:] if is_not else text
    is_exact = text[:1] == "="
    text = text[1:] if is_exact else text
    items, item, is_port = [], "", False
    for letter in text + ",":
        if letter == ",":
            items += [item] if item else []
            item, is_port = "", False
        elif letter == ":":
            is_port = True
        elif not is_port:
            item += letter
    if not items:
        return True
    found = any(name == item if is_exact else name[: len(item)] == item for item in items)
    return not found if is_not else found


@given(LETTERS, st.text("ab0_", min_size=1, max_size=4))
def test_any_list_is_parsed_as_nccl_does(text: str, name: str):
    assert parse(text).has(name) is as_nccl_does(text, name)


@given(
    st.lists(st.text("ab0_", min_size=1, max_size=3), min_size=1, max_size=3),
    st.text("ab0_", min_size=1),
)
def test_an_excluding_list_is_the_complement(items: list[str], name: str):
    text = ",".join(items)

    assert parse(text).has(name) is not parse("^" + text).has(name)
    assert parse("=" + text).has(name) is (name in items)


# -- NCCL_SOCKET_IFNAME -------------------------------------------------------------------------


@pytest.mark.parametrize("environ", [{}, {"NCCL_SOCKET_IFNAME": "bond0,eth0"}])
def test_an_existing_default_interface_stays(environ: dict[str, str]):
    choice = choose(TWO, network(ETH0, NET1), **environ)

    assert choice == Choice({"NCCL_SOCKET_IFNAME": environ.get("NCCL_SOCKET_IFNAME", DEFAULT)})


@pytest.mark.parametrize(
    ("value", "environ"),
    [(DEFAULT, {}), ("bond0,eth0", {"NCCL_SOCKET_IFNAME": "bond0,eth0"})],
)
def test_a_missing_default_interface_is_replaced(value: str, environ: dict[str, str]):
    choice = choose(
        TWO, network(ETH0._replace(name="ens1"), NET1, route_interface="net1"), **environ
    )

    assert choice == Choice(
        {"NCCL_SOCKET_IFNAME": "net1"},
        (
            f"choosing the network: NCCL_SOCKET_IFNAME={value}: no such network interface on"
            " node 1 (b), which has lo, ens1, net1; using net1",
        ),
        needs_route=True,
    )


@pytest.mark.parametrize(
    ("node", "found", "expected"),
    [
        # The route is unknown: the first interface that leads out of the machine.
        (TWO, network(DOCKER0, NET1), "net1"),
        (TWO, network(DOCKER0, NET1, route_interface="docker0"), "net1"),
        # All nodes are on one machine, as with the backend `process`.
        (TWO, network(NET1, route_interface="lo"), "lo"),
        (TWO, network(DOCKER0, route_interface="lo"), "lo"),
        (ONE, network(NET1), "net1"),
        (ONE, network(), "lo"),
        (ONE, network(DOCKER0), "lo"),
        # NCCL would also match en01, as it compares prefixes.
        (TWO, network(Interface("en0", ("10.0.0.1",)), Interface("en01", ("10.0.0.2",))), "=en0"),
    ],
)
def test_the_chosen_interface_leads_to_other_nodes(
    node: NodeEnv, found: NodeNetwork, expected: str
):
    """It is never local to a machine; it is the loopback only if all nodes are on one machine."""
    assert choose(node, found).variables["NCCL_SOCKET_IFNAME"] == expected


@pytest.mark.parametrize("found", [network(), network(DOCKER0, route_interface="docker0")])
def test_a_node_without_a_usable_interface_reports_it(found: NodeNetwork):
    choice = choose(TWO, found)

    assert choice.variables["NCCL_SOCKET_IFNAME"] == DEFAULT
    assert choice.notes[0].endswith("on node 1 (b), which has lo, and none leads to other nodes")
    assert choice.needs_route


@pytest.mark.parametrize(
    ("node", "environ"),
    [
        (TWO._replace(env_names=("NCCL_SOCKET_IFNAME",)), {"NCCL_SOCKET_IFNAME": "bond0,eth0"}),
        (TWO, {"NCCL_SOCKET_IFNAME": "bond0,eth0 "}),
        (TWO, {"NCCL_SOCKET_IFNAME": "^=net1,lo"}),
        (TWO._replace(open_mpi=OpenMpi(x_args="-x NCCL_SOCKET_IFNAME=ib0")), {}),
        (
            TWO._replace(open_mpi=OpenMpi(x_args="-x NCCL_SOCKET_IFNAME=ib0")),
            {"NCCL_SOCKET_IFNAME": "net1"},
        ),
    ],
)
def test_a_users_missing_interface_is_kept_and_reported(node: NodeEnv, environ: dict[str, str]):
    choice = choose(node, network(NET1, route_interface="net1"), **environ)
    value = "ib0" if node.open_mpi.x_args else environ["NCCL_SOCKET_IFNAME"]

    assert choice.variables == {"NCCL_SOCKET_IFNAME": value}
    assert choice.notes == (
        f"choosing the network: NCCL_SOCKET_IFNAME={value}: no such network interface on"
        " node 1 (b), which has lo, net1; left as it is, since it is not a default",
    )
    assert not choice.needs_route


@pytest.mark.parametrize("value", ["net1", "net", "=net1", "^docker0,lo", "^=lo", "x,net1", ""])
def test_a_users_existing_interface_is_not_reported(value: str):
    choice = choose(TWO, network(NET1), NCCL_SOCKET_IFNAME=value)

    assert choice == Choice({"NCCL_SOCKET_IFNAME": value})


def test_without_a_setting_nccl_chooses_itself():
    assert choose(TWO._replace(open_mpi=OpenMpi(x_args="")), network(NET1)) == Choice({})


def test_invalid_mpirun_options_are_ignored_here():
    assert choose(TWO._replace(open_mpi=OpenMpi(x_args="'")), network(NET1)) == Choice({})


# -- other variables ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "is_there"), [("net1", True), ("net1,lo", True), ("net", False), ("net1,x", False)]
)
def test_gloo_needs_full_names_of_existing_interfaces(value: str, is_there: bool):
    choice = choose(TWO, network(ETH0, NET1), GLOO_SOCKET_IFNAME=value)

    assert choice.variables["GLOO_SOCKET_IFNAME"] == value
    assert choice.notes == (
        ()
        if is_there
        else (
            f"choosing the network: GLOO_SOCKET_IFNAME={value}: no such network interface on"
            " node 1 (b), which has lo, eth0, net1; left as it is, since it is not a default",
        )
    )


@pytest.mark.parametrize(
    ("value", "devices", "is_there"),
    [
        ("^mlx5_bond_0", (), True),
        ("^mlx5_bond_0", ("mlx5_bond_0",), True),
        ("mlx5", ("mlx5_0",), True),
        ("=mlx5_0:1", ("mlx5_0",), True),
        ("=mlx5", ("mlx5_0",), False),
        ("mlx5_0:1", (), False),
    ],
)
def test_missing_infiniband_devices_are_reported(
    value: str, devices: tuple[str, ...], is_there: bool
):
    choice = choose(TWO, network(ETH0, devices=devices), NCCL_IB_HCA=value)

    assert choice.variables["NCCL_IB_HCA"] == value
    assert [note.endswith(": NCCL will use sockets") for note in choice.notes] == (
        [] if is_there else [True]
    )


EXCLUDE = "OMPI_MCA_btl_tcp_if_exclude"


def test_open_mpi_does_not_use_local_networks():
    """Each node excludes its local networks and those that Open MPI excludes by default."""
    choice = choose(TWO, network(ETH0, DOCKER0, Interface("br-1f", ("172.18.0.1",))))

    assert choice.variables[EXCLUDE] == "127.0.0.1/8,sppp,docker0,br-1f"
    assert choice.notes == (
        "choosing the network: node 1 (b): Open MPI will not use docker0, br-1f, which lead to no"
        " other node",
    )


@pytest.mark.parametrize(
    ("node", "found", "environ"),
    [
        (ONE, network(ETH0, DOCKER0), {}),
        (TWO, network(ETH0), {}),
        # Open MPI refuses an include list together with an exclude list.
        (TWO, network(ETH0, DOCKER0), {"OMPI_MCA_btl_tcp_if_include": "eth0"}),
        (TWO, network(ETH0, DOCKER0), {EXCLUDE: "lo"}),
        (
            TWO._replace(open_mpi=OpenMpi(mca_args="-mca btl_tcp_if_include eth0")),
            network(ETH0, DOCKER0),
            {},
        ),
        (
            TWO._replace(open_mpi=OpenMpi(extra_args="--mca btl_tcp_if_exclude lo")),
            network(ETH0, DOCKER0),
            {},
        ),
    ],
)
def test_open_mpi_keeps_its_interfaces_if_there_is_nothing_to_exclude(
    node: NodeEnv, found: NodeNetwork, environ: dict[str, str]
):
    assert set(choose(node, found, **environ).variables) == {"NCCL_SOCKET_IFNAME"}


# -- detection ----------------------------------------------------------------------------------


def test_the_loopback_interface_is_detected():
    found = {interface.name: interface for interface in interfaces.detect().interfaces}

    assert found["lo"].is_loopback
    assert "127.0.0.1" in found["lo"].addresses
    # The kernel also lists interfaces that are down or have no address.
    assert set(found) <= {path.name for path in Path("/sys/class/net").iterdir()}


def test_the_loopback_leads_to_nodes_on_this_machine():
    found = interfaces.detect()
    for environ, hosts in (
        ({"MA_CURRENT_IP": "127.0.3.4"}, ("no.invalid", "neither.invalid")),
        ({"MA_CURRENT_IP": "203.0.113.7"}, ("localhost", "no.invalid")),
        ({}, ("no.invalid", "localhost")),
    ):
        assert interfaces.interface_to_others(NodeEnv(hosts=hosts), environ, found) == "lo"


def test_an_unknown_route_is_empty():
    node = NodeEnv(hosts=("no.invalid", "neither.invalid"))

    assert interfaces.interface_to_others(node, {"MA_CURRENT_IP": "x"}, network(ETH0)) == ""
    assert interfaces.interface_to_others(NodeEnv(), {}, network(ETH0)) == ""


@pytest.mark.parametrize(
    ("address", "expected"),
    [("10.0.0.5", "eth0"), ("127.0.9.9", "lo"), ("10.0.0.6", ""), ("", "")],
)
def test_an_address_belongs_to_its_interface(address: str, expected: str):
    assert interfaces.interface_with(address, (LO, ETH0)) == expected
