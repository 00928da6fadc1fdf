"""One self-contained HTML file about a job, to keep or to attach to an issue."""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from cloudjob.console import charts, screenshot
from cloudjob.console.facts import clock, facts, texts_of
from cloudjob.console.text import displayable, displayable_line
from cloudjob.errors import CloudJobError
from cloudjob.model import summary
from cloudjob.model.text import size_text
from cloudjob.submission import failure_hint
from cloudjob.tracking import Job
from cloudjob.tracking.blocks import MAX_CHARS, LineReader
from cloudjob.tracking.journals import Journals
from cloudjob.tracking.log_filter import LogFilter

_STATIC = Path(__file__).parent / "static"
# The most log lines, counted from the end, and the most files in the report.
_LOG_LINES, _FILES = 5_000, 1_000
# The width of an image, the height of its head, and a chart's height of title, padding and gap.
_IMAGE_WIDTH_PX, _IMAGE_HEAD_PX, _IMAGE_PANEL_PX = 1200, 118, 66


def render(job: Job) -> str:
    """Return the report of a job in its current state, as an HTML page.

    The page lists the parts that cannot be read, such as outputs in a store that does not answer.

    Raises:
        CloudJobError: The status of the job cannot be read.
    """
    missing: list[str] = []
    read = _reader(missing)
    drawn = _charts(job, read)
    files = read("outputs", lambda: list(job.outputs()), [])
    return _page(
        job,
        drawn,
        hint=failure_hint.of_job(job, job.status()),
        facts=facts(job.status(), job),
        spec=read("description", lambda: texts_of(job.spec(), keeps_empty=False), {}),
        files=files[:_FILES],
        file_count=len(files),
        log=read("log", lambda: _log(job), []),
        missing=missing,
    )


def draw(job: Job) -> bytes:
    """Return a PNG of the timeline and the charts of a job, drawn by an installed browser.

    Raises:
        UsageError: There is no browser, or it draws nothing.
        CloudJobError: The job has nothing to draw, or its status cannot be read.
    """
    missing: list[str] = []
    drawn = _charts(job, _reader(missing))
    if not drawn:
        reason = missing[0] if missing else "it has recorded no phases, samples or metrics"
        raise CloudJobError(f"drawing {job.id}: {reason}")
    wide = [chart.height_px for group, chart in drawn if not group]
    rest = [chart.height_px for group, chart in drawn if group]
    rows = wide + [max(rest[at : at + 2]) for at in range(0, len(rest), 2)]
    height_px = _IMAGE_HEAD_PX + sum(row + _IMAGE_PANEL_PX for row in rows)
    page = _page(job, drawn, is_image=True, missing=missing)
    return screenshot.take(page, _IMAGE_WIDTH_PX, height_px)


# Called with the name of a part to read, a function that reads it, and its default.
_Read = Callable[[str, Callable[[], Any], Any], Any]


def _reader(missing: list[str]) -> _Read:
    """Return a function that reads a part, or adds its error to ``missing``."""

    def read(what: str, get: Callable[[], Any], default: Any) -> Any:
        try:
            return get()
        except CloudJobError as error:
            missing.append(f"{what}: {error.message}")
            return default

    return read


def _charts(job: Job, read: _Read) -> list[tuple[str, charts.Chart]]:
    """Return each chart with the name of its zoom group."""
    status = job.status()
    phases = read("phases", job.phases, ())
    journals = read("journals", job.journals, Journals())
    points = read("metrics", job.thinned_metrics, [])
    steps = charts.last_steps(points)
    grids = (charts.rank_grid(status, journals, shows, steps) for shows in charts.RANK_VALUES)
    drawn = [
        ("", charts.timeline(status, phases, time.time())),
        *(("ranks", grid and grid._replace(title=f"Ranks: {grid.title}")) for grid in grids),
        *(("metrics", chart) for chart in charts.curves(points, status)),
        *(("resources", chart) for chart in charts.resources(journals, status)),
    ]
    return [(group, chart) for group, chart in drawn if chart is not None]


def _page(
    job: Job, drawn: list[tuple[str, charts.Chart]], *, is_image: bool = False, **more: Any
) -> str:
    status = job.status()
    environment = Environment(
        loader=PackageLoader("cloudjob.console"),
        autoescape=True,
        undefined=StrictUndefined,
        # Texts that are marked as safe stay unchanged.
        finalize=lambda value: displayable(value) if type(value) is str else value,
    )
    environment.filters["size"] = size_text
    return environment.get_template("report.html").render(
        status=status,
        duration=summary.duration(status),
        submitted=clock(status.created_at),
        reason=summary.reason(status),
        is_image=is_image,
        charts=drawn,
        options=_script([chart.option for _, chart in drawn]),
        style=(_STATIC / "console.css").read_text(),
        functions=(_STATIC / "console.js").read_text(),
        **more,
        **_echarts(),
    )


def _log(job: Job) -> list[tuple[str, str]]:
    """Return the mark and the text of the last lines."""
    last: deque[tuple[int, int | None, bytes]] = deque(maxlen=_LOG_LINES)
    reader = LineReader()
    for piece in LogFilter(tail=_LOG_LINES).pieces(job, follow=False):
        last.extend((piece.node, *line) for line in reader.add(piece.node, piece.data))
    last.extend((*key, data) for key, data in reader.items())
    return [
        (f"node {node}" if rank is None else f"rank {rank}", displayable_line(data)[:MAX_CHARS])
        for node, rank, data in last
    ]


def _script(values: object) -> str:
    """Return JSON that cannot close the script element that contains it."""
    return json.dumps(values).replace("<", "\\u003c")


def _echarts() -> dict[str, str]:
    """Return the module of ECharts that NiceGUI contains, and the name of its export."""
    # Importing NiceGUI would take a second.
    spec = find_spec("nicegui")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(name="nicegui")
    folder = Path(spec.origin).parent / "elements" / "echart" / "dist"
    index = (folder / "index.js").read_text()
    names = re.search(r'import\{(\w+) as (\w+).*?\}from"\./([\w.-]+)";export\{\2 as echarts', index)
    assert names, "this release of NiceGUI has another layout"
    name, _, module = names.groups()
    return {"echarts": _script((folder / module).read_text()), "export": name}
