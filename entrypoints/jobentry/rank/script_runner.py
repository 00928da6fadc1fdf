"""Runs a Python script as Python does, and says at once when it ends badly.

``sys.exit(3)`` or an uncaught exception after MPI_Init hangs bare mpirun for ever: the interpreter
waits in MPI_Finalize for the other ranks, which wait for this one (tried on 4.1.4 and 5.0.11).
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

# How long a script that failed may take to leave: its exit handlers run, MPI_Finalize is cut off.
LEAVE_S = 0.5
# How long PyTorch's threads have to give back what they hold.
_GLOO_S = 0.05


def main(words: list[str]) -> None:
    """Run the script ``words[0]`` with the arguments that follow, as the module ``__main__``."""
    end = int(os.environ.pop(names.CLOUDJOB_END_FD, "-1"))
    if end >= 0:
        os.set_inheritable(end, False)
    module = _become(words)
    pid = os.getpid()
    try:
        with open(words[0], "rb") as file:
            text = file.read()
        # Not with our own ``annotations`` import, which would make the script's annotations text.
        exec(compile(text, module.__file__ or "", "exec", dont_inherit=True), module.__dict__)
    except SystemExit as error:
        # A forked child of the script (a data loader) ends here too; it must not speak for us.
        if os.getpid() == pid:
            _exit(end, error)
        raise
    except BaseException as error:  # noqa: BLE001 (whatever it is, it ends the script)
        # A user sees the frames of the script only, and before anything else happens.
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            _end_by_sigint()
        if os.getpid() == pid:
            _leave(end, 1, _line(error))
        sys.exit(1)
    else:
        _let_gloo_go()


def _exit(end: int, error: SystemExit) -> None:
    """Say with what the script has called ``sys.exit``, and leave, if it is a failure."""
    code = _code(error.code)
    if not code:
        _let_gloo_go()
        return
    if not isinstance(error.code, int):
        # Python would print it on its way out, too late for the last lines of the record.
        print(error.code, file=sys.stderr)  # noqa: T201 (as Python does)
    _leave(end, code, f"sys.exit({repr(error.code)[:500]})")
    sys.exit(code)


def _become(words: list[str]) -> ModuleType:
    """Make this process look as if Python had been started with the script."""
    entry, sys.argv[:] = sys.argv[0], words
    path = os.path.abspath(words[0])
    if getattr(sys.flags, "safe_path", False):
        # Python then leaves out the folder of a script, but not the entry's own.
        if sys.path[:1] == [entry]:
            del sys.path[0]
    else:
        sys.path[0] = os.path.dirname(path)
    module: ModuleType = type(sys)("__main__")
    # Absolute, as Python itself makes it since 3.9, so that it holds when the folder is changed.
    module.__file__ = path
    module.__dict__.update(__annotations__={}, __builtins__=builtins, __cached__=None)
    from importlib.machinery import SourceFileLoader

    module.__loader__ = SourceFileLoader("__main__", path)
    module.__spec__ = None
    module.__package__ = None
    sys.modules["__main__"] = module
    # A module of the user may have the name of one of ours.
    for name in [name for name in sys.modules if name.partition(".")[0] == "jobentry"]:
        del sys.modules[name]
    return module


def _let_gloo_go() -> None:
    """Let PyTorch's threads have Python's lock before the interpreter begins to end.

    After a collective of Gloo one of them gives tensors back, and needs the lock for it. A script
    that ends within milliseconds has never let go of it, and then the thread aborts the process:
    a job that was done fails with SIGABRT (https://github.com/pytorch/pytorch/issues/190489).
    """
    if "torch.distributed" in sys.modules:
        time.sleep(_GLOO_S)


def _leave(end: int, code: int, message: str) -> None:
    """Say how the script ended; from now on the process has only a short time to be gone."""
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

    # The default action of SIGALRM ends the process in the kernel, also while C code hangs.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, LEAVE_S)


def _end_by_sigint() -> None:
    """End as an interrupted program does, so that whoever waits sees the signal."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGINT)


def _code(code: object) -> int:
    """The exit code that Python makes of what ``sys.exit`` was given."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _line(error: BaseException) -> str:
    text = str(error).strip()
    name = type(error).__name__
    return f"{name}: {text.splitlines()[0]}" if text else name
