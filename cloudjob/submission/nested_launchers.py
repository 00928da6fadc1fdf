"""Finds launchers that a script starts itself: with them, every rank would start all ranks again.

The parser below covers what shell scripts for training use: words, quotes, comments, redirections,
here-documents, loops and ``&``. It does not expand variables. ``started_commands`` has the parser
for Python scripts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cloudjob.errors import SpecError
from cloudjob.model.text import one_line
from cloudjob.submission import known_launchers, scripts, started_commands
from jobentry.contract.launchers import LAUNCHERS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

_COUNTS = re.compile(
    r"-{1,2}(?:np|n|c|nproc_per_node|nproc-per-node|local_worker_num|worker_num)(?:=(\d+))?"
)
# Words that may precede a command.
_PREFIXES = frozenset(
    (
        *("!", "{", "time", "exec", "nohup", "env", "sudo", "nice", "command", "eval"),
        *("then", "do", "else", "elif", "if", "while", "until"),
    )
)
_SHELLS = frozenset(("bash", "sh", "dash", "source", "."))
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_PYTHON = re.compile(r"python[\d.]*$")
_TOKEN = re.compile(
    r"""(?P<blank>[^\S\n]+|\\\n)
      | (?P<comment>\#[^\n]*)
      | (?P<here><<-?(?!<)[^\S\n]*(?P<end>[\w'"\\]+))
      | (?P<redirect>&>>?|[<>]+[&|]?)
      | (?P<operator>&&|\|\||;;|[;&|()\n])
      | (?P<word>(?:[^\s;&|()<>'"\\]|\\.|'[^']*'|"(?:\\.|[^"\\])*")+)
      | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a shell script.

    Args:
        is_repeated: Whether it is in a loop.
        is_background: Whether the script continues while it runs (``&``).
        is_failure_ignored: Whether the script ignores its exit code.
    """

    argv: tuple[str, ...]
    line: int
    is_repeated: bool
    is_background: bool = False
    is_failure_ignored: bool = False


@dataclass(frozen=True, slots=True)
class Nested:
    """A launcher that a script starts itself.

    Args:
        where: The place in the script, such as ``run.sh line 12``.
        what: What the script does there, as the predicate of a sentence.
        is_launcher: Whether it is a known launcher, and not a loop that starts processes.
        replacement: Arguments of ``cloudjob submit`` that do the same; empty if there are none.
        is_failure_ignored: Whether the script succeeds although this launcher has failed.
        may_outlive_script: Whether the script may end before this launcher.
    """

    where: str
    what: str
    is_launcher: bool
    replacement: str
    is_failure_ignored: bool = False
    may_outlive_script: bool = False


def check(spec: JobSpec) -> None:
    """Refuse a shell script that starts ranks if the job's launcher also starts ranks.

    Raises:
        SpecError: The script starts ranks; the hint names the submit that does the same.
    """
    found = None if spec.script.endswith(".py") else _repeated(spec)
    if found is None:
        return
    once = f"with --launcher python {one_line(spec.script)} runs once on each node as it is"
    if found.replacement:
        once = f"submit what it starts: cloudjob submit {found.replacement}; {once}"
    raise SpecError(
        [f"script: {found.where} {found.what}, and cloudjob would run it once for each rank"],
        hint=once,
    )


def repeated_in_python(spec: JobSpec) -> str:
    """Return what a Python script starts that the chosen launcher repeats; empty for nothing.

    It is not an error, as the script may start it in one rank only.
    """
    found = _repeated(spec) if spec.script.endswith(".py") else None
    if found is None or not found.is_launcher:
        return ""
    return f"{found.where} {found.what}, and cloudjob runs it once for each rank"


def _repeated(spec: JobSpec) -> Nested | None:
    """Return the launcher in a script that the job's launcher starts once for each rank."""
    launcher = LAUNCHERS.get(spec.launcher)
    if launcher is None or launcher.is_one_a_node:
        return None
    return find(Path(spec.source), spec.script)


def ignored_exit_code(spec: JobSpec) -> str:
    """Return a command of a script whose exit code the script ignores; empty if there is none."""
    if spec.takes_command or spec.strict == "true":
        return ""
    found = find(Path(spec.source), spec.script)
    if found is None or not found.is_failure_ignored:
        return ""
    return f"{found.where} {found.what} and ignores its exit code, so the job succeeds if it fails"


def find(source: Path, script: str) -> Nested | None:
    """Return the first launcher started by a script or by the shell scripts it runs."""
    waiting, seen = [script], {script}
    while waiting:
        name = waiting.pop(0)
        commands = read(source / name)
        has_wait = any(command.argv[0] == "wait" for command in commands)
        for command in commands:
            where = f"{one_line(name)} line {command.line}"
            found = _nested(command, where, has_wait=has_wait)
            if found is not None:
                return found
            further = _script_of(command.argv)
            if further and further not in seen:
                seen.add(further)
                waiting.append(further)
    return None


def _nested(command: Command, where: str, *, has_wait: bool) -> Nested | None:
    argv = command.argv
    known = known_launchers.in_command(argv)
    if known:
        return Nested(
            where,
            f"starts {known.shown} itself",
            is_launcher=True,
            replacement=replacement_of(known.launcher, argv),
            is_failure_ignored=command.is_failure_ignored,
            may_outlive_script=command.is_background and not has_wait,
        )
    if command.is_repeated and command.is_background and not has_wait and _is_python(argv):
        replacement = f"--procs-per-node N {_program(argv)}"
        return Nested(
            where,
            "starts processes in a loop and does not wait for them",
            is_launcher=False,
            replacement=replacement,
        )
    return None


def replacement_of(launcher: str, argv: Sequence[str]) -> str:
    """Return the arguments of ``cloudjob submit`` that do the same; empty without a launcher."""
    count = _count(argv)
    size = f" --procs-per-node {count}" if count else ""
    return f"--launcher {launcher}{size} {_program(argv)}" if launcher else ""


def _count(argv: Sequence[str]) -> str:
    """Return the number of ranks that a command starts; empty if it is in a variable."""
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        found = _COUNTS.fullmatch(argument)
        if found:
            return found.group(1) or (following if following.isdecimal() else "")
    return ""


def _program(argv: Sequence[str]) -> str:
    """Return the Python script that a command starts, as ``cloudjob submit`` expects it."""
    script = next((argument for argument in argv if argument.endswith(".py")), "SCRIPT")
    return one_line(script.removeprefix("./"))


def _is_python(argv: Sequence[str]) -> bool:
    return any(
        argument.endswith(".py") or _PYTHON.match(argument.rpartition("/")[2]) for argument in argv
    )


def _script_of(argv: Sequence[str]) -> str:
    """Return the shell script that a command runs; empty if it runs none."""
    names = argv[1:] if argv[0] in _SHELLS else argv[:1]
    name = next((argument for argument in names if not argument.startswith("-")), "")
    return name.removeprefix("./") if name.endswith(".sh") and not name.startswith("/") else ""


# -- reading --------------------------------------------------------------------------------------


def read(path: Path) -> list[Command]:
    """Return the commands of a script; none if it is neither for Python nor for a shell."""
    data = scripts.read(path)
    if path.suffix == ".py":
        return [
            replace(command, line=started.line, is_failure_ignored=started.is_failure_ignored)
            for started in started_commands.read(data)
            for command in commands(started.text)
        ]
    first = data.partition(b"\n")[0]
    is_shell = path.suffix == ".sh" or re.match(rb"#!.*\b(ba|da|z)?sh\b", first) is not None
    return _with_ignored_exit_codes(commands(data.decode("utf-8", "replace"))) if is_shell else []


def _with_ignored_exit_codes(found: list[Command]) -> list[Command]:
    """Mark the commands whose exit code is neither the script's own nor checked later."""
    if any(_ends_on_errors(command.argv) for command in found):
        return found
    is_noted = False
    noted = []
    for at, command in reversed([*enumerate(found)]):
        is_followed_by_exit = found[at + 1 : at + 2] and found[at + 1].argv[0] == "exit"
        is_failure_ignored = at + 1 < len(found) and not is_noted and not is_followed_by_exit
        noted.append(replace(command, is_failure_ignored=is_failure_ignored))
        is_noted = is_noted or any(
            "$?" in argument or "PIPESTATUS" in argument for argument in command.argv
        )
    return noted[::-1]


def _ends_on_errors(argv: Sequence[str]) -> bool:
    return argv[0] == "set" and any(re.match(r"-\w*e|errexit", argument) for argument in argv[1:])


def commands(text: str) -> list[Command]:
    """Return the commands in the text of a shell script."""
    found: list[Command] = []
    words: list[str] = []
    depth = line = 0
    for kind, value, number in _tokens(text):
        if kind == "word":
            line = line if words else number
            words.append(value)
            continue
        if words:
            command = _command(words, line, depth)
            depth = max(0, depth + _loops(words))
            words = []
            found += _unwrapped(command) if command else []
        if value == "&" and found:
            found[-1] = replace(found[-1], is_background=True)
    return found


def _command(words: list[str], line: int, depth: int) -> Command | None:
    """Return a command without assignments and keywords before it; None if nothing is left."""
    at = 0
    while at < len(words) and (words[at] in _PREFIXES or _ASSIGNMENT.match(words[at])):
        at += 1
    is_repeated = depth + words[:at].count("do") > 0
    return Command(tuple(words[at:]), line, is_repeated) if words[at:] else None


def _unwrapped(command: Command) -> list[Command]:
    """Return the commands in the text of ``bash -c TEXT``, or else the command itself."""
    argv = command.argv
    if argv[0].rpartition("/")[2] in _SHELLS and len(argv) > 2:
        for at, argument in enumerate(argv[1:-1], 1):
            if re.fullmatch(r"-\w*c", argument):
                inner = commands(argv[at + 1])
                return [replace(each, line=command.line) for each in inner] or [command]
    return [command]


def _loops(words: Sequence[str]) -> int:
    """Return how a command changes the nesting depth of loops: 1, 0 or -1."""
    return int("do" in words[:1]) - int(words[0] == "done")


def _tokens(text: str) -> Iterator[tuple[str, str, int]]:
    """Yield ``(kind, text, line)`` for words and operators; a final newline ends the text."""
    at, line = 0, 1
    ends: list[str] = []
    follows_redirect = False
    while at < len(text):
        found = _TOKEN.match(text, at)
        assert found is not None, "the last alternative takes any character"
        kind, value = str(found.lastgroup), found.group()
        at, number, line = found.end(), line, line + value.count("\n")
        if kind == "here" or found.group("end"):
            ends.append(found.group("end").strip("'\"\\"))
        elif kind == "redirect":
            follows_redirect = True
        elif kind == "word":
            if not follows_redirect:
                yield kind, _unquoted(value), number
            follows_redirect = False
        elif kind == "operator":
            yield kind, value, number
            while value == "\n" and ends:
                body = text[at:].partition(f"\n{ends.pop(0)}\n")
                at += len(text[at:]) - len(body[2])
                line = text.count("\n", 0, at) + 1
    yield "operator", "\n", line


def _unquoted(word: str) -> str:
    try:
        return "".join(shlex.split(word)) or word
    except ValueError:
        return word
