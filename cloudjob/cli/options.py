"""Parsers of commands, and the options that several of them have."""

from __future__ import annotations

import argparse
import os

from cloudjob.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any, NoReturn

    from cloudjob.model.types import Option


def state_home() -> Path:
    """Return the folder of cloudjob's state."""
    from cloudjob.home import home

    return home()


_LAST_PORT = 65535


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a fault as every other fault is reported."""

    command = ""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing a page of usage."""
        hint = f"{self.prog} --help"
        unknown = message.partition("unrecognized arguments: ")[2].split()
        if unknown:
            import difflib

            word = unknown[0].partition("=")[0]
            close = difflib.get_close_matches(word, self._all_options(), n=1)
            hint = f"did you mean {close[0]}? {hint}" if close else hint
        raise UsageError(f"reading the command line: {message}", hint=hint)

    def _all_options(self) -> list[str]:
        options = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                options += action.choices[self.command]._option_string_actions
        return options


def actions_of(parser: argparse.ArgumentParser) -> Any:
    """Return where the actions of a command are added; one of them must be given."""
    return parser.add_subparsers(dest="action", metavar="ACTION", required=True)


def add_action(
    actions: Any, name: str, run: Callable[..., int], text: str, **more: Any
) -> argparse.ArgumentParser:
    """Add an action of a command, which ``run`` runs, and return its parser."""
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=text, description=text, allow_abbrev=False, **more
    )
    parser.set_defaults(run=run)
    return parser


def job_argument(parser: argparse.ArgumentParser, **more: Any) -> None:
    """Add the argument that names a job."""
    parser.add_argument("job", metavar="JOB", help="its id, its name or its handle", **more)


def spec_flags(parser: Any) -> None:
    """Add the option of every field that has one."""
    from cloudjob.model.job import OPTIONS, JobSpec
    from cloudjob.model.types import is_map

    for name, option in OPTIONS.items():
        field = JobSpec.model_fields[name]
        if option.const:
            kind: dict[str, Any] = {"action": "store_const", "const": option.const}
        else:
            action = "append" if is_map(field) else "store"
            kind = {"action": action, "metavar": option.metavar}
        flags = [option.short, option.flag] if option.short else [option.flag]
        text = (field.description or "").replace("%", "%%")
        parser.add_argument(*flags, dest=name, help=text, **kind)
    parser.add_argument(
        "--env-file", action="append", metavar="FILE", help="read variables from FILE"
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="the job file")


def json_flag(parser: Any) -> None:
    """Add the option --json."""
    parser.add_argument("--json", action="store_true", help="print one JSON value")


def whole_number(text: str) -> int:
    """Read an option's value that counts something."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def port_number(text: str) -> int:
    """Read an option's value that is a TCP port, 0 for any that is free."""
    number = whole_number(text)
    if number > _LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 0 to {_LAST_PORT}")
    return number


def given_flags(options: argparse.Namespace) -> dict[str, object]:
    """Return what the user gave on the command line, by field."""
    from cloudjob.config import read_env_file
    from cloudjob.model.job import OPTIONS

    flags: dict[str, object] = {}
    for name, option in OPTIONS.items():
        value = getattr(options, name, None)
        if value is not None:
            flags[name] = _pairs(name, option, value) if isinstance(value, list) else value
    if options.env_file:
        variables: dict[str, str] = {}
        for path in options.env_file:
            variables.update(read_env_file(path, os.environ))
        given = flags.get("env", {})
        assert isinstance(given, dict)
        flags["env"] = {**variables, **given}
    if options.script is not None:
        flags["script"] = options.script
        flags["args"] = tuple(options.rest)
    return flags


def _pairs(key: str, option: Option, texts: list[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals and key == "env":
            if name not in os.environ:
                raise UsageError(
                    f"reading {option.flag} {text}: {name} is not set in your environment",
                    hint=f"{option.flag} {name}=VALUE",
                )
            value = os.environ[name]
        elif not equals and key == "inputs":
            raise UsageError(f"reading {option.flag} {text}: no '='", hint=f"give {option.metavar}")
        pairs[name] = value
    return pairs
