"""Chooses a launcher by the imports of a script, without running it.

A script that starts a launcher itself runs once on each node. For other scripts the first match
decides: the script's own imports, the imports of the modules beside it (breadth first), optional
imports, the name of the image.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from cloudjob.model.text import given, one_line
from cloudjob.submission import nested_launchers, scripts
from jobentry.contract.launchers import DEFAULT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

# In order of precedence. mpi4py comes before torch: a script that imports both has MPI start its
# ranks and passes rank and size on to torch.
_BY_IMPORT: Mapping[str, str] = {
    "horovod": "horovod",
    "mindspore": "msrun",
    "mpi4py": "mpirun",
    "torch.distributed": "torchrun",
    "torch.nn.parallel.DistributedDataParallel": "torchrun",
}
_BY_IMAGE: Mapping[str, str] = {
    "horovod": "horovod",
    "mindspore": "msrun",
    "mpi": "mpirun",
    "openmpi": "mpirun",
    "pytorch": "torchrun",
    "torch": "torchrun",
}


class Choice(NamedTuple):
    """A launcher and the reason for it, such as ``train.py imports torch.distributed``."""

    launcher: str
    why: str


def choose(spec: JobSpec) -> Choice:
    """Return the launcher for a job that names none; its script is in its source folder."""
    nested = nested_launchers.find(Path(spec.source), spec.script)
    if nested and nested.is_launcher and not nested.may_outlive_script:
        return Choice("python", f"{nested.where} {nested.what}")
    found = _in_imports(Path(spec.source), spec.script) or _in_image(spec)
    if found and found.launcher == "horovod" and spec.min_nodes:
        return Choice("horovod-elastic", f"{found.why}, and min_nodes is {spec.min_nodes}")
    if found and _is_gloo(spec, found.launcher):
        return Choice("horovod-gloo", f"{found.why}, and HOROVOD_CONTROLLER is gloo")
    if found:
        return found
    if spec.script.endswith(".py"):
        first: dict[str, str] = {}
        for module, launcher in _BY_IMPORT.items():
            first.setdefault(launcher, module)
        frameworks = ", ".join(first.values())
        return Choice(DEFAULT, f"{one_line(spec.script)} imports none of {frameworks}")
    return Choice(DEFAULT, f"{one_line(spec.script)} is not a Python script")


def _is_gloo(spec: JobSpec, launcher: str) -> bool:
    return launcher == "horovod" and spec.env.get("HOROVOD_CONTROLLER", "").lower() == "gloo"


def _in_image(spec: JobSpec) -> Choice | None:
    """Return the launcher that the name of the image or of the preset engine suggests."""
    engine = spec.section(spec.backend).get("engine", "")
    for what, text in (("image", spec.image), ("engine", str(engine))):
        words = set(re.findall(r"[a-z]+", text.lower()))
        for word, launcher in _BY_IMAGE.items():
            if word in words:
                return Choice(launcher, f"the {what} is {given(text)}")
    return None


# -- imports ------------------------------------------------------------------------------------

# How certain it is that an import runs: always; inside a function or condition; inside a ``try``
# that handles its failure.
_CERTAIN, _LAZY, _OPTIONAL = range(3)
# The imports of one file: dotted names (relative ones begin with their dots) and their certainty.
_Imports = dict[str, int]


def _in_imports(source: Path, script: str) -> Choice | None:
    """Return the launcher that matches the imports of the script or of the modules beside it."""
    if not script.endswith(".py"):
        return None
    start = source / script
    level, seen = [start], {start}
    fallback: Choice | None = None
    while level:
        # For each certainty, the first file that imports each module.
        found: list[dict[str, Path]] = [{}, {}, {}]
        further: list[Path] = []
        for path in level:
            for name, certainty in sorted(imports_of(path).items()):
                own = own_files(start.parent, path, name)
                further += own or []
                if own is None:
                    for module in filter(lambda module: _is_in(name, module), _BY_IMPORT):
                        found[certainty].setdefault(module, path)
        certain, lazy, optional = (_best(modules, source, script) for modules in found)
        if certain or lazy:
            return certain or lazy
        fallback = fallback or optional
        level = [path for path in dict.fromkeys(further) if path not in seen]
        seen.update(level)
    return fallback


def _best(found: Mapping[str, Path], source: Path, script: str) -> Choice | None:
    """Return the launcher with the highest precedence among the imported modules, if any."""
    for module, launcher in _BY_IMPORT.items():
        if module in found:
            shown = one_line(found[module].relative_to(source).as_posix())
            by = "" if found[module] == source / script else f", which {one_line(script)} imports,"
            others = [other for other in found if _BY_IMPORT[other] != launcher]
            rest = f", and {' and '.join(others)}" if others else ""
            return Choice(launcher, f"{shown}{by} imports {module}{rest}")
    return None


def _is_in(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def imports_of(path: Path) -> _Imports:
    """Return the imports of a file by dotted name; empty if it cannot be parsed as Python."""
    found: _Imports = {}
    bound: dict[str, tuple[str, int]] = {}
    uses: list[tuple[ast.Attribute, int]] = []
    for node, certainty in _walk(scripts.parse(scripts.read(path))):
        for name, here, meaning in _names(node):
            found[name] = min(certainty, found.get(name, certainty))
            bound.setdefault(here, (meaning, certainty))
        if isinstance(node, ast.Attribute):
            uses.append((node, certainty))
    # ``import torch`` alone also gives access to torch.distributed.
    for chain, certainty in uses:
        used, at_most = _dotted(chain, bound)
        if used:
            found.setdefault(used, max(certainty, at_most))
    return found


def certain_imports_of(path: Path) -> set[str]:
    """Return the dotted names that a Python file imports whenever it runs."""
    return {name for name, certainty in imports_of(path).items() if certainty == _CERTAIN}


def _names(node: ast.AST) -> Iterator[tuple[str, str, str]]:
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


_LAZY_NODES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.If)


def _walk(tree: ast.AST) -> Iterator[tuple[ast.AST, int]]:
    """Yield each node and how certain it is to run; iterative, so deep trees are no problem."""
    waiting: list[tuple[ast.AST, int]] = [(tree, _CERTAIN)]
    while waiting:
        node, certainty = waiting.pop()
        yield node, certainty
        children: Iterable[ast.AST] = ast.iter_child_nodes(node)
        if isinstance(node, ast.If) and _names_in(node.test) & {"TYPE_CHECKING"}:
            children = node.orelse
        elif isinstance(node, ast.Try) and any(map(_catches_imports, node.handlers)):
            certainty = _OPTIONAL
        elif isinstance(node, _LAZY_NODES) and not _is_main(node):
            certainty = max(certainty, _LAZY)
        waiting += [(child, certainty) for child in children]


def _is_main(node: ast.AST) -> bool:
    """Whether this is ``if __name__ == "__main__"``, whose body always runs in a script."""
    return isinstance(node, ast.If) and "__name__" in _names_in(node.test)


def _names_in(tree: ast.AST) -> set[str]:
    return {getattr(node, "id", "") or getattr(node, "attr", "") for node in ast.walk(tree)}


def _catches_imports(handler: ast.ExceptHandler) -> bool:
    kinds = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
    return handler.type is None or bool(_names_in(handler.type) & kinds)


def _dotted(chain: ast.Attribute, bound: Mapping[str, tuple[str, int]]) -> tuple[str, int]:
    """Return the dotted name, such as ``torch.distributed.init``, of an imported attribute."""
    parts: list[str] = []
    node: ast.expr = chain
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in bound:
        return "", _CERTAIN
    name, certainty = bound[node.id]
    return ".".join([name, *reversed(parts)]), certainty


# -- the user's own modules -----------------------------------------------------------------------


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
        if path.is_dir() and (count or dots or _is_package(path, part)):
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


def _is_package(folder: Path, name: str) -> bool:
    """Whether Python imports this folder as the module of that name.

    Without ``__init__.py`` an installed framework of the same name takes precedence.
    """
    is_framework = any(name == module.partition(".")[0] for module in _BY_IMPORT)
    return not is_framework or (folder / "__init__.py").is_file()
