"""A rank that slows a job down: what its node counts, and what the head concludes from that.

The nodes send a ``RankShare`` for each rank to the head, which writes a ``Slow`` to its journal for
the laptop.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple, Sequence

from jobentry.contract.hangs import shortened
from jobentry.contract.lists import numbers, ranges
from jobentry.contract.malformed import finite, whole
from jobentry.contract.stacks import Frame

# Limits for reading: functions of a rank, and CPUs in a list.
MOST_FUNCTIONS = 12
_MODULE = "<module>"


class Reason(Enum):
    """Why a rank is slow, as far as counters show it."""

    QUOTA = "quota"
    BINDING = "binding"
    CPU = "cpu"
    MEMORY = "memory"
    DISK = "disk"
    NETWORK = "network"
    DATA = "data"
    UNEVEN = "uneven"
    UNKNOWN = "unknown"


class Function(NamedTuple):
    """A function of the job's own code in which a rank was when it did not wait for others.

    Args:
        line: The line that it was at most often.
        looks: How often it was there.
        callers: A checksum of the functions of the job that have called it: ``forward()`` of an
            evaluation is not that of a training.
    """

    file: str
    name: str
    line: int
    looks: int
    callers: int = 0


class RankShare(NamedTuple):
    """What a rank did in one window of time.

    Args:
        looks: How often the node looked at it.
        waits: At how many of these looks it waited for other ranks, or for its device.
        passes: At how many of these waits it was at another one than at the look before.
        meeting: The call in which it waited most often, ``allreduce at train.py:41``.
        is_message: Whether that is a call between two ranks, such as ``recv``.
        data: At how many looks it waited for its data loader.
        disk: At how many looks the kernel let it wait for a disk.
        network: At how many looks it used a connection of its own, such as a download.
        delay_percent: The time in which it was ready to run and had no CPU.
        throttled_percent: The time in which the CPU limit of its node held it back.
        faults_s: Pages that a second had to be read from a disk for it.
        cpus: The CPUs that it may use.
        functions: Where it was when it did not wait, most often first.
    """

    rank: int
    node: int
    looks: int
    waits: int
    passes: int
    meeting: str = ""
    is_message: bool = False
    data: int = 0
    disk: int = 0
    network: int = 0
    delay_percent: float = 0.0
    throttled_percent: float = 0.0
    faults_s: float = 0.0
    cpus: tuple[int, ...] = ()
    functions: tuple[Function, ...] = ()


class Slow(NamedTuple):
    """Ranks that slow a job down, or no longer do.

    Args:
        at: When this was written, in seconds since 1970, by the clock of the head.
        cost_percent: The part of the time for which the others wait for them.
        evidence: What shows the reason, in words; empty if nothing does.
        place: Where they spend more time than the others.
        place_percent: The part of the time that they are in its function.
        is_over: Whether they no longer slow the job down.
    """

    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    at: float
    cost_percent: int
    reason: Reason
    evidence: str
    place: Frame
    place_percent: int
    is_over: bool = False


# ---- as JSON -------------------------------------------------------------------------------------


def to_values(slow: Slow) -> dict[str, Any]:
    """Return plain values for ``from_values``."""
    return {
        "ranks": ranges(slow.ranks),
        "nodes": ranges(slow.nodes),
        "at": round(slow.at, 1),
        "cost_percent": slow.cost_percent,
        "reason": slow.reason.value,
        "evidence": shortened(slow.evidence),
        "file": shortened(slow.place.file),
        "line": slow.place.line,
        "function": shortened(slow.place.function),
        "place_percent": slow.place_percent,
        "is_over": slow.is_over,
    }


def from_values(values: Any) -> Slow:
    """Return what ``to_values`` was called with.

    Raises:
        ValueError: The values have another form.
        TypeError: They have another form.
        LookupError: They have another form.
    """
    place = Frame(shortened(values["file"]), whole(values["line"]), shortened(values["function"]))
    return Slow(
        tuple(numbers(values["ranks"])),
        tuple(numbers(values["nodes"])),
        finite(values["at"]),
        whole(values["cost_percent"]),
        Reason(values["reason"]),
        shortened(values["evidence"]),
        place,
        whole(values["place_percent"]),
        values["is_over"] is True,
    )


def to_row(share: RankShare) -> list[Any]:
    """Return plain values for ``from_row``."""
    return [*share[:-2], ranges(share.cpus), [list(each) for each in share.functions]]


def from_row(row: Sequence[Any]) -> RankShare:
    """Return what ``to_row`` was called with.

    Raises:
        ValueError: The row has another form.
        TypeError: It has another form.
    """
    rank, node, looks, waits, passes, meeting, is_message, data, disk, network, *rates = row
    delay_percent, throttled_percent, faults_s, cpus, functions = rates
    return RankShare(
        whole(rank),
        whole(node),
        whole(looks),
        whole(waits),
        whole(passes),
        shortened(meeting),
        bool(is_message),
        whole(data),
        whole(disk),
        whole(network),
        finite(delay_percent),
        finite(throttled_percent),
        finite(faults_s),
        tuple(numbers(cpus)) if cpus else (),
        tuple(
            Function(shortened(file), shortened(name), whole(line), whole(count), whole(callers))
            for file, name, line, count, callers in functions[:MOST_FUNCTIONS]
        ),
    )


# ---- in words ------------------------------------------------------------------------------------


def headline(slow: Slow) -> str:
    """Return who slows the job down, what that costs, and why, as one line."""
    it = "it" if len(slow.ranks) == 1 else "them"
    cost = f"the others wait {slow.cost_percent} % of the time for {it}"
    return "; ".join(filter(None, (f"{who(slow)}: {cost}", slow.evidence)))


def who(slow: Slow) -> str:
    """Return the ranks as text: ``rank 5 on node 1``."""
    ranks = f"{'rank' if len(slow.ranks) == 1 else 'ranks'} {ranges(slow.ranks)}"
    return f"{ranks} on node {slow.nodes[0]}" if len(slow.nodes) == 1 else ranks


def place_text(place: Frame) -> str:
    """Return a place as ``augment() at data.py:30``."""
    call = "" if place.function == _MODULE else f"{place.function}() "
    return f"{call}at {place.file}:{place.line}"
