"""How much the TCP connections of processes have carried, as the kernel counts it.

What ``recv`` and ``send`` transfer is not in ``/proc/PID/io``. See sock_diag(7).
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
from typing import Iterator

from jobentry.system import linux

_SOCK_DIAG, _BY_FAMILY, _ERROR, _DONE = 4, 20, 2, 3
_REQUEST_DUMP = 0x301
_ESTABLISHED, _CLOSE_WAIT = 1 << 1, 1 << 8
# Each answer has ``tcp_info``, an attribute of this number.
_INFO = 2
_HEADER = struct.Struct("=IHHII")
_QUESTION = struct.Struct("=BBBBI48x")
_ATTRIBUTE = struct.Struct("=HH")
_INODE_AT, _ATTRIBUTES_AT = 68, 72
# Bytes that the other side has acknowledged, and bytes received.
_COUNTS, _COUNTS_AT = struct.Struct("=QQ"), 120
_TIMEOUT_S = 1.0
_PIECE_BYTES = 1 << 16
_INODE = re.compile(r"socket:\[(\d+)\]")


def carried() -> dict[int, int]:
    """Return the bytes that each connection of this network has carried, by its inode.

    It is empty if the kernel does not tell.
    """
    bytes_of: dict[int, int] = {}
    with contextlib.suppress(OSError, struct.error):
        for family in (socket.AF_INET, socket.AF_INET6):
            bytes_of.update(_of_family(family))
    return bytes_of


def inodes(process: int) -> list[int]:
    """Return the inodes of the sockets that a process has open."""
    matches = (_INODE.match(path) for _, path in linux.open_files(process))
    return [int(match[1]) for match in matches if match]


def _of_family(family: int) -> Iterator[tuple[int, int]]:
    states = _ESTABLISHED | _CLOSE_WAIT
    question = _QUESTION.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, states)
    header = _HEADER.pack(_HEADER.size + len(question), _BY_FAMILY, _REQUEST_DUMP, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as stream:
        stream.settimeout(_TIMEOUT_S)
        stream.sendall(header + question)
        while True:
            data = stream.recv(_PIECE_BYTES)
            while data:
                size, kind, *_ = _HEADER.unpack_from(data)
                if kind in (_ERROR, _DONE) or size < _HEADER.size:
                    return
                yield from _connection(data[_HEADER.size : size])
                data = data[_aligned(size) :]


def _connection(message: bytes) -> Iterator[tuple[int, int]]:
    """Yield the inode of a connection, and what it has carried."""
    (inode,) = struct.unpack_from("=I", message, _INODE_AT)
    at = _ATTRIBUTES_AT
    while at + _ATTRIBUTE.size <= len(message):
        size, kind = _ATTRIBUTE.unpack_from(message, at)
        if kind == _INFO and size >= _ATTRIBUTE.size + _COUNTS_AT + _COUNTS.size:
            yield inode, sum(_COUNTS.unpack_from(message, at + _ATTRIBUTE.size + _COUNTS_AT))
        at += max(_ATTRIBUTE.size, _aligned(size))


def _aligned(size: int) -> int:
    return size + 3 & ~3
