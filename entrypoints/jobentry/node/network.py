"""The network of this node: its interfaces, and the one that leads to the other nodes.

The kernel is asked, not a list of names: what counts is the route to another node. The node's own
name says nothing, as Debian and Ubuntu give it the address 127.0.1.1, and neither does the name of
an interface: ``br-lan`` may lead to the others, and ``eth0`` to nowhere.
"""

from __future__ import annotations

import array
import contextlib
import os
import pwd
import shutil
import socket
import struct
import threading
from typing import Mapping, NamedTuple, Sequence

from jobentry.contract import names
from jobentry.contract.env import NodeEnv
from jobentry.system.addresses import address_of, addresses_of, is_loopback, source_for

# From linux/sockios.h and linux/if.h. These requests give the flags and addresses in this network
# namespace, which /sys/class/net may not.
_GET_ADDRESSES, _GET_FLAGS, _GET_MTU = 0x8912, 0x8913, 0x8921
_IS_UP, _IS_LOOPBACK = 0x1, 0x8
# The size of struct ifreq on 64-bit machines, and of the part of it that holds a name.
_ENTRY_BYTES, _NAME_BYTES = 40, 16
_MAX_ADDRESSES = 4096
_INFINIBAND = "/sys/class/infiniband"
# Seconds to wait for the name of another node to resolve: if something else tells the interface,
# and if not. In a container, a name may only resolve once that node has started.
_QUICK_S, _PATIENCE_S = 2.0, 15.0
_POLL_S = 0.2
# So many other nodes are looked up at most: all are in one network.
_PEERS = 4
# Addresses outside, to find the default route (RFC 5737, RFC 3849); nothing is sent to them.
_OUTSIDE = ("203.0.113.1", "2001:db8::1")
# Where Open MPI and its runtime PRRTE look for parameters: below mpirun's folder, and at home.
_OPEN_MPI_FILES = ("etc/openmpi-mca-params.conf", "etc/openmpi/openmpi-mca-params.conf")
_OWN_OPEN_MPI_FILE = ".openmpi/mca-params.conf"
_NCCL_FILE, _OWN_NCCL_FILE = "/etc/nccl.conf", ".nccl.conf"
_MAX_FILE_BYTES = 1_000_000


class Interface(NamedTuple):
    """A network interface that is up and has an address."""

    name: str
    addresses: tuple[str, ...]
    is_loopback: bool = False


class Route(NamedTuple):
    """The way to the other nodes: an interface, and the address of this node that they see."""

    interface: str = ""
    address: str = ""


NOWHERE = Route()


class NodeNetwork(NamedTuple):
    """The network of this node.

    Args:
        devices: The names of its InfiniBand devices.
        open_mpi_parameters: The names of the parameters that Open MPI's files on this node set.
        nccl_parameters: What NCCL's files on this node set.
        name_is_loopback: Whether this node's own name means the loopback on it.
    """

    interfaces: tuple[Interface, ...]
    route: Route = NOWHERE
    devices: tuple[str, ...] = ()
    open_mpi_parameters: frozenset[str] = frozenset()
    nccl_parameters: Mapping[str, str] = {}
    name_is_loopback: bool = False

    @property
    def outward(self) -> tuple[Interface, ...]:
        """The interfaces other than the loopback."""
        return tuple(interface for interface in self.interfaces if not interface.is_loopback)


def detect(node: NodeEnv, environ: Mapping[str, str]) -> NodeNetwork:
    """Return the network of this node; it may wait until the name of another node resolves."""
    network = NodeNetwork(_interfaces())
    devices: list[str] = []
    with contextlib.suppress(OSError):
        devices = sorted(os.listdir(_INFINIBAND))
    return network._replace(
        route=_route(node, environ.get(names.MA_CURRENT_IP, ""), network),
        devices=tuple(devices),
        nccl_parameters=_nccl_parameters(environ),
        open_mpi_parameters=_open_mpi_parameters(environ) if node.nodes > 1 else frozenset(),
        name_is_loopback=node.nodes > 1 and _is_name_loopback(),
    )


def interface_with(address: str, interfaces: Sequence[Interface]) -> str:
    """Return the name of the interface with this address, empty if there is none."""
    for interface in interfaces:
        # All of 127.0.0.0/8 belongs to the loopback interface.
        if address in interface.addresses or (interface.is_loopback and address.startswith("127.")):
            return interface.name
    return ""


def _route(node: NodeEnv, address: str, network: NodeNetwork) -> Route:
    """Return the way to the other nodes.

    Args:
        address: The address of this node in ``MA_CURRENT_IP``. The platform may set that of the
            physical machine, which no interface of a container has.
    """
    interfaces = network.interfaces
    stated = Route(interface_with(address, interfaces), address) if address else NOWHERE
    is_known_outward = bool(stated.interface) and not is_loopback(address)
    if node.control_dir:
        # Emulated nodes, all on this machine.
        return stated if stated.interface else _route_to("127.0.0.1", interfaces)
    if node.nodes > 1:
        is_open = len(network.outward) > 1 and not stated.interface
        peers = [host for host in node.hosts if host != node.host][:_PEERS]
        route = _route_to_any(peers, interfaces, _PATIENCE_S if is_open else _QUICK_S)
        if route.interface:
            # Of several addresses of that interface, the platform's; also instead of a loopback, as
            # the hosts file of a copied machine gives one to the machine that it was copied from.
            is_stale = is_known_outward and is_loopback(route.address)
            return stated if is_stale or stated.interface == route.interface else route
    if is_known_outward:
        return stated
    return _default_route(network)


def _default_route(network: NodeNetwork) -> Route:
    """Return the way out of this machine, else the first network."""
    for outside in _OUTSIDE:
        route = _route_to(outside, network.interfaces)
        if route.interface:
            return route
    for interface in network.outward or network.interfaces:
        return Route(interface.name, interface.addresses[0])
    return NOWHERE


def _route_to_any(
    hosts: Sequence[str], interfaces: Sequence[Interface], patience_s: float
) -> Route:
    """Return the way to the first of these hosts that has one.

    In a thread, as looking up a name may take much longer than it is worth.
    """
    routes: list[Route] = []
    is_over = threading.Event()

    def look() -> None:
        while not routes and not is_over.is_set():
            ways = (_route_to_host(host, interfaces) for host in hosts)
            routes.extend(next(([way] for way in ways if way.interface), []))
            # A found way must not wait for the pause.
            if not routes:
                is_over.wait(_POLL_S)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(patience_s)
    is_over.set()
    return routes[0] if routes else NOWHERE


def _route_to_host(host: str, interfaces: Sequence[Interface]) -> Route:
    with contextlib.suppress(OSError):
        addresses = addresses_of(host)
        if host != "localhost" and not is_loopback(host):
            # A stale hosts file may give another node an address of this one, like 127.0.1.1 or a
            # NAT's 10.0.2.15, which all virtual machines have.
            addresses = [
                address for address in addresses if not interface_with(address, interfaces)
            ]
        ways = (_route_to(address, interfaces) for address in addresses)
        return next((way for way in ways if way.interface), NOWHERE)
    return NOWHERE


def _is_name_loopback() -> bool:
    try:
        return is_loopback(address_of(socket.gethostname()))
    except OSError:
        return False


def _route_to(address: str, interfaces: Sequence[Interface]) -> Route:
    """Return the way to an address: the source address that the kernel would choose for it."""
    source = source_for(address)
    return Route(interface_with(source, interfaces), source) if source else NOWHERE


def _interfaces() -> tuple[Interface, ...]:
    """Return the interfaces that are up and have an address, in the order of the kernel."""
    addresses_of_name: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name, address in (*_ipv4_addresses(probe), *_ipv6_addresses()):
            addresses_of_name.setdefault(name, []).append(address)
        flags = {name: _flags(probe, name) for name in addresses_of_name}
    return tuple(
        Interface(name, tuple(addresses), bool(flags[name] & _IS_LOOPBACK))
        for name, addresses in addresses_of_name.items()
        if flags[name] & _IS_UP
    )


def _ipv4_addresses(probe: socket.socket) -> list[tuple[str, str]]:
    """Return each address with its interface; an interface may have several."""
    import fcntl

    room = array.array("B", bytes(_ENTRY_BYTES * _MAX_ADDRESSES))
    start, size = room.buffer_info()
    try:
        answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESSES, struct.pack("iP", size, start))
    except OSError:
        return []
    entries = memoryview(room)[: struct.unpack("iP", answer)[0]]
    pairs = []
    for at in range(0, len(entries), _ENTRY_BYTES):
        entry = bytes(entries[at : at + _ENTRY_BYTES])
        # An alias (eth0:1) is a second address of its interface.
        name = os.fsdecode(entry[:_NAME_BYTES].partition(b"\0")[0]).partition(":")[0]
        pairs.append((name, socket.inet_ntoa(entry[_NAME_BYTES + 4 : _NAME_BYTES + 8])))
    return pairs


def _ipv6_addresses() -> list[tuple[str, str]]:
    """Return each address with its interface, without link-local ones."""
    pairs: list[tuple[str, str]] = []
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as file:
        for line in file:
            fields = line.split()
            if not fields[0].startswith("fe80"):
                address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0]))
                pairs.append((fields[5], address))
    return pairs


def mtu_bytes(name: str) -> int:
    """Return the largest packet of an interface; 0 if it is not known."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return _ask(probe, name, _GET_MTU, "=I")


def _flags(probe: socket.socket, name: str) -> int:
    return _ask(probe, name, _GET_FLAGS, "=H")


def _ask(probe: socket.socket, name: str, request: int, form: str) -> int:
    """Return a number that the kernel knows about an interface; 0 if it has no such interface."""
    import fcntl

    entry = struct.pack("256s", os.fsencode(name)[: _NAME_BYTES - 1])
    try:
        data = fcntl.ioctl(probe.fileno(), request, entry)
    except OSError:
        return 0
    return int(struct.unpack_from(form, data, _NAME_BYTES)[0])


def _open_mpi_parameters(environ: Mapping[str, str]) -> frozenset[str]:
    """Return the parameters that Open MPI's files set, as some exclude each other."""
    mpirun = shutil.which("mpirun", path=environ.get("PATH", os.defpath))
    prefix = os.path.dirname(os.path.dirname(os.path.abspath(mpirun))) if mpirun else "/usr"
    # Debian's Open MPI in /usr has its files in /etc.
    root = "/" if prefix == "/usr" else prefix
    paths = [os.path.join(root, name) for name in _OPEN_MPI_FILES]
    paths.append(os.path.join(environ.get("HOME", "/"), _OWN_OPEN_MPI_FILE))
    return frozenset(_settings(paths))


def _nccl_parameters(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return what NCCL's files on this node set, as variables would overrule them."""
    file_of_user = environ.get("NCCL_CONF_FILE") or ""
    if not file_of_user:
        # NCCL does not ask $HOME.
        with contextlib.suppress(KeyError):
            file_of_user = os.path.join(pwd.getpwuid(os.geteuid()).pw_dir, _OWN_NCCL_FILE)
    return _settings([file_of_user, _NCCL_FILE])


def _settings(paths: Sequence[str]) -> dict[str, str]:
    """Return the ``NAME=VALUE`` lines of files that exist; the first of a name counts."""
    value_of: dict[str, str] = {}
    # A pipe would wait for its writer.
    for path in filter(os.path.isfile, paths):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            for line in file.read(_MAX_FILE_BYTES).decode("utf-8", "replace").splitlines():
                name, equals, value = line.partition("=")
                if equals and not name.lstrip().startswith("#"):
                    value_of.setdefault(name.strip(), value.strip())
    return value_of
