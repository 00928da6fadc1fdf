"""Chooses a launcher by the imports of a script, without running it.

A script that starts a launcher itself runs once on each node. For other scripts the first match
decides: the script's own imports, the imports of the modules beside it (breadth first), optional
imports, the name of the image.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from cloudjob.model.text import given, one_line
from cloudjob.submission.scripts import File, Files
from jobentry.contract.launchers import DEFAULT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec
    from cloudjob.submission.script_check import Script

# In order of precedence. mpi4py comes before torch: a script that imports both has MPI start its
# ranks and passes rank and size on to torch.
_BY_IMPORT: Mapping[str, str] = {
    "horovod": "horovod",
    "mindspore": "msrun",
    "mpi4py": "mpirun",
    "torch.distributed": "torchrun",
    "torch.nn.parallel.DistributedDataParallel": "torchrun",
}
# The same modules, by the package that they are in.
_FRAMEWORKS = {
    top: [module for module in _BY_IMPORT if module.partition(".")[0] == top]
    for top in (module.partition(".")[0] for module in _BY_IMPORT)
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


def choose(spec: JobSpec, script: Script) -> Choice:
    """Return the launcher for a job that names none."""
    nested = script.nested
    if nested and nested.is_waited_for:
        return Choice("python", f"{nested.where} {nested.what}")
    found = _in_imports(script.files, Path(spec.source), spec.script) or _in_image(spec)
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


def _in_imports(files: Files, source: Path, script: str) -> Choice | None:
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
            imports = _imports_of(files[path], start.parent)
            further += imports.own
            for name, certainty in imports.others:
                for module in _frameworks_in(name):
                    found[certainty].setdefault(module, path)
        certain, lazy, optional = (_best(modules, source, script) for modules in found)
        if certain or lazy:
            return certain or lazy
        fallback = fallback or optional
        level = [path for path in dict.fromkeys(further) if path not in seen]
        seen.update(level)
    return fallback


class _Imports(NamedTuple):
    """What a file imports: the files of the user's own modules, and the names of all others."""

    own: tuple[Path, ...]
    others: tuple[tuple[str, int], ...]


def _imports_of(file: File, folder: Path) -> _Imports:
    own: list[Path] = []
    others: list[tuple[str, int]] = []
    elsewhere: set[str] = set()
    for name, certainty in sorted(file.imports.items()):
        top = name.partition(".")[0]
        files = None if top in elsewhere else own_files(folder, file.path, name)
        if files is None:
            elsewhere.add(top)
            others.append((name, certainty))
        else:
            own += files
    return _Imports(tuple(own), tuple(others))


def _frameworks_in(name: str) -> Iterator[str]:
    for module in _FRAMEWORKS.get(name.partition(".")[0], ()):
        if f"{name}.".startswith(f"{module}."):
            yield module


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
    return name not in _FRAMEWORKS or (folder / "__init__.py").is_file()
