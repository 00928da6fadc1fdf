"""Network interfaces: NCCL's lists, the choice for each node, and the messages."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobentry.contract.env import NodeEnv, OpenMpi
from jobentry.node import interfaces
from jobentry.node.interfaces import Choice, Names, parse
from jobentry.node.network import NOWHERE, Interface, NodeNetwork, Route, detect

LO = Interface("lo", ("127.0.0.1",), is_loopback=True)
ETH0 = Interface("eth0", ("10.0.0.5",))
NET1 = Interface("net1", ("10.1.0.5",))
DOCKER0 = Interface("docker0", ("172.17.0.1",))
ONE = NodeEnv()
TWO = NodeEnv(node=1, hosts=("a", "b"))
DEFAULT = "ib0,bond0,eth0"


def network(
    *others: Interface, via: Interface | None = None, devices: tuple[str, ...] = ()
) -> NodeNetwork:
    """Return the network of a node with the loopback and the given interfaces.

    Args:
        via: The interface that leads to the other nodes; by default the first one.
    """
    route = via or next(iter(others), None)
    way = Route(route.name, route.addresses[0]) if route else NOWHERE
    return NodeNetwork((LO, *others), way, devices)


def choose(node: NodeEnv, node_network: NodeNetwork, **environ: str) -> Choice:
    """Return the variables and messages that are chosen for a node and its environment."""
    return interfaces.choose(node, {"MA_CURRENT_IP": "10.0.0.5", **environ}, node_network)


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
    is_listed = any(name == item if is_exact else name[: len(item)] == item for item in items)
    return not is_listed if is_not else is_listed


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


# -- the way to the other nodes -------------------------------------------------------------------

EXACT = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")
OPEN_MPI = (
    "OMPI_MCA_btl_tcp_if_include",
    "OMPI_MCA_oob_tcp_if_include",
    "PRTE_MCA_prte_if_include",
)
# Virtual networks that have the same address on every machine.
VIRTUAL = tuple(
    Interface(name, ("192.168.56.1",))
    for name in (
        *("vboxnet0", "vmnet8", "nerdctl0", "docker0", "br-1f2e3d", "vxlan.calico", "wg0"),
        *("cilium_host", "tailscale0", "tun0", "eth0"),
    )
)


def test_every_library_uses_the_interface_that_leads_to_the_other_nodes():
    """It is the same for all of them, whatever the other interfaces are called."""
    choice = choose(TWO, network(*VIRTUAL, NET1, via=NET1))

    assert choice.variables == {
        "NCCL_SOCKET_IFNAME": "net1",
        "HCCL_IF_IP": "10.1.0.5",
        **dict.fromkeys((*EXACT, *OPEN_MPI), "net1"),
    }
    assert choice.notes == (
        "choosing the network: node 1 (b): net1 (10.1.0.5) leads to the other nodes, so ranks do"
        " not use vboxnet0, vmnet8, nerdctl0, docker0, br-1f2e3d, vxlan.calico, wg0, cilium_host"
        " and 3 more",
    )


@pytest.mark.parametrize("name", ["br-lan", "virbr0", "docker_gwbridge", "dummy0", "tailscale0"])
def test_the_name_of_an_interface_does_not_matter(name: str):
    interface = Interface(name, ("10.0.0.5",))

    assert (
        choose(TWO, network(ETH0, interface, via=interface)).variables["GLOO_SOCKET_IFNAME"] == name
    )


def test_a_vlan_is_not_taken_for_its_interface():
    """NCCL and HCCL compare beginnings; the others have exact names."""
    vlan = Interface("eth0.100", ("10.2.0.5",))
    variables = choose(TWO, network(ETH0, vlan)).variables

    assert variables["NCCL_SOCKET_IFNAME"] == variables["HCCL_SOCKET_IFNAME"] == "=eth0"
    assert {variables[name] for name in OPEN_MPI} == {"eth0"}
    assert choose(TWO, network(ETH0, vlan, via=vlan)).variables["NCCL_SOCKET_IFNAME"] == "eth0.100"


def test_a_node_with_one_network_needs_no_message():
    assert choose(TWO, network(ETH0)).notes == ()


def test_a_node_without_a_way_to_the_others_reports_it():
    choice = choose(TWO, NodeNetwork((LO, ETH0)))

    assert choice.notes == (
        "choosing the network: node 1 (b): no interface leads to the other nodes",
    )
    assert choice.variables == {"NCCL_SOCKET_IFNAME": DEFAULT}


@pytest.mark.parametrize("more", [(), (DOCKER0,)])
def test_an_address_on_the_loopback_interface_is_reported(more: tuple[Interface, ...]):
    """Libraries that get the name of that interface use 127.0.0.1."""
    lo = Interface("lo", ("127.0.0.1", "10.0.0.5"), is_loopback=True)
    node_network = NodeNetwork((lo, *more), Route("lo", "10.0.0.5"))

    choice = choose(TWO, node_network, MA_CURRENT_IP="127.0.1.1")
    assert choice.variables["MA_CURRENT_IP"] == "10.0.0.5"
    assert "lo" not in choice.variables.values()
    assert choice.notes[-1] == (
        "choosing the network: node 1 (b): 10.0.0.5 leads to the other nodes, but it is an address"
        " of the loopback interface, which libraries do not use; give the address to an interface"
        " of the type dummy"
    )


def test_nccl_uses_ipv6_if_only_that_leads_to_the_other_nodes():
    node_network = network(Interface("eth0", ("fd00::5",)))

    assert choose(TWO, node_network).variables["NCCL_SOCKET_FAMILY"] == "AF_INET6"
    user = TWO._replace(env_names=("NCCL_SOCKET_FAMILY",))
    assert (
        "NCCL_SOCKET_FAMILY"
        not in choose(user, node_network, NCCL_SOCKET_FAMILY="AF_INET").variables
    )


def test_a_job_of_one_node_keeps_its_libraries_own_choices():
    assert choose(ONE, network(ETH0, DOCKER0)).variables == {"NCCL_SOCKET_IFNAME": DEFAULT}
    assert choose(ONE, network(NET1)).variables == {"NCCL_SOCKET_IFNAME": "net1"}
    assert choose(ONE, network(via=LO)).variables == {"NCCL_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize(
    ("address", "expected", "notes"),
    [
        ("", {"MA_CURRENT_IP": "10.0.0.5", "MA_CURRENT_HOST_IP": "10.0.0.5"}, ()),
        (
            "127.0.1.1",
            {"MA_CURRENT_IP": "10.0.0.5", "MA_CURRENT_HOST_IP": "10.0.0.5"},
            (
                "choosing the network: node 1 (b): MA_CURRENT_IP=127.0.1.1: no other node can reach"
                " that address; using 10.0.0.5",
            ),
        ),
        # The platform may mean the physical machine.
        ("192.0.2.9", {}, ()),
        ("10.0.0.5", {}, ()),
    ],
)
def test_the_address_of_the_node_is_set_unless_the_platform_has_set_it(
    address: str, expected: dict[str, str], notes: tuple[str, ...]
):
    choice = choose(TWO, network(ETH0), MA_CURRENT_IP=address)

    assert {k: v for k, v in choice.variables.items() if k.startswith("MA_")} == expected
    assert choice.notes == notes


def test_emulated_nodes_keep_their_loopback_addresses():
    node_network = NodeNetwork((LO, ETH0), Route("lo", "127.0.0.2"))
    choice = choose(TWO, node_network, MA_CURRENT_IP="127.0.0.2", OMPI_MCA_btl_tcp_if_include="lo")

    assert "MA_CURRENT_IP" not in choice.variables
    assert choice.variables["GLOO_SOCKET_IFNAME"] == "lo"
    assert choice.notes == ()


def test_horovod_over_gloo_reports_a_name_that_is_a_loopback_address():
    """Its process sets ignore the interface, and use the address of the node's own name."""
    node_network = network(ETH0)._replace(name_is_loopback=True)
    node = TWO._replace(launcher="horovod-gloo")

    assert choose(node, node_network).notes == (
        "choosing the network: node 1 (b): its own name is a loopback address, which Horovod gives"
        " to the other nodes; give the name the address 10.0.0.5 in /etc/hosts, or use the launcher"
        " horovod",
    )
    assert choose(TWO, node_network).notes == choose(node, network(ETH0)).notes == ()


# -- what the user or the platform has set --------------------------------------------------------


def test_a_list_of_the_platform_stays_if_it_has_an_interface_of_this_node():
    choice = choose(TWO, network(ETH0, NET1), NCCL_SOCKET_IFNAME="bond0,eth0")

    assert choice.variables["NCCL_SOCKET_IFNAME"] == "bond0,eth0"


def test_a_list_of_the_platform_that_leads_elsewhere_stays_and_is_reported():
    choice = choose(TWO, network(ETH0, NET1, via=NET1), NCCL_SOCKET_IFNAME="bond0,eth0")

    assert choice.variables["NCCL_SOCKET_IFNAME"] == "bond0,eth0"
    assert choice.variables["GLOO_SOCKET_IFNAME"] == "net1"
    assert choice.notes[0] == (
        "choosing the network: node 1 (b): NCCL_SOCKET_IFNAME=bond0,eth0 stays as the platform has"
        " set it, although net1 leads to the other nodes"
    )


def test_a_list_of_the_platform_without_an_interface_of_this_node_is_replaced():
    choice = choose(
        TWO,
        network(ETH0._replace(name="ens1"), NET1, via=NET1),
        NCCL_SOCKET_IFNAME="bond0,eth0",
    )

    assert choice.variables["NCCL_SOCKET_IFNAME"] == "net1"
    assert choice.notes[0] == (
        "choosing the network: NCCL_SOCKET_IFNAME=bond0,eth0: no such network interface on"
        " node 1 (b), which has lo, ens1, net1; using net1"
    )


def test_a_list_of_the_platform_means_exact_names():
    vlan = Interface("eth0.100", ("10.2.0.5",))
    choice = choose(TWO, network(ETH0, vlan), NCCL_SOCKET_IFNAME="bond0,eth0")

    assert choice.variables["NCCL_SOCKET_IFNAME"] == "=eth0"


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
    choice = choose(node, network(NET1), **environ)
    value = "ib0" if node.open_mpi.x_args else environ["NCCL_SOCKET_IFNAME"]

    assert choice.variables["NCCL_SOCKET_IFNAME"] == value
    assert choice.notes == (
        f"choosing the network: NCCL_SOCKET_IFNAME={value}: no such network interface on"
        " node 1 (b), which has lo, net1; left as it is, since it is not a default",
    )


@pytest.mark.parametrize("value", ["net1", "net", "=net1", "^docker0,lo", "^=lo", "x,net1", ""])
def test_a_users_existing_interface_is_not_reported(value: str):
    choice = choose(TWO, network(NET1), NCCL_SOCKET_IFNAME=value)

    assert choice.variables["NCCL_SOCKET_IFNAME"] == value
    assert choice.notes == ()


def test_invalid_mpirun_options_are_ignored_here():
    variables = choose(TWO._replace(open_mpi=OpenMpi(x_args="'")), network(NET1)).variables

    assert variables["NCCL_SOCKET_IFNAME"] == "net1"


@pytest.mark.parametrize(
    ("value", "is_there"), [("net1", True), ("net1,lo", True), ("net", False), ("net1,x", False)]
)
@pytest.mark.parametrize("name", ["GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"])
def test_gloo_needs_full_names_of_existing_interfaces(name: str, value: str, is_there: bool):
    choice = choose(TWO, network(NET1), **{name: value})

    assert choice.variables[name] == value
    assert choice.notes == (
        ()
        if is_there
        else (
            f"choosing the network: {name}={value}: no such network interface on"
            " node 1 (b), which has lo, net1; left as it is, since it is not a default",
        )
    )


@pytest.mark.parametrize("name", ["HCCL_SOCKET_IFNAME", "HCCL_IF_IP"])
def test_hccl_gets_nothing_beside_a_users_choice(name: str):
    """One of the two takes precedence over the other."""
    assert not {"HCCL_SOCKET_IFNAME", "HCCL_IF_IP"} & set(
        choose(TWO, network(NET1), **{name: "eth7"}).variables
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


@pytest.mark.parametrize(
    ("node", "node_network", "environ"),
    [
        # Open MPI refuses an include list together with an exclude list.
        (TWO, network(ETH0, DOCKER0), {"OMPI_MCA_btl_tcp_if_include": "eth0"}),
        (TWO, network(ETH0, DOCKER0), {"OMPI_MCA_btl_tcp_if_exclude": "lo"}),
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
        (
            TWO,
            network(ETH0)._replace(open_mpi_parameters=frozenset(["btl_tcp_if_exclude"])),
            {},
        ),
    ],
)
def test_open_mpis_ranks_keep_a_choice_of_the_user_or_the_image(
    node: NodeEnv, node_network: NodeNetwork, environ: dict[str, str]
):
    variables = choose(node, node_network, **environ).variables

    assert OPEN_MPI[0] not in variables
    assert variables[OPEN_MPI[1]] == "eth0"


@pytest.mark.parametrize(
    ("launcher", "node_network", "has_agent", "expected"),
    [
        ("mpirun", network(ETH0), True, OPEN_MPI),
        # ssh would carry the head's names to the other nodes.
        ("mpirun", network(ETH0, DOCKER0), False, OPEN_MPI[:1]),
        # They refuse to use the loopback only.
        ("mpirun", network(ETH0, via=LO), True, OPEN_MPI[:1]),
        ("srun", network(ETH0), True, OPEN_MPI[:1]),
        # An mpirun that the script starts with a list of its own would refuse both.
        ("python", network(ETH0), True, ()),
        ("python", network(ETH0, DOCKER0), True, OPEN_MPI[:1]),
    ],
)
def test_open_mpis_daemons_use_the_same_interface(
    launcher: str, node_network: NodeNetwork, has_agent: bool, expected: tuple[str, ...]
):
    node = TWO._replace(launcher=launcher)
    variables = interfaces.choose(node, {}, node_network, has_agent=has_agent).variables

    assert tuple(name for name in OPEN_MPI if name in variables) == expected


@pytest.mark.parametrize(
    ("text", "environ", "expected"),
    [
        ("NCCL_SOCKET_IFNAME=docker0\n", {}, "docker0"),
        ("NCCL_SOCKET_IFNAME=^eth\n", {}, "^eth"),
        ("NCCL_SOCKET_IFNAME=docker0\n", {"NCCL_SOCKET_IFNAME": "=eth0"}, "=eth0"),
        ("#NCCL_SOCKET_IFNAME=docker0\nNCCL_DEBUG=INFO\n", {}, "eth0"),
    ],
)
def test_what_a_file_of_nccl_sets_stays(
    tmp_path: Path, text: str, environ: dict[str, str], expected: str
):
    """A variable would overrule it, so none is set to something else."""
    (tmp_path / "conf").write_text(text)
    detected = detect(ONE, {"NCCL_CONF_FILE": str(tmp_path / "conf")})
    node_network = network(ETH0, DOCKER0)._replace(nccl_parameters=detected.nccl_parameters)

    assert choose(TWO, node_network, **environ).variables["NCCL_SOCKET_IFNAME"] == expected


@pytest.mark.timeout(60)
def test_a_pipe_in_the_place_of_a_file_of_nccl_does_not_stop_a_node(tmp_path: Path):
    os.mkfifo(tmp_path / "conf")

    assert (
        "NCCL_DEBUG" not in detect(ONE, {"NCCL_CONF_FILE": str(tmp_path / "conf")}).nccl_parameters
    )


def test_nccl_finds_the_users_file_without_the_variable_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / ".nccl.conf").write_text("NCCL_SOCKET_IFNAME=docker0\n")
    user = pwd.struct_passwd(("me", "x", 1, 1, "", str(tmp_path), "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: user)

    assert detect(ONE, {"HOME": "/nowhere"}).nccl_parameters["NCCL_SOCKET_IFNAME"] == "docker0"
