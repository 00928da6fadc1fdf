"""Checks a script before anything is sent: it must not be a web page, and it must parse.

On this machine, the Python that runs it decides. Other nodes' may be newer than the one that runs
cloudjob, so syntax that a newer one has only causes a warning there; so does a shell script if the
local bash is too old to parse it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

from cloudjob.backends import interpreters
from cloudjob.errors import BackendError, SpecError
from cloudjob.model.text import one_line
from cloudjob.submission import known_launchers, nested_launchers
from cloudjob.submission.nested_launchers import Nested
from cloudjob.submission.scripts import File, Files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

_WEB_PAGE = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html)\b", re.I)
_SHELL = re.compile(rb"#!.*\b(bash|dash|sh)\b")
_SHOWN = 60
# Syntax that each version of Python added, as found in the line or the message of the error.
_NEWER = {
    (3, 11): r"\bexcept\s*\*|\[\s*\*\w",
    (3, 12): r"^\s*type\s+\w+|\b(?:def|class)\s+\w+\s*\[|f-string"
    r"|\b[rR]?[fF][rR]?['\"].*\n(?:unterminated string|unexpected character)",
    (3, 14): r"\b[rR]?[tT][rR]?['\"]|\bexcept\s[^(:]*,",
    (3, 15): r"^\s*lazy\s|cannot be used in comprehension",
}
# The bash of macOS is older and lacks what version 4 added: ``|&``, ``&>>``, ``;&``, ``coproc``.
_BASH = 4
_PARSE_S = 10.0


class Problem(NamedTuple):
    """Why a script cannot run.

    Args:
        is_certain: Whether it cannot run on any node.
    """

    what: str
    hint: str
    is_certain: bool = True


class Script(NamedTuple):
    """What a submit knows of a job's script; it is read once and passed on.

    Args:
        files: The script and the files of its source that were read.
        problem: Why it cannot run; None if nothing is wrong or it cannot be read.
        nested: The launcher that it starts itself, if any.
    """

    files: Files
    problem: Problem | None = None
    nested: Nested | None = None


def check(spec: JobSpec) -> Script:
    """Read a script, and refuse one that no node can run.

    Raises:
        SpecError: It is a web page, or it does not parse.
    """
    script = read(spec)
    if script.problem and script.problem.is_certain:
        raise SpecError([f"script: {script.problem.what}"], hint=script.problem.hint)
    return script


def read(spec: JobSpec) -> Script:
    """Read a script, and what it imports and starts as far as its source shows that."""
    files = Files()
    if spec.takes_command:
        return Script(files)
    source = Path(spec.source)
    nested = nested_launchers.find(files, source, spec.script)
    return Script(files, _problem(spec, files[source / spec.script]), nested)


def _problem(spec: JobSpec, file: File) -> Problem | None:
    if not file.data:
        # Path.exists raises for a name that is too long, which is reported when it is packed.
        return None if os.path.exists(file.path) else _program(spec)  # noqa: PTH110
    name = one_line(spec.script)
    if _WEB_PAGE.match(file.data):
        hint = "on GitHub, download the raw file instead of saving its page"
        return Problem(f"{name} is a web page (HTML), not a program", hint)
    if file.path.suffix == ".py":
        return _python(spec, name, file)
    shebang = _SHELL.match(file.data)
    shell = "bash" if file.path.suffix == ".sh" else shebang and shebang.group(1).decode()
    return _shell(file, shell) if shell and b"\0" not in file.data else None


def _program(spec: JobSpec) -> Problem | None:
    """Return why a program of the nodes cannot be the script; None if it is none."""
    argv = (spec.script, *spec.args)
    known = known_launchers.in_command(argv)
    if known is None and ("/" in spec.script or shutil.which(spec.script) is None):
        return None
    command = f"cloudjob submit --launcher command {one_line(shlex.join(argv))}"
    hint = f"{command} runs it once on each node"
    replacement = nested_launchers.replacement_of(known.launcher, argv) if known else ""
    if replacement:
        hint = f"cloudjob submit {replacement} starts the ranks itself; {hint}"
    return Problem(f"{one_line(spec.script)} is a program, not a file of the source", hint)


def _python(spec: JobSpec, name: str, file: File) -> Problem | None:
    try:
        with warnings.catch_warnings():
            # Warnings about the user's code belong in the log of the job.
            warnings.simplefilter("ignore")
            compile(file.data, name, "exec", dont_inherit=True)
    except SyntaxError as error:
        return _syntax_error(spec, name, file.data, error)
    except ValueError as error:
        return Problem(f"{name} is not valid Python: {error}", "save it as text in UTF-8")
    except (RecursionError, MemoryError):
        pass
    return None


def _syntax_error(spec: JobSpec, name: str, data: bytes, error: SyntaxError) -> Problem | None:
    number = error.lineno or 0
    lines = data.decode("utf-8", "replace").splitlines()
    line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    where = f"{name} line {number}" if number else name
    what = f"{where} is not valid in Python {'{}.{}'.format(*sys.version_info)}: {error.msg}"
    if line:
        what += f": {one_line(line[:_SHOWN])}"
    if "Missing parentheses" in error.msg:
        return Problem(what, "the script is for Python 2, and nodes run Python 3")
    if spec.backend == "process":
        hint = "process: {python: PATH} in a job file names another Python for the script"
        return None if _is_valid_in_other_python(spec, data) else Problem(what, hint)
    for newer, pattern in _NEWER.items():
        if sys.version_info < newer and re.search(pattern, f"{line}\n{error.msg}"):
            hint = f"it may be valid in Python {'{}.{}'.format(*newer)}, which the nodes then need"
            return Problem(what, hint, is_certain=False)
    return Problem(what, "if the nodes have a newer Python that accepts it, submit with that one")


def _is_valid_in_other_python(spec: JobSpec, data: bytes) -> bool:
    """Whether the job's Python is not the one that runs us, and parses the script."""
    try:
        python = interpreters.python_of(spec.process.python, "process.python")
    except BackendError:
        # Building the request reports it.
        return True
    if python == sys.executable:
        return False
    program = "import sys; compile(sys.stdin.buffer.read(), 'script', 'exec')"
    argv = [python, "-I", "-S", "-W", "ignore", "-c", program]
    try:
        done = subprocess.run(
            argv, input=data, capture_output=True, timeout=_PARSE_S, check=False, cwd="/"
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _shell(file: File, shell: str) -> Problem | None:
    path = file.path
    if shutil.which(shell) is None:
        return None
    message = _first_error(path, shell)
    # A script may switch on extglob, but bash applies that only when it runs the script.
    if not message or (shell == "bash" and not _first_error(path, shell, "-O", "extglob")):
        return None
    hint = f"`{shell} -n {one_line(path.name)}` prints all of its messages"
    if b"\r\n" in file.data:
        convert = f"`sed -i 's/\\r$//' {one_line(path.name)}`"
        hint = f"it has Windows line endings; {convert} converts them"
    is_old = shell == "bash" and _bash_version() < _BASH
    if is_old:
        hint = f"bash is older than version {_BASH} here; the nodes' may accept the line"
    return Problem(one_line(f"{path.name} {message}"), hint, is_certain=not is_old)


def _first_error(path: Path, shell: str, *options: str) -> str:
    """Return the first error of a shell that parses a script without running it."""
    unset = ("BASH_ENV", "ENV")
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    try:
        done = subprocess.run(
            [shell, *options, "-n", f"./{path.name}"],
            cwd=path.parent,
            env={**environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PARSE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    stderr = os.fsdecode(done.stderr).strip()
    message = stderr.partition("\n")[0].removeprefix(f"./{path.name}: ") if done.returncode else ""
    # dash prints only the line's number.
    return f"line {message}" if message[:1].isdigit() else message


def _bash_version() -> int:
    done = subprocess.run(
        ["bash", "-c", 'echo "${BASH_VERSINFO:-0}"'],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    return int(done.stdout) if done.stdout.strip().isdigit() else 0
