"""The command line: parses, calls, prints and exits; nothing else in cloudjob prints."""

from __future__ import annotations

import argparse
import os
import sys

from cloudjob.cli.parser import parser_of, split_at_script
from cloudjob.cli.say import hear_library, tell_error
from cloudjob.errors import CloudJobError

# What a command needs it imports itself, so that `cloudjob --help` costs next to nothing.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_INTERRUPTED = 130
_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except CloudJobError as error:
        tell_error(error)
        return error.exit_code
    except BrokenPipeError:
        # The reader has gone (`| head`); Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _BROKEN_PIPE
    except MemoryError:
        hint = "`ulimit -v` shows this shell's limit"
        tell_error(CloudJobError("running cloudjob: there is not enough memory", hint=hint))
        return CloudJobError.exit_code
    except (RuntimeError, BlockingIOError) as error:
        if isinstance(error, RuntimeError) and "can't start new thread" not in str(error):
            raise
        hint = "`ulimit -u` shows this shell's limit on processes"
        tell_error(CloudJobError(f"running cloudjob: {_lowered(error)}", hint=hint))
        return CloudJobError.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED


def _lowered(error: Exception) -> str:
    return (getattr(error, "strerror", "") or str(error)).lower()


def _run(words: list[str]) -> int:
    parser = parser_of(words[0] if words else "")
    # What follows the script is the script's, byte for byte; argparse would take "--" from it.
    own, rest = split_at_script(parser, words)
    options = parser.parse_args(own)
    if options.command is None:
        parser.print_help()
        return 2
    options.rest = rest
    hear_library()
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)
