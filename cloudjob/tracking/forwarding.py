"""A port of this machine whose connections end at a port of a job's node."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

_LOOPBACK = "127.0.0.1"
# The columns of /proc/net/tcp.
_LOCAL, _REMOTE, _USER, _INODE = 1, 2, 7, 9


class Forwarding:
    """Listens on loopback; each connection becomes input and output of a command.

    On Linux, only programs of this user are let in; elsewhere the system does not say whose they
    are.

    Args:
        port: The port of this machine; 0 for any free one.
        argv: The command.
        on_refusal: Called with the id of another user whose program was refused; None for a
            program that has left already.

    Raises:
        OSError: The port is taken.
    """

    def __init__(
        self, port: int, argv: Sequence[str], on_refusal: Callable[[int | None], None]
    ) -> None:
        self._argv = argv
        self._on_refusal = on_refusal
        self._server = socket.create_server((_LOOPBACK, port))
        self.port: int = self._server.getsockname()[1]

    def serve(self) -> None:
        """Accept connections until the process ends."""
        while True:
            connection, _ = self._server.accept()
            with connection:
                user = user_of(connection) if sys.platform == "linux" else os.getuid()
                if user == os.getuid():
                    self._pass_on(connection)
                else:
                    self._on_refusal(user)

    def _pass_on(self, connection: socket.socket) -> None:
        end = connection.fileno()
        process = subprocess.Popen(self._argv, stdin=end, stdout=end)
        # Without it, the process would stay a zombie.
        threading.Thread(target=process.wait, daemon=True).start()


def user_of(connection: socket.socket) -> int | None:
    """Return the user at the other end of a connection from this machine; None if it has left.

    Only Linux knows it.
    """
    try:
        ends = _written(connection.getpeername()), _written(connection.getsockname())
    except OSError:
        # It has reset the connection.
        return None
    for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        # Without an inode it belongs to no program any more, and the kernel shows root.
        if (fields[_LOCAL], fields[_REMOTE]) == ends and fields[_INODE] != "0":
            return int(fields[_USER])
    return None


def _written(address: tuple[str, int]) -> str:
    """Return an address as the kernel writes it: its bytes in the machine's order."""
    number = int.from_bytes(socket.inet_aton(address[0]), sys.byteorder)
    return f"{number:08X}:{address[1]:04X}"
