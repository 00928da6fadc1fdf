"""What a running job does right now, as texts and values for its page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from cloudjob.console.log_table import Curve
from cloudjob.console.text import displayable
from cloudjob.model.summary import span
from cloudjob.model.text import size_text
from cloudjob.tracking.journals import Journals
from cloudjob.tracking.training import Count, Training
from jobentry.contract.journal import Sample

# A shorter silence is not worth a line.
_SILENT_S = 10
# From this many seconds on, an estimate is in minutes.
_FEW_S = 120
_MIB = 1024 * 1024
# The size of a small curve, and the most points in it.
SPARK_BOX = (320, 40)
_SPARK_POINTS = 160


class Now(NamedTuple):
    """What a job does.

    Args:
        share: What is done of all, from 0 to 1; None if unknown.
        facts: Names and texts.
        spark: The path of a small curve (``spark_path``); empty without one.
        lines: The last lines of the log, each with the mark of its rank.
    """

    share: float | None
    facts: Sequence[tuple[str, str]]
    spark: str
    lines: Sequence[str]


def now(
    journals: Journals,
    training: Training,
    curve: Curve | None,
    rows: Iterable[dict[str, Any]],
    *,
    wait: str = "",
    has_shared_memory: bool = False,
) -> Now:
    """Return what a running job does.

    Args:
        rows: The last rows of its log.
        wait: For how long it has waited, and for what; may be empty.
        has_shared_memory: Whether its nodes share the memory of one machine.
    """
    facts = [
        ("Waits", wait),
        ("Progress", _progress(training)),
        (_left_name(training), _left(training)),
        ("Speed", training.rate),
        *_last(curve, training),
        ("Silent for", span(int(journals.silent_s)) if journals.silent_s >= _SILENT_S else ""),
        *_resources([samples[-1] for samples in journals.resources.values()], has_shared_memory),
    ]
    return Now(
        share=training.share,
        facts=[(displayable(name), displayable(text)) for name, text in facts if text],
        spark=spark_path([value for _, value in curve.points]) if curve else "",
        lines=[_marked(row) for row in rows],
    )


def _last(curve: Curve | None, training: Training) -> list[tuple[str, str]]:
    """Return the last value of a metric, and its step if the progress does not have it."""
    if curve is None:
        return []
    step, value = curve.points[-1]
    return [("Step", "" if training.steps else f"{step:,.10g}"), (curve.name, f"{value:.4g}")]


def _progress(training: Training) -> str:
    counts = (("epoch", training.epochs), ("step", training.steps))
    return ", ".join(f"{name} {_count(count)}" for name, count in counts if count)


def _count(count: Count) -> str:
    return f"{count.done:,} of {count.total:,}"


def _left_name(training: Training) -> str:
    return "Left in this epoch" if training.is_left_in_epoch else "Time left"


def _left(training: Training) -> str:
    if training.left_s is None:
        return ""
    # An estimate has no seconds.
    unit_s = 1 if training.left_s < _FEW_S else 60
    return f"about {span(unit_s * round(training.left_s / unit_s))}"


def _resources(last: Sequence[Sample], has_shared_memory: bool) -> list[tuple[str, str]]:
    """Return what the nodes use, as a range if there are several."""
    used = [sample.memory for sample in last if sample.memory]
    fullest = max(used, key=lambda memory: memory[0] / max(1, memory[1]), default=None)
    memory = (
        f"{size_text(int(fullest[0] * _MIB))} of {size_text(int(fullest[1] * _MIB))}"
        if fullest
        else ""
    )
    cpu_name = "CPU of the machine" if len(last) < 2 else "CPU of the machines"
    memory_name = "Memory" if len(used) < 2 else "Memory of the fullest node"
    if has_shared_memory:
        cpu_name, memory_name = "CPU of the machine", "Memory of the machine"
    cpus = [sum(sample.cpu[:2]) for sample in last if sample.cpu]
    busy = [
        device.utilisation_percent
        for sample in last
        for device in sample.devices
        if device.utilisation_percent is not None
    ]
    return [
        (cpu_name, _percent(cpus)),
        (memory_name, memory),
        ("GPUs and NPUs", f"{fmean(busy):.0f} % on average" if busy else ""),
    ]


def _percent(values: Sequence[float]) -> str:
    if not values:
        return ""
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


def _marked(row: dict[str, Any]) -> str:
    return str(row["text"]) if row["rank"] is None else f"[{row['rank']}] {row['text']}"


def spark_path(values: Sequence[float]) -> str:
    """Return a curve as the ``d`` of an SVG path; empty with fewer than two finite values."""
    finite = [value for value in values if abs(value) < float("inf")]
    step = -(-len(finite) // _SPARK_POINTS)
    kept = finite[::-1][:: max(1, step)][::-1]
    if len(kept) < 2:
        return ""
    # Halves, because the difference of two numbers may be infinite.
    low = min(kept) / 2
    height = (max(kept) / 2 - low) or 1.0
    points = (
        f"{place * SPARK_BOX[0] / (len(kept) - 1):.1f},"
        f"{SPARK_BOX[1] - 1 - (value / 2 - low) / height * (SPARK_BOX[1] - 2):.1f}"
        for place, value in enumerate(kept)
    )
    return f"M{' L'.join(points)}"


def spark(path: str) -> str:
    """Return a small curve as SVG."""
    return (
        f'<svg class="spark" viewBox="0 0 {SPARK_BOX[0]} {SPARK_BOX[1]}" aria-hidden="true">'
        f'<path d="{path}"/></svg>'
    )
