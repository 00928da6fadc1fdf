"""Two or more jobs side by side: results, curves, descriptions, variables and code."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from nicegui import ui

from cloudjob.console import charts
from cloudjob.console.code_diff import diffs
from cloudjob.console.facts import texts_of
from cloudjob.console.job_list import row_of
from cloudjob.console.pages.frame import frame, heading, page
from cloudjob.console.pages.live import ChartView
from cloudjob.console.results import legends
from cloudjob.console.state import Console
from cloudjob.console.text import displayable
from cloudjob.console.threads import in_thread
from cloudjob.errors import CloudJobError
from cloudjob.model import summary
from cloudjob.model.text import size_text
from cloudjob.tracking import Job
from cloudjob.tracking.metrics import MetricPoint
from jobentry.contract.packages import FILE, FOLDER

MAX_JOBS = 8
_NUMBER = re.compile(r"-\.?[0-9][0-9.]*(e[-+]?[0-9]+)?", re.IGNORECASE)
# A page with more files would take seconds to load.
_MAX_FILES = 1000


class _Section(NamedTuple):
    """A table with a column for each job.

    Args:
        columns: The values of each job by name.
        note: The errors of parts that could not be read.
    """

    title: str
    columns: Sequence[Mapping[str, str]]
    note: str = ""


def register(console: Console) -> None:
    """Add the page."""

    @page("/compare")
    async def compare_page(jobs: str = "") -> None:
        ids = [job for job in jobs.split(",") if job][:MAX_JOBS]
        compared = [await in_thread(console.job, job) for job in ids]
        with frame("Compare", "Compare"):
            # A platform may take longer to answer than NiceGUI waits for a page.
            await ui.context.client.connected()
            if len(compared) < 2:
                ui.label("Select two or more jobs in the list to compare them.").classes("quiet")
                return
            await _Comparison(console, compared).build()


class _Comparison:
    def __init__(self, console: Console, jobs: list[Job]) -> None:
        self._console = console
        self._jobs = jobs
        self._points: dict[str, list[MetricPoint]] = {}
        # The points of these jobs do not change any more.
        self._ended: set[str] = set()
        self._sections: list[_Section] = []
        self._shows_all = False

    async def build(self) -> None:
        with ui.row().classes("toolbar items-center"):
            ui.switch("Show equal values", on_change=self._change).props("dense")
        self._sections = await in_thread(_sections, self._jobs)
        self._tables()
        await ChartView(self._jobs[0], self._curves, "", others=self._jobs).start()
        self._sections.append(await in_thread(_metrics, self._console, self._jobs))
        self._sections.append(await in_thread(_code, self._jobs))
        self._tables.refresh()
        first, *others = self._jobs
        for other in others:
            if other.code_digest != first.code_digest:
                await _show_diffs(first, other)

    async def _curves(self) -> list[charts.Chart]:
        for job in self._jobs:
            if job.id not in self._ended:
                was_final = job.has_final_status
                self._points[job.id] = await in_thread(self._console.metrics, job)
                self._ended |= {job.id} if was_final else set()
        names = await in_thread(legends, self._jobs)
        return charts.compared_curves({names[job]: each for job, each in self._points.items()})

    def _change(self, event: Any) -> None:
        self._shows_all = bool(event.value)
        self._tables.refresh()

    @ui.refreshable_method
    def _tables(self) -> None:
        for section in self._sections:
            with ui.card().classes("panel").style("overflow-x: auto"):
                heading(section.title)
                if section.note:
                    ui.label(displayable(section.note)).classes("quiet")
                if any(section.columns) or not section.note:
                    ui.html(self._table(section), sanitize=False).classes("w-full")

    def _table(self, section: _Section) -> str:
        ids = [escape(job.id) for job in self._jobs]
        head = "".join(f'<th scope="col"><a href="/job/{job}">{job}</a></th>' for job in ids)
        rows = []
        for key in dict.fromkeys(key for column in section.columns for key in column):
            cells = [displayable(column.get(key, "")) for column in section.columns]
            differs = len(set(cells)) > 1
            if differs or (self._shows_all and any(cells)):
                kind = ' class="differs"' if differs and self._shows_all else ""
                texts = "".join(
                    f'<td class="mono">{escape(cell) or "&ndash;"}</td>' for cell in cells
                )
                rows.append(
                    f'<tr{kind}><td class="quiet">{escape(displayable(key))}</td>{texts}</tr>'
                )
        body = "".join(rows) or f'<tr><td colspan="{len(ids) + 1}">no difference</td></tr>'
        return (
            f'<table class="plain even"><thead><tr><td></td>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table>"
        )


def _sections(jobs: Sequence[Job]) -> list[_Section]:
    """Return results, descriptions and variables; this may wait for a platform."""
    specs, notes = [], []
    for job in jobs:
        try:
            specs.append(job.spec())
        except CloudJobError as error:
            specs.append({})
            notes.append(error.message)
    variables = [spec.pop("env", None) or {} for spec in specs]
    arguments = [by_option(spec.pop("args", None) or ()) for spec in specs]
    return [
        _Section("Results", [_result(job) for job in jobs]),
        _Section(
            "Description", [texts_of(spec, keeps_empty=False) for spec in specs], "; ".join(notes)
        ),
        _Section("Arguments", arguments),
        _Section("Variables", [texts_of(each) for each in variables]),
    ]


async def _show_diffs(one: Job, other: Job) -> None:
    """Show how the texts of two packages differ."""
    try:
        file_diffs = await in_thread(lambda: list(diffs(one, other)))
    except CloudJobError:
        # The table of files says so.
        return
    for diff in file_diffs:
        with ui.card().classes("panel"):
            heading(f"{diff.name}: {one.id} → {other.id}")
            if diff.note:
                ui.label(diff.note).classes("quiet")
            if diff.lines:
                text = "\n".join(_diff_line(line) for line in diff.lines)
                pre = f'<pre class="lines" tabindex="0">{text}</pre>'
                ui.html(pre, sanitize=False).classes("w-full")


def _diff_line(line: str) -> str:
    kind = {"+": "added", "-": "removed", "@": "quiet"}.get(line[:1], "")
    return f'<span class="{kind}">{escape(line)}</span>'


def by_option(args: Sequence[object]) -> dict[str, str]:
    """Return the arguments of a script by option; those before the first one are numbered.

    Words after an option are its values, unless they look like another option; one without a value
    is "set".
    """
    uses_of: dict[str, list[list[str]]] = {}
    values: list[str] | None = None
    for word in map(str, args):
        if word.startswith("-") and not _NUMBER.fullmatch(word):
            option, is_joined, value = word.partition("=")
            values = [value] if is_joined else []
            uses_of.setdefault(option, []).append(values)
        elif values is None:
            uses_of[f"argument {len(uses_of) + 1}"] = [[word]]
        else:
            values.append(word)
    return {
        name: " ".join(shlex.join(each) or "set" for each in uses) for name, uses in uses_of.items()
    }


def _metrics(console: Console, jobs: Sequence[Job]) -> _Section:
    """Return the last values of the metrics; this may read whole logs."""
    metrics_of = [console.results.of(job, with_metrics=True).metrics for job in jobs]
    columns = [{name: f"{value:.6g}" for name, value in each.items()} for each in metrics_of]
    return _Section("Last metrics", columns)


def _result(job: Job) -> dict[str, str]:
    try:
        status = job.status()
    except CloudJobError as error:
        status = job.unknown(error.message)
    row = row_of(status)
    return {
        "state": row["state"],
        "backend": row["backend"],
        "duration": summary.duration(status),
        "exit code": "" if row["exit_code"] is None else str(row["exit_code"]),
        "reason": row["reason"],
    }


def _code(jobs: Sequence[Job]) -> _Section:
    """Return the files that differ; equal packages are not read."""
    if len({job.code_digest for job in jobs}) == 1:
        return _Section("Code", [{} for _ in jobs], "The packages are equal.")
    columns, notes = [], []
    for job in jobs:
        try:
            columns.append(
                {
                    each.name: f"{size_text(each.size_bytes)}, {each.digest[:8]}"
                    if each.kind == FILE
                    else f"→ {each.target}"
                    for each in job.code_files()
                    if each.kind != FOLDER
                }
            )
        except CloudJobError as error:
            columns.append({})
            notes.append(error.message)
    names = sorted({name for column in columns for name in column})
    changed = [name for name in names if len({column.get(name) for column in columns}) > 1]
    if len(changed) > _MAX_FILES:
        notes.append(f"the first {_MAX_FILES} of {len(changed)} files that differ")
    visible = [{name: column.get(name, "") for name in changed[:_MAX_FILES]} for column in columns]
    return _Section("Code", visible, "; ".join(notes))
