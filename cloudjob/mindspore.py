"""Which launchers, devices and parallel modes MindSpore's documents allow together. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jobentry.contract import devices
from jobentry.contract.launchers import LAUNCHERS

# Left to the script.
NONE = "none"
DEVICE_TARGETS = (NONE, "CPU", "GPU", "Ascend")
_SERVERS = "MS_SERVER_NUM"
PARALLEL_MODES = (
    NONE, "stand_alone", "data_parallel", "semi_auto_parallel", "auto_parallel", "hybrid_parallel",
)  # fmt: skip
SEARCH_MODES = (NONE, "dynamic_programming", "recursive_programming", "sharding_propagation")
# The other modes split the graph, which MindSpore supports on accelerators only.
_ON_CPU = (NONE, "stand_alone", "data_parallel")


@dataclass(frozen=True, slots=True)
class Job:
    """The settings of a job that matter to MindSpore.

    Args:
        launcher: Its name; an unknown one is reported elsewhere.
        is_checked: Whether combinations that the documents rule out are errors.
        servers: The job's variable MS_SERVER_NUM; empty if not set.
    """

    launcher: str
    nodes: int
    procs_per_node: int
    is_checked: bool
    device_target: str
    parallel_mode: str
    search_mode: str
    devices: Sequence[str]
    servers: str = ""


def faults(job: Job) -> Iterator[tuple[str, str]]:
    """Yield each error as its dotted key and what is wrong."""
    if job.is_checked:
        yield from _hardware_faults(job)
    launcher = LAUNCHERS.get(job.launcher)
    is_split = job.parallel_mode not in (NONE, "stand_alone")
    own = [name for name, other in LAUNCHERS.items() if other.module == "mindspore"]
    if is_split and launcher and job.launcher not in (*own, "rank-table"):
        yield (
            "mindspore.parallel_mode",
            f"needs a launcher of MindSpore (given launcher {job.launcher};"
            f" allowed {', '.join(own)})",
        )
    if job.search_mode != NONE and job.parallel_mode != "auto_parallel":
        yield (
            "mindspore.search_mode",
            f"is only for the parallel_mode auto_parallel (given {job.parallel_mode})",
        )
    if launcher and job.launcher in own and job.servers.strip() not in ("", "0"):
        yield (
            f"env.{_SERVERS}",
            f"parameter servers are not started (given {job.servers[:20]!r}; allowed 0)",
        )
    yield from _device_faults(job)


def _hardware_faults(job: Job) -> Iterator[tuple[str, str]]:
    launcher = LAUNCHERS.get(job.launcher)
    target = job.device_target
    if launcher and launcher.devices and target not in (NONE, *launcher.devices):
        yield (
            "launcher",
            f"{job.launcher} does not work on {target}: use {launcher.instead}"
            f" (given mindspore.device_target {target}; allowed {', '.join(launcher.devices)};"
            " --no-hardware-check starts it all the same)",
        )
    if target == "CPU" and job.parallel_mode not in _ON_CPU:
        yield (
            "mindspore.parallel_mode",
            f"{job.parallel_mode} does not work on CPU: use data_parallel"
            " (given mindspore.device_target CPU; allowed GPU, Ascend;"
            " --no-hardware-check starts it all the same)",
        )


def _device_faults(job: Job) -> Iterator[tuple[str, str]]:
    key = "mindspore.devices"
    if job.devices and len(job.devices) != job.nodes:
        yield key, f"needs a line for each node (given {len(job.devices)}; allowed {job.nodes})"
    for index, line in enumerate(job.devices):
        try:
            found = len(devices.parse(line).devices)
        except ValueError as error:
            form = "SERVER[@SUPER_POD] DEVICE=ADDRESS[/SUPER_DEVICE]..."
            yield f"{key}[{index}]", f"{error} (given {line[:60]!r}; allowed {form})"
            continue
        if found != job.procs_per_node:
            yield (
                f"{key}[{index}]",
                "needs a device for each rank of the node"
                f" (given {found}; allowed {job.procs_per_node}, see procs_per_node)",
            )
