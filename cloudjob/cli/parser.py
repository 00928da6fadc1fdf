"""The parser of the whole command line."""

from __future__ import annotations

import argparse
from importlib import import_module

from cloudjob.cli.options import Parser, sentence

_DESCRIPTION = "Run a training script on several nodes: here, on a cluster or in the cloud."
_EXAMPLES = """\
examples:
  cloudjob init                              write a job file for this folder
  cloudjob submit -n 2 train.py --epochs 3   run train.py on two nodes
  cloudjob logs train -f                     follow the newest job named train
  cloudjob list --state RUNNING              list the jobs that are running

`cloudjob COMMAND --help` shows a command's options, `cloudjob docs` the manual.
"""
# Each command, the module whose ``add_COMMAND`` adds its options, and its help text. Only the
# module of the command that was called is imported.
_COMMANDS = (
    ("init", "init", "write cloudjob.yaml, a commented job file, for this folder"),
    ("submit", "submit", "run a script as a job"),
    ("status", "status", "show the state of a job"),
    ("attach", "attach", "follow a job to its end, even if it was submitted elsewhere"),
    ("logs", "logs", "show the log of a job"),
    ("wait", "wait", "wait for jobs; exit with the code of the first that failed"),
    ("list", "list", "list the jobs submitted from this machine"),
    ("cancel", "cancel", "cancel a job, or every job that matches the filters"),
    ("refresh", "refresh", "give the nodes of a job fresh keys of its store"),
    ("cp", "submit", "submit a job again, with changes"),
    ("diff", "diff", "show how two jobs differ"),
    ("events", "events", "show what the platform recorded about a job"),
    ("metrics", "metrics", "show the metrics of a training, or what the nodes used"),
    ("outputs", "outputs", "list or download the outputs of a job"),
    ("rm", "rm", "remove a job and everything stored for it"),
    ("top", "top", "show what the nodes and ranks of a job use"),
    ("stacks", "stacks", "show what the ranks of a job execute right now"),
    ("profile", "profile", "show where a rank of a running job spends its time"),
    ("exec", "enter", "run a command on a node of a running job, as a rank would"),
    ("shell", "enter", "open a shell on a node of a running job"),
    ("forward", "forward", "reach a port of a node of a running job from this machine"),
    ("console", "console", "show every job in the browser"),
    ("report", "console", "write one HTML file about a job"),
    ("image", "machine", "build the images that jobs run in"),
    ("emulator", "emulator", "emulate ModelArts on this machine"),
    ("doctor", "machine", "check this machine, or an image"),
    ("docs", "docs", "show the manual"),
    ("example", "docs", "copy an example program or a commented job file"),
    ("completion", "completion", "print the completion script of a shell"),
    ("config", "settings", "show the configuration and where each value comes from"),
    ("package", "packages", "show which files of the source are packed"),
    ("store", "packages", "inspect and clean up stored packages"),
)


class _Version(argparse.Action):
    """Prints the version, whose module `cloudjob --help` does not need."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from cloudjob import __version__

        print("cloudjob", __version__)
        parser.exit()


def parser_of(command: str) -> Parser:
    """Return a parser that knows ``command`` with its options, or the names of all commands."""
    parser = Parser(prog="cloudjob", description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.add_argument(
        "--version", action=_Version, nargs=0, default=argparse.SUPPRESS, help="show the version"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, module, text in [row for row in _COMMANDS if row[0] == command] or _COMMANDS:
        added = commands.add_parser(name, help=text, description=sentence(text))
        if name == command:
            getattr(import_module(f"cloudjob.cli.commands.{module}"), f"add_{name}")(added)
    parser.command = command
    return parser


def split_at_script(parser: Parser, arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """Split the arguments into those of cloudjob, and those of the script or command that it runs.

    Those of cloudjob end with SCRIPT; with ``exec``, whose COMMAND follows JOB, before COMMAND.
    """
    if arguments[:1] == ["cp"]:
        end = arguments.index("--") if "--" in arguments else len(arguments)
        return arguments[:end], arguments[end + 1 :] if end < len(arguments) else None
    if arguments[:1] not in (["submit"], ["exec"]):
        return arguments, []
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    takes_value = {
        name
        for action in commands.choices[arguments[0]]._actions
        for name in action.option_strings
        if action.nargs is None
    }
    # The index of each argument after the command that is no option: a word, or ``--``.
    positions: list[int] = []
    index = 1
    while index < len(arguments):
        argument = arguments[index]
        if not argument.startswith("-") or argument in ("-", "--"):
            positions.append(index)
        index += 2 if argument in takes_value else 1
    first, at, *_ = *positions, len(arguments), len(arguments)
    if arguments[0] == "exec":
        return arguments[:at], arguments[at + (arguments[at : at + 1] == ["--"]) :]
    end = first + 1 + (arguments[first : first + 1] == ["--"])
    return arguments[:end], arguments[end:]
