"""A card in a notebook that shows what a job does until it has ended: ``follow`` shows it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from html import escape
from importlib import import_module
from typing import Any

from cloudjob.console.log_table import LogTable
from cloudjob.console.now import SPARK_BOX, Now, now
from cloudjob.console.text import displayable
from cloudjob.errors import UsageError
from cloudjob.model import summary
from cloudjob.model.status import JobStatus
from cloudjob.tracking.job import Job

_LINES = 8
_COLOURS = {"RUNNING": "#2563eb", "SUCCEEDED": "#15803d", "FAILED": "#dc2626"}
_OTHER_COLOUR = "#6b7280"
_CARD = "border:1px solid #8886;border-radius:8px;padding:10px 14px;max-width:900px"
_BADGE = "color:#fff;border-radius:9px;padding:1px 8px;font-size:12px;background:"
_FACT = "display:inline-block;margin:4px 22px 4px 0"


def follow(job: Job, *, poll_s: float = 2.0) -> JobStatus:
    """Show what a job does, in place, until it has ended; return its status.

    If the cell is interrupted, the job continues.

    Args:
        poll_s: Seconds between two updates.

    Raises:
        UsageError: IPython is not installed.
        CloudJobError: As for ``Job.wait``.
    """
    try:
        ipython = import_module("IPython.display")
    except ImportError as error:
        raise UsageError(
            f"showing {job.id} in a notebook: {error}", hint="outside of notebooks: job.wait()"
        ) from error
    display: Any = None
    for text in cards(job, poll_s):
        if display is None:
            display = ipython.display(ipython.HTML(text), display_id=True)
        else:
            display.update(ipython.HTML(text))
    return job.wait()


def cards(job: Job, poll_s: float) -> Iterator[str]:
    """Yield the card of a job as HTML every ``poll_s`` seconds; the last one when it has ended."""
    with closing(LogTable(job)) as log:
        while True:
            status = job.status()
            # The table starts to read the log.
            rows = log.end(_LINES)
            wait = summary.wait(status)
            current = now(log.journals, log.progress(), log.main_curve(), rows, wait=wait)
            yield card(status, current)
            if status.is_over:
                return
            time.sleep(poll_s)


def card(status: JobStatus, current: Now) -> str:
    """Return a card as HTML; texts of a job stay texts."""
    state = status.state.value
    colour = _COLOURS.get(state, _OTHER_COLOUR)
    failure = summary.reason(status)
    # An ended job has neither speed nor time left.
    facts = "" if status.is_over else "".join(_fact(name, text) for name, text in current.facts)
    share = None if status.is_over else current.share
    parts = (
        f"<b>{escape(displayable(status.job))}</b> "
        f'<span style="{_BADGE}{colour}">{state}</span> {escape(summary.duration(status))}',
        f"<div>{escape(displayable(failure))}</div>" if failure else "",
        f'<progress value="{share:.3f}" style="width:100%"></progress>' if share else "",
        f"<div>{facts}</div>" if facts else "",
        _curve(current.spark) if current.spark else "",
        f'<pre style="overflow:auto">{escape(chr(10).join(current.lines))}</pre>'
        if current.lines
        else "",
    )
    return f'<div style="{_CARD}">{"".join(parts)}</div>'


def _fact(name: str, text: str) -> str:
    return f'<span style="{_FACT}"><small>{escape(name)}</small><br>{escape(text)}</span>'


def _curve(path: str) -> str:
    return (
        f'<svg viewBox="0 0 {SPARK_BOX[0]} {SPARK_BOX[1]}" width="{SPARK_BOX[0]}" '
        f'style="display:block"><path d="{path}" fill="none" stroke="#2563eb"/></svg>'
    )
