"""The table and the lines that show a check of the nodes. No I/O."""

from __future__ import annotations

from typing import Sequence

from jobentry.contract.lists import some
from jobentry.contract.preflight import (
    UNLIMITED,
    Finding,
    NodeFacts,
    Reach,
    Report,
    Weight,
)
from jobentry.preflight.judgement import size_text

_HEADINGS = (
    *("node", "host", "interface", "address", "MTU", "reached", "round trip", "clock"),
    *("open files", "locked", "/dev/shm", "free", "driver", "NCCL", "GPUs"),
)
_SPEED_HEADINGS = ("network", "disk", "memory", "matrix")
# Longer lists of findings help nobody; the first are the faults.
_MAX_LINES = 12
_MARKS = {Weight.FAULT: "FAULT", Weight.DOUBT: "doubt"}


def report(nodes: Sequence[NodeFacts], findings: Sequence[Finding]) -> Report:
    """Return the table of the nodes with a mark at those that a finding concerns."""
    has_speeds = any(node.transfers or node.speeds.memory_gb_s for node in nodes)
    marks: dict[int, str] = {}
    for finding in findings:
        for number in finding.nodes:
            marks.setdefault(number, _MARKS.get(finding.weight, ""))
    heading = (*_HEADINGS, *(_SPEED_HEADINGS if has_speeds else ()), "")
    rows = [
        (*_cells(node), *(_speed_cells(node) if has_speeds else ()), marks.get(node.node) or "ok")
        for node in nodes
    ]
    return Report(tuple(findings), (heading, *rows))


def warnings(findings: Sequence[Finding], hosts: Sequence[str]) -> list[str]:
    """Return the lines of the log about faults and doubts, each with its hint after it."""
    serious = [each for each in findings if each.weight is not Weight.NOTE]
    text = []
    for finding in serious[:_MAX_LINES]:
        text.append(line(finding, hosts))
        if finding.hint:
            text.append("hint: " + finding.hint)
    more = len(serious) - _MAX_LINES
    return [*text, f"checking the nodes: {more} more findings"] if more > 0 else text


def line(finding: Finding, hosts: Sequence[str]) -> str:
    """Return a finding as one line: what was checked, which nodes, what is wrong."""
    named = some([f"node {number} ({hosts[number]})" for number in finding.nodes], 4)
    return f"checking the nodes: {named}: {finding.text}"


def _cells(node: NodeFacts) -> tuple[str, ...]:
    versions = dict(node.versions)
    endpoint = node.endpoints[0] if node.endpoints else None
    working = sum(link.reach is Reach.WORKS for link in node.links)
    trips = [link.round_trip_us for link in node.links if link.round_trip_us]
    free = min((disk.free_bytes for disk in node.disks), default=0)
    return (
        *(str(node.node), node.host),
        *((endpoint.interface, endpoint.address, str(endpoint.mtu)) if endpoint else ("-",) * 3),
        f"{working}/{len(node.links)}",
        f"{min(trips) / 1000:.2f} ms" if trips else "-",
        f"{node.clock_ahead_s:+.1f} s" if node.node else "-",
        _limit(node.limits.open_files),
        "any" if node.limits.can_lock else _limit_size(node.limits.locked_bytes),
        _size(node.shm_bytes),
        _size(free) if node.disks else "-",
        *(versions.get(name, "-") for name in ("driver", "NCCL")),
        str(node.gpus),
    )


def _speed_cells(node: NodeFacts) -> tuple[str, ...]:
    speeds = node.speeds
    best = max((transfer.mb_s for transfer in node.transfers), default=0.0)
    slowest = min(speeds.matrix_tflops, default=0.0)
    return (
        f"{best:.0f} MB/s" if best else "-",
        f"{speeds.disk_mb_s:.0f} MB/s" if speeds.disk_mb_s else "-",
        f"{speeds.memory_gb_s:.1f} GB/s" if speeds.memory_gb_s else "-",
        f"{slowest:.1f} TFLOPS" if slowest else "-",
    )


def _limit(value: int) -> str:
    return "any" if value == UNLIMITED else str(value)


def _limit_size(value: int) -> str:
    return "any" if value == UNLIMITED else _size(value)


def _size(size_bytes: int) -> str:
    return "-" if size_bytes < 0 else size_text(size_bytes)
