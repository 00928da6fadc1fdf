"""Measures this node for a full check: its disk, its memory and its GPUs."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Mapping

from jobentry.contract.env import NodeEnv
from jobentry.contract.paths import NodePaths
from jobentry.contract.preflight import Speeds
from jobentry.system.processes import output_of

_CHUNK_BYTES = 4 << 20
# Enough to leave the caches of a disk controller, little enough for a disk of 50 MB/s.
_DISK_BYTES, _DISK_S = 128 << 20, 4.0
# More than the caches of most processors, and little enough for a small container.
_MEMORY_BYTES, _MEMORY_ROUNDS = 64 << 20, 5
_GPU_S = 20.0
# Importing torch takes some seconds. The second of two rounds counts, as the first loads kernels.
_MATRIX = """\
import sys, time
try:
    import torch
except ImportError:
    sys.exit(0)
size = 4096
for number in range(torch.cuda.device_count()):
    a = torch.ones(size, size, device=f"cuda:{number}", dtype=torch.float16)
    for repeats in (2, 20):
        torch.cuda.synchronize(number)
        begun = time.monotonic()
        for _ in range(repeats):
            b = a @ a
        torch.cuda.synchronize(number)
        took = time.monotonic() - begun
    if float(b[0, 0]) != size:
        took = float("inf")
    print(2 * size**3 * repeats / took / 1e12)
"""


def measure(node: NodeEnv, node_paths: NodePaths, environ: Mapping[str, str]) -> Speeds:
    """Return how fast this node is; what cannot be measured is 0."""
    tflops = _matrix_tflops(node.interpreter or "python3", environ)
    return Speeds(_disk_mb_s(node_paths.node_dir), _memory_gb_s(), tflops)


def _disk_mb_s(folder: str) -> float:
    """Return how fast a file can be written to the disk, in MB/s."""
    path = os.path.join(folder, "preflight-write")
    chunk = os.urandom(_CHUNK_BYTES)
    written_bytes = 0
    try:
        with open(path, "wb", buffering=0) as file:
            begun_s = time.monotonic()
            while written_bytes < _DISK_BYTES and time.monotonic() - begun_s < _DISK_S:
                written_bytes += file.write(chunk)
                os.fdatasync(file.fileno())
            return written_bytes / max(1e-6, time.monotonic() - begun_s) / 1e6
    except OSError:
        return 0.0
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _memory_gb_s() -> float:
    """Return how fast one processor copies memory, in GB/s."""
    try:
        source = bytearray(_MEMORY_BYTES)
        target = bytearray(_MEMORY_BYTES)
    except MemoryError:
        return 0.0
    best_s = float("inf")
    for _ in range(_MEMORY_ROUNDS):
        begun_s = time.monotonic()
        memoryview(target)[:] = memoryview(source)
        best_s = min(best_s, time.monotonic() - begun_s)
    return _MEMORY_BYTES / max(1e-6, best_s) / 1e9


def _matrix_tflops(python: str, environ: Mapping[str, str]) -> tuple[float, ...]:
    """Return the speed of a matrix multiplication on each GPU, if the script's Python has torch."""
    if not any(name.startswith("nvidia") and name[6:].isdigit() for name in os.listdir("/dev")):
        return ()
    output = output_of([python, "-c", _MATRIX], _GPU_S, environ)
    try:
        return tuple(float(line) for line in output.split()[:64])
    except ValueError:
        return ()
