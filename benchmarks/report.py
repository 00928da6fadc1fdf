"""Report the results: as text tables, as Markdown, and as JSON with every value."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks.floor import Results, Verdict
from benchmarks.result import CaseResult, SubjectResult

_HEAD = ("subject", "figure", "min", "median", "max", "ratio", "n")
_UNITS = {
    "transfer_s": ("transfer s", 3),
    "wall_s": ("wall s", 3),
    "cpu_s": ("CPU s", 3),
    "first_line_s": ("to the first line, s", 3),
    "done_s": ("to the end, s", 3),
    "head_cpu_s": ("CPU s, node 0", 3),
    "make_s": ("until its containers were started, s", 2),
    "stage_s": ("of it, code to node 0, s", 2),
    "bring_up_s": ("of it, bring-up, s", 2),
    "run_s": ("of it, run, s", 2),
    "end_s": ("after the run, s", 2),
    "found_s": ("until all have answered, s", 2),
    "quick_s": ("until all but the late have, s", 2),
    "head_ms": ("CPU ms of the head, a worker", 2),
    "shells_ms": ("CPU ms of all its shells, a worker", 2),
    "rss_mib": ("RSS MiB, started process", 1),
    "other_rss_mib": ("RSS MiB, largest other", 1),
    "lost_lines": ("lines lost", 0),
    "lost_bytes": ("bytes lost", 0),
    "sent_bytes": ("bytes sent", 0),
    "request_s": ("requests s", 3),
    "page_ms": ("page ms", 1),
    "server_rss_mib": ("RSS MiB, emulator", 1),
    "grown_mib": ("grown by MiB", 1),
    "is_exact": ("same sha256 (1: yes)", 0),
}
# Groups of cases that share one page of figures/; the others have a page each.
_PAGES = {
    **dict.fromkeys(("help", "version", "noop", "entry", "log", "size"), "jobs"),
    **dict.fromkeys(("containers", "submit", "probe"), "containers"),
}


def machine(versions: dict[str, str], rounds: int) -> dict[str, Any]:
    """Return the machine's properties on which the figures depend."""
    return {
        "cpus": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load_1_min": round(os.getloadavg()[0], 2),
        "rounds": rounds,
        "versions": versions,
    }


def text(facts: dict[str, Any], results: Results, verdicts: Iterable[Verdict]) -> str:
    """Return the tables and the verdicts for a terminal."""
    blocks = [_facts(facts)]
    blocks += [case_text(result, facts) for result in results.values()]
    blocks.append("\n".join(f"{v.outcome:8}{v.claim}: {v.measured}" for v in verdicts))
    return "\n\n".join(block for block in blocks if block)


def case_text(result: CaseResult, facts: dict[str, Any]) -> str:
    """Return the table of one case."""
    rows = _rows(result, facts["versions"])
    return "\n".join([_title(result), *_aligned([_HEAD, *rows]), *_notes(result)])


def pages(facts: dict[str, Any], results: Results, verdicts: list[Verdict]) -> dict[str, str]:
    """Return the tables in Markdown, by page name."""
    results_of: dict[str, Results] = {}
    for name, result in results.items():
        results_of.setdefault(_page(result.case.group), {})[name] = result
    return {
        page: _markdown(page, facts, cases, [v for v in verdicts if _is_of(v, cases)])
        for page, cases in results_of.items()
    }


def _page(group: str) -> str:
    return _PAGES.get(group, group)


def _is_of(verdict: Verdict, cases: Results) -> bool:
    """Whether a floor belongs to these cases: it starts with the name of a case or group."""
    about = verdict.claim.partition(":")[0]
    names = {name for result in cases.values() for name in (result.case.name, result.case.group)}
    return about in names or _PAGES.get(about) in {_page(r.case.group) for r in cases.values()}


def _markdown(
    page: str, facts: dict[str, Any], results: Results, verdicts: Iterable[Verdict]
) -> str:
    groups = dict.fromkeys(result.case.group for result in results.values())
    run = f"benchmarks/run --only {','.join(groups)} -n {facts['rounds']} --keep"
    floors = [(v.claim, v.measured, v.outcome) for v in verdicts]
    blocks = [
        f"# Figures: {page}",
        f"`{run}` wrote this page; [README.md](../README.md) says what the words mean.",
        _facts(facts),
        "## Floors\n\n" + _pipes(("floor", "measured", "outcome"), floors),
    ]
    for result in results.values():
        rows = _rows(result, facts["versions"])
        notes = "".join(f"\n\n{note}" for note in _notes(result))
        blocks.append(f"## {_title(result)}\n\n" + _pipes(_HEAD, rows) + notes)
    return "\n\n".join(blocks) + "\n"


def as_json(facts: dict[str, Any], results: Results, verdicts: Iterable[Verdict]) -> dict[str, Any]:
    """Return all results as one JSON object."""
    return {
        "machine": facts,
        "cases": [_case_json(result) for result in results.values()],
        "floors": [vars(verdict) for verdict in verdicts],
    }


def _facts(facts: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return (
        f"{facts['cpus']} CPUs, {facts['system']}, Python {facts['python']}, "
        f"load {facts['load_1_min']} at the start, {facts['rounds']} rounds; {versions}."
    )


def _title(result: CaseResult) -> str:
    return f"{result.case.name}: {result.case.title}"


def _rows(result: CaseResult, versions: dict[str, str]) -> list[tuple[str, ...]]:
    rows = []
    for name, subject in result.subjects.items():
        label = f"{name} {versions[name]}" if name in versions else name
        for figure in result.case.figures:
            if subject.values(figure):
                rows.append((label, *_row(result, subject, figure)))
                label = ""
    return rows


def _row(result: CaseResult, subject: SubjectResult, figure: str) -> tuple[str, ...]:
    unit, digits = _UNITS[figure]
    values = subject.values(figure)
    three = (min(values), statistics.median(values), max(values))
    ratio = _ratio(result, subject, figure)
    ratio_text = "" if ratio is None else f"{ratio:.2f}"
    return (
        unit,
        *(f"{round(value, digits) + 0.0:.{digits}f}" for value in three),
        ratio_text,
        str(len(values)),
    )


def _ratio(result: CaseResult, subject: SubjectResult, figure: str) -> float | None:
    """Return the subject's median over that of the case's first subject."""
    reference = result.subjects.get(result.case.subjects[0].name)
    ours, theirs = subject.median(figure), reference.median(figure) if reference else None
    if (
        ours is None
        or not theirs
        or figure in ("is_exact", "lost_lines", "lost_bytes", "sent_bytes")
    ):
        return None
    return ours / theirs


def _notes(result: CaseResult) -> list[str]:
    notes = []
    for name, subject in result.subjects.items():
        if subject.not_run:
            notes.append(f"{name}: not run: {subject.not_run}")
        elif subject.failures:
            notes.append(f"{name}: {len(subject.failures)} failed: {subject.failures[0]}")
        left = sum(subject.values("left_behind"))
        if left:
            notes.append(f"{name}: left {left:.0f} processes behind")
    return notes


def _case_json(result: CaseResult) -> dict[str, Any]:
    return {
        "name": result.case.name,
        "title": result.case.title,
        "reference": result.case.subjects[0].name,
        "subjects": {name: _subject_json(result, each) for name, each in result.subjects.items()},
    }


def _subject_json(result: CaseResult, subject: SubjectResult) -> dict[str, Any]:
    figures = {}
    for figure in result.case.figures:
        values = subject.values(figure)
        if values:
            figures[figure] = {
                "min": min(values),
                "median": subject.median(figure),
                "max": max(values),
                "ratio": _ratio(result, subject, figure),
                "values": values,
            }
    return {"not_run": subject.not_run, "failures": subject.failures, "figures": figures}


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    return ["  " + "  ".join(_cell(i, row[i], widths[i]) for i in range(len(row))) for row in rows]


def _cell(column: int, content: str, width: int) -> str:
    return content.ljust(width) if column < 2 else content.rjust(width)


def _pipes(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
