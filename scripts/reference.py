"""Write the reference of the command line from the parser, and that of job files from their keys.

python scripts/reference.py          # tests compare the pages with what this would write
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

from cloudjob.cli.parser import parser_of
from cloudjob.model.job import JobSpec
from cloudjob.model.keys import Key, Section, Values
from cloudjob.model.kinds import Number

_REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "reference"
PAGE = _REFERENCE / "command-line.md"
JOB_FILE_PAGE = _REFERENCE / "job-file.md"
_TABLE_HEAD = "| key | flag | type | default | meaning |\n|---|---|---|---|---|\n"
_WIDTH = 100
_HEAD = """\
# Command line

The output of `--help` for every command.
[Commands](commands.md) explains them with examples.
"""


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and the parsers of its subcommands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _parsers(inner)


def page() -> str:
    """Return the text of the page."""
    os.environ["COLUMNS"] = str(_WIDTH)
    top = parser_of("")
    names = next(a for a in top._actions if isinstance(a, argparse._SubParsersAction)).choices
    parts = [_HEAD, f"## cloudjob\n\n```text\n{top.format_help()}```\n"]
    for name in names:
        found = next(
            a for a in parser_of(name)._actions if isinstance(a, argparse._SubParsersAction)
        )
        for parser in _parsers(found.choices[name]):
            parts.append(f"## {parser.prog}\n\n```text\n{parser.format_help()}```\n")
    return "\n".join(parts)


def job_file_page() -> str:
    """Return the text of the page about job files with the present table of keys."""
    before, head, rest = JOB_FILE_PAGE.read_text(encoding="utf-8").partition(_TABLE_HEAD)
    after = rest.partition("\n\n")[2]
    return f"{before}{head}{chr(10).join(_rows(JobSpec))}\n\n{after}"


def _rows(model: type[Values], prefix: str = "") -> Iterator[str]:
    for name, key in model.KEYS.items():
        if isinstance(key.kind, Section):
            yield from _rows(key.kind.model, f"{name}.")
        else:
            yield _row(prefix + name, key)


def _row(name: str, key: Key) -> str:
    flags = (key.option.short, key.option.flag) if key.option else ()
    shown_flags = ", ".join(f"`{flag}`" for flag in flags if flag)
    allowed = ", ".join(f"`{choice}`" if choice else "empty" for choice in key.kind.choices)
    if isinstance(key.kind, Number):
        allowed = key.kind.range
    kind = key.kind.title + (f": {allowed}" if allowed and key.kind.title != "boolean" else "")
    return f"| `{name}` | {shown_flags} | {kind} | {_default(key)} | {key.description} |"


def _default(key: Key) -> str:
    default = key.kind.shown(key.default)
    if isinstance(default, bool):
        return f"`{json.dumps(default)}`"
    default = list(default) if isinstance(default, tuple) else default
    return f"`{default}`" if default not in ("", [], {}) else ""


if __name__ == "__main__":
    JOB_FILE_PAGE.write_text(job_file_page(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
