"""Handshakes of the control connection: what strangers do to a worker's port."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

from jobentry.contract.env import NodeEnv
from jobentry.control import handshake
from jobentry.control.handshake import Listener
from jobentry.control.transport import Link
from tests.support.loops import make_loop, paths_in, signals_restored


def test_connections_that_are_reset_at_once_do_not_block_the_head(tmp_path: Path):
    """A port scanner does this, and each such connection once took one of the 32 places forever."""
    reset_on_close = struct.pack("ii", 1, 0)
    with signals_restored():
        loop = make_loop(NodeEnv(), paths_in(tmp_path))
        server = handshake.listen(0, "127.0.0.1")
        link = Link(lambda message: None, lambda why: None)
        listener = Listener(loop, server, b"key", 1, link, lambda: None)
        for _ in range(40):
            stranger = socket.create_connection(server.getsockname(), 60)
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset_on_close)
            stranger.close()
            loop.step()

        with socket.create_connection(server.getsockname(), 60) as head:
            loop.step()
            assert head.recv(19) == handshake.GREETING
        listener.close()
        loop.relay.finish()
