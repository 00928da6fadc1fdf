"""The commands console and report: jobs in the browser, and one job in a file."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import threading
from typing import NoReturn

import cloudjob
from cloudjob.cli.messages import print_message, print_name
from cloudjob.cli.options import job_argument, port_number, state_home
from cloudjob.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def _extra(doing: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{doing}: the module {error.name} is missing", hint="pip install 'cloudjob[console]'"
        ) from error


def _console(options: argparse.Namespace) -> int:
    with _extra("starting the console"):
        from cloudjob.console.server import serve

    def ready(link: str, new_link: Callable[[], str]) -> None:
        port = link.split(":")[2].partition("/")[0]
        print_message(f"the console runs until Ctrl-C; open this link, which works once:\n  {link}")
        if options.no_open:
            print_message(f"from another machine: ssh -N -L {port}:127.0.0.1:{port} HOST")
        if os.isatty(0) and (options.no_open or not _browses_in_terminal()):
            print_message("for another browser: press Enter for a new link")
            # In the background, reading fails instead of stopping the console.
            signal.signal(signal.SIGTTIN, signal.SIG_IGN)
            threading.Thread(target=_print_links, args=(new_link,), daemon=True).start()

    # With the default handlers, the console's temporary folder would be left behind.
    signal.signal(signal.SIGTERM, _end)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        # The server shuts down cleanly on SIGTERM.
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        serve(state_home(), options.port, opens_browser=not options.no_open, on_ready=ready)
    except OSError as error:
        raise UsageError(
            f"starting the console: port {options.port}: {error.strerror}",
            hint="choose another one with --port, or 0 for a free one",
        ) from error
    return 0


def _browses_in_terminal() -> bool:
    """Whether the browser that opens reads from this terminal."""
    import webbrowser

    try:
        # Of its classes, this one is for text browsers; those with windows are derived from it.
        return type(webbrowser.get()) is webbrowser.GenericBrowser
    except webbrowser.Error:
        return False


def _print_links(new_link: Callable[[], str]) -> None:
    """Print a new link whenever the user presses Enter."""
    with contextlib.suppress(OSError):
        # ``sys.stdin`` has a lock that its reader would hold when the console ends.
        while os.read(0, 1024):
            print_message(f"this link works once:\n  {new_link()}")


def _end(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _report(options: argparse.Namespace) -> int:
    from pathlib import Path

    job = cloudjob.attach(options.job)
    path = Path(options.to or f"{job.id}.{'png' if options.png else 'html'}")
    with _extra("writing a report"):
        from cloudjob.console import report

        if options.png:
            data = report.draw(job)
        else:
            data = report.render(job).encode("utf-8", "backslashreplace")
    try:
        path.write_bytes(data)
    except OSError as error:
        raise UsageError(f"writing the report: {path}: {error.strerror}") from error
    print_name(str(path))
    return 0


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command ``report``."""
    parser.set_defaults(run=_report)
    job_argument(parser)
    parser.add_argument("--to", metavar="FILE", default="", help="the file to write")
    text = "write an image of the failure, timeline and charts; needs Chromium, Chrome or Edge"
    parser.add_argument("--png", action="store_true", help=text)


def add_console(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command ``console``."""
    parser.add_argument(
        "--port", type=port_number, default=0, help="the port on loopback (default: a free one)"
    )
    parser.add_argument(
        "--no-open", action="store_true", help="do not open a browser; print how to reach the page"
    )
    parser.set_defaults(run=_console)
