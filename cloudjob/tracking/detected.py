"""Metrics that are found without a pattern: what training scripts and frameworks usually print.

``loss 0.5``, ``val_loss=0.5``, ``Train Loss: 0.5``, Hugging Face's ``{'loss': 0.5, 'epoch': 1.0}``,
the lines of Keras, and what tqdm and Lightning write behind their progress bars.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator
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
# Every repeat has a limit, so that no line takes long.
_METRIC = re.compile(
    rf"(?<![\w.])((?:[a-z0-9]{{1,20}}[_/.-]|(?:{'|'.join(_PARTS)})[ ]){{0,3}}"
    rf"(?:{'|'.join(_WORDS)})(?:[_@][a-z0-9]{{1,12}}){{0,2}})"
    rf"['\"]?[ \t]{{0,4}}[=:]?[ \t]{{0,4}}(?:tensor\()?({_NUMBER})"
    r"(?:/([1-9][0-9]{0,17}))?(?![\w.])",
    re.IGNORECASE,
)
_STEP = re.compile(
    r"(?<![\w.])(?:global_step|step|iteration|iter)['\"]?[ \t]{0,4}[=:#]?[ \t]{0,4}\[?([0-9]{1,15})"
    r"(?![\w.])|\|[ \t]{0,4}([0-9]{1,15})/[0-9]{1,15} \[",
    re.IGNORECASE,
)
# A dictionary of Python, as Hugging Face's Trainer prints it: if one number is a metric, all are.
_DICTIONARY = re.compile(r"^\{'[^{}]{1,4000}\}$")
_IS_METRIC = re.compile("|".join(rf"(?<![a-z]){word}(?![a-z])" for word in _WORDS), re.IGNORECASE)
_ITEM = re.compile(rf"'([\w/.@ -]{{1,60}})': '?({_NUMBER})'?(?=[,}}])", re.IGNORECASE)
_STEPS = ("step", "global_step")
# What is searched of a longer line: metrics stand behind a progress bar.
MOST_CHARACTERS = 4000
_PREFILTER = (
    rf"(?i)(?:{'|'.join(_WORDS)})[a-z0-9_@'\"]{{0,30}}[ \t]{{0,4}}[=:]?[ \t]{{0,4}}"
    r"(?:[-+.0-9]|nan|inf|tensor)|\{'"
)


class Detected(NamedTuple):
    """A metric in a line; ``step`` is None if the line names none."""

    name: str
    value: float
    step: float | None


@functools.cache
def prefilter() -> Pattern:
    """Return an expression that matches every line in which ``find`` finds something."""
    return Pattern(_PREFILTER)


def find(line: bytes, others: Collection[str] = ()) -> Iterator[Detected]:
    """Yield the metrics in a line.

    Args:
        others: Names that are not metrics here, because a pattern finds them.
    """
    text = line.decode("utf-8", "replace").strip()
    if _DICTIONARY.match(text):
        items = {name: float(number) for name, number in _ITEM.findall(text)}
        step = next((items[name] for name in _STEPS if name in items), None)
        names = {*items} - {*_STEPS, "epoch"} if any(map(_IS_METRIC.search, items)) else ()
        found = {name: items[name] for name in items if name in names}
    else:
        match = _STEP.search(text)
        step = float(match[1] or match[2]) if match else None
        found = {}
        for name, number, whole in _METRIC.findall(text[-MOST_CHARACTERS:]):
            found[_name(name)] = float(number) / (int(whole) if whole else 1)
    for name, value in found.items():
        if name not in others:
            yield Detected(name, value, step)


def find_in_lines(text: str, others: Collection[str]) -> Iterator[tuple[int, Detected]]:
    """Yield what ``find`` yields for each of many lines, with the number of the line.

    Args:
        text: Lines of at most ``MOST_CHARACTERS``, none of which is a dictionary of Python.
    """
    steps: dict[int, float] = {}
    for number, match in _numbered(_STEP, text):
        steps.setdefault(number, float(match[1] or match[2]))
    found: dict[tuple[int, str], float] = {}
    for number, match in _numbered(_METRIC, text):
        name, value, whole = match.groups()
        found[number, _name(name)] = float(value) / (int(whole) if whole else 1)
    for (number, name), value in found.items():
        if name not in others:
            yield number, Detected(name, value, steps.get(number))


def _numbered(pattern: re.Pattern[str], text: str) -> Iterator[tuple[int, re.Match[str]]]:
    """Yield each match, with the number of its line."""
    number = at = 0
    for match in pattern.finditer(text):
        number += text.count("\n", at, at := match.start())
        yield number, match


def _name(text: str) -> str:
    """Return the name of a metric: ``Train Loss`` and ``train_loss`` are the same one."""
    return text.lower().replace(" ", "_")
