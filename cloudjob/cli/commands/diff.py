"""The command diff: shows how two jobs differ."""

from __future__ import annotations

import argparse
import json
import shlex

import cloudjob
from cloudjob.cli.messages import print_json
from cloudjob.cli.options import json_flag
from cloudjob.errors import CloudJobError
from cloudjob.model.text import counted, one_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# The files that `diff` names.
_MAX_FILES = 20


def _diff(options: argparse.Namespace) -> int:
    first, second = cloudjob.attach(options.first), cloudjob.attach(options.second)
    rows = first.differences(second)
    if options.json:
        print_json({key: [one, other] for key, one, other in rows})
        return 1 if rows else 0
    for key, one, other in rows:
        lines = _changed_files(first, second) if key == "code.digest" else []
        for line in lines or [f"{key}: {_value_text(one)} -> {_value_text(other)}"]:
            print(one_line(line))
    return 1 if rows else 0


def _value_text(value: Any) -> str:
    """Return a value of a job's description as a user would write it."""
    if value is None:
        return "(not set)"
    if isinstance(value, list):
        return shlex.join(map(str, value)) or "(none)"
    return value or '""' if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _changed_files(first: cloudjob.Job, second: cloudjob.Job) -> list[str]:
    """Return which files of two packages differ; empty if one of them cannot be read."""
    try:
        one, other = ({entry.name: entry for entry in job.code_files()} for job in (first, second))
    except CloudJobError:
        return []
    changed = [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
    lines = []
    for name in changed[:_MAX_FILES]:
        where = "differs"
        if name not in other:
            where = f"only in {first.id}"
        elif name not in one:
            where = f"only in {second.id}"
        lines.append(f"code: {name} {where}")
    rest = len(changed) - len(lines)
    return [*lines, f"code: {counted(rest, 'more file')}"] if rest else lines


def add_diff(parser: argparse.ArgumentParser) -> None:
    """Give the command diff its options."""
    parser.set_defaults(run=_diff)
    parser.add_argument("first", metavar="JOB", help="its id, its name or its handle")
    parser.add_argument("second", metavar="OTHER", help="the job to compare it with")
    json_flag(parser)
