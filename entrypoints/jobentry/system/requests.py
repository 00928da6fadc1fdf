"""Requests to a running job: a socket in the folder of its head, and one line of JSON each way.

Only the job's own user can connect. On platforms where no command reaches a node, request and
answer are objects in the job's store: the answer starts with the digest of its request.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
from typing import Any, Iterator

STACKS, PROFILE = "stacks", "profile"
_SOCKET = "requests"
# The longest request, and the longest answer.
REQUEST_LIMIT_BYTES = 4096
ANSWER_LIMIT_BYTES = 64 << 20
# Seconds that the head waits for its workers.
ANSWER_S = 10.0
_PATIENCE_S = 2 * ANSWER_S
# Seconds between two looks of a head at its store.
LOOK_S = 15.0
_PIECE_BYTES = 1 << 16


class RequestError(Exception):
    """The head did not answer."""


def listen(node_dir: str) -> socket.socket:
    """Return the listening socket of a head.

    Raises:
        OSError: It cannot be made.
    """
    server = socket.socket(socket.AF_UNIX)
    try:
        with _short_path(node_dir) as path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            previous = os.umask(0o177)
            try:
                server.bind(path)
            finally:
                os.umask(previous)
        server.listen()
        server.setblocking(False)
    except OSError:
        server.close()
        raise
    return server


def ask(node_dir: str, request: bytes) -> bytes:
    """Send one line to the head whose folder this is, and return the line that it answers.

    Raises:
        RequestError: It does not answer, or not in time.
    """
    try:
        with socket.socket(socket.AF_UNIX) as stream:
            stream.settimeout(_PATIENCE_S)
            with _short_path(node_dir) as path:
                stream.connect(path)
            stream.sendall(request + b"\n")
            return _line(stream)
    except OSError as error:
        raise RequestError(error.strerror or str(error)) from error


def request(kind: str, **values: Any) -> bytes:
    """Return a request without its newline."""
    return json.dumps({"kind": kind, **values}).encode("ascii")


def stored_answer(request: bytes, answer: bytes) -> bytes:
    """Return the object with the answer to a request in a store."""
    return _digest(request) + b"\n" + answer


def answer_to(request: bytes, stored: bytes) -> bytes:
    """Return the answer in an object; empty if it is the answer to another request."""
    digest, _, answer = stored.partition(b"\n")
    return answer if digest == _digest(request) else b""


def _digest(request: bytes) -> bytes:
    return hashlib.sha256(request).hexdigest().encode("ascii")


def _line(stream: socket.socket) -> bytes:
    received = bytearray()
    while not received.endswith(b"\n"):
        piece = stream.recv(_PIECE_BYTES)
        if not piece:
            raise RequestError("its head ended while it answered")
        received += piece
        if len(received) > ANSWER_LIMIT_BYTES:
            raise RequestError("its answer is longer than %d bytes" % ANSWER_LIMIT_BYTES)
    return bytes(received[:-1])


@contextlib.contextmanager
def _short_path(node_dir: str) -> Iterator[str]:
    """The path of the socket in at most 107 bytes, the limit of unix(7)."""
    folder = os.open(node_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield "/proc/self/fd/%d/%s" % (folder, _SOCKET)
    finally:
        os.close(folder)
