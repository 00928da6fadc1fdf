"""Shell completion: the script that a shell loads, and the completions for it."""

from __future__ import annotations

import argparse

from cloudjob.cli.parser import parser_of, split_at_script
from cloudjob.errors import CloudJobError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any, NoReturn

_SHELLS = ("bash", "zsh", "fish")
# The number of ids to offer, newest first; a shell cannot list many more.
_MAX_JOBS = 200


def answer() -> NoReturn:
    """Print the completions that a shell requests, and exit."""
    import os

    import argcomplete
    from argcomplete.lexers import split_line

    line, point = os.environ["COMP_LINE"], int(os.environ["COMP_POINT"])
    arguments = split_line(line, point)[3][1:]
    parser: argparse.ArgumentParser = parser_of(arguments[0] if arguments else "")
    if arguments[:1] == ["submit"] and _has_script(arguments):
        # What follows the script is for the script, so files are offered.
        parser = argparse.ArgumentParser(add_help=False, prefix_chars="+")
        parser.add_argument("arguments", nargs="*", metavar="PATH")
    for each in _actions(parser):
        if completer := _completer(each):
            each.completer = completer  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser, always_complete_options=False)
    raise SystemExit(1)


def _has_script(arguments: list[str]) -> bool:
    """Whether the arguments of a submit include the script."""
    parser = parser_of("submit")
    try:
        return parser.parse_args(split_at_script(parser, arguments)[0]).script is not None
    except CloudJobError:
        return False  # the value of an option is missing


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _actions(inner)


def _completer(action: argparse.Action) -> Any:
    """Return the completer for an option or argument; None for a file or a choice."""
    from argcomplete import completers

    from cloudjob.model.rules import BACKENDS
    from cloudjob.model.status import JobState
    from jobentry.contract.launchers import AUTO, LAUNCHERS

    choices: dict[str, Iterable[str]] = {
        "--launcher": (AUTO, *LAUNCHERS),
        "--backend": BACKENDS,
        "--state": tuple(state.value for state in JobState),
        "--restore-outputs": ("none", "own", "all"),
    }
    for option in action.option_strings:
        if option in choices:
            return completers.ChoicesCompleter(dict.fromkeys(choices[option], ""))
    if action.metavar in ("JOB", "OTHER"):
        return _jobs
    if action.metavar == "DIR":
        return completers.DirectoriesCompleter()
    if action.metavar in ("TOPIC", "EXAMPLE"):
        return _topics if action.metavar == "TOPIC" else _examples
    is_file = action.metavar in ("FILE", "FILE.yaml", "PATH", "SCRIPT")
    is_known = is_file or action.choices is not None
    return None if is_known else _nothing


def _nothing(**_: object) -> Iterable[str]:
    return ()


def _jobs(**_: object) -> Iterable[str]:
    """Return the ids of the jobs in the records; no platform is queried."""
    from cloudjob.cli.options import state_home
    from cloudjob.home import records_path
    from cloudjob.home.records import Records

    with Records(records_path(state_home())) as db:
        return [record.job for record in db.list(limit=_MAX_JOBS)]


def _topics(**_: object) -> Iterable[str]:
    from cloudjob.cli.commands.docs import topics

    return topics()


def _examples(**_: object) -> Iterable[str]:
    from cloudjob.cli.commands.docs import examples

    return examples()


def _completion(options: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["cloudjob"], shell=options.shell))
    return 0


def add_completion(parser: argparse.ArgumentParser) -> None:
    """Give the command completion its argument."""
    parser.set_defaults(run=_completion)
    text = f"the shell: {', '.join(_SHELLS)}"
    parser.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=text)
    parser.epilog = """\
examples:
  eval "$(cloudjob completion bash)"       in ~/.bashrc
  eval "$(cloudjob completion zsh)"        in ~/.zshrc, after compinit
  cloudjob completion fish | source        in ~/.config/fish/config.fish
"""
