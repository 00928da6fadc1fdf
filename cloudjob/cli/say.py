"""Messages on stderr and output on stdout."""

from __future__ import annotations

import sys

from cloudjob.errors import CloudJobError, NotReady, SpecError

_SPEC_HINT = "`cloudjob submit --help` lists the options, `cloudjob docs job-file` every key"


def print_error(error: CloudJobError) -> None:
    """Print every problem of an error with its hint."""
    if isinstance(error, SpecError):
        for problem in error.problems:
            say(f"error: {problem}")
        say(f"hint: {error.hint or _SPEC_HINT}")
    elif isinstance(error, NotReady):
        for found, hint in error.problems:
            say(f"error: {found}")
            if hint:
                say(f"hint: {hint}")
    else:
        say(f"error: {error.message}")
        _hint(error)


def size(size_bytes: int) -> str:
    """Return a number of bytes with its unit."""
    from cloudjob.package.messages import size_text

    return size_text(size_bytes)


def count(number: int, noun: str) -> str:
    """Return how many there are: ``1 node``, ``2 nodes``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def print_json(value: object) -> None:
    """Print a value as JSON, in one line."""
    import json

    print(json.dumps(value))


def printable(text: str) -> str:
    """Return ``text`` on one line, without characters that control a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def print_name(name: str) -> None:
    """Print the name of a file: its bytes for a file or a pipe, one safe line for a terminal."""
    if sys.stdout.isatty():
        print(printable(name))
    else:
        sys.stdout.buffer.write(name.encode("utf-8", "surrogateescape") + b"\n")


def say(text: str) -> None:
    """Write a message to stderr; what is not printable in it is escaped."""
    show("\n".join(printable(line) for line in text.split("\n")) + "\n")


def show(text: str) -> None:
    """Write to stderr, whether or not anybody reads it."""
    # There is no stderr in a process that was started with it closed.
    if not text or sys.stderr is None:
        return
    try:
        sys.stderr.write(text.encode("utf-8", "backslashreplace").decode("utf-8"))
        sys.stderr.flush()
    except OSError:
        pass  # nobody reads stderr any more; the job continues


def print_library_log() -> None:
    """Print what the library logs, such as a service that it waits for."""
    import logging

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(record.getMessage())

    logger = logging.getLogger("cloudjob")
    if all(isinstance(handler, logging.NullHandler) for handler in logger.handlers):
        logger.addHandler(Handler())


def _hint(error: CloudJobError) -> None:
    if error.hint:
        say(f"hint: {error.hint}")
