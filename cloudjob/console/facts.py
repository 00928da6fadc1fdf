"""What is known about a job, as names and texts."""

from __future__ import annotations

from cloudjob.console.pages import words
from cloudjob.model.status import JobStatus
from cloudjob.model.text import counted
from cloudjob.package.messages import size_text
from cloudjob.tracking import Job


def facts(status: JobStatus, job: Job) -> list[tuple[str, str]]:
    """Return what is known about a job, with names."""
    code = status.code
    known = (
        ("Id", status.job),
        ("Backend", status.backend),
        ("Handle", job.handle),
        ("Nodes", str(status.nodes)),
        ("Ranks", str(status.nodes * status.procs_per_node)),
        ("Native state", status.native_state),
        ("Cause", status.cause),
        ("Exit code", None if status.exit_code is None else str(status.exit_code)),
        ("Submitted", clock(status.created_at)),
        ("Started", clock(status.started_at)),
        ("Ended", clock(status.ended_at)),
        (
            "Code",
            f"{counted(code.files, 'file')}, {size_text(code.size_bytes)}" if code else None,
        ),
    )
    return [(name, words.text(value)) for name, value in known if value]


def clock(moment: str | None) -> str:
    """Return a time of RFC 3339 in UTC without its fraction of a second."""
    return f"{moment[:10]} {moment[11:19]} UTC" if moment else ""
