"""Connects standard input and output to a port of this node, for ``cloudjob forward``."""

from __future__ import annotations

import os
import socket
import sys
import threading

_PIECE_BYTES = 1 << 16
_LIMIT_S = 10.0


def main(number: str) -> int:
    """Pass data on until the server closes the connection, and return the exit code."""
    port = int(number)
    try:
        connection = connect(port)
    except OSError as error:
        sys.stderr.write(
            f"jobentry: connecting to port {port} of this node: {error.strerror or error}\n"
        )
        return 1
    # The client may have sent everything and still wait for the answer.
    threading.Thread(target=_send, args=(connection,), daemon=True).start()
    while True:
        data = connection.recv(_PIECE_BYTES)
        if not data:
            return 0
        while data:
            data = data[os.write(1, data) :]


def connect(port: int) -> socket.socket:
    """Return a connection to a server of this node, which may listen on one address only.

    Raises:
        OSError: Nobody listens at the port.
    """
    try:
        connection = socket.create_connection(("localhost", port), timeout=_LIMIT_S)
    except OSError:
        connection = socket.create_connection((socket.gethostname(), port), timeout=_LIMIT_S)
    connection.settimeout(None)
    return connection


def _send(connection: socket.socket) -> None:
    try:
        while data := os.read(0, _PIECE_BYTES):
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        # The server has closed the connection.
        return
