"""Decides which ranks slow a job down, and why. No I/O and no clock.

In a job whose ranks do the same and meet in a collective, the slow one waits least for the others.
A wrong name is worse than none, so a rank is named only if all of this is true for minutes: every
other rank waits much more, in the same collective, which they pass again and again; and the rank
spends its time in a function in which the others are, too, so that it has no work of its own.
"""

from __future__ import annotations

from collections import Counter
from math import sqrt
from typing import Callable, Mapping, NamedTuple, Sequence, Tuple

from jobentry.contract.lists import ranges
from jobentry.contract.slow import RankShare, Reason, Slow, place_text
from jobentry.contract.stacks import Frame
from jobentry.preflight.judgement import median

# How many windows are judged together, and in how many of them a rank must stand out.
WINDOWS, _MOST_ORDINARY = 6, 1
# Fewer looks at a rank in a window tell nothing; with few, the errors below are large.
_LEAST_LOOKS = 4
# The others wait at least this share of the time, and this much more than the rank; and so many
# standard errors more, as each share is counted at a number of looks.
_LEAST_COST, _LEAST_MARGIN, _LEAST_ERRORS = 0.20, 0.15, 4.0
# So often, in all windows, the others are seen to have passed the collective; a loop none of whose
# variables changes is seen to do so only if a look falls between two rounds.
_LEAST_PASSES = 3
# A rank that has been named stays so as long as this part of the margin is left.
_KEEPS = 0.5
# A counter shows a reason from this value on, if it is so much higher than that of the others.
_FACTOR = 3.0
_DELAY_PERCENT, _THROTTLED_PERCENT, _FAULTS_S, _SHARE_PERCENT = 10.0, 5.0, 20.0, 20.0
# With less than this everywhere, only the rank's own work can be the reason.
_QUIET_PERCENT = 10.0


# A function with its file and its callers.
_Function = Tuple[str, str, int]


class _Sum(NamedTuple):
    """What a rank did in all windows together; percentages are means."""

    rank: int
    node: int
    looks: int
    waits: int
    passes: int
    meeting: str
    has_messages: bool
    cpus: frozenset[int]
    data_percent: float
    disk_percent: float
    network_percent: float
    delay_percent: float
    throttled_percent: float
    faults_s: float
    functions: Mapping[_Function, int]
    lines: Mapping[_Function, int]

    @property
    def wait_share(self) -> float:
        return self.waits / self.looks


class _Split(NamedTuple):
    """The ranks that wait much less than the others, and these."""

    slow: tuple[_Sum, ...]
    others: tuple[_Sum, ...]

    @property
    def margin(self) -> float:
        """How much more the others wait, as a share of the time."""
        return median(each.wait_share for each in self.others) - self.least_wait

    @property
    def least_wait(self) -> float:
        """The largest share of the time for which a slow rank waits."""
        return max(each.wait_share for each in self.slow)


def judge(
    running: frozenset[int],
    history: Mapping[int, Sequence[RankShare]],
    before: frozenset[int] = frozenset(),
) -> Slow | None:
    """Return which ranks slow a job down; None if none stands out.

    Args:
        running: The ranks that have not ended.
        history: The last windows of each rank.
        before: The ranks that were named by the last call.
    """
    windows = {rank: tuple(history.get(rank, ()))[-WINDOWS:] for rank in running}
    if len(running) < 2 or not all(map(_is_enough, windows.values())):
        return None
    split = _split([_sum(each) for each in windows.values()])
    if split is None or not _stands_out(split, windows, before) or not _is_in_step(split.others):
        return None
    places = [_own_place(each, split.others) for each in split.slow]
    if None in places:
        return None
    place, percent = max((each for each in places if each), key=lambda each: each[1])
    reason, evidence = _reason(split, place, percent)
    return Slow(
        tuple(each.rank for each in split.slow),
        tuple(sorted({each.node for each in split.slow})),
        0.0,
        round(100 * split.margin),
        reason,
        evidence,
        place,
        percent,
    )


# ---- who -----------------------------------------------------------------------------------------


def _is_enough(windows: Sequence[RankShare]) -> bool:
    return len(windows) == WINDOWS and all(each.looks >= _LEAST_LOOKS for each in windows)


def _split(ranks: Sequence[_Sum]) -> _Split | None:
    """Split ranks at the largest gap between their shares; None if most wait little."""
    ordered = sorted(ranks, key=lambda each: (each.wait_share, each.rank))
    gaps = [
        (ordered[at].wait_share - ordered[at - 1].wait_share, at) for at in range(1, len(ordered))
    ]
    at = max(gaps)[1]
    if at > len(ordered) - at:
        return None
    slow, others = ordered[:at], ordered[at:]
    return _Split(tuple(sorted(slow, key=lambda each: each.rank)), tuple(others))


def _stands_out(
    split: _Split, windows: Mapping[int, Sequence[RankShare]], before: frozenset[int]
) -> bool:
    """Whether the others wait so much more that it is no chance, and in nearly every window."""
    is_named = before == {each.rank for each in split.slow}
    factor = _KEEPS if is_named else 1.0
    cost = median(each.wait_share for each in split.others)
    errors = sqrt(max(_variance(each) for each in split.slow) + _variance_of_median(split.others))
    margin = factor * max(_LEAST_MARGIN, _LEAST_ERRORS * errors)
    if cost < factor * _LEAST_COST or split.margin < margin:
        return False
    ordinary = 0
    for number in range(WINDOWS):
        shares = {rank: each[number].waits / each[number].looks for rank, each in windows.items()}
        slow = max(shares[each.rank] for each in split.slow)
        others = median(shares[each.rank] for each in split.others)
        ordinary += others - slow < factor * _LEAST_MARGIN
    return ordinary <= _MOST_ORDINARY


def _variance(each: _Sum) -> float:
    # One look more in each class, as a share of 0 or 1 is not certain either.
    share = (each.waits + 1) / (each.looks + 2)
    return share * (1 - share) / each.looks


def _variance_of_median(ranks: Sequence[_Sum]) -> float:
    return 1.6 * max(map(_variance, ranks)) / len(ranks)


def _is_in_step(others: Sequence[_Sum]) -> bool:
    """Whether these ranks wait in the same collective, and pass it again and again."""
    meetings = {each.meeting for each in others}
    if len(meetings) > 1 or "" in meetings or any(each.has_messages for each in others):
        return False
    return all(each.passes >= _LEAST_PASSES for each in others)


def _own_place(slow: _Sum, others: Sequence[_Sum]) -> tuple[Frame, int] | None:
    """Return where a rank spends more time than the others, and which percentage of it.

    None if most of them never are in that function, called from the same ones, as then the rank has
    work of its own.
    """
    extra = {
        function: count / slow.looks - median(_share_in(each, function) for each in others)
        for function, count in slow.functions.items()
    }
    if not extra:
        return None
    function = max(sorted(extra), key=lambda each: extra[each])
    if 2 * sum(function in each.functions for each in others) < len(others):
        return None
    file, name, _ = function
    looks = sum(count for each, count in slow.functions.items() if each[:2] == (file, name))
    percent = round(100 * looks / slow.looks)
    return Frame(file, slow.lines[function], name), percent


def _share_in(each: _Sum, function: _Function) -> float:
    return each.functions.get(function, 0) / each.looks


# ---- why -----------------------------------------------------------------------------------------


class _Counter(NamedTuple):
    """A counter that may show why a rank is slow.

    Args:
        least: Smaller values show nothing.
        text: What it shows, with the value of the slow ranks and that of the others.
    """

    reason: Reason
    value: Callable[[_Sum], float]
    least: float
    text: str

    def evidence(self, split: _Split) -> str:
        """Return what it shows; empty if the slow ranks and the others are alike."""
        slow = min(map(self.value, split.slow))
        others = median(map(self.value, split.others))
        if slow < self.least or slow < _FACTOR * others:
            return ""
        return self.text % (round(slow), round(others))


# The most specific reason comes first: a CPU limit also makes a rank wait for a CPU.
_COUNTERS = (
    _Counter(
        Reason.QUOTA,
        lambda each: each.throttled_percent,
        _THROTTLED_PERCENT,
        "the CPU limit of its node held it back for %d %% of the time, the others for %d %%",
    ),
    _Counter(
        Reason.CPU,
        lambda each: each.delay_percent,
        _DELAY_PERCENT,
        "for %d %% of the time it was ready to run and had no CPU, the others for %d %%",
    ),
    _Counter(
        Reason.MEMORY,
        lambda each: each.faults_s,
        _FAULTS_S,
        "%d pages a second had to be read from a disk for it, %d for the others: its memory is "
        "swapped, or it reads a mapped file",
    ),
    _Counter(
        Reason.DISK,
        lambda each: each.disk_percent,
        _SHARE_PERCENT,
        "it waits for a disk for %d %% of the time, the others for %d %%",
    ),
    _Counter(
        Reason.NETWORK,
        lambda each: each.network_percent,
        _SHARE_PERCENT,
        "it waits for the network for %d %% of the time, the others for %d %%",
    ),
    _Counter(
        Reason.DATA,
        lambda each: each.data_percent,
        _SHARE_PERCENT,
        "it waits for its data loader for %d %% of the time, the others for %d %%",
    ),
)


def _reason(split: _Split, place: Frame, percent: int) -> tuple[Reason, str]:
    """Return why ranks are slow, and what shows it; only a counter that differs is a reason."""
    spends = f"{percent} % in {place_text(place)}"
    for counter in _COUNTERS:
        evidence = counter.evidence(split)
        # A binding makes a rank wait for a CPU, too.
        binding = _binding(split) if evidence and counter.reason is Reason.CPU else ""
        if binding:
            return Reason.BINDING, f"{binding}; {spends}"
        if evidence:
            return counter.reason, f"{evidence}; {spends}"
    if all(map(_has_quiet_counters, split.slow)):
        return Reason.UNEVEN, f"uneven work: {spends}"
    return Reason.UNKNOWN, f"no counter shows why; {spends}"


def _has_quiet_counters(each: _Sum) -> bool:
    return (
        each.delay_percent < _DELAY_PERCENT
        and each.throttled_percent < _THROTTLED_PERCENT
        and each.faults_s < _FAULTS_S
        and each.disk_percent < _QUIET_PERCENT
        and each.network_percent < _QUIET_PERCENT
    )


def _binding(split: _Split) -> str:
    """Return which ranks share too few CPUs, if a slow one is among them."""
    ranks = (*split.slow, *split.others)
    for each in split.slow:
        neighbours = [other for other in ranks if other.node == each.node and other.cpus]
        same = sorted(other.rank for other in neighbours if other.cpus <= each.cpus)
        # If all share all CPUs, that makes none of them slower than the others.
        if each.cpus and len(each.cpus) < len(same) < len(neighbours):
            return f"ranks {ranges(same)} are all bound to CPU {ranges(sorted(each.cpus))}"
    return ""


# ---- sums ----------------------------------------------------------------------------------------


def _sum(windows: Sequence[RankShare]) -> _Sum:
    looks = sum(each.looks for each in windows)
    functions: Counter[_Function] = Counter()
    lines: dict[_Function, int] = {}
    for window in windows:
        for each in window.functions:
            key = (each.file, each.name, each.callers)
            functions[key] += each.looks
            lines[key] = each.line
    meetings = Counter(each.meeting for each in windows if each.waits)
    last = windows[-1]
    return _Sum(
        last.rank,
        last.node,
        looks,
        sum(each.waits for each in windows),
        sum(each.passes for each in windows),
        max(sorted(meetings), key=lambda each: meetings[each], default=""),
        any(each.is_message for each in windows),
        frozenset(last.cpus),
        100 * sum(each.data for each in windows) / looks,
        100 * sum(each.disk for each in windows) / looks,
        100 * sum(each.network for each in windows) / looks,
        _mean([each.delay_percent for each in windows]),
        _mean([each.throttled_percent for each in windows]),
        _mean([each.faults_s for each in windows]),
        functions,
        lines,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
