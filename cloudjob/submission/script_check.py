"""Checks a script before anything is sent: it must not be a web page, and it must parse.

The nodes' Python may be newer than the one that runs cloudjob and accept newer syntax. Such a
script only causes a warning; so does a shell script if the local bash is too old to parse it.
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
from cloudjob.model.text import one_line
from cloudjob.submission import known_launchers, nested_launchers, scripts

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


def check(spec: JobSpec) -> None:
    """Refuse a script that no node can run.

    Raises:
        SpecError: It is a web page, or it does not parse.
    """
    problem = find(spec)
    if problem and problem.is_certain:
        raise SpecError([f"script: {problem.what}"], hint=problem.hint)


def find(spec: JobSpec) -> Problem | None:
    """Return why the script cannot run; None if nothing is wrong or it cannot be read."""
    path = Path(spec.source, spec.script)
    data = b"" if spec.takes_command else scripts.read(path)
    if not data:
        # Path.exists raises for a name that is too long, which is reported when it is packed.
        is_there = os.path.exists(path)  # noqa: PTH110
        return None if spec.takes_command or is_there else _program(spec)
    name = one_line(spec.script)
    if _WEB_PAGE.match(data):
        hint = "on GitHub, download the raw file instead of saving its page"
        return Problem(f"{name} is a web page (HTML), not a program", hint)
    if path.suffix == ".py":
        return _python(name, data)
    found = _SHELL.match(data)
    shell = "bash" if path.suffix == ".sh" else found and found.group(1).decode()
    return _shell(path, shell) if shell and b"\0" not in data else None


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


def _python(name: str, data: bytes) -> Problem | None:
    try:
        with warnings.catch_warnings():
            # Warnings about the user's code belong in the log of the job.
            warnings.simplefilter("ignore")
            compile(data, name, "exec", dont_inherit=True)
    except SyntaxError as error:
        return _syntax_error(name, data, error)
    except ValueError as error:
        return Problem(f"{name} is not valid Python: {error}", "save it as text in UTF-8")
    except (RecursionError, MemoryError):
        pass
    return None


def _syntax_error(name: str, data: bytes, error: SyntaxError) -> Problem:
    version = "{}.{}".format(*sys.version_info)
    number = error.lineno or 0
    lines = data.decode("utf-8", "replace").splitlines()
    line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    where = f"{name} line {number}" if number else name
    what = f"{where} is not valid in Python {version}: {error.msg}"
    if line:
        what += f": {one_line(line[:_SHOWN])}"
    for newer, pattern in _NEWER.items():
        if sys.version_info < newer and re.search(pattern, f"{line}\n{error.msg}"):
            least = "{}.{}".format(*newer)
            hint = f"it may be valid in Python {least}, which the nodes then need"
            return Problem(what, hint, is_certain=False)
    if "Missing parentheses" in error.msg:
        return Problem(what, "the script is for Python 2, and nodes run Python 3")
    return Problem(what, "if the nodes have a newer Python that accepts it, submit with that one")


def _shell(path: Path, shell: str) -> Problem | None:
    if shutil.which(shell) is None:
        return None
    message = _first_error(path, shell)
    # A script may switch on extglob, but bash applies that only when it runs the script.
    if not message or (shell == "bash" and not _first_error(path, shell, "-O", "extglob")):
        return None
    hint = f"`{shell} -n {one_line(path.name)}` prints all of its messages"
    if b"\r\n" in path.read_bytes():
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
