"""Finds launchers that a script starts itself; each rank would start all ranks again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from cloudjob.errors import SpecError
from cloudjob.model.text import one_line
from cloudjob.submission import known_launchers, shell_commands, started_commands
from cloudjob.submission.scripts import File, Files
from cloudjob.submission.shell_commands import Command
from jobentry.contract.launchers import LAUNCHERS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

_COUNTS = re.compile(
    r"-{1,2}(?:np|n|c|nproc_per_node|nproc-per-node|local_worker_num|worker_num)(?:=(\d+))?"
)
_SHELL = re.compile(rb"#!.*\b(ba|da|z)?sh\b")
_PYTHON = re.compile(r"(?:.*/)?python[\d.]*|.*\.py")


class Nested(NamedTuple):
    """A launcher that a script starts itself.

    Args:
        where: The place in the script, such as ``run.sh line 12``.
        what: What the script does there, as the predicate of a sentence.
        replacement: Arguments of ``cloudjob submit`` that do the same; empty if there are none.
        is_waited_for: Whether the script ends after this launcher, so that it can run as it is.
        is_failure_ignored: Whether the script succeeds although this launcher has failed.
    """

    where: str
    what: str
    replacement: str
    is_waited_for: bool
    is_failure_ignored: bool


def check(spec: JobSpec, nested: Nested | None) -> None:
    """Refuse a shell script that starts ranks if the job's launcher also starts ranks.

    A Python script may start them in one rank only, so it causes no more than a warning.

    Raises:
        SpecError: The script starts ranks; the hint names the submit that does the same.
    """
    repeated = what_is_repeated(spec, nested)
    if not repeated or spec.script.endswith(".py"):
        return
    hint = f"with --launcher python {one_line(spec.script)} runs once on each node as it is"
    if nested and nested.replacement:
        hint = f"submit what it starts: cloudjob submit {nested.replacement}; {hint}"
    raise SpecError(
        [f"script: {repeated}, and cloudjob would run it once for each rank"], hint=hint
    )


def what_is_repeated(spec: JobSpec, nested: Nested | None) -> str:
    """Return what a script does that its launcher does once for each rank; empty for nothing."""
    launcher = LAUNCHERS.get(spec.launcher)
    if nested is None or launcher is None or launcher.is_one_a_node:
        return ""
    return f"{nested.where} {nested.what}"


def ignored_exit_code(spec: JobSpec, nested: Nested | None) -> str:
    """Return a command of a script whose exit code the script ignores; empty if there is none."""
    if nested is None or not nested.is_failure_ignored or spec.strict:
        return ""
    return (
        f"{nested.where} {nested.what} and ignores its exit code, so the job succeeds if it fails"
    )


def find(files: Files, source: Path, script: str) -> Nested | None:
    """Return the first launcher started by a script or by the shell scripts it runs."""
    names = [script]
    for name in names:
        commands = _commands(files[source / name])
        has_wait = any(command.argv[0] == "wait" for command in commands)
        for at, command in enumerate(commands):
            is_ignored = command.is_failure_ignored or _goes_on_after(commands, at, name)
            where = f"{one_line(name)} line {command.line}"
            nested = _nested(command, where, has_wait=has_wait, is_ignored=is_ignored)
            if nested is not None:
                return nested
            further = _script_of(command.argv)
            if further and further not in names:
                names.append(further)
    return None


def _commands(file: File) -> list[Command]:
    """Return the commands of a script; none if it is neither for Python nor for a shell."""
    if file.path.suffix == ".py":
        return started_commands.read(file)
    if file.path.suffix == ".sh" or _SHELL.match(file.data):
        return shell_commands.commands(file.data.decode("utf-8", "replace"))
    return []


def _goes_on_after(commands: Sequence[Command], at: int, name: str) -> bool:
    """Whether a shell script goes on after a command that has failed, and never checks it."""
    later = commands[at + 1 :]
    if name.endswith(".py") or not later or later[0].argv[0] == "exit":
        return False
    if any("$?" in word or "PIPESTATUS" in word for command in later for word in command.argv):
        return False
    return not any(
        command.argv[0] == "set" and re.search(r" -\w*e| errexit", " ".join(command.argv))
        for command in commands
    )


def _nested(command: Command, where: str, *, has_wait: bool, is_ignored: bool) -> Nested | None:
    argv = command.argv
    is_left_behind = command.is_background and not has_wait
    known = known_launchers.in_command(argv)
    if known:
        what, replacement = f"starts {known.shown} itself", replacement_of(known.launcher, argv)
        return Nested(where, what, replacement, not is_left_behind, is_ignored)
    if command.is_repeated and is_left_behind and any(map(_PYTHON.fullmatch, argv)):
        what = "starts processes in a loop and does not wait for them"
        replacement = f"--procs-per-node N {_program(argv)}"
        return Nested(where, what, replacement, is_waited_for=False, is_failure_ignored=False)
    return None


def replacement_of(launcher: str, argv: Sequence[str]) -> str:
    """Return the arguments of ``cloudjob submit`` that do the same; empty without a launcher."""
    count = _count(argv)
    size = f" --procs-per-node {count}" if count else ""
    return f"--launcher {launcher}{size} {_program(argv)}" if launcher else ""


def _count(argv: Sequence[str]) -> str:
    """Return the number of ranks that a command starts; empty if it is in a variable."""
    for argument, following in pairwise((*argv, "")):
        option = _COUNTS.fullmatch(argument)
        if option:
            return option.group(1) or (following if following.isdecimal() else "")
    return ""


def _program(argv: Sequence[str]) -> str:
    """Return the Python script that a command starts, as ``cloudjob submit`` expects it."""
    script = next((argument for argument in argv if argument.endswith(".py")), "SCRIPT")
    return one_line(script.removeprefix("./"))


def _script_of(argv: Sequence[str]) -> str:
    """Return the shell script that a command runs; empty if it runs none."""
    names = argv[1:] if argv[0] in shell_commands.SHELLS else argv[:1]
    name = next((argument for argument in names if not argument.startswith("-")), "")
    return name.removeprefix("./") if name.endswith(".sh") and not name.startswith("/") else ""
