"""Asks the interpreter of the script, if nodes use this machine's, whether it can run the script.

cloudjob may be installed with pipx or uv, in an environment of its own, while the script's packages
are in that of the ``python`` on PATH.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from cloudjob.backends import interpreters
from cloudjob.backends.base import Check
from cloudjob.errors import BackendError
from cloudjob.model.job import JobSpec
from cloudjob.model.rules import BACKENDS
from cloudjob.model.text import one_line
from cloudjob.submission.scripts import CERTAIN, Files

_LIMIT_S = 20.0
# Modules that only the nodes have.
_OF_NODES = frozenset(("moxing",))
_PARSE = "import sys; compile(sys.stdin.buffer.read(), 'script', 'exec')"
_LOOK = (
    "import importlib.util, json, sys;"
    "print(json.dumps([n for n in sys.argv[1:] if not importlib.util.find_spec(n)]))"
)


def accepts(spec: JobSpec, source: bytes) -> bool:
    """Whether the job's Python is not the one that runs us, and parses a script."""
    try:
        python = _interpreter(spec).path
    except BackendError:
        # Building the request reports it.
        return True
    return python != sys.executable and _answer(python, _PARSE, source=source) is not None


def checks(spec: JobSpec, files: Files) -> Iterator[Check]:
    """Yield a check that fails if another interpreter has modules that the script's lacks."""
    if not BACKENDS[spec.backend].shares_files:
        return
    try:
        chosen = _interpreter(spec)
    except BackendError:
        # Building the request reports it.
        return
    if chosen.stale:
        yield Check("python", False, f"{chosen.stale}; {chosen.shown}", is_needed=False)
    other = _on_path()
    if not other or other == chosen.path:
        return
    missing = _missing(chosen.path, _imports(spec, files))
    only_there = sorted(set(missing) - set(_missing(other, missing)))
    if only_there:
        yield Check(
            "python",
            False,
            f"{chosen.shown}; it has no {', '.join(only_there)}, but {other} has",
            hint=f"{named(spec, other)}, or activate its environment",
            is_needed=False,
        )


def described(spec: JobSpec, files: Files) -> tuple[str, ...]:
    """Return the interpreter of the script, then what is wrong with it, for people."""
    if not BACKENDS[spec.backend].shares_files:
        return ()
    chosen = _interpreter(spec)
    return f"{chosen.path} ({chosen.why})", *(check.found for check in checks(spec, files))


def named(spec: JobSpec, python: str) -> str:
    """Return how a job file names an interpreter: ``process: {python: PATH} in a job file``."""
    section, _, key = BACKENDS[spec.backend].python_key.partition(".")
    return f"{section}: {{{key}: {python}}} in a job file"


def _interpreter(spec: JobSpec) -> interpreters.Interpreter:
    """Return the interpreter of the script on this machine.

    Raises:
        BackendError: The job file names one that does not exist.
    """
    key = BACKENDS[spec.backend].python_key
    section, _, name = key.partition(".")
    return interpreters.choose(getattr(getattr(spec, section), name), key)


def _on_path() -> str:
    found = shutil.which("python") or shutil.which("python3")
    return str(Path(found).absolute()) if found else ""


def _imports(spec: JobSpec, files: Files) -> list[str]:
    """Return the modules that the script always imports and that neither Python nor it brings."""
    script = Path(spec.source, spec.script)
    if spec.takes_command or script.suffix != ".py":
        return []
    imports = files[script].imports
    tops = {name.partition(".")[0] for name, how in imports.items() if how == CERTAIN} - {""}
    tops -= sys.stdlib_module_names | _OF_NODES
    return sorted(
        one_line(name)
        for name in tops
        if not ((script.parent / name).exists() or (script.parent / f"{name}.py").exists())
    )


def _missing(python: str, modules: Sequence[str]) -> list[str]:
    """Return the modules that an interpreter does not find; none if it cannot be asked."""
    try:
        answer = json.loads(_answer(python, _LOOK, *modules) or "[]") if modules else []
    except ValueError:
        return []
    return [name for name in modules if isinstance(answer, list) and name in answer]


def _answer(python: str, program: str, *words: str, source: bytes = b"") -> bytes | None:
    """Run a program with an interpreter and return its output; None if it has failed."""
    try:
        done = subprocess.run(
            [python, "-W", "ignore", "-c", program, *words],
            input=source,
            capture_output=True,
            timeout=_LIMIT_S,
            check=False,
            cwd="/",
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout
