"""The failure of a job as Markdown, to paste into an issue."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cloudjob.console.text import displayable
from cloudjob.model import summary
from cloudjob.model.status import JobStatus

_BACKTICKS = re.compile(r"`+")
# What has a meaning in a line of Markdown, or of the HTML in it.
_SPECIAL = re.compile(r"([\\`*_\[\]<>&#|~@])")


def failure_text(status: JobStatus, hint: str) -> str:
    """Return how a job failed: where, why, its stacks and its last lines.

    Args:
        hint: What this machine knows about it; may be empty.
    """
    failure = status.failure
    facts = (
        f"backend {status.backend}",
        f"{status.nodes} x {status.procs_per_node} ranks",
        f"ran for {summary.duration(status)}" if summary.duration(status) else "",
        f"exit code {status.exit_code}" if status.exit_code is not None else "",
    )
    parts = [
        f"**{_plain(status.job)}: {status.state}**: {_plain(summary.reason(status))}",
        ", ".join(filter(None, facts)),
        _plain(f"Hint: {hint}") if hint else "",
        *(
            _block(lines)
            for lines in ((failure.stack_lines, failure.last_lines) if failure else ())
        ),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _plain(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", " ".join(displayable(text).split()))


def _block(lines: Sequence[str]) -> str:
    """Return lines as code, in a fence that is longer than any in them."""
    text = displayable("\n".join(lines))
    longest = max(map(len, _BACKTICKS.findall(text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}" if lines else ""
