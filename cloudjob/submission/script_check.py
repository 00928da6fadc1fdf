"""Checks a script before anything is sent: it must not be a web page, and it must parse.

The Python and the bash that run the script decide. Those of other machines may be newer than this
machine's, so what only a newer one may accept causes no more than a warning there.
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

from cloudjob.errors import SpecError
from cloudjob.model.rules import BACKENDS
from cloudjob.model.text import one_line
from cloudjob.submission import nested_launchers, script_python
from cloudjob.submission.nested_launchers import Nested
from cloudjob.submission.scripts import File, Files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

_WEB_PAGE = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html)\b", re.I)
_SHELL = re.compile(rb"#!.*\b(bash|dash|sh)\b")
_SHOWN = 60
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
    known = nested_launchers.in_command(argv)
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
    version = "{}.{}".format(*sys.version_info)
    what = f"{where} is not valid in Python {version}: {error.msg}"
    if line:
        what += f": {one_line(line[:_SHOWN])}"
    if "Missing parentheses" in error.msg:
        return Problem(what, "the script is for Python 2, and nodes run Python 3")
    if BACKENDS[spec.backend].shares_files:
        hint = f"{script_python.named(spec, 'PATH')} names another Python for the script"
        return None if script_python.accepts(spec, data) else Problem(what, hint)
    # No version of Python has changed the rules of indentation.
    is_certain = isinstance(error, IndentationError)
    hint = "correct the line" if is_certain else f"only a Python newer than {version} may accept it"
    return Problem(what, hint, is_certain)


def _shell(file: File, shell: str) -> Problem | None:
    path = file.path
    message = _first_error(path, shell)
    if not message:
        return None
    hint = f"`{shell} -n {one_line(path.name)}` prints all of its messages"
    if b"\r\n" in file.data:
        convert = f"`sed -i 's/\\r$//' {one_line(path.name)}`"
        hint = f"it has Windows line endings; {convert} converts them"
    is_old = shell == "bash" and _bash_version() < _BASH
    if is_old:
        hint = f"bash is older than version {_BASH} here; the nodes' may accept the line"
    return Problem(one_line(f"{path.name} {message}"), hint, is_certain=not is_old)


def _first_error(path: Path, shell: str) -> str:
    """Return the first error of a shell that parses a script without running it."""
    # A script may switch on extglob, but bash applies that only when it runs the script.
    options = ("-O", "extglob") if shell == "bash" else ()
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
