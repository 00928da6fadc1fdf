"""How far a training is, and how fast, from the last lines that a rank has printed.

Epochs and steps count only with their totals, as in ``epoch 3/10``, ``step 120 of 1000`` and the
progress bars of tqdm and Keras. Nothing is guessed from a number without a total.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

# What is searched of a line: its beginning, because counters stand in front.
_MOST_CHARACTERS = 1000
_COUNT = r"([0-9]{1,15})[ \t]{0,4}(?:/|of)[ \t]{0,4}([0-9]{1,15})"
_NAMED = r"['\"]?[ \t]{0,4}[=:#]?[ \t]{0,4}[\[(]?[ \t]{0,4}"
_EPOCHS = re.compile(rf"(?<![\w.])epochs?{_NAMED}{_COUNT}(?![\w.])", re.IGNORECASE)
_STEPS = re.compile(
    rf"(?<![\w.])(?:global[_ ]step|steps?|iterations?|iter|it|batch(?:es)?)"
    rf"{_NAMED}{_COUNT}(?![\w.])",
    re.IGNORECASE,
)
# tqdm: ``train:  12%|██  | 120/1000 [00:10<01:20, 11.0it/s]``.
_TQDM = re.compile(
    r"%\|[^|]{0,400}\| ([0-9]{1,15})/([0-9]{1,15}) \[[0-9:]{4,12}<([0-9:]{4,12}|\?)"
    r"(?:, {1,6}([0-9.]{1,12})(it/s|s/it))?"
)
# Keras: ``120/1000 ━━━━━━━ 1s 10ms/step`` and ``120/1000 [=====>......]``.
_KERAS = re.compile(r"^[ \t\b]{0,9}([0-9]{1,15})/([0-9]{1,15}) {1,4}(?:\[[=>.]|[━╸])")
_EPOCH_WORD = re.compile(r"epoch", re.IGNORECASE)
_NUMBER = r"[0-9]{1,12}(?:\.[0-9]{1,6})?"
_UNIT = r"((?:it|iters?|steps?|samples?|examples?|images?|imgs?|tokens?|tok|seqs?)/s)(?:ec)?"
# ``11.0 it/s``, and ``it/s: 11.0``, where a number before it is that of something else.
_RATE = re.compile(
    rf"(?<![\w.])(?:({_NUMBER})[ \t]{{0,2}}{_UNIT}(?![\w/]|[ \t]{{0,2}}[:=])"
    rf"|{_UNIT}[ \t]{{0,2}}[:=][ \t]{{0,2}}({_NUMBER})(?![\w.]))",
    re.IGNORECASE,
)
# A rate by the clock of the log needs lines that are this many seconds apart.
_LEAST_S = 5.0


class Count(NamedTuple):
    """How many of a known number are done."""

    done: int
    total: int

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return min(1.0, self.done / self.total)


class Counters(NamedTuple):
    """What one line says.

    Args:
        is_epoch_bar: Whether ``steps`` counts within an epoch whose number the line names.
        left_s: Seconds left for ``steps`` or, without them, ``epochs``; None if it does not say.
        rate: The speed in the line's own words; empty if it has none.
    """

    epochs: Count | None = None
    steps: Count | None = None
    is_epoch_bar: bool = False
    left_s: float | None = None
    rate: str = ""


class Line(NamedTuple):
    """A line of the log; ``at`` is in seconds since 1970, 0 if unknown."""

    at: float
    text: str


class Training(NamedTuple):
    """How far a training is.

    Args:
        share: What is done of all, from 0 to 1; None if the log has no totals.
        left_s: Seconds until its end, or until the end of the epoch (``is_left_in_epoch``); None
            if it cannot be told.
        rate: How fast it is, such as ``11.0 it/s``; empty if unknown.
    """

    epochs: Count | None = None
    steps: Count | None = None
    share: float | None = None
    left_s: float | None = None
    is_left_in_epoch: bool = False
    rate: str = ""


def counters(text: str) -> Counters:
    """Return what a line says about the epochs and steps that are done."""
    text = text[:_MOST_CHARACTERS]
    epochs, steps = _count(_EPOCHS.search(text)), _count(_STEPS.search(text))
    names_epoch = _EPOCH_WORD.search(text) is not None
    rate = _rate(text)
    bar = _TQDM.search(text)
    if bar:
        label = text[: bar.start()]
        counted, left_s = _count(bar), _seconds(bar[3])
        if rate == "" and bar[4]:
            rate = f"{bar[4]} {bar[5]}"
        # "Epochs: 30%|…| 3/10" counts epochs, "Epoch 3: 12%|…| 120/1000" the steps of one.
        if _EPOCH_WORD.search(label) and not re.search(r"[0-9]", label.rpartition(":")[0]):
            return Counters(epochs=counted, left_s=left_s, rate=rate)
        return Counters(epochs, counted, names_epoch, left_s, rate)
    steps = steps or _count(_KERAS.search(text))
    return Counters(epochs, steps, names_epoch and steps is not None, None, rate)


def read(lines: Iterable[Line]) -> Training:
    """Return how far a training is, from the last lines of one rank, the oldest first."""
    now = Counters()
    rate = ""
    states: list[tuple[float, Counters]] = []
    for at, text in lines:
        seen = counters(text)
        rate = seen.rate or rate
        if seen.steps is not None or seen.epochs is not None:
            now = seen._replace(epochs=seen.epochs or now.epochs)
            states.append((at, now))
    epochs = now.epochs
    if _counts_through([each for _, each in states]):
        states = [
            (at, each._replace(epochs=None, is_epoch_bar=False) if each.steps else each)
            for at, each in states
        ]
        now = states[-1][1]
    # When which share was done, by lines that count steps and by those that count epochs only.
    by_step: list[_Mark] = []
    by_epoch: list[_Mark] = []
    for at, each in states:
        _add(by_epoch if each.steps is None else by_step, _Mark(at, _share(each) or 0.0))
    share, speed = _share(now), _speed(by_step or by_epoch)
    left_s, is_in_epoch = now.left_s, now.is_epoch_bar and now.epochs is None
    if now.steps and now.epochs and now.epochs.total > 1:
        # The time that a bar names is that of its epoch.
        left_s = None
    if left_s is None and speed and share is not None:
        left_s = (1 - share) / speed
    if not rate and speed and now.steps:
        rate = f"{speed * now.steps.total * (now.epochs.total if now.epochs else 1):.3g} steps/s"
    return Training(epochs, now.steps, share, left_s, is_in_epoch, rate)


def _counts_through(states: Sequence[Counters]) -> bool:
    """Return whether steps count through all epochs, as a new epoch did not begin them anew."""
    pairs = [
        (before.steps, after.steps)
        for before, after in pairwise(states)
        if before.epochs and after.epochs and before.epochs.done < after.epochs.done
    ]
    known_pairs = [(before, after) for before, after in pairs if before and after]
    return bool(known_pairs) and all(before.done < after.done for before, after in known_pairs)


class _Mark(NamedTuple):
    """When a share was done."""

    at: float
    share: float


def _add(marks: list[_Mark], mark: _Mark) -> None:
    if marks and mark.share < marks[-1].share:
        # The counter began anew.
        marks.clear()
    if mark.at:
        marks.append(mark)


def _share(seen: Counters) -> float | None:
    epochs, steps = seen.epochs, seen.steps
    if epochs is None:
        return steps.share if steps else None
    if steps is None or steps.done == steps.total:
        return epochs.share
    return min(1.0, (max(0, epochs.done - 1) + steps.share) / epochs.total)


def _speed(marks: Sequence[_Mark]) -> float:
    """Return the share that is done in a second; 0 if the marks do not tell."""
    lasted_s = marks[-1].at - marks[0].at if marks else 0.0
    return (marks[-1].share - marks[0].share) / lasted_s if lasted_s >= _LEAST_S else 0.0


def _count(match: re.Match[str] | None) -> Count | None:
    if match is None:
        return None
    count = Count(int(match[1]), int(match[2]))
    return count if 0 <= count.done <= count.total and count.total else None


def _rate(text: str) -> str:
    match = _RATE.search(text)
    return f"{match[1] or match[4]} {(match[2] or match[3]).lower()}" if match else ""


def _seconds(clock: str) -> float | None:
    """Return the seconds of ``1:02:03``; None for ``?``."""
    parts = clock.split(":")
    if not all(map(str.isdecimal, parts)):
        return None
    seconds = 0.0
    for part in parts:
        seconds = 60 * seconds + int(part)
    return seconds
