"""Choose the network interfaces for NCCL, Gloo, HCCL and Open MPI: the way to the other nodes.

Libraries that choose themselves take the first interface, or the address of the node's own name.
On a node with a ``docker0`` or a ``vboxnet0``, or with Debian's ``127.0.1.1`` in its hosts file,
they then wait for each other for ever.
"""

from __future__ import annotations

import enum
from typing import Mapping, NamedTuple, Sequence

from jobentry.contract import names
from jobentry.contract.env import NodeEnv
from jobentry.contract.launchers import LAUNCHERS
from jobentry.contract.lists import some
from jobentry.launchers import mpi
from jobentry.node.network import NodeNetwork
from jobentry.system.addresses import is_loopback

# Set by the platform on a flavor with GPUs.
PRESET_SOCKET_IFNAME = "bond0,eth0"
# Variables with the exact name of one interface.
_EXACT = (names.GLOO_SOCKET_IFNAME, names.TP_SOCKET_IFNAME)
_HCCL = (names.HCCL_SOCKET_IFNAME, names.HCCL_IF_IP)
# Variable of the interfaces of Open MPI's daemons, and the parameters that the user may have set
# instead: of version 4.1, and of 5.0.
_DAEMONS = (
    (names.OMPI_DAEMONS_INCLUDE, ("oob_tcp_if_include", "oob_tcp_if_exclude")),
    (names.PRTE_INCLUDE, ("prte_if_include", "prte_if_exclude")),
)
_HOROVOD = "give the name the address %s in /etc/hosts, or use the launcher horovod"
_DUMMY = "give the address to an interface of the type dummy"
# A machine with many containers has hundreds of interfaces.
_SHOWN = 8
_RANKS = (names.OMPI_TCP_INCLUDE, ("btl_tcp_if_include", "btl_tcp_if_exclude"))


class Origin(enum.Enum):
    """Who has chosen the value of a variable."""

    USER = "user"
    PLATFORM = "platform"
    DEFAULT = "default"


class Choice(NamedTuple):
    """The choice of interfaces for the ranks of this node.

    Args:
        variables: The variables to set, for this node only.
        notes: Messages for the log.
    """

    variables: Mapping[str, str]
    notes: tuple[str, ...] = ()


class Names(NamedTuple):
    """A list of interfaces or devices as NCCL reads it; see ``parse``."""

    items: tuple[tuple[str, str], ...]
    is_exact: bool = False
    is_exclude: bool = False

    def has(self, name: str) -> bool:
        """Whether the list selects the interface ``name``; ports are ignored."""
        if not self.items:
            return True
        is_listed = any(
            name == item if self.is_exact else name.startswith(item) for item, _ in self.items
        )
        return is_listed != self.is_exclude


def parse(text: str) -> Names:
    """Parse ``[^][=]NAME[:PORT],…``: name prefixes, or full names after ``=``; ``^`` excludes."""
    is_exclude = text.startswith("^")
    rest = text[is_exclude:]
    is_exact = rest.startswith("=")
    pairs = (item.partition(":") for item in rest[is_exact:].split(","))
    return Names(tuple((name, port) for name, _, port in pairs if name), is_exact, is_exclude)


def choose(
    node: NodeEnv, environ: Mapping[str, str], network: NodeNetwork, *, has_agent: bool = True
) -> Choice:
    """Return the variables for the ranks of this node, with messages about problems.

    What the user or the platform has set stays, unless it is the platform's and cannot work.

    Args:
        environ: The environment of this node.
        has_agent: Whether mpirun's daemons start over the control connection, not over ssh.
    """
    network = _without_loopback(network)
    choices = (
        _own_address(node, environ, network),
        _sockets_of_nccl(node, environ, network),
        _devices_of_nccl(node, environ, network),
        *(_sockets_by_name(node, environ, network, name) for name in _EXACT),
        _sockets_of_hccl(node, environ, network),
        _sockets_of_open_mpi(node, environ, network, has_agent=has_agent),
        _name_for_horovod(node, network),
    )
    notes = tuple(note for choice in choices for note in choice.notes)
    return Choice(
        {name: value for choice in choices for name, value in choice.variables.items()},
        (*notes, *_chosen_note(node, network)),
    )


def _without_loopback(network: NodeNetwork) -> NodeNetwork:
    """Return the network without an interface for libraries if that would be the loopback.

    Sites that route to each machine give it its address on the loopback. By the name of that
    interface, libraries use 127.0.0.1 (NCCL, Gloo) or refuse it (Open MPI).
    """
    route = network.route
    is_loopback_only = any(
        item.is_loopback and item.name == route.interface for item in network.interfaces
    )
    if not is_loopback_only or is_loopback(route.address):
        return network
    return network._replace(route=route._replace(interface=""))


def _own_address(node: NodeEnv, environ: Mapping[str, str], network: NodeNetwork) -> Choice:
    """Set the address of this node if nobody has, or if it is one that no other node can reach."""
    address, route_address = environ.get(names.MA_CURRENT_IP, ""), network.route.address
    if not route_address or (address and (not is_loopback(address) or is_loopback(route_address))):
        return Choice({})
    host = environ.get(names.MA_CURRENT_HOST_IP, "")
    variables = {names.MA_CURRENT_IP: route_address}
    if not host or is_loopback(host):
        variables[names.MA_CURRENT_HOST_IP] = route_address
    if not address:
        return Choice(variables)
    problem = f"{names.MA_CURRENT_IP}={address[:80]}: no other node can reach that address"
    return Choice(variables, (_note(node, f"{problem}; using {route_address}"),))


def _sockets_of_nccl(node: NodeEnv, environ: Mapping[str, str], network: NodeNetwork) -> Choice:
    value, origin = _value(node, environ, network, names.NCCL_SOCKET_IFNAME)
    if origin is Origin.USER:
        is_known = any(parse(value).has(interface.name) for interface in network.interfaces)
        return Choice(
            {names.NCCL_SOCKET_IFNAME: value},
            () if is_known else (_missing(node, names.NCCL_SOCKET_IFNAME, value, network),),
        )
    name = network.route.interface
    family = _family_of_nccl(node, environ, network)
    if origin is Origin.PLATFORM:
        kept = _of_platform(node, value, network)
        if kept.variables:
            return kept._replace(variables={**kept.variables, **family})
        if name:
            problem = _problem(node, names.NCCL_SOCKET_IFNAME, value, "network interface", network)
            text = f"{problem}; using {name}"
            return Choice({names.NCCL_SOCKET_IFNAME: _for_nccl(name, network), **family}, (text,))
    if name and (node.nodes > 1 or not _selected(value, network)):
        return Choice({names.NCCL_SOCKET_IFNAME: _for_nccl(name, network), **family})
    return Choice({names.NCCL_SOCKET_IFNAME: value} if value else {})


def _of_platform(node: NodeEnv, value: str, network: NodeNetwork) -> Choice:
    """Return the platform's list as this node needs it; empty if none of its interfaces is here."""
    selected = _selected(value, network)
    if not selected:
        return Choice({})
    listed = [name for name in value.split(",") if name in selected]
    if listed and len(listed) < len(selected):
        # NCCL compares beginnings, so that eth0 would also mean the VLAN eth0.100.
        selected, value = listed, "=" + ",".join(listed)
    variables = {names.NCCL_SOCKET_IFNAME: value}
    interface = network.route.interface
    if node.nodes == 1 or not interface or interface in selected:
        return Choice(variables)
    text = (
        f"{names.NCCL_SOCKET_IFNAME}={value} stays as the platform has set it, although {interface}"
    )
    return Choice(variables, (_note(node, f"{text} leads to the other nodes"),))


def _selected(value: str, network: NodeNetwork) -> list[str]:
    names_ = parse(value)
    return [item.name for item in network.outward if value and names_.has(item.name)]


def _for_nccl(interface: str, network: NodeNetwork) -> str:
    """Return a list of NCCL that selects one interface; the exact form if its name begins others.

    Not always that form, as scripts copy the value to GLOO_SOCKET_IFNAME, which has none.
    """
    is_prefix = sum(item.name.startswith(interface) for item in network.interfaces) > 1
    return "=" + interface if is_prefix else interface


def _family_of_nccl(
    node: NodeEnv, environ: Mapping[str, str], network: NodeNetwork
) -> Mapping[str, str]:
    """Return NCCL's address family if the default one, IPv4, does not lead to the other nodes."""
    _, origin = _value(node, environ, network, names.NCCL_SOCKET_FAMILY)
    is_ipv6 = ":" in network.route.address
    return {names.NCCL_SOCKET_FAMILY: "AF_INET6"} if is_ipv6 and origin is Origin.DEFAULT else {}


def _sockets_by_name(
    node: NodeEnv, environ: Mapping[str, str], network: NodeNetwork, name: str
) -> Choice:
    """Set or check a list of full names, all of which must exist."""
    value, _ = _value(node, environ, network, name)
    route_name = network.route.interface
    if not value:
        return Choice({name: route_name} if node.nodes > 1 and route_name else {})
    names_here = {interface.name for interface in network.interfaces}
    if names_here.issuperset(value.split(",")):
        return Choice({name: value})
    return Choice({name: value}, (_missing(node, name, value, network),))


def _devices_of_nccl(node: NodeEnv, environ: Mapping[str, str], network: NodeNetwork) -> Choice:
    """Check NCCL's devices: without them it uses sockets, which can be a hundred times slower."""
    name = names.NCCL_IB_HCA
    value, _ = _value(node, environ, network, name)
    if not value:
        return Choice({name: value} if name in environ else {})
    selected = parse(value)
    # Excluded devices need not exist.
    if selected.is_exclude or any(selected.has(device) for device in network.devices):
        return Choice({name: value})
    problem = _problem(node, name, value, "InfiniBand device", network, network.devices)
    return Choice({name: value}, (f"{problem}: NCCL will use sockets",))


def _sockets_of_hccl(node: NodeEnv, environ: Mapping[str, str], network: NodeNetwork) -> Choice:
    """Set HCCL's interface, in NCCL's syntax, and its address, unless one of the two is set."""
    route = network.route
    if node.nodes == 1 or not route.interface or any(environ.get(name) for name in _HCCL):
        return Choice({})
    return Choice(
        {
            names.HCCL_SOCKET_IFNAME: _for_nccl(route.interface, network),
            names.HCCL_IF_IP: route.address,
        }
    )


def _sockets_of_open_mpi(
    node: NodeEnv, environ: Mapping[str, str], network: NodeNetwork, *, has_agent: bool
) -> Choice:
    """Name the one interface that Open MPI's ranks and daemons use, by its exact name.

    Otherwise a rank tries every network that both nodes have, although each machine may have one
    of its own with the same address: an allreduce hangs (4.1.4 and 5.0.11, with a vboxnet0).
    """
    route_name = network.route.interface
    launcher = LAUNCHERS.get(node.launcher)
    has_mpirun = launcher is not None and launcher.needs_mpi
    starts_mpi = has_mpirun or node.launcher == "srun"
    # An mpirun of the script's own gets a list only if it has a choice: with another list on its
    # command line, it would refuse both. A list of the head would otherwise reach the workers.
    if node.nodes == 1 or not route_name or not (starts_mpi or len(network.outward) > 1):
        return Choice({})
    set_by_user = mpi.given_parameters(node)
    variables = {}
    # Daemons refuse to use the loopback only; on one machine they find each other.
    limits_daemons = has_mpirun and has_agent and not is_loopback(network.route.address)
    for variable, parameters in (_RANKS, *(_DAEMONS if limits_daemons else ())):
        prefix = variable[: variable.index("_MCA_")] + "_MCA_"
        is_set = any(
            name in set_by_user or name in network.open_mpi_parameters or prefix + name in environ
            for name in parameters
        )
        if not is_set:
            variables[variable] = route_name
    return Choice(variables)


def _name_for_horovod(node: NodeEnv, network: NodeNetwork) -> Choice:
    """Warn that Horovod will not use the chosen interface.

    Its process sets ignore HOROVOD_GLOO_IFACE (0.28.1, ``GlooContext::InitializeForProcessSet``),
    and use the address of the node's own name.
    """
    address = network.route.address
    is_reachable = not network.name_is_loopback or is_loopback(address)
    if node.launcher != "horovod-gloo" or not address or is_reachable:
        return Choice({})
    text = f"its own name is a loopback address, which Horovod gives to the other nodes; {_HOROVOD}"
    return Choice({}, (_note(node, text % address),))


def _value(
    node: NodeEnv, environ: Mapping[str, str], network: NodeNetwork, name: str
) -> tuple[str, Origin]:
    """Return the value that the ranks would get, empty for none, and who has chosen it."""
    exported = mpi.exported_values(node).get(name)
    if exported is not None and node.open_mpi.x_args is not None:
        return exported, Origin.USER
    if name in environ:
        value = environ[name]
        if name in node.env_names or value not in (PRESET_SOCKET_IFNAME, exported):
            return value, Origin.USER
        if value != exported:
            return value, Origin.PLATFORM
    in_file = network.nccl_parameters.get(name)
    if in_file:
        return in_file, Origin.USER
    return exported or "", Origin.DEFAULT


def _chosen_note(node: NodeEnv, network: NodeNetwork) -> tuple[str, ...]:
    """Return a line that names the chosen interface, if this node had a choice."""
    route = network.route
    others = [item.name for item in network.outward if item.name != route.interface]
    if node.nodes == 1 or is_loopback(route.address):
        return ()
    if not route.interface and route.address:
        text = f"{route.address} leads to the other nodes, but it is an address of the loopback"
        return (_note(node, f"{text} interface, which libraries do not use; {_DUMMY}"),)
    if not route.interface:
        text = "no interface leads to the other nodes"
        return (_note(node, text),) if network.outward else ()
    text = f"{route.interface} ({route.address}) leads to the other nodes"
    first = _first_address(network)
    if first != route.address:
        # NCCL, Gloo and Open MPI look no further.
        text += f", but libraries use the first address of {route.interface}, {first}"
    elif others:
        text += f", so ranks do not use {some(others, _SHOWN)}"
    return (_note(node, text),) if others or first != route.address else ()


def _first_address(network: NodeNetwork) -> str:
    """Return the first address of the chosen interface, of the family of the chosen one."""
    route = network.route
    for item in network.interfaces:
        if item.name == route.interface:
            return next(text for text in item.addresses if (":" in text) == (":" in route.address))
    return route.address


def _note(node: NodeEnv, text: str) -> str:
    return f"choosing the network: node {node.node} ({node.host}): {text}"


def _missing(node: NodeEnv, name: str, value: str, network: NodeNetwork) -> str:
    problem = _problem(node, name, value, "network interface", network)
    return f"{problem}; left as it is, since it is not a default"


def _problem(
    node: NodeEnv,
    name: str,
    value: str,
    what: str,
    network: NodeNetwork,
    names_there: Sequence[str] | None = None,
) -> str:
    listed = [item.name for item in network.interfaces] if names_there is None else names_there
    return "choosing the network: %s=%s: no such %s on node %d (%s), which has %s" % (
        *(name, value[:80], what, node.node, node.host),
        some(listed, _SHOWN) or "none",
    )
