"""The parser of the whole command line."""

from __future__ import annotations

import argparse

from cloudjob import __version__
from cloudjob.cli.emulator import add_emulator
from cloudjob.cli.jobs import add_left, add_many, add_one
from cloudjob.cli.machine import add_doctor, add_image
from cloudjob.cli.options import Parser
from cloudjob.cli.packages import add_package, add_store
from cloudjob.cli.settings import add_config
from cloudjob.cli.submit import add_submit

_DESCRIPTION = "Takes a training script to the cloud; what runs here runs there unchanged."


def parser_of(command: str) -> Parser:
    """Return the parser of all commands, with the options of ``command`` alone."""
    parser = Parser(prog="cloudjob", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"cloudjob {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    add_submit(commands, is_asked=command == "submit")
    add_one(commands)
    add_many(commands, is_cp=command == "cp")
    add_left(commands)
    add_image(commands)
    add_emulator(commands, is_asked=command == "emulator")
    add_doctor(commands)
    add_config(commands, is_asked=command == "config")
    add_package(commands)
    add_store(commands)
    parser.command = command
    return parser


def split_at_script(parser: Parser, words: list[str]) -> tuple[list[str], list[str] | None]:
    """Part the words of cloudjob, up to and with SCRIPT, from those of the script."""
    if words[:1] == ["cp"]:
        end = words.index("--") if "--" in words else len(words)
        return words[:end], words[end + 1 :] if end < len(words) else None
    if words[:1] != ["submit"]:
        return words, []
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    submit = commands.choices["submit"]
    takes_value = {
        name for action in submit._actions for name in action.option_strings if action.nargs is None
    }
    index = 1
    while index < len(words):
        word = words[index]
        if word == "--":
            return words[:index] + words[index : index + 2], words[index + 2 :]
        if not word.startswith("-") or word == "-":
            return words[: index + 1], words[index + 1 :]
        index += 2 if word in takes_value else 1
    return words, []
