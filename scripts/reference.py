"""Write the reference of the command line, docs/reference/command-line.md, from the parser.

python scripts/reference.py          # a test compares the page with what this would write
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from cloudjob.cli.parser import parser_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "command-line.md"
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


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
