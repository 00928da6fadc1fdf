"""The command docs: the manual of the installed version."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cloudjob.cli.tables import print_table
from cloudjob.errors import UsageError


def _folder() -> Path:
    """Return the folder of the pages: in the wheel, else in the project's own folder."""
    package = Path(__file__).parents[1]
    installed = package / "docs"
    return installed if installed.is_dir() else package.parent / "docs"


def topics() -> dict[str, Path]:
    """Return the file of each topic, in the order of the names; ADRs are not topics."""
    pages = (path for path in _folder().rglob("*.md") if path.parent.name != "adr")
    return {path.stem: path for path in sorted(pages, key=lambda path: path.stem)}


def _title(page: Path) -> str:
    with page.open(encoding="utf-8") as file:
        return file.readline().lstrip("# ").rstrip()


def _docs(options: argparse.Namespace) -> int:
    pages = topics()
    if options.topic is None:
        print_table([(topic, _title(page)) for topic, page in pages.items()])
        return 0
    if options.topic not in pages:
        import difflib

        close = difflib.get_close_matches(options.topic, pages, n=1)
        hint = f"did you mean {close[0]}?" if close else "`cloudjob docs` lists the topics"
        raise UsageError(f"showing the page {options.topic!r}: there is no such topic", hint=hint)
    text = pages[options.topic].read_text(encoding="utf-8")
    if sys.stdout.isatty():
        _show(text)
    else:
        print(text, end="")
    return 0


def _show(text: str) -> None:
    """Show a page on the terminal, one screen at a time."""
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    with console.pager(styles=True):
        console.print(Markdown(text, hyperlinks=False))


def add_docs(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command docs."""
    parser.set_defaults(run=_docs)
    parser.add_argument(
        "topic", metavar="TOPIC", nargs="?", help="the page to show; without one, list all topics"
    )
