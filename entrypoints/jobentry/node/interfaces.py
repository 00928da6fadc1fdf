"""Which network interfaces NCCL, Gloo and Open MPI are told to use, and whether they are here.

With a name that no interface has, both end in the middle of a start, with words that say little.
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

# What the platform sets on a flavor with GPUs. That, and the default of OPENMPI_X_ARGS, is nobody's
# wish, so it may be mended; every other value is somebody's word.
PRESET_SOCKET_IFNAME = "bond0,eth0"

# Networks of one machine's own containers and virtual machines: no other node is reached there.
_OWN_NETWORKS = (
    *("docker", "podman", "br-", "virbr", "veth", "cni", "cbr", "flannel", "cali", "lxc", "lxd"),
    *("kube-", "ifb", "dummy", "tunl"),
)
# What its own default leaves out, which a value of ours replaces.
_EXCLUDED_BY_OPEN_MPI = "127.0.0.1/8,sppp"
# From linux/sockios.h and linux/if.h: as addresses and flags of this network namespace, which
# /sys/class/net need not show.
_GET_FLAGS, _GET_ADDRESS = 0x8913, 0x8915
_IS_UP, _IS_LOOPBACK = 0x1, 0x8
_INFINIBAND = "/sys/class/infiniband"


class Interface(NamedTuple):
    """A network interface that is up and has an address."""

    name: str
    addresses: tuple[str, ...]
    is_loopback: bool = False


class Here(NamedTuple):
    """What this node has.

    Args:
        devices: The names of its InfiniBand devices.
        toward: The name of the interface on which the other nodes are, empty when not known.
    """

    interfaces: tuple[Interface, ...]
    devices: tuple[str, ...] = ()
    toward: str = ""


class Choice(NamedTuple):
    """What the ranks of this node are told.

    Args:
        variables: Interfaces by variable, for this node only.
        notes: What people should know.
        asks_way: Whether an interface is to take the place of one that is not here, so that it
            matters on which one the other nodes are.
    """

    variables: Mapping[str, str]
    notes: tuple[str, ...] = ()
    asks_way: bool = False


class Names(NamedTuple):
    """A list of interfaces or devices as NCCL reads it; see ``parse``."""

    items: tuple[tuple[str, str], ...]
    is_exact: bool = False
    is_exclude: bool = False

    def has(self, name: str) -> bool:
        """Whether the list stands for ``name``; a port is not looked at."""
        if not self.items:
            return True
        found = any(
            name == item if self.is_exact else name.startswith(item) for item, _ in self.items
        )
        return found != self.is_exclude


def parse(text: str) -> Names:
    """Read ``[^][=]NAME[:PORT],…``: beginnings of names, ``=`` whole ones, ``^`` not those."""
    is_exclude = text.startswith("^")
    rest = text[is_exclude:]
    is_exact = rest.startswith("=")
    pairs = (word.partition(":") for word in rest[is_exact:].split(","))
    return Names(tuple((name, port) for name, _, port in pairs if name), is_exact, is_exclude)


def choose(node: NodeEnv, environ: Mapping[str, str], here: Here) -> Choice:
    """Return what the ranks of this node are told, and what is wrong with it.

    Args:
        environ: The environment of this node.
    """
    choices = (
        _sockets_of_nccl(node, environ, here),
        _sockets_of_gloo(node, environ, here),
        _devices_of_nccl(node, environ, here),
        _sockets_of_open_mpi(node, environ, here),
    )
    return Choice(
        {name: value for choice in choices for name, value in choice.variables.items()},
        tuple(note for choice in choices for note in choice.notes),
        any(choice.asks_way for choice in choices),
    )


def _sockets_of_nccl(node: NodeEnv, environ: Mapping[str, str], here: Here) -> Choice:
    name = names.NCCL_SOCKET_IFNAME
    value, is_users = _asked(node, environ, name)
    if value is None:
        return Choice({})
    wanted = parse(value)
    if any(wanted.has(interface.name) for interface in here.interfaces):
        return Choice({name: value})
    fault = _fault(node, name, value, "network interface", _shown(here))
    if is_users:
        return Choice({name: value}, (f"{fault}; left as it is, since it is not a default",))
    best = _best(node, here)
    if not best:
        return Choice({name: value}, (f"{fault}, and none leads to other nodes",), True)
    return Choice({name: best}, (f"{fault}; using {best}",), True)


def _sockets_of_gloo(node: NodeEnv, environ: Mapping[str, str], here: Here) -> Choice:
    """Gloo takes whole names, and needs every one of them."""
    name = names.GLOO_SOCKET_IFNAME
    value, _ = _asked(node, environ, name)
    if not value:
        return Choice({})
    known = {interface.name for interface in here.interfaces}
    if known.issuperset(value.split(",")):
        return Choice({name: value})
    fault = _fault(node, name, value, "network interface", _shown(here))
    return Choice({name: value}, (f"{fault}; left as it is, since it is not a default",))


def _devices_of_nccl(node: NodeEnv, environ: Mapping[str, str], here: Here) -> Choice:
    """Without its devices NCCL goes over sockets, which may be a hundred times slower."""
    name = names.NCCL_IB_HCA
    value, _ = _asked(node, environ, name)
    if value is None:
        return Choice({})
    wanted = parse(value)
    # Devices that are left out need not be here.
    if wanted.is_exclude or any(wanted.has(device) for device in here.devices):
        return Choice({name: value})
    fault = _fault(node, name, value, "InfiniBand device", here.devices)
    return Choice({name: value}, (f"{fault}: NCCL will go over sockets",))


def _sockets_of_open_mpi(node: NodeEnv, environ: Mapping[str, str], here: Here) -> Choice:
    """Keep ranks off the networks that every node has for itself, with the same addresses.

    A rank takes such an address of its peer's for a way to it, and an allreduce hangs (4.1.4 and
    5.0.11, each node with a docker0).
    """
    own = [interface.name for interface in here.interfaces if _is_own(interface)]
    is_asked = any(name in environ for name in (names.OMPI_TCP_INCLUDE, names.OMPI_TCP_EXCLUDE))
    is_asked = is_asked or any(
        name.startswith("btl_tcp_if_") for name in mpi.given_parameters(node)
    )
    if node.nodes == 1 or not own or is_asked:
        return Choice({})
    note = (
        "choosing the network: node %d (%s): Open MPI is kept off %s, which lead%s to no other node"
    )
    note %= (node.node, node.host, ", ".join(own), "s" * (len(own) == 1))
    return Choice({names.OMPI_TCP_EXCLUDE: ",".join((_EXCLUDED_BY_OPEN_MPI, *own))}, (note,))


def _asked(node: NodeEnv, environ: Mapping[str, str], name: str) -> tuple[str | None, bool]:
    """Return what the ranks would be told, and whether that is somebody's own word."""
    given = mpi.exported_values(node).get(name)
    if given is not None and node.open_mpi.x_args is not None:
        return given, True
    if name in environ:
        defaults = (PRESET_SOCKET_IFNAME, given)
        return environ[name], name in node.env_names or environ[name] not in defaults
    return given, False


def _fault(node: NodeEnv, name: str, value: str, what: str, known: Sequence[str]) -> str:
    return "choosing the network: %s=%s: no such %s on node %d (%s), which has %s" % (
        *(name, value[:80], what, node.node, node.host),
        ", ".join(known) or "none",
    )


def _best(node: NodeEnv, here: Here) -> str:
    """Return the interface for NCCL on this node, as it reads it; empty when there is none."""
    usable = [item.name for item in here.interfaces if not item.is_loopback and not _is_own(item)]
    loopback = [item.name for item in here.interfaces if item.is_loopback]
    # The others are on this very machine when they are reached on its loopback.
    if (node.nodes > 1 and here.toward in loopback) or here.toward in usable:
        usable = [here.toward]
    elif node.nodes == 1:
        usable += loopback
    if not usable:
        return ""
    longer = [item for item in here.interfaces if item.name.startswith(usable[0])][1:]
    return "=" + usable[0] if longer else usable[0]


def _shown(here: Here) -> list[str]:
    return [interface.name for interface in here.interfaces if not _is_own(interface)]


def _is_own(interface: Interface) -> bool:
    return interface.name.startswith(_OWN_NETWORKS)


# -- what is there ------------------------------------------------------------------------------


def look() -> Here:
    """Return what this node has, but for the way to the others."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        wide = _wide_addresses()
        for name in _names():
            flags = _flags(probe, name)
            addresses = (*_address(probe, name), *wide.get(name, ()))
            if flags & _IS_UP and addresses:
                found.append(Interface(name, addresses, bool(flags & _IS_LOOPBACK)))
    devices: list[str] = []
    with contextlib.suppress(OSError):
        devices = sorted(os.listdir(_INFINIBAND))
    return Here(tuple(found), tuple(devices))


def _names() -> list[str]:
    """Return the names of all interfaces; PyPy has no ``socket.if_nameindex``."""
    with contextlib.suppress(OSError), open("/proc/net/dev", "rb") as file:
        return [os.fsdecode(line.partition(b":")[0].strip()) for line in file.readlines()[2:]]
    return []


def toward_others(node: NodeEnv, environ: Mapping[str, str], here: Here) -> str:
    """Return the interface on which the other nodes are, empty when that cannot be found out.

    The lookup of a name may take seconds, so this is only for a node that has to choose.
    """
    if node.nodes == 1:
        return ""
    peer = node.hosts[0 if not node.is_head else 1]
    ways: tuple[Callable[[], str], ...] = (
        lambda: environ.get(names.MA_CURRENT_IP, ""),
        lambda: socket.gethostbyname(node.host),
        lambda: _source_address(peer),
    )
    for way in ways:
        with contextlib.suppress(OSError, UnicodeError):
            name = holder(way(), here.interfaces)
            if name:
                return name
    return ""


def holder(address: str, interfaces: Sequence[Interface]) -> str:
    """Return the name of the interface with this address, empty when none has it."""
    for interface in interfaces:
        # All of 127.0.0.0/8 is the loopback's.
        if address in interface.addresses or (interface.is_loopback and address.startswith("127.")):
            return interface.name
    return ""


def _source_address(peer: str) -> str:
    """Return the address from which this node speaks to ``peer``; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])


def _flags(probe: socket.socket, name: str) -> int:
    data = _asked_of_kernel(probe, _GET_FLAGS, name)
    return int(struct.unpack_from("=H", data, 16)[0]) if data else 0


def _address(probe: socket.socket, name: str) -> tuple[str, ...]:
    data = _asked_of_kernel(probe, _GET_ADDRESS, name)
    return (socket.inet_ntoa(data[20:24]),) if data else ()


def _asked_of_kernel(probe: socket.socket, request: int, name: str) -> bytes:
    """Return the ``struct ifreq`` that the kernel fills in, empty when it has no answer."""
    import fcntl

    try:
        return fcntl.ioctl(probe.fileno(), request, struct.pack("256s", os.fsencode(name)[:15]))
    except OSError:
        return b""


def _wide_addresses() -> dict[str, list[str]]:
    """Return the IPv6 addresses of each interface, as 32 digits, but for those of its link only."""
    found: dict[str, list[str]] = {}
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as file:
        for line in file:
            words = line.split()
            if not words[0].startswith("fe80"):
                found.setdefault(words[5], []).append(words[0])
    return found
