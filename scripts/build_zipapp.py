"""Builds the zipapp of the container half; hatchling calls it when it builds the wheel.

python scripts/build_zipapp.py cloudjob/jobentry.pyz
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import zipfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand, without hatchling
    BuildHookInterface = object  # type: ignore[assignment, misc]

ROOT = Path(__file__).resolve().parent.parent
TARGET = "cloudjob/jobentry.pyz"
# The earliest date that a zip file can name: the same bytes from the same sources.
_DATE = (1980, 1, 1, 0, 0, 0)


def zipapp(entrypoints: Path) -> bytes:
    """Return the zipapp of the sources under ``entrypoints``, the same bytes on any machine."""
    texts = {}
    for path in sorted(entrypoints.rglob("*.py")):
        source = bare(path.read_text("utf-8"))
        if path.name != "__init__.py":
            source = untyped(source)
        texts[path.relative_to(entrypoints).as_posix()] = narrow(source)
    loader = texts.pop("loader.py")
    data = io.BytesIO()
    data.write(b"#!/usr/bin/env -S python3 -I -S\n")
    with zipfile.ZipFile(data, "a") as archive:
        _add(archive, "__main__.py", loader)
        # One member, which entrypoints/loader.py takes apart.
        _add(archive, "modules", "\0".join(["\n".join(texts), *texts.values()]))
    return data.getvalue()


def _add(archive: zipfile.ZipFile, name: str, text: str) -> None:
    info = zipfile.ZipInfo(name, _DATE)
    info.external_attr = 0o644 << 16
    archive.writestr(info, text, zipfile.ZIP_DEFLATED, compresslevel=9)


def bare(source: str) -> str:
    """Return Python without comments, docstrings and annotations of functions, every line in place.

    Only who reads the sources needs them, and they are a third of what goes to every node. The
    lines stay, so a traceback names the line of the source.
    """
    return _without(source, _comments(source) + _docstrings(source) + _annotations(source))


def untyped(source: str) -> str:
    """Return Python without imports that only annotations need: these are never evaluated.

    What is not imported costs no start, and no room.
    """
    tree = ast.parse(source)
    checks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and _is_for_types(node)]
    used = _used(tree)
    cuts = [((node.lineno - 1, node.col_offset), _end(source, node), "") for node in checks]
    inside = {id(each) for node in checks for each in ast.walk(node)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module != "__future__"
            and id(node) not in inside
        ):
            kept = [name for name in node.names if (name.asname or name.name) in used]
            if len(kept) < len(node.names):
                text = ast.unparse(ast.ImportFrom(node.module, kept, node.level)) if kept else ""
                cuts.append(((node.lineno - 1, node.col_offset), _end(source, node), text))
    return _without(source, cuts)


def _is_for_types(node: ast.AST) -> bool:
    test = node.test if isinstance(node, ast.If) else None
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def _used(tree: ast.AST) -> set[str]:
    """Return the names that are looked up when the module runs."""
    found: set[str] = set()
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name):
            found.add(node.id)
        for name, value in ast.iter_fields(node):
            is_skipped = _is_for_types(node) or (
                isinstance(node, ast.AnnAssign) and name == "annotation"
            )
            values = value if isinstance(value, list) else [value]
            waiting += [each for each in values if isinstance(each, ast.AST) and not is_skipped]
    return found


def narrow(source: str) -> str:
    """Return Python with one blank where there were four at the beginning of a line."""
    inside: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (tokenize.NEWLINE, tokenize.NL):
            # The later lines of a text, which are not ours to change.
            inside.update(range(token.start[0], token.end[0]))
    lines = source.split("\n")
    for number, line in enumerate(lines):
        if number not in inside:
            text = line.lstrip(" ")
            lines[number] = " " * ((len(line) - len(text)) // 4) + text
    return "\n".join(lines)


def _without(source: str, cuts: list[_Cut]) -> str:
    """Return Python with other texts in the places of some, every line in its place."""
    lines = source.split("\n")
    for begin, end, text in sorted(cuts, reverse=True):
        (first, start), (last, stop) = begin, end
        rest = lines[last][stop:]
        lines[first] = (lines[first][:start] + text + rest).rstrip()
        lines[first + 1 : last + 1] = [""] * (last - first)
    return "\n".join(lines)


# From where to where, as lines and columns from 0, and what stands there instead.
_Cut = tuple[tuple[int, int], tuple[int, int], str]


def _comments(source: str) -> list[_Cut]:
    # The first line may say which interpreter runs it.
    return [
        ((token.start[0] - 1, token.start[1]), (token.end[0] - 1, token.end[1]), "")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and not token.string.startswith("#!")
    ]


def _docstrings(source: str) -> list[_Cut]:
    cuts: list[_Cut] = []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            found = node.body[0]
            text = "pass" if len(node.body) == 1 and not isinstance(node, ast.Module) else ""
            # What stands before a docstring is blank.
            cuts.append(((found.lineno - 1, found.col_offset), _end(source, found), text))
    return cuts


def _annotations(source: str) -> list[_Cut]:
    """What says of which type an argument or a result is; fields of a NamedTuple stay."""
    arrows = [
        (token.start[0] - 1, token.start[1])
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.string == "->"
    ]
    cuts: list[_Cut] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg) and node.annotation is not None:
            line, column = _place(source, node.lineno, node.col_offset)
            begin = (line, column + len(node.arg))
            cuts.append((begin, _end(source, node.annotation), ""))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.returns is not None:
            end = _end(source, node.returns)
            cuts.append((max(arrow for arrow in arrows if arrow < end), end, ""))
    return cuts


def _end(source: str, node: ast.stmt | ast.expr) -> tuple[int, int]:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return _place(source, node.end_lineno, node.end_col_offset)


def _place(source: str, line: int, column: int) -> tuple[int, int]:
    """Return a place of ast, whose columns are bytes, as line and character from 0."""
    text = source.split("\n")[line - 1].encode("utf-8")
    return line - 1, len(text[:column].decode("utf-8"))


def build(target: Path) -> None:
    """Write the zipapp to ``target``."""
    new = target.with_suffix(".new")
    new.write_bytes(zipapp(ROOT / "entrypoints"))
    new.chmod(0o755)
    # A job that starts meanwhile finds the old one or the new one, never a half.
    new.replace(target)


class ZipappHook(BuildHookInterface):  # type: ignore[type-arg, misc, unused-ignore]
    """Puts the zipapp into the wheel, and beside the sources of an editable install."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the zipapp and name it as a part of the wheel."""
        build(ROOT / TARGET)
        build_data["force_include"][str(ROOT / TARGET)] = TARGET
        build_data["artifacts"].append(TARGET)


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / TARGET)
