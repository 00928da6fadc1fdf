"""Which launcher a script asks for, read from what it imports; nothing of it is run.

The nearest word decides: the script's own imports, then those of the modules beside it that it
imports, one step after the other, then imports that the script can do without, then the name of
the image.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from cloudjob.spec import JobSpec, given, one_line, section
from jobentry.contract.launchers import DEFAULT

# In the order in which they win: who imports two of them starts with the first and uses the other.
# mpi4py stands before torch: such a script has its ranks from MPI, and tells torch of them.
_OF_IMPORT: Mapping[str, str] = {
    "horovod": "horovod",
    "mindspore": "msrun",
    "mpi4py": "mpirun",
    "torch.distributed": "torchrun",
    "torch.nn.parallel.DistributedDataParallel": "torchrun",
}
_OF_IMAGE: Mapping[str, str] = {
    "horovod": "horovod",
    "mindspore": "msrun",
    "mpi": "mpirun",
    "openmpi": "mpirun",
    "pytorch": "torchrun",
    "torch": "torchrun",
}
# A module of a person's is a few thousand lines; what is larger is data.
_MOST_BYTES = 1_000_000


class Choice(NamedTuple):
    """A launcher, and why it is that: ``train.py imports torch.distributed``."""

    launcher: str
    why: str


def choose(spec: JobSpec) -> Choice:
    """Return the launcher for a job that names none; the script lies in its source."""
    found = _in_imports(Path(spec.source), spec.script) or _in_image(spec)
    if found and found.launcher == "horovod" and spec.min_nodes:
        return Choice("horovod-elastic", f"{found.why}, and min_nodes is {spec.min_nodes}")
    if found and _is_gloo(spec, found.launcher):
        return Choice("horovod-gloo", f"{found.why}, and HOROVOD_CONTROLLER is gloo")
    if found:
        return found
    if spec.script.endswith(".py"):
        first = {launcher: module for module, launcher in [*_OF_IMPORT.items()][::-1]}
        looked_for = ", ".join(module for module in _OF_IMPORT if module in first.values())
        return Choice(DEFAULT, f"{one_line(spec.script)} imports none of {looked_for}")
    return Choice(DEFAULT, f"{one_line(spec.script)} is no Python, whose imports would tell")


def _is_gloo(spec: JobSpec, launcher: str) -> bool:
    return launcher == "horovod" and spec.env.get("HOROVOD_CONTROLLER", "").lower() == "gloo"


def _in_image(spec: JobSpec) -> Choice | None:
    """Return what the image's name suggests, or that of the platform's preset."""
    engine = section(spec, spec.backend).get("engine", "")
    for what, text in (("image", spec.image), ("engine", str(engine))):
        words = set(re.findall(r"[a-z]+", text.lower()))
        for word, launcher in _OF_IMAGE.items():
            if word in words:
                return Choice(launcher, f"the {what} is {given(text)}")
    return None


# -- imports ------------------------------------------------------------------------------------

# How sure it is that an import happens: it stands open, or in a function or a condition, or in a
# ``try`` that goes on without it.
_FIRM, _LAZY, _OPTIONAL = range(3)
# What one file imports: dotted names, a relative one beginning with its dots, and how sure each is.
_Imports = dict[str, int]


def _in_imports(source: Path, script: str) -> Choice | None:
    """Return what the imports of the script and of its own modules ask for."""
    if not script.endswith(".py"):
        return None
    start = source / script
    level, seen = [start], {start}
    spare: Choice | None = None
    while level:
        # By how sure an import is: the first file that imports each module.
        found: list[dict[str, Path]] = [{}, {}, {}]
        further: list[Path] = []
        for path in level:
            for name, sureness in sorted(_read(path).items()):
                own = _own(start.parent, path, name)
                further += own or []
                if own is None:
                    for module in filter(lambda module: _is_in(name, module), _OF_IMPORT):
                        found[sureness].setdefault(module, path)
        best, lesser, least = (_best(modules, source, script) for modules in found)
        if best or lesser:
            return best or lesser
        spare = spare or least
        level = [path for path in dict.fromkeys(further) if path not in seen]
        seen.update(level)
    return spare


def _best(found: Mapping[str, Path], source: Path, script: str) -> Choice | None:
    """Return the launcher that wins among the modules that were found, and where."""
    for module, launcher in _OF_IMPORT.items():
        if module in found:
            shown = one_line(found[module].relative_to(source).as_posix())
            by = "" if found[module] == source / script else f", which {one_line(script)} imports,"
            others = [other for other in found if _OF_IMPORT[other] != launcher]
            rest = f", and {' and '.join(others)}" if others else ""
            return Choice(launcher, f"{shown}{by} imports {module}{rest}")
    return None


def _is_in(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def _read(path: Path) -> _Imports:
    """Return what a file imports; nothing when it cannot be read as Python of this version."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return {}
        with warnings.catch_warnings():
            # What Python has to say of the user's text it says on the nodes.
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    return _imports(tree)


def _imports(tree: ast.Module) -> _Imports:
    found: _Imports = {}
    bound: dict[str, tuple[str, int]] = {}
    uses: list[tuple[ast.Attribute, int]] = []
    for node, sureness in _walk(tree):
        for name, here, meaning in _names(node):
            found[name] = min(sureness, found.get(name, sureness))
            bound.setdefault(here, (meaning, sureness))
        if isinstance(node, ast.Attribute):
            uses.append((node, sureness))
    # Who imports torch alone has torch.distributed all the same.
    for chain, sureness in uses:
        used, at_most = _dotted(chain, bound)
        if used:
            found.setdefault(used, max(sureness, at_most))
    return found


def _names(node: ast.AST) -> Iterator[tuple[str, str, str]]:
    """Yield what a statement imports: its full name, the name it gets here, and what that means."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            top = alias.name.partition(".")[0]
            yield (alias.name, *((alias.asname, alias.name) if alias.asname else (top, top)))
    elif isinstance(node, ast.ImportFrom):
        base = "." * node.level + (node.module or "")
        joint = "" if base.endswith(".") else "."
        for alias in node.names:
            name = base if alias.name == "*" else base + joint + alias.name
            yield name, alias.asname or alias.name, name


_LAZY_NODES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.If)


def _walk(tree: ast.AST) -> Iterator[tuple[ast.AST, int]]:
    """Yield each node, and how sure it is to run; without a stack of Python's."""
    waiting: list[tuple[ast.AST, int]] = [(tree, _FIRM)]
    while waiting:
        node, sureness = waiting.pop()
        yield node, sureness
        children: Iterable[ast.AST] = ast.iter_child_nodes(node)
        if isinstance(node, ast.If) and _names_in(node.test) & {"TYPE_CHECKING"}:
            children = node.orelse
        elif isinstance(node, ast.Try) and any(map(_catches_imports, node.handlers)):
            sureness = _OPTIONAL
        elif isinstance(node, _LAZY_NODES) and not _is_main(node):
            sureness = max(sureness, _LAZY)
        waiting += [(child, sureness) for child in children]


def _is_main(node: ast.AST) -> bool:
    """Whether this is ``if __name__ == "__main__"``, which is so in a script."""
    return isinstance(node, ast.If) and "__name__" in _names_in(node.test)


def _names_in(tree: ast.AST) -> set[str]:
    return {getattr(node, "id", "") or getattr(node, "attr", "") for node in ast.walk(tree)}


def _catches_imports(handler: ast.ExceptHandler) -> bool:
    kinds = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
    return handler.type is None or bool(_names_in(handler.type) & kinds)


def _dotted(chain: ast.Attribute, bound: Mapping[str, tuple[str, int]]) -> tuple[str, int]:
    """Return ``torch.distributed.init`` for an attribute of what an import has bound."""
    parts: list[str] = []
    node: ast.expr = chain
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in bound:
        return "", _FIRM
    name, sureness = bound[node.id]
    return ".".join([name, *reversed(parts)]), sureness


# -- modules of the user's own --------------------------------------------------------------------


def _own(folder: Path, importer: Path, name: str) -> list[Path] | None:
    """Return the files of a module of the user's; None when the module is somebody else's.

    Args:
        folder: That of the script, where Python looks first.
    """
    dots = len(name) - len(name.lstrip("."))
    place = importer.parents[dots - 1] if 0 < dots <= len(importer.parents) else folder
    if not place.is_relative_to(folder):
        return []
    files = [place / "__init__.py"] if dots else []
    for count, part in enumerate(filter(None, name.lstrip(".").split("."))):
        place = place / part
        if place.is_dir() and (count or dots or _is_package(place, part)):
            files.append(place / "__init__.py")
        elif place.with_name(f"{part}.py").is_file():
            files.append(place.with_name(f"{part}.py"))
            break
        elif count or dots:
            # Not a module, but what is in it.
            break
        else:
            return None
    return [path for path in files if path.is_file()]


def _is_package(folder: Path, name: str) -> bool:
    """Whether Python takes a folder for the module of its name.

    Without ``__init__.py`` it does only where there is no other of that name, as an installed
    framework is.
    """
    is_framework = any(name == module.partition(".")[0] for module in _OF_IMPORT)
    return not is_framework or (folder / "__init__.py").is_file()
