"""A job that hangs: which rule says so, which ranks stand where, and the same in words.

The head writes it to its journal and to the exit record, and the laptop reads it.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple, Sequence

from jobentry.contract.lists import numbers, ranges
from jobentry.contract.malformed import finite, whole
from jobentry.contract.stacks import Frame, Wait

# Limits for reading: characters of a text, and groups of a hang.
_TEXT_LIMIT, _GROUPS_LIMIT = 300, 16
# How many ranks a report of Horovod may name, and how many tensors of each.
MOST_LATE, _MOST_NAMES = 256, 16
_MOST_GROUPS = 4
# The function of code outside functions.
_MODULE = "<module>"


class Activity(Enum):
    """What a rank does while its main thread stays at one place."""

    MOVING = "moving"
    WAITING = "waiting"
    BUSY = "busy"
    IDLE = "idle"
    GONE = "gone"


class Rule(Enum):
    """Why a job counts as hung."""

    STOPPED = "stopped"
    DEADLOCK = "deadlock"
    ALL_WAIT = "all-wait"
    ONE_IDLE = "one-idle"
    ONE_BUSY = "one-busy"
    NOTHING_MOVES = "nothing-moves"
    NO_START = "no-start"
    NOT_JOINED = "not-joined"


class Confidence(Enum):
    """How certain it is that the job hangs, and that the named ranks are the reason."""

    CERTAIN = "certain"
    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


class Progress(Enum):
    """How many collectives the library of a rank has launched, compared with those of other ranks.

    ``BOTH`` is a rank that has launched more than some and fewer than others.
    """

    UNKNOWN = "unknown"
    LEVEL = "level"
    AHEAD = "ahead"
    BEHIND = "behind"
    BOTH = "both"


class Late(NamedTuple):
    """A rank that has not launched what others have, as a library of another rank says."""

    rank: int
    names: tuple[str, ...]


class Standing(NamedTuple):
    """A rank whose main thread has been at one place for long, as its node reports to the head.

    Args:
        does: What it does, in words.
        place: The innermost call in the job's own code. Its file is empty after its script; its
            line is 0 in a program without Python.
        operation: The call in which it waits for others; empty if it does not.
        still_s: How long it has been there.
        longest_s: The longest that a rank of this node has been there, and left again.
        cpu_percent: What it and its processes use, in percent of one CPU.
        moved_bytes_s: Bytes that they read and write in a second.
        quiet_s: How long it has printed nothing.
        late_s: How long ago its library said what is in ``late``.
        computes: Whether a device of its node computes; None if that is not known.
        missing: The collective that others have launched and it has not; empty if none is known.
        late: What its library says about other ranks.
    """

    rank: int
    node: int
    activity: Activity
    wait: Wait
    does: str
    place: Frame
    operation: str
    still_s: float
    longest_s: float = 0.0
    cpu_percent: int = 0
    moved_bytes_s: float = 0.0
    quiet_s: float = 0.0
    late_s: float = 0.0
    computes: bool | None = None
    progress: Progress = Progress.UNKNOWN
    missing: str = ""
    late: tuple[Late, ...] = ()


class Group(NamedTuple):
    """Ranks that do the same at the same place.

    Args:
        ranks: In order, with their nodes.
        does: What they do, in words.
        place: The innermost call in the job's own code; its file is empty after its script.
        operation: The call in which they wait for others; empty if they do not.
        cpu_percent: The most that one of them uses.
    """

    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    activity: Activity
    wait: Wait
    does: str
    place: Frame
    operation: str = ""
    cpu_percent: int = 0


class Hang(NamedTuple):
    """A job that hangs, or hung.

    Args:
        at: When this was written, in seconds since 1970, by the clock of the head.
        lasted_s: How long no rank has moved.
        groups: Those that the others wait for come first.
        named: How many of the groups the others wait for; 0 if none stands out.
        is_over: Whether the ranks move again.
    """

    rule: Rule
    confidence: Confidence
    at: float
    lasted_s: float
    groups: tuple[Group, ...]
    named: int = 0
    is_over: bool = False

    @property
    def may_stop(self) -> bool:
        """Whether it is certain enough to end the job for it."""
        return self.confidence in (Confidence.CERTAIN, Confidence.HIGH) and self.rule in (
            Rule.STOPPED,
            Rule.DEADLOCK,
            Rule.ONE_IDLE,
            Rule.NOT_JOINED,
        )

    @property
    def culprits(self) -> tuple[Group, ...]:
        """The ranks that the others wait for; empty if none stand out."""
        return self.groups[: self.named]


# ---- as JSON -------------------------------------------------------------------------------------


def to_values(hang: Hang) -> dict[str, Any]:
    """Return plain values for ``from_values``."""
    return {
        "rule": hang.rule.value,
        "confidence": hang.confidence.value,
        "at": round(hang.at, 1),
        "lasted_s": round(hang.lasted_s, 1),
        "named": hang.named,
        "is_over": hang.is_over,
        "groups": [_group_values(group) for group in hang.groups[:_GROUPS_LIMIT]],
    }


def from_values(values: Any) -> Hang:
    """Return the hang from which ``to_values`` made these values.

    Raises:
        ValueError: They have another form.
        TypeError: They have another form.
        LookupError: They have another form.
    """
    groups = tuple(_group(each) for each in values["groups"][:_GROUPS_LIMIT])
    return Hang(
        Rule(values["rule"]),
        Confidence(values["confidence"]),
        finite(values["at"]),
        finite(values["lasted_s"]),
        groups,
        min(len(groups), max(0, whole(values["named"]))),
        values["is_over"] is True,
    )


def to_row(standing: Standing) -> list[Any]:
    """Return plain values for ``from_row``."""
    values = standing._asdict()
    values["activity"], values["wait"] = standing.activity.value, standing.wait.value
    values["progress"] = standing.progress.value
    return list(values.values())


def from_row(row: Any) -> Standing:
    """Return the standing rank from which ``to_row`` made these values.

    Raises:
        ValueError: They have another form.
        TypeError: They have another form.
    """
    rank, node, activity, wait, does, place, operation, *others = row
    *numbers_of, computes, progress, missing, late = others
    still_s, longest_s, cpu_percent, moved_bytes_s, quiet_s, late_s = map(finite, numbers_of)
    file, line, function, source = place
    return Standing(
        whole(rank),
        whole(node),
        Activity(activity),
        Wait(wait),
        shortened(does),
        Frame(shortened(file), whole(line), shortened(function), shortened(source)),
        shortened(operation),
        still_s,
        longest_s,
        whole(cpu_percent),
        moved_bytes_s,
        quiet_s,
        late_s,
        None if computes is None else bool(computes),
        Progress(progress),
        shortened(missing),
        tuple(
            Late(whole(other), tuple(map(shortened, names[:_MOST_NAMES])))
            for other, names in late[:MOST_LATE]
        ),
    )


def _group_values(group: Group) -> dict[str, Any]:
    return {
        "ranks": ranges(group.ranks),
        "nodes": ranges(group.nodes),
        "activity": group.activity.value,
        "wait": group.wait.value,
        "does": group.does[:_TEXT_LIMIT],
        "file": group.place.file[:_TEXT_LIMIT],
        "line": group.place.line,
        "function": group.place.function[:_TEXT_LIMIT],
        "source": group.place.source[:_TEXT_LIMIT],
        "operation": group.operation[:_TEXT_LIMIT],
        "cpu_percent": group.cpu_percent,
    }


def _group(values: Any) -> Group:
    return Group(
        tuple(numbers(values["ranks"])),
        tuple(numbers(values["nodes"])),
        Activity(values["activity"]),
        Wait(values["wait"]),
        shortened(values["does"]),
        Frame(
            shortened(values["file"]),
            whole(values["line"]),
            shortened(values["function"]),
            shortened(values["source"]),
        ),
        shortened(values["operation"]),
        whole(values["cpu_percent"]),
    )


def shortened(value: Any) -> str:
    """Return a value of others as a text of limited length."""
    return str(value)[:_TEXT_LIMIT]


# ---- in words ------------------------------------------------------------------------------------

_UNITS = ((3600, "h", 60, "min"), (60, "min", 1, "s"))


def headline(hang: Hang) -> str:
    """Return what hangs, where and for how long, as one line."""
    lasted = f"for {span(hang.lasted_s)}"
    if hang.rule is Rule.DEADLOCK:
        places = ", ".join(f"{_who(each)} {_waiting_at(each)}" for each in _shown(hang.groups))
        return f"deadlock: {places}, {lasted}; they wait for each other"
    if not hang.culprits:
        what = _what_they_wait_for(hang.groups) if _all_wait(hang) else "nothing moves"
        return f"{what}, {lasted}; no rank stands out"
    return f"{what_they_do(hang.culprits)}, {lasted}"


def what_they_do(groups: Sequence[Group]) -> str:
    """Return where ranks are and what they do there; empty if there are none."""
    return "; ".join(f"{_who(each)} {_is_doing(each)}" for each in _shown(groups))


def details(hang: Hang) -> list[str]:
    """Return what the other ranks do, as lines."""
    if hang.rule is Rule.DEADLOCK:
        return []
    others = hang.groups[hang.named :]
    if not hang.culprits:
        return [f"{_who(each)}: {_located_and_does(each)}" for each in _shown(others)]
    waiting = [each for each in others if each.activity is Activity.WAITING]
    return [
        f"{_who(each)} {'waits' if len(each.ranks) == 1 else 'wait'} for that {_located(each)}"
        for each in _shown(waiting)
    ]


def span(seconds: float) -> str:
    """Return a duration as text: ``42 s``, ``12 min``, ``1 h 05 min``."""
    whole = max(0, int(seconds))
    for limit, unit, part, small in _UNITS:
        if whole >= limit:
            rest = whole % limit // part if unit == "h" else 0
            return f"{whole // limit} {unit}" + (f" {rest:02d} {small}" if rest else "")
    return f"{whole} s"


def _shown(groups: Sequence[Group]) -> Sequence[Group]:
    return groups[:_MOST_GROUPS]


def _all_wait(hang: Hang) -> bool:
    return all(each.activity is Activity.WAITING for each in hang.groups)


def _what_they_wait_for(groups: Sequence[Group]) -> str:
    on_devices = any(each.wait is Wait.DEVICE for each in groups)
    return f"all ranks wait for {'their devices' if on_devices else 'each other'}"


def _waiting_at(group: Group) -> str:
    # Calls of the job do not show for which other ranks a device waits.
    return _located_and_does(group) if group.wait is Wait.DEVICE else _located(group)


def _who(group: Group) -> str:
    text = f"{'rank' if len(group.ranks) == 1 else 'ranks'} {ranges(group.ranks)}"
    return f"{text} on node {group.nodes[0]}" if len(group.nodes) == 1 else text


def _is_doing(group: Group) -> str:
    verb = "is" if len(group.ranks) == 1 else "are"
    if group.activity is Activity.GONE:
        what, _, more = group.does.partition("; ")
        place = f" {_located(group)}" if group.place.file else ""
        return f"{verb} {what}{place}" + (f" ({more})" if more else "")
    if group.activity is Activity.BUSY:
        return f"{verb} busy {_located(group)} ({group.cpu_percent} % CPU), perhaps only slow"
    return f"{verb} stuck {_located(group)} ({group.does})"


def _located_and_does(group: Group) -> str:
    return ", ".join(filter(None, (_located(group), group.does)))


def _located(group: Group) -> str:
    """Return the place of a group: ``in load() at data.py:17``, or the call that waits there."""
    if not group.place.file:
        return f"in {group.operation or 'C code'} after its script"
    function = group.place.function
    call = group.operation or ("" if function in ("", _MODULE) else f"{function}()")
    line = f":{group.place.line}" if group.place.line else ""
    return f"{f'in {call} ' if call else ''}at {group.place.file}{line}"
