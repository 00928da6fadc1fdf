"""Addresses of hosts."""

from __future__ import annotations

import socket

# Any port: nothing is sent.
ANY_PORT = 9


def is_loopback(address: str) -> bool:
    """Whether an address means the machine itself."""
    return address.startswith("127.") or address == "::1"


def address_of(host: str) -> str:
    """Return the address of a host for a program that needs one.

    Raises:
        OSError: The name does not resolve.
    """
    return addresses_of(host)[0]


def addresses_of(host: str) -> list[str]:
    """Return the addresses of a host in the system's order, but those of IPv4 first.

    NCCL and Open MPI use IPv4 by default, and IPv6 is often there without a route.

    Raises:
        OSError: The name does not resolve.
    """
    try:
        infos = socket.getaddrinfo(plain_name(host), ANY_PORT, type=socket.SOCK_DGRAM)
    except UnicodeError as error:
        raise OSError(f"not a host name: {host[:80]!r}") from error
    return [str(item[4][0]) for item in sorted(infos, key=lambda item: item[0] != socket.AF_INET)]


def plain_name(host: str) -> str | bytes:
    """Return a host as ``getaddrinfo`` takes it; for a text it imports the tables of IDNA."""
    return host.encode("ascii") if host.isascii() else host
