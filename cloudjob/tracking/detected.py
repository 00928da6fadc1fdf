"""Metrics that are found without a pattern: what training scripts and frameworks usually print.

``loss 0.5``, ``val_loss=0.5``, ``Train Loss: 0.5``, Hugging Face's ``{'loss': 0.5, 'epoch': 1.0}``,
the lines of Keras, and what tqdm and Lightning write behind their progress bars.
"""

from __future__ import annotations

import functools
import re
import string
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from operator import truediv
from typing import NamedTuple

from cloudjob.model.patterns import Pattern

# A number is a metric only behind one of these words: other numbers are ports, sizes and versions.
_WORDS = (
    "loss", "acc", "accuracy", "lr", "learning_rate", "learning rate", "perplexity", "ppl",
    "grad_norm", "reward", "f1", "auc", "mse", "mae", "rmse", "psnr", "ssim", "bleu", "wer", "cer",
    "iou", "miou", "precision", "recall", "top1", "top5",
)  # fmt: skip
_PARTS = ("train", "training", "val", "valid", "validation", "eval", "test", "avg", "average",
          "mean", "total")  # fmt: skip
_NUMBER = r"[-+]?(?:[0-9]{1,30}\.?[0-9]{0,30}|\.[0-9]{1,30})(?:e[-+]?[0-9]{1,4})?|nan|[-+]?inf"
# Small letters stand for capital ones too, as ignoring the case takes twice as long.
_SMALL = {ord(letter): ord(letter.lower()) for letter in string.ascii_uppercase}
# Every repeat has a limit, so that no line takes long.
_METRIC = re.compile(
    rf"(?<![\w.])((?:[a-z0-9]{{1,20}}[_/.-]|(?:{'|'.join(_PARTS)})[ ]){{0,3}}"
    rf"(?:{'|'.join(_WORDS)})(?:[_@][a-z0-9]{{1,12}}){{0,2}})"
    rf"['\"]?[ \t]{{0,4}}[=:]?[ \t]{{0,4}}(?:tensor\()?({_NUMBER})"
    # No part of a version, date, time, address, or number with commas.
    r"(?:/([1-9][0-9]{0,17}))?(?!\w|[.-]\w|[,:][0-9])"
)
_STEP = re.compile(
    r"(?<![\w.])(?:global_step|step|iteration|iter)['\"]?[ \t]{0,4}[=:#]?[ \t]{0,4}\[?([0-9]{1,15})"
    r"(?![\w.])|\|[ \t]{0,4}([0-9]{1,15})/[0-9]{1,15} \["
)
# A dictionary of Python, as Hugging Face's Trainer prints it: if one number is a metric, all are.
_DICTIONARY = re.compile(r"\s*\{'[^{}]{1,4000}\}\s*$")
_IS_METRIC = re.compile("|".join(rf"(?<![a-z]){word}(?![a-z])" for word in _WORDS))
_ITEM = re.compile(rf"'([\w/.@ -]{{1,60}})': '?((?a:{_NUMBER}))'?(?=[,}}])", re.IGNORECASE)
_STEPS = ("step", "global_step")
# What is searched of a longer line.
_MOST_CHARACTERS = 4000
# Lines that differ only in digits have the same shape, and metrics at the same places; but in some
# words a digit is a letter.
_SHAPE = str.maketrans("123456789", "0" * 9)
_NUMBERED_WORD = re.compile(r"(?:f|top)[0-9]")
_BEHIND_SLASH = re.compile(r"/[0-9]")
# Characters of the shapes that are remembered: the places in a line may take 30 times its size.
_MOST_REMEMBERED = 500_000
_PREFILTER = (
    rf"(?i)(?:{'|'.join(_WORDS)})[a-z0-9_@'\"]{{0,30}}[ \t]{{0,4}}[=:]?[ \t]{{0,4}}"
    r"(?:[-+.0-9]|nan|inf|tensor)|\{'"
)


class LineMetrics(NamedTuple):
    """Metrics of lines that have the same ones.

    Args:
        numbers: Those of the lines.
        steps: That of each line; None if it names none.
        values: The values of each metric, one for each line.
    """

    numbers: list[int]
    steps: Sequence[float | None]
    values: list[tuple[str, list[float]]]


class _Places(NamedTuple):
    """Where the metrics are in a line, and in every line of its shape.

    Args:
        metrics: The name of each, where its number is, and the whole of which that may be a part.
        step: Where the step is; None if the line names none.
        digits: Other digits on which all of this depends.
        is_zero: For the first digit behind each slash, whether it is 0.
    """

    metrics: tuple[tuple[str, slice, slice | None], ...]
    step: slice | None
    digits: tuple[tuple[int, str], ...]
    is_zero: tuple[tuple[int, bool], ...]

    @property
    def is_exact(self) -> bool:
        """Whether every line of the same shape has the same metrics, or none."""
        return not (self.digits or (self.metrics and self.is_zero))

    def metrics_of(self, lines: Sequence[str], numbers: list[int]) -> Iterator[LineMetrics]:
        """Yield the metrics of some lines, which have them there."""
        if not self.metrics or not numbers:
            return
        chosen = [lines[number] for number in numbers]
        steps: Sequence[float | None] = [None] * len(numbers)
        if self.step:
            steps = [float(line[self.step]) for line in chosen]
        values = []
        for name, at, whole_at in self.metrics:
            of_lines = [float(line[at]) for line in chosen]
            if whole_at:
                wholes = [int(line[whole_at]) for line in chosen]
                of_lines = [*map(truediv, of_lines, wholes)]
            values.append((name, of_lines))
        yield LineMetrics(numbers, steps, values)

    def same(self, lines: Sequence[str], numbers: list[int]) -> list[int]:
        """Return those lines, of the same shape, in which the metrics are there, too."""
        for at, digit in self.digits:
            numbers = [number for number in numbers if lines[number][at] == digit]
        for at, is_zero in self.is_zero:
            numbers = [number for number in numbers if (lines[number][at] == "0") is is_zero]
        return numbers


class Finder:
    """Finds metrics in many lines. A log has few shapes of lines, so most are searched only once.

    Args:
        others: Names that are not metrics here, because a pattern finds them.
    """

    def __init__(self, others: Collection[str] = ()) -> None:
        self._others = others
        self._places: dict[str, _Places] = {}
        self._remembered = 0

    def find(self, lines: Sequence[str]) -> Iterator[LineMetrics]:
        """Yield the metrics in lines, in any order."""
        numbers_of = defaultdict[str, list[int]](list)
        for number, shape in enumerate("\n".join(lines).translate(_SHAPE).split("\n")):
            numbers_of[shape].append(number)
        for shape, numbers in numbers_of.items():
            places = self._places.get(shape) or self._learn(lines[numbers[0]], shape)
            if places.is_exact:
                yield from places.metrics_of(lines, numbers)
                continue
            same = places.same(lines, numbers)
            yield from places.metrics_of(lines, same)
            for number in sorted(set(numbers).difference(same)):
                yield from self._learn(lines[number], shape).metrics_of(lines, [number])

    def _learn(self, line: str, shape: str) -> _Places:
        places = _places(line, self._others)
        if len(line) <= _MOST_CHARACTERS:
            self._remembered += len(line)
            if self._remembered > _MOST_REMEMBERED:
                self._places.clear()
                self._remembered = len(line)
            self._places[shape] = places
        return places


@functools.cache
def prefilter() -> Pattern:
    """Return an expression that matches every line in which metrics are found."""
    return Pattern(_PREFILTER)


def _places(text: str, others: Collection[str]) -> _Places:
    small = text.translate(_SMALL)
    places: dict[str, tuple[slice, slice | None]]
    if _DICTIONARY.match(text):
        items = {match[1]: match for match in _ITEM.finditer(text)}
        step = next((slice(*items[name].span(2)) for name in _STEPS if name in items), None)
        matches = (
            list(items.values())
            if any(map(_IS_METRIC.search, (name.lower() for name in items)))
            else []
        )
        places = {
            name: (slice(*match.span(2)), None)
            for name, match in items.items()
            if matches and name not in (*_STEPS, "epoch")
        }
    else:
        match = _STEP.search(small)
        step = slice(*match.span(match.lastindex or 0)) if match else None
        # Metrics stand behind a progress bar.
        matches = list(_METRIC.finditer(small, max(0, len(text) - _MOST_CHARACTERS)))
        places = {
            # "Train Loss" and "train_loss" are the same one.
            match[1].replace(" ", "_"): (
                slice(*match.span(2)),
                slice(*match.span(3)) if match[3] else None,
            )
            for match in matches
        }
    of_names = {at for match in matches for at in range(*match.span(1))}
    of_words = {match.end() - 1 for match in _NUMBERED_WORD.finditer(small)}
    return _Places(
        tuple((name, *at) for name, at in places.items() if name not in others),
        step,
        tuple((at, text[at]) for at in sorted(of_names | of_words) if text[at].isdecimal()),
        tuple((match.end() - 1, match[0] == "/0") for match in _BEHIND_SLASH.finditer(text)),
    )
