"""The head's end of a control connection, driven by a test instead of an event loop."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

from jobentry.control import handshake, transport
from jobentry.control.transport import Channel, Message

KEY = b"the key of the job"


class Head:
    """A connection to the worker ``node``, which has announced itself in ``folder``."""

    def __init__(self, folder: Path, node: int = 1, session: str = "session") -> None:
        self._folder = folder
        self._node = node
        self._session = session
        self.sent = self.received = 0
        self.open()

    def open(self) -> None:
        """Connect or reconnect."""
        deadline = time.monotonic() + 180
        while (address := handshake.announced(str(self._folder), self._node)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self.socket = socket.create_connection(address, 60)
        self._file = self.socket.makefile("rb")
        greeting = self._file.readline().decode().split()[2:]
        key = transport.secret(KEY)
        transcript = " ".join((*greeting, transport.nonce(), self._session, str(self.received)))
        proof = transport.proof(key, "head", self._node, transcript)
        own_part = transcript.split(" ", 2)[2]
        self.socket.sendall(f"{own_part} {proof}\n".encode())
        self.reply, _, self._proof = self._file.readline().decode().strip().partition(" ")
        self._channel = Channel(key, "head", "worker", f"{transcript} {self.reply}")

    def send(self, kind: str, **values: Any) -> None:
        """Send a message."""
        self.sent += 1
        text = b"%d %d %s" % (self.sent, self.received, transport.dump(kind, **values)[:-1])
        self.socket.sendall(self._channel.seal(text))

    def read(self) -> Message:
        """Return the next message."""
        while True:
            line = self._file.readline()
            assert line, "the worker has hung up"
            number, _, text = self._channel.open(line[:-1]).split(b" ", 2)
            if int(number) > self.received:
                self.received = int(number)
                return transport.load(text)

    def receive(self, kind: str) -> dict[str, Any]:
        """Return the values of the next message, which must be of this kind."""
        message = self.read()
        assert message.kind == kind, message
        return message.values

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self.socket.close()
