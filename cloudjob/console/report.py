"""One self-contained HTML file about a job, to keep or to attach to an issue."""

from __future__ import annotations

import json
import re
import time
from collections import deque
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from cloudjob import times
from cloudjob.console import charts
from cloudjob.console.facts import facts
from cloudjob.console.log_file import LONGEST_CHARS, printable
from cloudjob.errors import CloudJobError
from cloudjob.model import summary
from cloudjob.tracking import Job
from jobentry.contract import lines

_STATIC = Path(__file__).parent / "static"
# The last lines of the log, and the most files that the report contains.
_LOG_LINES, _FILES = 5_000, 1_000


def render(job: Job) -> str:
    """Return the page of a job as it is now.

    What cannot be read, such as the outputs in a store that does not answer, is left out and named.

    Raises:
        CloudJobError: The status of the job cannot be read.
    """
    status = job.status()
    missing: list[str] = []

    def read(what: str, get: Any, default: Any) -> Any:
        try:
            return get()
        except CloudJobError as error:
            missing.append(f"{what}: {error.message}")
            return default

    zero_s = times.seconds_of(status.created_at)
    phases = read("phases", job.phases, ())
    journals = read("journals", job.journals, None)
    points = read("metrics", job.training_metrics, [])
    files = read("outputs", lambda: list(job.outputs()), [])
    drawn = [("", charts.timeline(status, phases, time.time()))]
    if journals is not None:
        steps = charts.last_steps(points)
        drawn += [
            ("ranks", _titled(charts.rank_grid(journals, v, steps))) for v in charts.RANK_VALUES
        ]
    drawn += [("metrics", chart) for chart in charts.curves(points)]
    if journals is not None:
        drawn += [("resources", chart) for chart in charts.resources(journals, zero_s)]
    shown = [(group, chart) for group, chart in drawn if chart is not None]
    environment = Environment(
        loader=PackageLoader("cloudjob.console"), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("report.html").render(
        status=status,
        age=summary.age(status),
        duration=summary.duration(status),
        facts=facts(status, job),
        charts=shown,
        options=_script([chart.option for _, chart in shown]),
        spec=read("description", lambda: _spec(job), {}),
        files=files[:_FILES],
        file_count=len(files),
        log=read("log", lambda: _log(job), []),
        missing=missing,
        style=(_STATIC / "console.css").read_text(),
        functions=(_STATIC / "console.js").read_text(),
        **_echarts(),
    )


def _spec(job: Job) -> dict[str, str]:
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in job.spec().items()
        if value not in (None, "", [], {})
    }


def _log(job: Job) -> list[tuple[str, str]]:
    """Return the mark and the text of the last lines."""
    last: deque[tuple[str, str]] = deque(maxlen=_LOG_LINES)
    for piece in job.pieces(follow=False):
        for text in piece.data.split(b"\n")[:-1]:
            line = lines.read(text + b"\n")
            mark = f"node {piece.node}" if line.rank is None else f"rank {line.rank}"
            last.append((mark, printable(line.data)[:LONGEST_CHARS]))
    return list(last)


def _titled(grid: charts.Chart | None) -> charts.Chart | None:
    return grid and grid._replace(title=f"Ranks: {grid.title}")


def _script(values: object) -> str:
    """Return JSON that cannot end the script that contains it."""
    return json.dumps(values).replace("<", "\\u003c")


def _echarts() -> dict[str, str]:
    """Return the module of ECharts that NiceGUI contains, and the name of its export."""
    # To import NiceGUI takes a second.
    found = find_spec("nicegui")
    if found is None or found.origin is None:
        raise ModuleNotFoundError(name="nicegui")
    folder = Path(found.origin).parent / "elements" / "echart" / "dist"
    index = (folder / "index.js").read_text()
    names = re.search(r'import\{(\w+) as (\w+).*?\}from"\./([\w.-]+)";export\{\2 as echarts', index)
    assert names, "this release of NiceGUI has another layout"
    name, _, module = names.groups()
    return {"echarts": _script((folder / module).read_text()), "export": name}
