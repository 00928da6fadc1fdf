"""Reads the files of scripts: their bytes, and the syntax trees and imports of Python files."""

from __future__ import annotations

import ast
import stat
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path

# A script written by hand is a few thousand lines; a larger file holds data.
_MAX_BYTES = 1_000_000
# Python 3.11 raises SystemError if two threads parse at the same time (CPython issue 106905).
_PARSING = threading.Lock()
# How certain it is that a statement runs: always; inside a function or condition; inside a ``try``
# that handles its failure.
CERTAIN, LAZY, OPTIONAL = range(3)
_LAZY_NODES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.If)


def read(path: Path) -> bytes:
    """Return the content of a script; empty if it cannot be read or is too large for a script.

    Only a regular file is read: a named pipe would never end.
    """
    try:
        status = path.stat()
        is_script = stat.S_ISREG(status.st_mode) and status.st_size <= _MAX_BYTES
        return path.read_bytes() if is_script else b""
    except OSError:
        # For example, it belongs to another user.
        return b""


def parse(source: bytes) -> ast.Module:
    """Return the syntax tree of a Python file; an empty one if it cannot be parsed."""
    try:
        with _PARSING, warnings.catch_warnings():
            # Warnings about the user's code belong in the log of the job.
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


class File:
    """A file of a source; it is read and parsed when that is first needed, and only once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def data(self) -> bytes:
        """The content; see ``read``."""
        return read(self.path)

    @cached_property
    def nodes(self) -> list[tuple[ast.AST, int]]:
        """The nodes of its syntax tree in their order, each with how certain it is to run."""
        return [*_walk(parse(self.data))]

    @cached_property
    def imports(self) -> Mapping[str, int]:
        """Each dotted name that it imports (a relative one with its dots), and how certainly."""
        found: dict[str, int] = {}
        for name, _, _, certainty in self._imported:
            found[name] = min(certainty, found.get(name, certainty))
        # ``import torch`` alone also gives access to torch.distributed.
        for node, certainty in self.nodes:
            if isinstance(node, ast.Attribute):
                name, at_most = self.full_name(node)
                if name:
                    found.setdefault(name, max(certainty, at_most))
        return found

    def full_name(self, node: ast.expr) -> tuple[str, int]:
        """Return the dotted name of something imported, and how certainly; empty for the rest."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self._bound:
            return "", CERTAIN
        name, certainty = self._bound[node.id]
        return ".".join([name, *reversed(parts)]), certainty

    @cached_property
    def _imported(self) -> list[tuple[str, str, str, int]]:
        return [(*names, certainty) for node, certainty in self.nodes for names in _names_of(node)]

    @cached_property
    def _bound(self) -> Mapping[str, tuple[str, int]]:
        return {bound: (target, how) for _, bound, target, how in reversed(self._imported)}


class Files(dict[Path, File]):
    """The files of a source, by path."""

    def __missing__(self, path: Path) -> File:
        """Return a file that was not asked for before."""
        self[path] = File(path)
        return self[path]


def _names_of(node: ast.AST) -> Iterator[tuple[str, str, str]]:
    """Yield for each import its full name, the name it binds, and the target of that name."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            top = alias.name.partition(".")[0]
            yield (alias.name, *((alias.asname, alias.name) if alias.asname else (top, top)))
    elif isinstance(node, ast.ImportFrom):
        base = "." * node.level + (node.module or "")
        separator = "" if base.endswith(".") else "."
        for alias in node.names:
            name = base if alias.name == "*" else base + separator + alias.name
            yield name, alias.asname or alias.name, name


def _walk(tree: ast.AST) -> Iterator[tuple[ast.AST, int]]:
    """Yield each node and how certain it is to run; iterative, so deep trees are no problem."""
    waiting: list[tuple[ast.AST, int]] = [(tree, CERTAIN)]
    while waiting:
        node, certainty = waiting.pop()
        yield node, certainty
        children: Iterable[ast.AST] = ast.iter_child_nodes(node)
        if isinstance(node, ast.If) and _names_in(node.test) & {"TYPE_CHECKING"}:
            children = node.orelse
        elif isinstance(node, ast.Try) and any(map(_catches_imports, node.handlers)):
            certainty = OPTIONAL
        elif isinstance(node, _LAZY_NODES) and not _is_main(node):
            certainty = max(certainty, LAZY)
        waiting += [(child, certainty) for child in children][::-1]


def _is_main(node: ast.AST) -> bool:
    """Whether this is ``if __name__ == "__main__"``, whose body always runs in a script."""
    return isinstance(node, ast.If) and "__name__" in _names_in(node.test)


def _names_in(tree: ast.AST) -> set[str]:
    return {getattr(node, "id", "") or getattr(node, "attr", "") for node in ast.walk(tree)}


def _catches_imports(handler: ast.ExceptHandler) -> bool:
    kinds = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
    return handler.type is None or bool(_names_in(handler.type) & kinds)
