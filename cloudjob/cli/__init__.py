"""The command line: parses, calls, prints and exits; nothing else in cloudjob prints.

Start with ``parser.py``, which names the module of each command.
"""

from __future__ import annotations

import argparse
import errno
import gc
import io
import os
import sys

from cloudjob.cli.messages import print_error, print_library_log
from cloudjob.cli.parser import parser_of, split_at_script
from cloudjob.errors import CloudJobError, UsageError
from cloudjob.model.text import one_line
from jobentry.system import linux

# Each command imports its own modules, so that `cloudjob --help` costs next to nothing.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_INTERRUPTED = 130
_BROKEN_PIPE = 141
_STDERR = 2
# Files that a command may have open at once; a submit of one process opens 30.
_LEAST_FILES = 64
# New objects after which cycles are looked for; Python does so after 700.
_GARBAGE = 10_000


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    # Modules and values of a command make few cycles; looking for them took 5 % of a submit.
    gc.set_threshold(_GARBAGE)
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_standard_streams()
    _set_home()
    if "_ARGCOMPLETE" in os.environ:
        from cloudjob.cli.commands import completion

        completion.answer()
    try:
        linux.save_address_space()
        code = _run(arguments)
        # Python's own flush at the end would ignore a full disk.
        sys.stdout.flush()
        return code
    except CloudJobError as error:
        print_error(error)
        return error.exit_code
    except BrokenPipeError:
        # The reader has closed the pipe (`| head`).
        _discard_output()
        return _BROKEN_PIPE
    except (MemoryError, SystemError, ImportError, RuntimeError, OSError) as error:
        reason = _too_long(error) or _no_folder(error) or _full(error) or _shortage(error)
        if reason is None:
            raise
        print_error(reason)
        return reason.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED


def _open_standard_streams() -> None:
    """Open each closed standard stream, as a service or `>&-` may close them.

    The next file that is opened would get its number, and with it what is meant for a terminal.
    """
    # The lowest free number is used first.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    # Python has none for a stream that was closed.
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    # Characters that the locale lacks are escaped, as on stderr.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _need_files() -> None:
    """Check that this shell lets a command open the files that it needs.

    Otherwise the first file too many would be to blame, here or on a node, whatever it is.
    """
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and limit < _LEAST_FILES:
        raise CloudJobError(
            f"running cloudjob: this shell allows only {limit} open files",
            hint="`ulimit -n 1024` allows more, if `ulimit -Hn` does",
        )


def _set_home() -> None:
    """Set ``HOME`` as container engines do, for a user who has none in the list of users."""
    if not os.path.isabs(os.environ.get("HOME", "")):  # noqa: PTH117 (no Path is needed)
        os.environ.pop("HOME", None)
    # ``Path.expanduser`` would raise.
    if os.path.expanduser("~") == "~":  # noqa: PTH111
        os.environ["HOME"] = "/"


def _too_long(error: Exception) -> CloudJobError | None:
    """Return the error of a path with a name that is too long; None for any other error."""
    if getattr(error, "errno", None) != errno.ENAMETOOLONG:
        return None
    name = one_line(str(getattr(error, "filename", "") or "")[:200])
    return UsageError(f"reading {name}…: the name is too long", hint="is the path right?")


def _no_folder(error: Exception) -> CloudJobError | None:
    """Return the error of a current folder that was removed; None for any other error."""
    if not isinstance(error, FileNotFoundError) or error.filename is not None:
        return None
    try:
        os.getcwd()  # noqa: PTH109 (only whether it works)
    except FileNotFoundError:
        return UsageError(
            "reading the current folder: it was removed", hint="cd to a folder that exists"
        )
    return None


def _full(error: Exception) -> CloudJobError | None:
    """Return the error of a file or an output without space; None for any other error."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if not isinstance(error, OSError) or error.errno not in full:
        return None
    name = one_line(str(error.filename)[:200]) if error.filename else ""
    if not name:
        # It may have been the standard output.
        _discard_output()
        name = "a file or the output of this command"
    hint = "is the disk or your quota full, or `ulimit -f` too low? a job that was started goes on"
    return CloudJobError(f"writing {name}: {os.strerror(error.errno).lower()}", hint=hint)


def _discard_output() -> None:
    """Discard what is not written yet; otherwise Python's final flush fails, too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _shortage(error: Exception) -> CloudJobError | None:
    """Return the error of a resource limit of this shell; None for any other error."""
    text = (getattr(error, "strerror", "") or str(error)).lower()
    # The system's loader has no error class of its own: it raises ImportError. Without memory even
    # for an exception, CPython raises SystemError: "error return without exception set".
    is_memory = isinstance(error, MemoryError) or "without exception set" in text
    is_memory |= getattr(error, "errno", None) == errno.ENOMEM
    if is_memory or "failed to map segment" in text:
        hint = "`ulimit -v` shows this shell's limit"
        return CloudJobError("running cloudjob: there is not enough memory", hint=hint)
    if isinstance(error, BlockingIOError) or "can't start new thread" in text:
        hint = "`ulimit -u` shows this shell's limit on processes"
        return CloudJobError(f"running cloudjob: {text}", hint=hint)
    return None


def _run(arguments: list[str]) -> int:
    parser = parser_of(arguments[0] if arguments else "")
    # The arguments after the script are passed on unchanged; argparse would remove "--" from them.
    our_arguments, rest = split_at_script(parser, arguments)
    options = parser.parse_args(our_arguments)
    if options.command is None:
        parser.print_help()
        return 2
    options.rest, options.is_marked = rest, "--" in our_arguments
    from cloudjob.home import file_systems, home

    print_library_log()
    _need_files()
    file_systems.watch(home())
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)
