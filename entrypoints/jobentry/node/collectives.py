"""Asks NCCL which collectives the ranks of this node have launched, compared with the other ranks.

Collectives on GPUs are asynchronous: each rank only waits for its device, so the calls of the ranks
do not show which of them has left out a collective. NCCL counts them, and a thread of each process
answers questions about all processes of the job (RAS, with JSON since NCCL 2.28.7:
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html).
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from typing import Any, Mapping, NamedTuple, Sequence

from jobentry.contract.hangs import Progress
from jobentry.contract.malformed import MALFORMED

_ADDRESS = ("127.0.0.1", 28028)
_REQUEST = b"CLIENT PROTOCOL 2\nSET FORMAT json\nVERBOSE STATUS\n"
# 10,000 ranks in a few communicators are about so much.
_LIMIT_BYTES = 16 << 20
_TIMEOUT_S = 2.0
_SOCKETS = "/proc/net/tcp"
# There: the state of a socket that listens, and the addresses 127.0.0.1 and 0.0.0.0.
_LISTENS, _LOOPBACKS = "0A", ("0100007F", "00000000")
_NAME = re.compile(r"[A-Za-z]{1,30}")


class Launched(NamedTuple):
    """What a process has launched.

    Args:
        missing: The first collective that others have launched and it has not, such as
            ``AllReduce 31``; empty if there is none.
    """

    progress: Progress = Progress.UNKNOWN
    missing: str = ""


def ask(address: tuple[str, int] = _ADDRESS) -> dict[int, Launched]:
    """Return what the processes of this machine have launched; empty if NCCL does not answer."""
    try:
        return compare(json.loads(_answer(address)))
    except (OSError, *MALFORMED):
        return {}


def _answer(address: tuple[str, int]) -> bytes:
    end_s = time.monotonic() + _TIMEOUT_S
    received = bytearray()
    if not _is_of_this_user(address[1]):
        raise PermissionError("another user listens there")
    with socket.create_connection(address, _TIMEOUT_S) as stream:
        stream.sendall(_REQUEST)
        while len(received) < _LIMIT_BYTES:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the answer takes too long")
            stream.settimeout(left_s)
            data = stream.recv(1 << 16)
            if not data:
                break
            received += data
    # The answers to the other commands are lines.
    return bytes(received[received.index(b"{") :])


def _is_of_this_user(port: int) -> bool:
    """Whether only processes of this user, as ranks are, can accept a connection to a port."""
    addresses = ["%s:%04X" % (address, port) for address in _LOOPBACKS]
    with open(_SOCKETS, encoding="ascii") as file:
        sockets = [line.split() for line in file]
    users = {each[7] for each in sockets if each[1] in addresses and each[3] == _LISTENS}
    return users == {str(os.geteuid())}


def compare(status: Mapping[str, Any]) -> dict[int, Launched]:
    """Return what the processes of this machine have launched.

    Args:
        status: The answer of RAS.
    """
    launched: dict[int, list[Launched]] = {}
    is_local: dict[str, bool] = {}
    for communicator in status["communicators"]:
        ranks = communicator["ranks"]
        names = {name for rank in ranks for name in rank["collective_counts"]}
        for name in sorted(filter(_NAME.fullmatch, names)):
            counts = [int(rank["collective_counts"].get(name, 0)) for rank in ranks]
            least, most = min(counts), max(counts)
            for rank, count in zip(ranks, counts):
                host, process = str(rank["host"]), int(rank["pid"])
                if host not in is_local:
                    is_local[host] = _is_local(host)
                if is_local[host]:
                    launched_here = _launched(name, count, least, most)
                    launched.setdefault(process, []).append(launched_here)
    return {process: joined(each) for process, each in launched.items()}


def joined(parts: Sequence[Launched]) -> Launched:
    """Return what has been launched in all parts: of a process, or of the processes of a rank."""
    kinds = {each.progress for each in parts} - {Progress.UNKNOWN, Progress.LEVEL}
    missing = next((each.missing for each in parts if each.missing), "")
    if len(kinds) > 1:
        return Launched(Progress.BOTH, missing)
    return Launched(kinds.pop() if kinds else Progress.LEVEL, missing)


def _launched(name: str, count: int, least: int, most: int) -> Launched:
    if least == most:
        return Launched(Progress.LEVEL)
    if count == most:
        return Launched(Progress.AHEAD)
    progress = Progress.BOTH if count > least else Progress.BEHIND
    return Launched(progress, f"{name} {count + 1}")


def _is_local(host: str) -> bool:
    """Whether an address is one of this machine's; processes elsewhere may have the same number."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind((host, 0))
                return True
        except (OSError, UnicodeError):
            continue
    return False
