"""Which keys of a job exclude each other: those of sweeps, and those of MindSpore. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from cloudjob.model import grid
from cloudjob.model.mindspore import NONE
from cloudjob.model.text import given, nearest
from jobentry.contract import devices
from jobentry.contract.launchers import LAUNCHERS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

_SERVERS = "MS_SERVER_NUM"
# The other modes split the graph, which MindSpore supports on accelerators only.
_ON_CPU = (NONE, "stand_alone", "data_parallel")


# -- sweeps ---------------------------------------------------------------------------------------


def of_sweep(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield each invalid key of a job's sweep, and why."""
    if not spec.sweep:
        return
    jobs = math.prod(map(len, spec.sweep.values()))
    if jobs > spec.max_jobs:
        more = f"allowed {spec.max_jobs}; max_jobs allows more, up to {grid.MAX_JOBS}"
        yield "sweep", f"makes too many jobs (given {jobs}; {more})"
    yield from _misused_names(spec)
    yield from _shared_outputs(spec)


def _misused_names(spec: JobSpec) -> Iterator[tuple[str, str]]:
    used = {name for text in _texts(spec) for name in grid.names_in(text)}
    guesses = {name: nearest(name, spec.sweep) for name in sorted(used - set(spec.sweep))}
    for name, guess in guesses.items():
        if guess:
            what = f"has no {name}, which is used as {{{name}}}{guess}"
            yield "sweep", f"{what} (if the script itself needs {{{name}}}, rename the sweep's)"
    for name in spec.sweep:
        if name not in used and not any(f"'{name}'" in guess for guess in guesses.values()):
            places = f"{{{name}}} in an argument, or in a value of env, inputs or outputs"
            yield f"sweep.{name}", f"is not used (allowed {places})"


def _shared_outputs(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield the outputs that several jobs would write to the same place."""
    several = {name for name, values in spec.sweep.items() if len(values) > 1}
    for name, uri in spec.outputs.items():
        missing = [f"{{{each}}}" for each in sorted(several - set(grid.names_in(uri)))]
        if uri and missing:
            yield (
                f"outputs.{name}",
                f"is the same for several jobs of the sweep (given {given(uri)}; allowed a URI "
                f"with {' and '.join(missing)}, or an empty one)",
            )


def _texts(spec: JobSpec) -> Iterator[str]:
    """Yield each text that may contain ``{NAME}``."""
    for key in grid.FILLED:
        value = getattr(spec, key)
        yield from value.values() if isinstance(value, Mapping) else value


# -- MindSpore ------------------------------------------------------------------------------------


def of_mindspore(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield each key whose value MindSpore does not allow together with other keys, and why."""
    launcher, settings = LAUNCHERS.get(spec.launcher), spec.mindspore
    if spec.hardware_check != "off":
        yield from _hardware_conflicts(spec)
    is_split = settings.parallel_mode not in (NONE, "stand_alone")
    launchers = [name for name, other in LAUNCHERS.items() if other.module == "mindspore"]
    if is_split and launcher and spec.launcher not in (*launchers, "rank-table"):
        yield (
            "mindspore.parallel_mode",
            f"needs a MindSpore launcher (given launcher {spec.launcher};"
            f" allowed {', '.join(launchers)})",
        )
    if settings.search_mode != NONE and settings.parallel_mode != "auto_parallel":
        yield (
            "mindspore.search_mode",
            f"is only for the parallel_mode auto_parallel (given {settings.parallel_mode})",
        )
    servers = spec.env.get(_SERVERS, "")
    if launcher and spec.launcher in launchers and servers not in ("", "0"):
        yield from _server_conflicts(spec.launcher, servers)
    if settings.devices:
        yield from _device_conflicts(spec)


def _server_conflicts(launcher: str, servers: str) -> Iterator[tuple[str, str]]:
    key, value = f"env.{_SERVERS}", f"given {servers[:20]!r}"
    if launcher != "dynamic-cluster":
        yield (
            key,
            f"only the launcher dynamic-cluster starts parameter servers ({value}; allowed 0)",
        )
    elif not (servers.isascii() and servers.isdecimal() and len(servers) < 6):
        yield key, f"is not a number of parameter servers ({value}; allowed 0, 1, …)"


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
    if len(lines) != spec.nodes:
        yield key, f"needs a line for each node (given {len(lines)}; allowed {spec.nodes})"
    for index, line in enumerate(lines):
        try:
            count = len(devices.parse(line).devices)
        except ValueError as error:
            form = "SERVER[@SUPER_POD] DEVICE=ADDRESS[/SUPER_DEVICE]..."
            yield f"{key}[{index}]", f"{error} (given {line[:60]!r}; allowed {form})"
            continue
        if count != (spec.procs_per_node or count):
            yield (
                f"{key}[{index}]",
                "needs a device for each rank of the node"
                f" (given {count}; allowed {spec.procs_per_node}, see procs_per_node)",
            )
