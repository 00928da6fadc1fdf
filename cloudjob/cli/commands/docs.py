"""The commands docs and example: the manual and the examples of the installed version."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cloudjob.cli.tables import print_table
from cloudjob.errors import UsageError


def _folder(name: str) -> Path:
    """Return a folder that belongs to cloudjob: in the wheel, else in the project's folder."""
    package = Path(__file__).parents[2]
    installed = package / name
    return installed if installed.is_dir() else package.parent / name


def topics() -> dict[str, Path]:
    """Return the file of each topic, in the order of the names; ADRs are not topics."""
    pages = (path for path in _folder("docs").rglob("*.md") if path.parent.name != "adr")
    return {path.stem: path for path in sorted(pages, key=lambda path: path.stem)}


def examples() -> dict[str, Path]:
    """Return the folder or file of each example by name: programs, then job files."""
    paths = (*_folder("examples").glob("*/"), *_folder("configs").glob("*.yaml"))
    return {path.name: path for path in sorted(paths, key=lambda path: (path.is_file(), path.name))}


def _title(path: Path) -> str:
    """Return the title: the first line of a page, of an example's page or of a job file."""
    page = path / "README.md" if path.is_dir() else path
    with page.open(encoding="utf-8") as file:
        return file.readline().lstrip("# ").rstrip()


def _docs(options: argparse.Namespace) -> int:
    pages = topics()
    if options.topic is None:
        print_table([(topic, _title(page)) for topic, page in pages.items()])
        return 0
    text = _chosen("topic", options.topic, pages).read_text(encoding="utf-8")
    if sys.stdout.isatty():
        _show(text)
    else:
        print(text, end="")
    return 0


def _chosen(kind: str, name: str, paths: dict[str, Path]) -> Path:
    """Return the path of this name."""
    if name in paths:
        return paths[name]
    import difflib

    close = difflib.get_close_matches(name, paths, n=1)
    command = "docs" if kind == "topic" else kind
    hint = f"did you mean {close[0]}?" if close else f"`cloudjob {command}` lists the {kind}s"
    raise UsageError(f"looking for the {kind} {name!r}: there is no such {kind}", hint=hint)


def _show(text: str) -> None:
    """Show a page on the terminal, one screen at a time."""
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    with console.pager(styles=True):
        console.print(Markdown(text, hyperlinks=False))


def _example(options: argparse.Namespace) -> int:
    path_of = examples()
    if options.name is None:
        print_table([(name, _title(path)) for name, path in path_of.items()])
        return 0
    source = _chosen("example", options.name, path_of)
    target = Path(options.folder, source.name)
    try:
        _copy(source, target)
    except FileExistsError as error:
        raise UsageError(
            f"copying the example {source.name}: {error.filename} exists already",
            hint=f"cloudjob example {source.name} DIR",
        ) from error
    except OSError as error:
        reason = f"{error.filename or target}: {error.strerror or error}"
        raise UsageError(f"copying the example {source.name}: {reason}") from error
    print(target)
    return 0


def _copy(source: Path, target: Path) -> None:
    import shutil

    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        target.mkdir()
    # File modes are not copied, because an installation may be read-only.
    for file in [source] if source.is_file() else filter(Path.is_file, source.iterdir()):
        path = target / file.name if source.is_dir() else target
        with file.open("rb") as old, path.open("xb") as new:
            shutil.copyfileobj(old, new)


def add_docs(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command docs."""
    parser.set_defaults(run=_docs)
    parser.add_argument(
        "topic", metavar="TOPIC", nargs="?", help="the page to show; without one, list all topics"
    )


def add_example(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command example."""
    parser.set_defaults(run=_example)
    text = "the example to copy; without one, list all"
    parser.add_argument("name", metavar="EXAMPLE", nargs="?", help=text)
    text = "where to copy it to; by default the current folder"
    parser.add_argument("folder", metavar="DIR", nargs="?", default=".", help=text)
