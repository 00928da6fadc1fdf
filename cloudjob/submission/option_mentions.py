"""Finds whether a script, or a file that it imports or starts, mentions an option."""

from __future__ import annotations

import re
from pathlib import Path

from cloudjob.submission import scripts
from cloudjob.submission.launcher_choice import imports_of, own_files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

# The search stops after this many files.
_MAX_FILES = 200
_STARTED = re.compile(r"[\w./-]+\.(?:py|sh)\b|(?<=-m )[\w.]+")


def is_mentioned(spec: JobSpec, option: str) -> bool:
    """Return whether the option's name is a word in one of the files; True if none is readable."""
    name = re.escape(option.lstrip("-")).replace(r"\-", "[-_]")
    # A single letter occurs as a word in many texts, so a short option is searched with its dash.
    dash = "" if option.startswith("--") else "-"
    pattern = re.compile(rf"(?<!\w){dash}{name}(?!\w)")
    source = Path(spec.source)
    start = source / spec.script
    files, seen = [start], {start}
    is_read = False
    while files:
        path = files.pop(0)
        text = scripts.read(path).decode("utf-8", "replace")
        is_read = is_read or bool(text)
        if pattern.search(text):
            return True
        for further in _mentioned_files(source, start.parent, path, text):
            if further not in seen and len(seen) < _MAX_FILES:
                seen.add(further)
                files.append(further)
    return not is_read


def _mentioned_files(source: Path, folder: Path, path: Path, text: str) -> list[Path]:
    """Return the modules that a Python file imports, or the files that another script names."""
    if path.suffix == ".py":
        return [file for name in imports_of(path) for file in own_files(folder, path, name) or ()]
    names = _STARTED.findall(text)
    names += [name.replace(".", "/") + ".py" for name in names if not name.endswith((".py", ".sh"))]
    return [source / name for name in names if not name.startswith("/") and ".." not in name]
