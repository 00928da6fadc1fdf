"""Who is at the other end of a connection to a forwarded port."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from cloudjob.tracking.forwarding import user_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the user")


def test_the_user_of_a_connection_is_known():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()),
        server.accept()[0] as accepted,
    ):
        assert user_of(accepted) == os.getuid()


@pytest.mark.parametrize("linger", [None, b"\1\0\0\0\0\0\0\0"], ids=["closed", "reset"])
def test_a_program_that_has_left_is_nobody(linger: bytes | None):
    """The kernel shows the rest of its connection as one of root."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as client:
            client.sendall(b"DELETE /\n")
            if linger:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        with server.accept()[0] as accepted:
            assert user_of(accepted) is None
