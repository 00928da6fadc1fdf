"""Which launchers, devices and parallel modes MindSpore's documents allow together. No I/O."""

from __future__ import annotations

from collections.abc import Iterator

from jobentry.contract import devices
from jobentry.contract.launchers import LAUNCHERS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

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


def conflicts(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield each key whose value MindSpore does not allow together with other keys, and why."""
    launcher, settings = LAUNCHERS.get(spec.launcher), spec.mindspore
    if spec.hardware_check != "off":
        yield from _hardware_conflicts(spec)
    is_split = settings.parallel_mode not in (NONE, "stand_alone")
    own = [name for name, other in LAUNCHERS.items() if other.module == "mindspore"]
    if is_split and launcher and spec.launcher not in (*own, "rank-table"):
        yield (
            "mindspore.parallel_mode",
            f"needs a MindSpore launcher (given launcher {spec.launcher};"
            f" allowed {', '.join(own)})",
        )
    if settings.search_mode != NONE and settings.parallel_mode != "auto_parallel":
        yield (
            "mindspore.search_mode",
            f"is only for the parallel_mode auto_parallel (given {settings.parallel_mode})",
        )
    servers = spec.env.get(_SERVERS, "")
    if launcher and spec.launcher in own and servers not in ("", "0"):
        yield from _server_conflicts(spec.launcher, servers)
    yield from _device_conflicts(spec)


def _server_conflicts(launcher: str, servers: str) -> Iterator[tuple[str, str]]:
    key, given = f"env.{_SERVERS}", f"given {servers[:20]!r}"
    if launcher != "dynamic-cluster":
        yield (
            key,
            f"only the launcher dynamic-cluster starts parameter servers ({given}; allowed 0)",
        )
    elif not (servers.isascii() and servers.isdecimal() and len(servers) < 6):
        yield key, f"is not a number of parameter servers ({given}; allowed 0, 1, …)"


def _hardware_conflicts(spec: JobSpec) -> Iterator[tuple[str, str]]:
    launcher, settings = LAUNCHERS.get(spec.launcher), spec.mindspore
    target = settings.device_target
    if launcher and launcher.devices and target not in (NONE, *launcher.devices):
        yield (
            "launcher",
            f"{spec.launcher} does not work on {target}: use {launcher.alternative}"
            f" (given mindspore.device_target {target}; allowed {', '.join(launcher.devices)};"
            " --no-hardware-check starts it anyway)",
        )
    if target == "CPU" and settings.parallel_mode not in _ON_CPU:
        yield (
            "mindspore.parallel_mode",
            f"{settings.parallel_mode} does not work on CPU: use data_parallel"
            " (given mindspore.device_target CPU; allowed GPU, Ascend;"
            " --no-hardware-check starts it anyway)",
        )


def _device_conflicts(spec: JobSpec) -> Iterator[tuple[str, str]]:
    key, lines = "mindspore.devices", spec.mindspore.devices
    if lines and len(lines) != spec.nodes:
        yield key, f"needs a line for each node (given {len(lines)}; allowed {spec.nodes})"
    for index, line in enumerate(lines):
        try:
            found = len(devices.parse(line).devices)
        except ValueError as error:
            form = "SERVER[@SUPER_POD] DEVICE=ADDRESS[/SUPER_DEVICE]..."
            yield f"{key}[{index}]", f"{error} (given {line[:60]!r}; allowed {form})"
            continue
        if found != (spec.procs_per_node or found):
            yield (
                f"{key}[{index}]",
                "needs a device for each rank of the node"
                f" (given {found}; allowed {spec.procs_per_node}, see procs_per_node)",
            )
