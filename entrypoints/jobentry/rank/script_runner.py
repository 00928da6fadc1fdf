"""Runs a Python script as Python does, and reports a failure at once.

With plain mpirun, ``sys.exit(3)`` or an uncaught exception after MPI_Init hangs the job: the rank
waits in MPI_Finalize for the other ranks, which wait for it (tried on 4.1.4 and 5.0.11).
"""

from __future__ import annotations

import builtins
import os
import sys
import time

from jobentry.contract import names

TYPE_CHECKING = False
if TYPE_CHECKING:  # types and typing cost each rank milliseconds
    from types import ModuleType
    from typing import Any, Callable

# Seconds for a failed script to exit: enough for exit handlers, but MPI_Finalize is cut off.
LEAVE_S = 0.5
# Programs that do the work of a job whose script starts them.
_LAUNCHERS = (
    r"\b((?:python|pypy)[\d.]*|torchrun|msrun|horovodrun|mpirun|mpiexec|accelerate|deepspeed)\b"
)
# Seconds for PyTorch's threads to release their tensors.
_GLOO_S = 0.05


def main(argv: list[str]) -> None:
    """Run the script ``argv[0]`` with the other arguments, as the module ``__main__``."""
    end = int(os.environ.pop(names.CLOUDJOB_END_FD, "-1"))
    if end >= 0:
        os.set_inheritable(end, False)
    module = _become(argv)
    pid = os.getpid()
    started = _note_started() if os.environ.get(names.CLOUDJOB_STRICT) else []
    try:
        with open(argv[0], "rb") as file:
            text = file.read()
        # ``dont_inherit``: our ``annotations`` import must not apply to the script.
        exec(compile(text, module.__file__ or "", "exec", dont_inherit=True), module.__dict__)
    except SystemExit as error:
        # A forked child of the script, such as a data loader, also ends here, but must not report.
        if os.getpid() == pid:
            _exit(end, error, started)
        raise
    except BaseException as error:  # noqa: BLE001 (any exception ends the script)
        # Show only the frames of the script, before anything else happens.
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            _end_by_sigint()
        if os.getpid() == pid:
            _leave(end, 1, _line(error))
        sys.exit(1)
    else:
        _fail_with(end, started)
        _let_gloo_finish()


def _note_started() -> list[tuple[str, Callable[[], int | None]]]:
    """Note the commands that the script starts from now on, each with its exit code."""
    import subprocess

    found: list[tuple[str, Callable[[], int | None]]] = []
    system, start = os.system, subprocess.Popen.__init__

    def noted_system(command: Any) -> int:
        status = system(command)
        found.append((os.fsdecode(command), lambda: status >> 8 or -(status & 0x7F)))
        return status

    def noted_start(process: Any, args: Any, *others: Any, **named: Any) -> None:
        start(process, args, *others, **named)
        argv = args if isinstance(args, (list, tuple)) else [args]
        found.append((" ".join(map(os.fsdecode, argv)), process.poll))

    os.system = noted_system
    subprocess.Popen.__init__ = noted_start  # type: ignore[assignment]
    return found


def _fail_with(end: int, started: list[tuple[str, Callable[[], int | None]]]) -> None:
    """End with the first exit code other than 0 of a launcher or a Python program, if any."""
    import re

    for command, code_of in started:
        code = code_of() if re.search(_LAUNCHERS, command) else 0
        if code:
            code = code if code > 0 else 128 - code
            _leave(end, code, "exit code %d of %s" % (code, command[:300]))
            sys.exit(code)


def _exit(end: int, error: SystemExit, started: list[tuple[str, Callable[[], int | None]]]) -> None:
    """Handle ``sys.exit`` of the script: report a failure and exit; return after a success."""
    code = _code(error.code)
    if not code:
        _fail_with(end, started)
        _let_gloo_finish()
        return
    if not isinstance(error.code, int):
        # Python would print it later, too late for the last lines in the record.
        print(error.code, file=sys.stderr)  # noqa: T201 (as Python does)
    _leave(end, code, f"sys.exit({repr(error.code)[:500]})")
    sys.exit(code)


def _become(argv: list[str]) -> ModuleType:
    """Make this process look as if Python had been started with the script; return ``__main__``."""
    entry, sys.argv[:] = sys.argv[0], argv
    path = os.path.abspath(argv[0])
    if getattr(sys.flags, "safe_path", False):
        # With -P, Python does not add the script's folder, but the entry's own path is still there.
        if sys.path[:1] == [entry]:
            del sys.path[0]
    else:
        sys.path[0] = os.path.dirname(path)
    if os.environ.get(names.CLOUDJOB_EMULATED):
        sys.path.append(os.path.join(os.path.abspath(entry), "emulated"))
    module: ModuleType = type(sys)("__main__")
    # Absolute, as in Python 3.9 and later, so that it stays valid after a change of folder.
    module.__file__ = path
    module.__dict__.update(__annotations__={}, __builtins__=builtins, __cached__=None)
    from importlib.machinery import SourceFileLoader

    module.__loader__ = SourceFileLoader("__main__", path)
    module.__spec__ = None
    module.__package__ = None
    sys.modules["__main__"] = module
    # The user may have a module with the same name as ours.
    for name in [name for name in sys.modules if name.partition(".")[0] == "jobentry"]:
        del sys.modules[name]
    return module


def _let_gloo_finish() -> None:
    """Give PyTorch's threads time to take the interpreter lock before the interpreter shuts down.

    After a Gloo collective, one of them needs the lock to release tensors. If the script ends
    within milliseconds, the thread gets the lock only during shutdown and aborts the process: a
    complete job fails with SIGABRT (https://github.com/pytorch/pytorch/issues/190489).
    """
    if "torch.distributed" in sys.modules:
        time.sleep(_GLOO_S)


def _leave(end: int, code: int, message: str) -> None:
    """Report how the script ended, and limit the time until the process has exited."""
    from contextlib import suppress

    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    if end >= 0:
        text = "%d %.6f %s" % (code, time.time(), message)
        os.write(end, text.encode("utf-8", "backslashreplace")[:2000])
    _cut_off()


def _cut_off() -> None:
    import signal

    # The default action of SIGALRM ends the process in the kernel, even while C code hangs.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, LEAVE_S)


def _end_by_sigint() -> None:
    """End by SIGINT, so that the parent process sees the signal."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGINT)


def _code(code: object) -> int:
    """Return the exit code that Python derives from the argument of ``sys.exit``."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _line(error: BaseException) -> str:
    text = str(error).strip()
    name = type(error).__name__
    return f"{name}: {text.splitlines()[0]}" if text else name
