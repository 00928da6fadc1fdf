"""Messages on stderr and output on stdout."""

from __future__ import annotations

import os
import re
import sys

from cloudjob import library_log
from cloudjob.errors import CloudJobError, NotReady, SpecError
from cloudjob.model.text import one_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

    from cloudjob import Progress

_SPEC_HINT = "`cloudjob submit --help` lists the options, `cloudjob docs job-file` every key"

# Colours of a message's first word, or of the state of a job, by word (ECMA-48).
_COLOURS = {
    "error:": "1;31",
    "warning:": "1;33",
    "hint:": "36",
    "SUCCEEDED": "32",
    "FAILED": "1;31",
    "CANCELLED": "33",
}
_COLOURED = r"^(?:error|warning|hint):|(?<=: )(?:SUCCEEDED|FAILED|CANCELLED)\b"


def print_error(error: CloudJobError) -> None:
    """Print every problem of an error with its hint."""
    if isinstance(error, SpecError):
        for problem in error.problems:
            print_message(f"error: {problem}")
        print_message(f"hint: {error.hint or _SPEC_HINT}")
    elif isinstance(error, NotReady):
        for what, hint in error.problems:
            print_message(f"error: {what}", hint)
    else:
        print_message(f"error: {error.message}", error.hint)


def print_json(value: object) -> None:
    """Print a value as JSON, in one line."""
    import json

    print(json.dumps(value))


def print_progress(progress: Progress) -> None:
    """Print a message of the library with its hint."""
    kind = "warning: " if progress.kind == "warning" else ""
    print_message(f"{kind}{progress.message}", progress.hint)


def print_name(name: str) -> None:
    """Print the name of a file in one line: its bytes to a file or pipe, escaped to a terminal.

    A newline in the name is escaped everywhere, so that each line is a name.
    """
    if sys.stdout.isatty():
        print(one_line(name))
    else:
        line = name.replace("\n", "\\n")
        sys.stdout.buffer.write(line.encode("utf-8", "surrogateescape") + b"\n")


def print_message(text: str, hint: str = "") -> None:
    """Write a message and a hint to stderr, with unprintable characters escaped."""
    text = f"{text}\nhint: {hint}" if hint else text
    lines = [one_line(line) for line in text.split("\n")]
    if has_colours(2):
        lines = [_coloured(line) for line in lines]
    write_stderr("\n".join(lines) + "\n")


def has_colours(descriptor: int) -> bool:
    """Whether to use colours, by ``NO_COLOR``, ``FORCE_COLOR``, ``TERM`` and the descriptor."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return os.isatty(descriptor) and os.environ.get("TERM") not in ("dumb", "unknown", None)


def _coloured(line: str) -> str:
    return re.sub(_COLOURED, lambda word: f"\x1b[{_COLOURS[word[0]]}m{word[0]}\x1b[0m", line)


def do_nothing() -> None:
    """Do nothing."""


# Called before a message is written, to remove lines that change in place.
before_message: Callable[[], object] = do_nothing


def write_stderr(text: str) -> None:
    """Write to stderr; ignore a closed stderr."""
    before_message()
    # stderr is None in a process that was started with it closed.
    if not text or sys.stderr is None:
        return
    try:
        sys.stderr.write(text.encode("utf-8", "backslashreplace").decode("utf-8"))
        sys.stderr.flush()
    except OSError:
        pass  # the reader has closed stderr; the job continues


def print_library_log() -> None:
    """Print the library's log messages, such as the service it is waiting for."""
    library_log.new_handler = _new_handler


def _new_handler() -> logging.Handler:
    import logging

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            print_message(record.getMessage())

    return Handler()
