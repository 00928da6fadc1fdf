"""The resources that nodes and ranks used, over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cloudjob.console.charts.lines import Group, View, line_charts
from cloudjob.console.charts.style import ELAPSED, Chart, megabytes
from cloudjob.model import times
from cloudjob.model.status import JobState, JobStatus
from cloudjob.tracking.journals import Journals
from jobentry.contract import journal


class _DevicePoint(NamedTuple):
    at: float
    device: journal.Device


def resources(journals: Journals, status: JobStatus, view: View = View()) -> list[Chart]:  # noqa: B008 (it is frozen)
    """Return a chart for each resource, all with the same axis: seconds since the submit."""
    zero_s = times.seconds_of(status.created_at)
    nodes = {f"node {node}": each for node, each in journals.resources.items()}
    # The last sample of a process that has ended shows no usage.
    ranks = {
        f"rank {rank}": [point for point in points if point.sample.state not in journal.ENDS]
        for rank, points in journals.ranks.items()
    }
    # The emulated nodes of a job share the memory of their machine.
    memory = "Memory of the machine (MB)" if status.backend == "process" else "Memory (MB)"
    devices: dict[str, list[_DevicePoint]] = {}
    for node, samples in nodes.items():
        for sample in samples:
            for device in sample.devices:
                name = f"{node} {device.kind} {device.number}"
                devices.setdefault(name, []).append(_DevicePoint(sample.at, device))
    table: tuple[tuple[str, Mapping[str, Sequence[Any]], Callable[[Any], float | None]], ...] = (
        ("CPU of the machine, all CPUs (%)", nodes, lambda s: sum(s.cpu[:2]) if s.cpu else None),
        (memory, nodes, lambda s: megabytes(s.memory[0]) if s.memory else None),
        ("Disk space used (%)", nodes, _space_percent),
        ("GPUs and NPUs (%)", devices, lambda point: point.device.utilisation_percent),
        ("CPU of each rank (% of one CPU)", ranks, lambda point: point.sample.cpu_percent),
        ("Memory of each rank (MB)", ranks, lambda point: megabytes(point.sample.rss_mib)),
        ("Network, received and sent (MB/s)", nodes, lambda s: _mb_s(s.network)),
        ("Disk, read and written (MB/s)", nodes, lambda s: _mb_s(s.disk)),
    )
    lines_of = {
        title: {
            name: [(item.at - zero_s, v) for item in items if (v := value(item)) is not None]
            for name, items in source.items()
        }
        for title, source, value in table
    }
    most = [megabytes(s.memory[1]) for samples in nodes.values() for s in samples if s.memory]
    limits = {memory: max(most)} if most else {}
    ended = failed_at(status)
    group = Group(lines_of, "seconds", ELAPSED, is_aligned=True, failed_at=ended, limits=limits)
    return line_charts(group, view)


def failed_at(status: JobStatus) -> float | None:
    """Return when a job failed, in seconds since its submit; None if it did not."""
    if status.state is not JobState.FAILED or not status.ended_at:
        return None
    return times.seconds_of(status.ended_at) - times.seconds_of(status.created_at)


def _space_percent(sample: journal.Sample) -> float | None:
    return 100 * sample.space[0] / sample.space[1] if sample.space else None


def _mb_s(kib_s: Sequence[float]) -> float | None:
    return megabytes(sum(kib_s) / 1024) if kib_s else None
