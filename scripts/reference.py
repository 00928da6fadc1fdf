"""Write what follows from the declarations of the keys and options of a job.

That is the help of each command in its reference, the table of keys in that of job files, and the
types of the keyword arguments in Python.

python scripts/reference.py          # tests compare the files with what this would write
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from cloudjob.cli.parser import parser_of
from cloudjob.model.job import JobSpec
from cloudjob.model.keys import Heading, Key, Section, Values
from cloudjob.model.kinds import Number

_ROOT = Path(__file__).resolve().parent.parent
_REFERENCE = _ROOT / "docs" / "reference"
COMMANDS_PAGE = _REFERENCE / "commands.md"
JOB_FILE_PAGE = _REFERENCE / "job-file.md"
OPTIONS = _ROOT / "cloudjob" / "model" / "options.pyi"
_OPTIONS_HEAD = '''\
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

# `python scripts/reference.py` writes this file.

class Options(TypedDict, total=False):
    """The keys of a job file as keyword arguments; ``docs/reference/job-file.md`` describes them.

    ``secrets`` are names of environment variables, or map a name to ``""`` or to ``@FILE``.
    """

'''
# The keys that Python takes in more types than a job has.
_IN_PYTHON = {
    "procs_per_node": "int | str",
    "source": "str | os.PathLike[str]",
    "env": "Mapping[str, str | float]",
    "secrets": "Sequence[str] | Mapping[str, str]",
    "retries": "int | Mapping[str, Any]",
    "sweep": "Mapping[str, Any]",
}
_TABLE_HEAD = "| key, option | type | default | meaning |\n|---|---|---|---|\n"
_WIDTH = 100
# The help of a command: what a block shows that begins with its usage.
_BLOCK = re.compile(r"```text\nusage: (cloudjob[^\n]*)\n.*?```\n", re.DOTALL)
# What the page says once for all commands, and a heading below which nothing else stands.
_COMMON = re.compile(r"(?m)^  (?:-h, --help +Show|JOB +Its id, its name or its handle\.$).*\n")
_EMPTY = re.compile(r"\n[a-z ]+:\n(?=\n|\Z)")
# What has a place of its own: the options of submit that are keys of a job file, and the commands.
_ELSEWHERE = re.compile(
    rf"\n(?:{Heading.PLACE.value}:\n.*?(?=\nnotifications:\n)"
    r"|positional arguments:\n  COMMAND\n(?: {4}[^\n]*\n)+)",
    re.DOTALL,
)
_BRACKETS = re.compile(r"(?: \[--?\w[^\]]*\])+")
# Commands that have the options of submit, too.
_SUBMITTING = ("cloudjob cp", "cloudjob config show")


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and the parsers of its subcommands."""
    yield parser
    for inner in _subcommands(parser).values():
        yield from _parsers(inner)


def _helps() -> dict[str, str]:
    """Return the help of each command that does something, by its words."""
    os.environ["COLUMNS"] = str(_WIDTH)
    top = parser_of("")
    helps = {top.prog: top.format_help()}
    for name in _subcommands(top):
        for parser in _parsers(_subcommands(parser_of(name))[name]):
            if parser.prog in _SUBMITTING:
                helps[parser.prog] = parser.format_usage()
            elif not _subcommands(parser):
                helps[parser.prog] = parser.format_help()
    return {command: _shortened(text) for command, text in helps.items()}


def _shortened(text: str) -> str:
    """Return a help without what it lists below its usage, and what the pages say once."""
    usage, _, rest = text.strip().partition("\n\n")
    usage = _BRACKETS.sub(" [OPTIONS]", " ".join(usage.split()).replace(" [-h]", ""))
    rest = _EMPTY.sub("", _COMMON.sub("", _ELSEWHERE.sub("", f"{rest}\n")))
    return f"{usage}\n\n{rest}" if rest.strip() else f"{usage}\n"


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def commands_page() -> str:
    """Return the text of the page about commands with the present help of each.

    Raises:
        LookupError: A command has no block there.
    """
    helps = _helps()
    absent = set(helps)

    def block(match: re.Match[str]) -> str:
        command = max((each for each in helps if f"{match[1]} ".startswith(f"{each} ")), key=len)
        absent.discard(command)
        return f"```text\n{helps[command]}```\n"

    page = _BLOCK.sub(block, COMMANDS_PAGE.read_text(encoding="utf-8"))
    if absent:
        raise LookupError(f"{COMMANDS_PAGE} has no block for {', '.join(sorted(absent))}")
    return page


def job_file_page() -> str:
    """Return the text of the page about job files with the present table of keys."""
    before, head, rest = JOB_FILE_PAGE.read_text(encoding="utf-8").partition(_TABLE_HEAD)
    after = rest.partition("\n\n")[2]
    rows: dict[str, list[str]] = {}
    for names, meaning in _rows(JobSpec):
        rows.setdefault(meaning, []).append(names)
    table = "".join(f"| {', '.join(names)} | {meaning} |\n" for meaning, names in rows.items())
    return f"{before}{head}{table}\n{after}"


def options() -> str:
    """Return the text of the file with the types of the keyword arguments."""
    types = {
        name: "Mapping[str, Any]"
        if isinstance(key.kind, Section)
        else JobSpec.__annotations__[name]
        for name, key in JobSpec.KEYS.items()
        if name not in ("script", "args")
    }
    return _OPTIONS_HEAD + "".join(f"    {k}: {v}\n" for k, v in (types | _IN_PYTHON).items())


def _rows(model: type[Values], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the names of each key, and the rest of its row, which several keys may share."""
    for name, key in model.KEYS.items():
        if isinstance(key.kind, Section):
            yield from _rows(key.kind.model, f"{name}.")
        else:
            yield _row(prefix + name, key)


def _row(name: str, key: Key) -> tuple[str, str]:
    flags = (key.option.short, key.option.flag) if key.option else ()
    names = ", ".join(f"`{each}`" for each in (name, *flags) if each)
    allowed = ", ".join(f"`{choice}`" if choice else "empty" for choice in key.kind.choices)
    if isinstance(key.kind, Number):
        allowed = key.kind.range
    kind = key.kind.title + (f": {allowed}" if allowed and key.kind.title != "boolean" else "")
    return names, f"{kind} | {_default(key)} | {key.description}"


def _default(key: Key) -> str:
    default = key.kind.shown(key.default)
    if isinstance(default, bool):
        return f"`{json.dumps(default)}`"
    default = list(default) if isinstance(default, tuple) else default
    return f"`{default}`" if default not in ("", [], {}) else ""


if __name__ == "__main__":
    JOB_FILE_PAGE.write_text(job_file_page(), encoding="utf-8")
    OPTIONS.write_text(options(), encoding="utf-8")
    COMMANDS_PAGE.write_text(commands_page(), encoding="utf-8")
