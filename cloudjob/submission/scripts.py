"""Reads the files of scripts: their bytes, syntax trees and imports, and what they use."""

from __future__ import annotations

import ast
import re
import stat
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import NamedTuple

# A script written by hand is a few thousand lines; a larger file holds data.
_MAX_BYTES = 1_000_000
# Python 3.11 raises SystemError if two threads parse at the same time (CPython issue 106905).
_PARSING = threading.Lock()
# How certain it is that a statement runs: always; inside a function or condition; inside a ``try``
# that handles its failure.
CERTAIN, LAZY, OPTIONAL = range(3)
_LAZY_NODES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.If)
# The files that a script uses are followed up to this number.
_MAX_FILES = 200
# Files that a shell script names; the second form is a module of Python.
_STARTED = r"[\w./-]+\.(?:py|sh)\b|(?<=-m )[\w.]+"
# Installed packages, which take precedence over a folder of that name without __init__.py.
_INSTALLED = frozenset(("horovod", "mindspore", "mpi4py", "torch"))


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


class ScriptFile:
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
        certainties: dict[str, int] = {}
        for name, _, _, certainty in self._imported:
            certainties[name] = min(certainty, certainties.get(name, certainty))
        # ``import torch`` alone also gives access to torch.distributed.
        for node, certainty in self.nodes:
            if isinstance(node, ast.Attribute):
                name, at_most = self.full_name(node)
                if name:
                    certainties.setdefault(name, max(certainty, at_most))
        return certainties

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


class Imports(NamedTuple):
    """What a file imports.

    Args:
        local: The files of the user's own modules.
        others: The dotted names of all other modules, and how certainly each is imported.
    """

    local: tuple[Path, ...]
    others: Mapping[str, int]


class ScriptFiles(dict[Path, ScriptFile]):
    """The files of a source, by path."""

    def __missing__(self, path: Path) -> ScriptFile:
        """Return a file that was not asked for before."""
        self[path] = ScriptFile(path)
        return self[path]

    def imports(self, path: Path, folder: Path) -> Imports:
        """Return what a file imports.

        Args:
            folder: The script's folder, where Python looks first.
        """
        local: list[Path] = []
        others: dict[str, int] = {}
        for name, certainty in sorted(self[path].imports.items()):
            files = own_files(folder, path, name)
            if files is None:
                others[name] = certainty
            else:
                local += files
        return Imports(tuple(local), others)

    def levels(self, source: Path, script: str) -> Iterator[list[Path]]:
        """Yield the script's file, then those of the source that it uses, nearest first."""
        start = source / script
        level, seen = [start], {start}
        while level:
            yield level
            used = chain.from_iterable(self._used(source, start.parent, path) for path in level)
            level = [path for path in dict.fromkeys(used) if path not in seen]
            del level[max(0, _MAX_FILES - len(seen)) :]
            seen.update(level)

    def _used(self, source: Path, folder: Path, path: Path) -> Iterable[Path]:
        """Return the modules that a Python file imports, or the files that another one names."""
        if path.suffix == ".py":
            return self.imports(path, folder).local
        names = re.findall(_STARTED, self[path].data.decode("utf-8", "replace"))
        modules = (name for name in names if not name.endswith((".py", ".sh")))
        names += [f"{name.replace('.', '/')}.py" for name in modules]
        inner = (name for name in names if not name.startswith("/") and ".." not in name)
        return [source / name for name in inner]


def own_files(folder: Path, importer: Path, name: str) -> list[Path] | None:
    """Return the files of a module in the source folder; None for a module from elsewhere.

    Args:
        folder: The script's folder, where Python looks first.
    """
    dots = len(name) - len(name.lstrip("."))
    path = importer.parents[dots - 1] if 0 < dots <= len(importer.parents) else folder
    if not path.is_relative_to(folder):
        return []
    files = [path / "__init__.py"] if dots else []
    for count, part in enumerate(filter(None, name.lstrip(".").split("."))):
        path = path / part
        is_package = part not in _INSTALLED or (path / "__init__.py").is_file()
        if path.is_dir() and (count or dots or is_package):
            files.append(path / "__init__.py")
        elif path.with_name(f"{part}.py").is_file():
            files.append(path.with_name(f"{part}.py"))
            break
        elif count or dots:
            # The rest of the name is something inside the module.
            break
        else:
            return None
    return [file for file in files if file.is_file()]


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
        tested = _names_in(node.test) if isinstance(node, ast.If) else set()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in tested:
            children = node.orelse
        elif isinstance(node, ast.Try) and any(map(_catches_imports, node.handlers)):
            certainty = OPTIONAL
        # The body of ``if __name__ == "__main__"`` always runs in a script.
        elif isinstance(node, _LAZY_NODES) and "__name__" not in tested:
            certainty = max(certainty, LAZY)
        waiting += [(child, certainty) for child in children][::-1]


def _names_in(tree: ast.AST) -> set[str]:
    return {getattr(node, "id", "") or getattr(node, "attr", "") for node in ast.walk(tree)}


def _catches_imports(handler: ast.ExceptHandler) -> bool:
    kinds = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
    return handler.type is None or bool(_names_in(handler.type) & kinds)
