"""Chooses a launcher by the imports of a script, without running it.

A script that starts a launcher itself runs once on each node. For other scripts the first match
decides: the script's own imports, the imports of the modules beside it (breadth first), optional
imports, the name of the image.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from cloudjob.model.text import given, one_line
from cloudjob.submission.scripts import Files
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
    folder = (source / script).parent
    fallback: Choice | None = None
    for level in files.levels(source, script):
        # For each certainty, the first file that imports each module.
        importers: list[dict[str, Path]] = [{}, {}, {}]
        for path in level:
            for name, certainty in files.imports(path, folder).others.items():
                for module in _BY_IMPORT:
                    if f"{name}.".startswith(f"{module}."):
                        importers[certainty].setdefault(module, path)
        certain, lazy, optional = (_best(modules, source, script) for modules in importers)
        if certain or lazy:
            return certain or lazy
        fallback = fallback or optional
    return fallback


def _best(importers: Mapping[str, Path], source: Path, script: str) -> Choice | None:
    """Return the launcher with the highest precedence among the imported modules, if any."""
    module = next((module for module in _BY_IMPORT if module in importers), None)
    if module is None:
        return None
    name = one_line(importers[module].relative_to(source).as_posix())
    by = "" if importers[module] == source / script else f", which {one_line(script)} imports,"
    others = [other for other in importers if _BY_IMPORT[other] != _BY_IMPORT[module]]
    rest = f", and {' and '.join(others)}" if others else ""
    return Choice(_BY_IMPORT[module], f"{name}{by} imports {module}{rest}")
