"""Choose the network interfaces for NCCL, Gloo and Open MPI, and report those that do not exist.

With the name of a missing interface, NCCL and Gloo fail while starting, with obscure messages.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import Callable, Mapping, NamedTuple, Sequence

from jobentry.contract import names
from jobentry.contract.env import NodeEnv
from jobentry.launchers import mpi

# Set by the platform on a flavor with GPUs. This value and the default of OPENMPI_X_ARGS are not
# the user's choice, so they may be replaced; any other value is.
PRESET_SOCKET_IFNAME = "bond0,eth0"

# Interfaces of a machine's local containers and virtual machines, which do not lead to other nodes.
_LOCAL_NETWORKS = (
    *("docker", "podman", "br-", "virbr", "veth", "cni", "cbr", "flannel", "cali", "lxc", "lxd"),
    *("kube-", "ifb", "dummy", "tunl"),
)
# Open MPI's default for btl_tcp_if_exclude, which our own value replaces.
_EXCLUDED_BY_OPEN_MPI = "127.0.0.1/8,sppp"
# From linux/sockios.h and linux/if.h. These requests give the flags and addresses in this network
# namespace, which /sys/class/net may not.
_GET_FLAGS, _GET_ADDRESS = 0x8913, 0x8915
_IS_UP, _IS_LOOPBACK = 0x1, 0x8
_INFINIBAND = "/sys/class/infiniband"


class Interface(NamedTuple):
    """A network interface that is up and has an address."""

    name: str
    addresses: tuple[str, ...]
    is_loopback: bool = False


class NodeNetwork(NamedTuple):
    """The network hardware of this node.

    Args:
        devices: The names of its InfiniBand devices.
        route_interface: The interface that leads to the other nodes, empty if not known.
    """

    interfaces: tuple[Interface, ...]
    devices: tuple[str, ...] = ()
    route_interface: str = ""


class Choice(NamedTuple):
    """The choice of interfaces for the ranks of this node.

    Args:
        variables: The variables to set, for this node only.
        notes: Messages for the log.
        needs_route: Whether a missing interface was replaced, so that the interface that leads to
            the other nodes must be known.
    """

    variables: Mapping[str, str]
    notes: tuple[str, ...] = ()
    needs_route: bool = False


class Names(NamedTuple):
    """A list of interfaces or devices as NCCL reads it; see ``parse``."""

    items: tuple[tuple[str, str], ...]
    is_exact: bool = False
    is_exclude: bool = False

    def has(self, name: str) -> bool:
        """Whether the list selects the interface ``name``; ports are ignored."""
        if not self.items:
            return True
        found = any(
            name == item if self.is_exact else name.startswith(item) for item, _ in self.items
        )
        return found != self.is_exclude


def parse(text: str) -> Names:
    """Parse ``[^][=]NAME[:PORT],…``: name prefixes, or full names after ``=``; ``^`` excludes."""
    is_exclude = text.startswith("^")
    rest = text[is_exclude:]
    is_exact = rest.startswith("=")
    pairs = (item.partition(":") for item in rest[is_exact:].split(","))
    return Names(tuple((name, port) for name, _, port in pairs if name), is_exact, is_exclude)


def choose(node: NodeEnv, environ: Mapping[str, str], network: NodeNetwork) -> Choice:
    """Return the variables for the ranks of this node, with messages about problems.

    Args:
        environ: The environment of this node.
    """
    choices = (
        _sockets_of_nccl(node, environ, network),
        _sockets_of_gloo(node, environ, network),
        _devices_of_nccl(node, environ, network),
        _sockets_of_open_mpi(node, environ, network),
    )
    return Choice(
        {name: value for choice in choices for name, value in choice.variables.items()},
        tuple(note for choice in choices for note in choice.notes),
        any(choice.needs_route for choice in choices),
    )


def _sockets_of_nccl(node: NodeEnv, environ: Mapping[str, str], network: NodeNetwork) -> Choice:
    name = names.NCCL_SOCKET_IFNAME
    value, is_users = _value(node, environ, name)
    if value is None:
        return Choice({})
    selected = parse(value)
    if any(selected.has(interface.name) for interface in network.interfaces):
        return Choice({name: value})
    problem = _problem(node, name, value, "network interface", _shown(network))
    if is_users:
        return Choice({name: value}, (f"{problem}; left as it is, since it is not a default",))
    best = _best(node, network)
    if not best:
        return Choice({name: value}, (f"{problem}, and none leads to other nodes",), True)
    return Choice({name: best}, (f"{problem}; using {best}",), True)


def _sockets_of_gloo(node: NodeEnv, environ: Mapping[str, str], network: NodeNetwork) -> Choice:
    """Check Gloo's list: it has full names, all of which must exist."""
    name = names.GLOO_SOCKET_IFNAME
    value, _ = _value(node, environ, name)
    if not value:
        return Choice({})
    known = {interface.name for interface in network.interfaces}
    if known.issuperset(value.split(",")):
        return Choice({name: value})
    problem = _problem(node, name, value, "network interface", _shown(network))
    return Choice({name: value}, (f"{problem}; left as it is, since it is not a default",))


def _devices_of_nccl(node: NodeEnv, environ: Mapping[str, str], network: NodeNetwork) -> Choice:
    """Check NCCL's devices: without them it uses sockets, which can be a hundred times slower."""
    name = names.NCCL_IB_HCA
    value, _ = _value(node, environ, name)
    if value is None:
        return Choice({})
    selected = parse(value)
    # Excluded devices need not exist.
    if selected.is_exclude or any(selected.has(device) for device in network.devices):
        return Choice({name: value})
    problem = _problem(node, name, value, "InfiniBand device", network.devices)
    return Choice({name: value}, (f"{problem}: NCCL will use sockets",))


def _sockets_of_open_mpi(node: NodeEnv, environ: Mapping[str, str], network: NodeNetwork) -> Choice:
    """Exclude networks that are local to each node and have the same addresses on all nodes.

    Otherwise a rank tries to reach its peer at such an address, and an allreduce hangs (4.1.4 and
    5.0.11, each node with a docker0).
    """
    local = [interface.name for interface in network.interfaces if _is_local(interface)]
    is_chosen = any(name in environ for name in (names.OMPI_TCP_INCLUDE, names.OMPI_TCP_EXCLUDE))
    is_chosen = is_chosen or any(
        name.startswith("btl_tcp_if_") for name in mpi.given_parameters(node)
    )
    if node.nodes == 1 or not local or is_chosen:
        return Choice({})
    note = (
        "choosing the network: node %d (%s): Open MPI will not use %s, which lead%s"
        " to no other node"
    )
    note %= (node.node, node.host, ", ".join(local), "s" * (len(local) == 1))
    return Choice({names.OMPI_TCP_EXCLUDE: ",".join((_EXCLUDED_BY_OPEN_MPI, *local))}, (note,))


def _value(node: NodeEnv, environ: Mapping[str, str], name: str) -> tuple[str | None, bool]:
    """Return the value that the ranks would get, and whether it is the user's choice."""
    given = mpi.exported_values(node).get(name)
    if given is not None and node.open_mpi.x_args is not None:
        return given, True
    if name in environ:
        defaults = (PRESET_SOCKET_IFNAME, given)
        return environ[name], name in node.env_names or environ[name] not in defaults
    return given, False


def _problem(node: NodeEnv, name: str, value: str, what: str, known: Sequence[str]) -> str:
    return "choosing the network: %s=%s: no such %s on node %d (%s), which has %s" % (
        *(name, value[:80], what, node.node, node.host),
        ", ".join(known) or "none",
    )


def _best(node: NodeEnv, network: NodeNetwork) -> str:
    """Return the interface for NCCL on this node, in NCCL's syntax; empty if there is none."""
    usable = [
        item.name for item in network.interfaces if not item.is_loopback and not _is_local(item)
    ]
    loopback = [item.name for item in network.interfaces if item.is_loopback]
    # If the loopback leads to the other nodes, they are on this machine.
    if (
        node.nodes > 1 and network.route_interface in loopback
    ) or network.route_interface in usable:
        usable = [network.route_interface]
    elif node.nodes == 1:
        usable += loopback
    if not usable:
        return ""
    longer = [item for item in network.interfaces if item.name.startswith(usable[0])][1:]
    return "=" + usable[0] if longer else usable[0]


def _shown(network: NodeNetwork) -> list[str]:
    return [interface.name for interface in network.interfaces if not _is_local(interface)]


def _is_local(interface: Interface) -> bool:
    return interface.name.startswith(_LOCAL_NETWORKS)


# -- detection ----------------------------------------------------------------------------------


def detect() -> NodeNetwork:
    """Return the network hardware of this node, without ``route_interface``."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        ipv6 = _ipv6_addresses()
        for name in _names():
            flags = _flags(probe, name)
            addresses = (*_address(probe, name), *ipv6.get(name, ()))
            if flags & _IS_UP and addresses:
                found.append(Interface(name, addresses, bool(flags & _IS_LOOPBACK)))
    devices: list[str] = []
    with contextlib.suppress(OSError):
        devices = sorted(os.listdir(_INFINIBAND))
    return NodeNetwork(tuple(found), tuple(devices))


def _names() -> list[str]:
    """Return the names of all interfaces; PyPy has no ``socket.if_nameindex``."""
    with contextlib.suppress(OSError), open("/proc/net/dev", "rb") as file:
        return [os.fsdecode(line.partition(b":")[0].strip()) for line in file.readlines()[2:]]
    return []


def interface_to_others(node: NodeEnv, environ: Mapping[str, str], network: NodeNetwork) -> str:
    """Return the interface that leads to the other nodes, empty if that cannot be determined.

    Looking up a name may take seconds, so call this only if the node has to choose.
    """
    if node.nodes == 1:
        return ""
    peer = node.hosts[0 if not node.is_head else 1]
    sources: tuple[Callable[[], str], ...] = (
        lambda: environ.get(names.MA_CURRENT_IP, ""),
        lambda: socket.gethostbyname(node.host),
        lambda: _source_address(peer),
    )
    for source in sources:
        with contextlib.suppress(OSError, UnicodeError):
            name = interface_with(source(), network.interfaces)
            if name:
                return name
    return ""


def interface_with(address: str, interfaces: Sequence[Interface]) -> str:
    """Return the name of the interface with this address, empty if there is none."""
    for interface in interfaces:
        # All of 127.0.0.0/8 belongs to the loopback interface.
        if address in interface.addresses or (interface.is_loopback and address.startswith("127.")):
            return interface.name
    return ""


def _source_address(peer: str) -> str:
    """Return the source address for packets to ``peer``; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])


def _flags(probe: socket.socket, name: str) -> int:
    data = _request(probe, _GET_FLAGS, name)
    return int(struct.unpack_from("=H", data, 16)[0]) if data else 0


def _address(probe: socket.socket, name: str) -> tuple[str, ...]:
    data = _request(probe, _GET_ADDRESS, name)
    return (socket.inet_ntoa(data[20:24]),) if data else ()


def _request(probe: socket.socket, request: int, name: str) -> bytes:
    """Return the ``struct ifreq`` filled in by the kernel, empty on an error."""
    import fcntl

    try:
        return fcntl.ioctl(probe.fileno(), request, struct.pack("256s", os.fsencode(name)[:15]))
    except OSError:
        return b""


def _ipv6_addresses() -> dict[str, list[str]]:
    """Return the IPv6 addresses of each interface as 32 digits, without link-local ones."""
    found: dict[str, list[str]] = {}
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as file:
        for line in file:
            fields = line.split()
            if not fields[0].startswith("fe80"):
                found.setdefault(fields[5], []).append(fields[0])
    return found
