"""Programs that simulate the workers of a very large job, and its mpirun."""


def address(worker: int) -> str:
    """Return the loopback address of a worker, 1 and up."""
    return f"127.1.{worker // 250}.{worker % 250 + 1}"
