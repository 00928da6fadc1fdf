"""The GPUs of emulated nodes: those of this machine that this shell may use.

https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cloudjob.errors import SpecError

CUDA = "CUDA_VISIBLE_DEVICES"
ASCEND = "ASCEND_RT_VISIBLE_DEVICES"
# The variables in which a shell or a scheduler names usable devices, in order of precedence.
_VARIABLES = (
    CUDA,
    "CUDA_DEVICE_ORDER",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    ASCEND,
)
_DRIVER = Path("/proc/driver/nvidia/gpus")


def visible(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that name the devices that we may use."""
    return {name: environ[name] for name in _VARIABLES if name in environ}


def gpus(environ: Mapping[str, str], driver: Path = _DRIVER) -> tuple[str, ...]:
    """Return NVIDIA's GPUs that may be used, as CUDA_VISIBLE_DEVICES names them."""
    if CUDA not in environ:
        try:
            return tuple(str(number) for number, _ in enumerate(driver.iterdir()))
        except OSError:
            return ()
    entries = [entry.strip() for entry in environ[CUDA].split(",")]
    # CUDA ignores what follows an invalid entry; people write -1 for "none".
    end = next((at for at, entry in enumerate(entries) if entry in ("", "-1")), len(entries))
    return tuple(entries[:end])


def count(
    environ: Mapping[str, str], driver: Path = _DRIVER, device_files: Path = Path("/dev")
) -> tuple[int, str]:
    """Return how many accelerators this shell may use, and their kind: ``GPU`` or ``NPU``."""
    devices = gpus(environ, driver)
    for name in () if devices else _VARIABLES[2:]:
        devices = devices or tuple(
            entry for entry in environ.get(name, "").split(",") if entry.strip()
        )
    if devices:
        return len(devices), "NPU" if CUDA not in environ and ASCEND in environ else "GPU"
    if CUDA in environ or ASCEND in environ:
        return 0, "GPU" if CUDA in environ else "NPU"
    npus = [path for path in device_files.glob("davinci*") if path.name[7:].isdecimal()]
    return len(npus), "NPU" if npus else "GPU"


def gpus_of_node(
    available: tuple[str, ...], nodes: int, per_node: int, node: int
) -> dict[str, str]:
    """Return the variables that name a node's own GPUs; none if the job requests no GPUs.

    Args:
        available: The GPUs of this machine.
        per_node: The number of GPUs of a node.

    Raises:
        SpecError: This machine has too few GPUs.
    """
    if not per_node:
        return {}
    if nodes * per_node > len(available):
        problem = (
            f"process.gpus: {nodes} {'node' if nodes == 1 else 'nodes'} with {per_node} each need "
            f"{nodes * per_node}, but this shell sees {_counted(available)} (given {per_node}; "
            f"allowed 0 to {len(available) // nodes})"
        )
        raise SpecError([problem], hint="with 0 all nodes share what this shell sees")
    return {
        CUDA: ",".join(available[node * per_node : (node + 1) * per_node]),
        "MA_NUM_GPUS": str(per_node),
    }


def _counted(available: tuple[str, ...]) -> str:
    return f"{len(available)}: {', '.join(available)}" if available else "none"
