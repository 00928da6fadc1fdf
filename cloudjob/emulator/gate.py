"""The emulated OBS as its clients reach it: requests go on to the S3 server, or meet a fault."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from cloudjob.emulator.web import is_from_here

_BLOCK_BYTES = 1 << 16
_HEAD_BYTES = 1 << 16
_WRITES = ("PUT", "POST")

Reader: TypeAlias = asyncio.StreamReader
Writer: TypeAlias = asyncio.StreamWriter


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a request gets instead of an answer: a wait, an error, or a wait and then its answer."""

    delay_s: float = 0.0
    status: int = 0
    code: str = ""
    message: str = ""


_FOREIGN = Refusal(
    0.0, 403, "AccessDenied", "The request is for another host or of another origin."
)
Judge = Callable[[str, str], "Refusal | None"]
Signer = Callable[[bytes], "bytes | Refusal"]


class Gate:
    """Listens on a port and passes each request on to a Unix socket.

    A signature covers the header ``Host``, so requests pass as they are, byte for byte, but for
    what ``signer`` signs again. Answers are not looked at. It runs in a thread of its own.
    A request for another host, or one that a web page sends, is refused.

    Args:
        behind: The path of the socket.
        judge: Given method and target of each request, what it gets instead.
        signer: Given the head of each request, what goes on, or what it gets instead.
    """

    def __init__(self, behind: str, judge: Judge, signer: Signer) -> None:
        self._behind = behind
        self._judge = judge
        self._signer = signer
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.base_events.Server] = []
        self._addresses: list[str] = []
        threading.Thread(target=self._run, name="obs", daemon=True).start()

    def listen(self, address: str, port: int) -> int:
        """Listen on one address more; return the port.

        Raises:
            OSError: That cannot be.
        """
        made = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, address, port, limit=_HEAD_BYTES, backlog=256),
            self._loop,
        ).result()
        self._servers.append(made)
        self._addresses.append(address)
        found: int = made.sockets[0].getsockname()[1]
        return found

    def close(self) -> None:
        """Let nobody in any more."""
        for server in self._servers:
            self._loop.call_soon_threadsafe(server.close)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _serve(self, reader: Reader, writer: Writer) -> None:
        try:
            behind_reader, behind_writer = await asyncio.open_unix_connection(self._behind)
        except OSError:
            writer.close()
            return
        back = asyncio.create_task(_pump(behind_reader, writer))
        # The server closes what was quiet for long. A client that did not see that would send its
        # next request to nobody, and wait.
        back.add_done_callback(lambda _: writer.close())
        try:
            while await self._pass_one(reader, writer, behind_writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            pass
        finally:
            with contextlib.suppress(OSError):
                if behind_writer.can_write_eof():
                    behind_writer.write_eof()
            with contextlib.suppress(OSError):
                await back
            for end in (writer, behind_writer):
                end.close()

    async def _pass_one(self, reader: Reader, writer: Writer, behind: Writer) -> bool:
        """Pass one request; say whether another may come on this connection."""
        head = await reader.readuntil(b"\r\n\r\n")
        method, target, headers = _read(head)
        length = int(headers.get("content-length", "0"))
        signed = self._signer(head)
        # The server answers every preflight with permissive CORS headers.
        if method == "OPTIONS" or not is_from_here(headers, self._addresses):
            refusal: Refusal | None = _FOREIGN
        else:
            refusal = signed if isinstance(signed, Refusal) else self._judge(method, target)
        if refusal:
            await asyncio.sleep(refusal.delay_s)
            if refusal.status:
                writer.write(_error(refusal))
                await writer.drain()
                # What the client still sends is read, or the kernel would reset the connection
                # before the client has read the answer.
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(_swallow(reader, length), 5)
                behind.transport.abort()
                return False
        assert isinstance(signed, bytes)
        behind.write(signed)
        if "chunked" in headers.get("transfer-encoding", "").lower():
            # From here on nobody knows where a request ends.
            await _pump(reader, behind)
            return False
        while length:
            data = await reader.read(min(length, _BLOCK_BYTES))
            if not data:
                return False
            length -= len(data)
            behind.write(data)
            await behind.drain()
        return True


async def _pump(reader: Reader, writer: Writer) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_BLOCK_BYTES):
            writer.write(data)
            await writer.drain()


async def _swallow(reader: Reader, length: int) -> None:
    while length > 0:
        data = await reader.read(min(length, _BLOCK_BYTES))
        if not data:
            return
        length -= len(data)


def _read(head: bytes) -> tuple[str, str, dict[str, str]]:
    """Return method, target, and the headers by their names in lower case."""
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    pairs = (line.partition(":") for line in lines)
    return method, target, {name.lower(): value.strip() for name, _, value in pairs}


def _error(refusal: Refusal) -> bytes:
    number = uuid.uuid4().hex.upper()
    body = (
        '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n'
        f"<Error><Code>{refusal.code}</Code><Message>{refusal.message}</Message>"
        f"<RequestId>{number}</RequestId><HostId>emulator</HostId></Error>"
    ).encode()
    head = (
        f"HTTP/1.1 {refusal.status} {refusal.code}\r\n"
        "Server: OBS\r\n"
        f"x-obs-request-id: {number}\r\nx-amz-request-id: {number}\r\n"
        "Content-Type: application/xml\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode("ascii") + body


def is_write(method: str, target: str) -> bool:
    """Whether a request needs room."""
    return method in _WRITES and "delete" not in target.partition("?")[2].split("&")
