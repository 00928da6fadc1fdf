"""Run a case, its subjects in turn, and collect the measurements."""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import measure
from benchmarks.case import Case, Figures, Subject
from benchmarks.measure import Failed
from benchmarks.subject import Bench
from benchmarks.venv import NotRun

# Failed runs in a row after which a subject is given up.
_GIVE_UP_AFTER = 2


@dataclass
class SubjectResult:
    """The measurements of one subject; ``not_run`` is the reason if there are none."""

    samples: list[Figures] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    not_run: str | None = None
    has_only_failed: bool = True

    def values(self, figure: str) -> list[float]:
        """Return the figure of each successful run."""
        return [sample[figure] for sample in self.samples if figure in sample]

    def median(self, figure: str) -> float | None:
        """Return the median of the successful runs, None without any."""
        values = self.values(figure)
        return statistics.median(values) if values else None


@dataclass(frozen=True)
class CaseResult:
    """The measurements of each subject, by name."""

    case: Case
    subjects: dict[str, SubjectResult]


def run(case: Case, bench: Bench, rounds: int, chosen: frozenset[str]) -> CaseResult:
    """Run the subjects in turn, A B C A B C, so that noise on the machine affects all equally.

    Round 0 warms up and does not count, unless it fails.
    """
    subjects = [each for each in case.subjects if not chosen or each.name in chosen]
    result = CaseResult(case, {each.name: SubjectResult() for each in subjects})
    for number in range(min(rounds, case.rounds or rounds) + 1):
        print(f"{case.name}: round {number}", file=sys.stderr, flush=True)
        for each in subjects:
            _take(case, each, bench, number, result.subjects[each.name])
    return result


def _take(case: Case, subject: Subject, bench: Bench, number: int, result: SubjectResult) -> None:
    if result.not_run or not _is_due(subject, number):
        return
    try:
        figures = _measure(case, subject, bench)
    except NotRun as error:
        result.not_run = str(error)
    except Failed as error:
        result.failures.append(str(error))
        if result.has_only_failed and len(result.failures) == _GIVE_UP_AFTER:
            result.not_run = result.failures[0]
    else:
        result.has_only_failed = False
        if number > 0:
            result.samples.append(figures)


def _is_due(subject: Subject, number: int) -> bool:
    return subject.rounds is None or 0 < number <= subject.rounds


def _measure(case: Case, subject: Subject, bench: Bench) -> Figures:
    if subject.take:
        return subject.take(bench)
    assert subject.command is not None
    # A short path: Open MPI puts sockets below it, and their names may have 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        command = subject.command(bench, folder)
        sample = measure.run(command, folder, watches_memory=case.watches_memory)
        if sample.exit_code != 0:
            raise Failed(f"exit {sample.exit_code}: {_last_line(sample.stderr)}")
        figures = {
            "wall_s": sample.wall_s,
            "cpu_s": sample.cpu_s,
            "left_behind": float(sample.left_behind),
        }
        if case.watches_memory:
            marks = {"rss_mib": sample.rss_mib, "other_rss_mib": sample.other_rss_mib}
            # Zero: the process ended before its memory was read.
            figures |= {name: mark for name, mark in marks.items() if mark > 0}
        return figures | (subject.inspect(sample) if subject.inspect else {})
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _last_line(path: Path) -> str:
    lines = path.read_bytes()[-4096:].decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "no message")[:200]
