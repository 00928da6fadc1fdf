"""The command console: every job in the browser."""

from __future__ import annotations

import argparse

from cloudjob.cli.options import port_number, state_home
from cloudjob.cli.say import say
from cloudjob.errors import UsageError


def _console(options: argparse.Namespace) -> int:
    try:
        from cloudjob.console.server import serve
    except ModuleNotFoundError as error:
        raise UsageError(
            f"starting the console: the module {error.name} is missing",
            hint="pip install 'cloudjob[console]'",
        ) from error

    def ready(link: str) -> None:
        port = link.split(":")[2].partition("/")[0]
        say(f"the console runs until Ctrl-C; open this link, which works once:\n  {link}")
        if options.no_open:
            say(f"from another machine: ssh -N -L {port}:127.0.0.1:{port} HOST")

    try:
        serve(state_home(), options.port, opens_browser=not options.no_open, on_ready=ready)
    except OSError as error:
        raise UsageError(
            f"starting the console: port {options.port}: {error.strerror}",
            hint="choose another one with --port, or 0 for a free one",
        ) from error
    return 0


def add_console(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command ``console``."""
    parser.add_argument(
        "--port", type=port_number, default=0, help="the port on loopback (default: a free one)"
    )
    parser.add_argument(
        "--no-open", action="store_true", help="do not open a browser; print how to reach the page"
    )
    parser.set_defaults(run=_console)
