"""The facts and the description of a job, as names and texts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from cloudjob.console.text import displayable
from cloudjob.errors import CloudJobError
from cloudjob.model import grid, summary
from cloudjob.model.job import JobSpec
from cloudjob.model.keys import Section, Values
from cloudjob.model.rules import VARIABLE_FIELDS
from cloudjob.model.status import JobStatus
from cloudjob.model.text import counted, size_text
from cloudjob.model.times import local
from cloudjob.tracking import Job


def facts(status: JobStatus, job: Job) -> list[tuple[str, str]]:
    """Return the facts about a job, as names and texts; this may wait for its store."""
    code = status.code
    rows = (
        ("Id", status.job),
        *_described(job),
        ("Submitted by", job.submitted_by),
        ("Backend", status.backend),
        ("Handle", job.handle),
        ("Nodes", str(status.nodes)),
        ("Ranks", str(status.nodes * status.procs_per_node)),
        ("Native state", status.native_state),
        ("Attempt", summary.attempt(status)),
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
    return [(name, displayable(value)) for name, value in rows if value]


def _described(job: Job) -> list[tuple[str, str]]:
    """Return what the description says; nothing if it was not recorded or cannot be read."""
    try:
        spec, commit, values = job.spec(), job.git_commit, job.sweep_values()
    except CloudJobError:
        return []
    return [
        ("Command", summary.command(spec)),
        ("Sweep", grid.text_of(values)),
        ("Image", str(spec.get("image") or "")),
        ("Interpreter", _of_sections(spec, "python")),
        ("Labels", labels_of(spec)),
        ("Git commit", commit),
    ]


def labels_of(spec: Mapping[str, Any]) -> str:
    """Return the labels that a job has on its platform: ``team=vision``; empty without any."""
    return _of_sections(spec, "labels")


def _of_sections(spec: Mapping[str, Any], name: str) -> str:
    """Return the value of a key of the section of the job's backend; empty if it is not set."""
    section = spec.get(str(spec.get("backend")))
    value = section.get(name) if isinstance(section, Mapping) else None
    return grid.text_of(value) if isinstance(value, Mapping) else str(value or "")


def changed(spec: Mapping[str, Any], model: type[Values] = JobSpec) -> dict[str, Any]:
    """Return what of a recorded description differs from the defaults, section by section."""
    differing = {}
    for name, value in spec.items():
        item = model.KEYS.get(name)
        if item and isinstance(item.kind, Section) and isinstance(value, Mapping):
            value = changed(value, item.kind.model)
        default = item.default if item else None
        # JSON has lists and objects for what the model has in other types.
        plain = list(default) if isinstance(default, tuple) else default
        if value != (dict(plain) if isinstance(plain, Mapping) else plain) and value != {}:
            differing[name] = value
    return differing


def clock(moment: str | None) -> str:
    """Return an RFC 3339 time as all views show it; empty without one."""
    return local(moment or "")


def texts_of(values: Mapping[str, Any], *, keeps_empty: bool = True) -> dict[str, str]:
    """Return the keys that have values; keys of sections are dotted.

    A text that is empty, or looks quoted, is in quotes.

    Args:
        keeps_empty: Whether an empty text is a value. In the description of a job it is one only
            for variables and the like; other keys are then not set.
    """
    text_of = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            texts = texts_of(value, keeps_empty=keeps_empty or key in VARIABLE_FIELDS)
            text_of.update({f"{key}.{name}": text for name, text in texts.items()})
        elif isinstance(value, (list, tuple)) and value and all(isinstance(e, str) for e in value):
            text_of[key] = shlex.join(value)
        elif value not in (None, []) and (keeps_empty or value != ""):
            is_plain = isinstance(value, str) and value and not value.startswith('"')
            text_of[key] = value if is_plain else json.dumps(value, ensure_ascii=False)
    return text_of
