"""Plays the sshds of many workers: sshds.py COUNT PORT, each on a loopback address of its own.

One in ten greets after a second only, and one in fifty listens two seconds late. It says
``listening`` when all others are there, and ends with its input.
"""

import asyncio
import resource
import sys

GREETING = b"SSH-2.0-simulated\r\n"
SLOW_S, LATE_S = 1.0, 2.0


def address(worker: int) -> str:
    """Return the address of a worker, 1 and up."""
    return f"127.1.{worker // 250}.{worker % 250 + 1}"


async def serve(worker: int, port: int) -> None:
    """Listen as a worker does."""

    async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if worker % 10 == 3:
            await asyncio.sleep(SLOW_S)
        writer.write(GREETING)
        writer.close()

    if worker % 50 == 7:
        await asyncio.sleep(LATE_S)
    await asyncio.start_server(greet, address(worker), port, backlog=16)


async def main(count: int, port: int) -> None:
    """Listen as all workers do, until the input ends."""
    late = []
    for worker in range(1, count + 1):
        task = asyncio.create_task(serve(worker, port))
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
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
