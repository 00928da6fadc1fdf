"""The commands exec and shell: run something on a node of a running job."""

from __future__ import annotations

import argparse
import os
import sys

import cloudjob
from cloudjob.cli.options import job_argument, whole_number
from cloudjob.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

# bash if the image has it. Not a login shell, which would set PATH and others anew.
_SHELL = ("sh", "-c", "command -v bash >/dev/null && exec bash; exec sh")


def add_exec(parser: argparse.ArgumentParser) -> None:
    """Give the command exec its options."""
    parser.set_defaults(run=_exec)
    parser.usage = "cloudjob exec [--node N | --rank R] JOB [--] COMMAND [ARGS]..."
    _model(parser)


def add_shell(parser: argparse.ArgumentParser) -> None:
    """Give the command shell its options."""
    parser.set_defaults(run=_shell)
    _model(parser)


def _model(parser: argparse.ArgumentParser) -> None:
    job_argument(parser)
    one = parser.add_mutually_exclusive_group()
    one.add_argument(
        "--node",
        type=whole_number,
        default=0,
        metavar="N",
        help="the node, by default 0; its lowest rank is the model",
    )
    one.add_argument(
        "--rank", type=whole_number, metavar="R", help="the rank that is the model, on its node"
    )


def _exec(options: argparse.Namespace) -> NoReturn:
    if not options.rest:
        raise UsageError(
            f"running a command on {options.job}: no command was given",
            hint=f"cloudjob exec {options.job} -- nvidia-smi",
        )
    _become(options, options.rest)


def _shell(options: argparse.Namespace) -> NoReturn:
    if not sys.stdin.isatty():
        raise UsageError(
            f"opening a shell on {options.job}: the input is not a terminal",
            hint=f"cloudjob exec {options.job} -- sh -c 'COMMAND'",
        )
    _become(options, list(_SHELL))


def _become(options: argparse.Namespace, command: list[str]) -> NoReturn:
    """Replace this process by the one that reaches the node, so that signals arrive there."""
    job = cloudjob.attach(options.job)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    argv = job.command_on(command, node=options.node, rank=options.rank, is_terminal=is_terminal)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp(argv[0], argv)
