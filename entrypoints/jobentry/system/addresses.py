"""Addresses of hosts."""

from __future__ import annotations

import socket

# Any port: nothing is sent.
ANY_PORT = 9


def is_loopback(address: str) -> bool:
    """Whether an address means the machine itself."""
    return address.startswith("127.") or address == "::1"


def is_link_local(address: str) -> bool:
    """Whether an address of IPv6 means something only together with an interface."""
    return address.startswith("fe80:")


def is_own(address: str) -> bool:
    """Whether an address is one of this machine's."""
    return is_loopback(address) or source_for(address) == address


def source_for(address: str) -> str:
    """Return the address from which the kernel would send to ``address``; empty for no route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, ANY_PORT))
            return str(probe.getsockname()[0]).partition("%")[0]
    except OSError:
        return ""


def address_of(host: str) -> str:
    """Return the address of a host for a program that needs one.

    Raises:
        OSError: The name does not resolve.
    """
    return addresses_of(host)[0]


def addresses_of(host: str) -> list[str]:
    """Return the addresses of a host in the system's order, but IPv4 first, link-local ones last.

    NCCL and Open MPI use IPv4 by default, and IPv6 is often there without a route.

    Raises:
        OSError: The name does not resolve.
    """
    try:
        infos = socket.getaddrinfo(plain_name(host), ANY_PORT, type=socket.SOCK_DGRAM)
    except UnicodeError as error:
        raise OSError(f"not a host name: {host[:80]!r}") from error
    infos.sort(key=lambda item: item[0] != socket.AF_INET)
    return sorted((str(item[4][0]) for item in infos), key=is_link_local)


def plain_name(host: str) -> str | bytes:
    """Return a host as ``getaddrinfo`` takes it; for a text it imports the tables of IDNA."""
    return host.encode("ascii") if host.isascii() else host
