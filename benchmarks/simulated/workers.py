"""Simulate many workers: workers.py COUNT PORT KEY ENTRY, each on its own loopback address.

Each behaves like the entry of a worker: it reports that it is ready, and leaves at the end. One in
ten greets only after a second, and one in fifty listens two seconds late. The program prints
``listening`` once all others listen, and ends when its input does.
"""

import asyncio
import resource
import sys
import time
from pathlib import Path

from benchmarks.simulated import address
from jobentry.control import handshake, transport
from jobentry.control.transport import Channel

SLOW_S, LATE_S = 1.0, 2.0


async def play(
    worker: int, key: bytes, entry: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Act as the worker on a connection of the head."""
    if worker % 10 == 3:
        await asyncio.sleep(SLOW_S)
    greeting = f"{transport.nonce()} {transport.nonce()}"
    writer.write(handshake.GREETING + greeting.encode() + b"\n")
    reply = (await reader.readline()).decode().strip()
    if not reply:
        return
    transcript = f"{greeting} {reply.rpartition(' ')[0]} 0"
    writer.write(f"0 {transport.proof(key, 'worker', worker, transcript)}\n".encode())
    channel = Channel(key, "worker", "head", transcript)
    facts = {"code": "", "mpi": "4.1", "entry": entry}
    facts["python"] = ".".join(map(str, sys.version_info[:3]))
    answers = {
        "hello": transport.dump("ready", **facts, at_s=time.time()),
        "job-ended": transport.dump("left", trouble=""),
    }
    received = sent = 0
    while line := await reader.readline():
        number, _, text = channel.open(line[:-1]).split(b" ", 2)
        received = int(number) or received
        answer = answers.get(transport.load(text).kind) if text else None
        if answer:
            sent += 1
            writer.write(channel.seal(b"%d %d %s" % (sent, received, answer[:-1])))
    writer.close()


async def serve(worker: int, port: int, key: bytes, entry: str) -> None:
    """Listen as a worker does."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await play(worker, key, entry, reader, writer)

    if worker % 50 == 7:
        await asyncio.sleep(LATE_S)
    await asyncio.start_server(greet, address(worker), port, backlog=16)


async def main(count: int, port: int, key: bytes, entry: str) -> None:
    """Listen as all workers do, until the input ends."""
    late = []
    for worker in range(1, count + 1):
        task = asyncio.create_task(serve(worker, port, key, entry))
        if worker % 50 == 7:
            late.append(task)
        else:
            await task
    print("listening", flush=True)
    await asyncio.gather(*late)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    secret = transport.secret(Path(sys.argv[3]).read_bytes())
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), secret, sys.argv[4]))
