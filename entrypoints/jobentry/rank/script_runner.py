"""Runs a Python script as Python does, and reports a failure at once.

With plain mpirun, ``sys.exit(3)`` or an uncaught exception after MPI_Init hangs the job: the rank
waits in MPI_Finalize for the other ranks, which wait for it (tried on 4.1.4 and 5.0.11).
"""

from __future__ import annotations

# Not ``signal``, of which the script's folder may have its own: imported once the script runs, that
# is found; imported before, Python's would hide it from the script.
import _signal as signal  # type: ignore[import-not-found]
import builtins
import os
import sys
import time

from jobentry.contract import names
from jobentry.rank import crash_file

TYPE_CHECKING = False
if TYPE_CHECKING:  # types and typing cost each rank milliseconds
    from types import ModuleType
    from typing import Any, Callable

# Seconds for the threads and exit handlers of a failed script if the job has no grace period.
_LEAVE_S = 10.0
# The same if it has loaded an MPI library: enough for most, but MPI_Finalize is cut off.
_LEAVE_MPI_S = 0.5
# Programs that do the work of a job whose script starts them.
_LAUNCHERS = (
    r"\b((?:python|pypy)[\d.]*|torchrun|msrun|horovodrun|mpirun|mpiexec|accelerate|deepspeed)\b"
)
_MPI_LIBRARIES = (b"libmpi", b"libpmpi", b"libmpich")
# Seconds for PyTorch's threads to release their tensors.
_GLOO_S = 0.05


def main(argv: list[str]) -> None:
    """Run the script ``argv[0]`` with the other arguments, as the module ``__main__``."""
    end = _EndReport(int(os.environ.pop(names.CLOUDJOB_END_FD, "-1")))
    crash_file.enable(os.environ.get(names.CLOUDJOB_NODE_DIR, ""))
    started = _note_started() if os.environ.get(names.CLOUDJOB_STRICT) else []
    module = _become(argv)
    pid = os.getpid()
    error = _run(argv[0], module)
    # Not within an ``except``, as hooks and exit handlers must not see an exception being handled.
    # A forked child of the script, such as a data loader, also ends here, but must not report.
    is_child = os.getpid() != pid
    if isinstance(error, SystemExit):
        if not is_child:
            _exit(end, error, started)
        raise SystemExit(error.code)
    if error is not None:
        _show(error)
        if isinstance(error, KeyboardInterrupt):
            _end_by_sigint()
        if not is_child:
            _leave(end, 1, _line(error))
        sys.exit(1)
    if not is_child:
        _fail_with(end, started)
        _let_gloo_finish(end)


class _EndReport:
    """The pipe to the wrapper, which is told through it how the script has ended."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
            self._inode = os.fstat(descriptor).st_ino

    def send(self, code: int, message: str) -> None:
        """Send exit code, time and message, unless the script has closed the pipe.

        Its number may by now be that of a file of the script.
        """
        text = "%d %.6f %s" % (code, time.time(), message)
        try:
            if self._descriptor >= 0 and os.fstat(self._descriptor).st_ino == self._inode:
                os.write(self._descriptor, text.encode("utf-8", "backslashreplace")[:2000])
        except OSError:
            pass


def _run(script: str, module: ModuleType) -> BaseException | None:
    """Run the script as ``module``; return its exception, with the frames of the script alone."""
    try:
        with open(script, "rb") as file:
            text = file.read()
        # ``dont_inherit``: our ``annotations`` import must not apply to the script.
        exec(compile(text, module.__file__ or "", "exec", dont_inherit=True), module.__dict__)
    except SystemExit as error:
        # Without its traceback, which would keep the objects of the script's functions alive.
        error_of_script = _Exit(error.code)
        error_of_script.reason = _reason(error) if _code(error.code) else ""
        return error_of_script
    except BaseException as error:  # noqa: BLE001 (any exception ends the script)
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        return error
    return None


class _Exit(SystemExit):
    """The end of a script by ``sys.exit``, with the reason if it is known."""

    reason = ""


def _reason(error: SystemExit) -> str:
    """Return why a script has called ``sys.exit``, as the rest of a sentence, or "".

    Libraries such as ``absl`` and ``hydra`` print what is wrong with the arguments, and call it
    while they handle the exception that says so.
    """
    # Not our own frame, whose variables would keep the exception and the script's objects alive.
    traceback = error.__traceback__ and error.__traceback__.tb_next
    while traceback is not None:
        frame = traceback.tb_frame
        function = frame.f_globals.get("__name__"), frame.f_code.co_name
        if function == ("argparse", "error"):
            return ": error: {}".format(frame.f_locals.get("message", ""))
        if function == ("click.core", "main"):
            # click 8.5 exits after it has handled the exception, which this method shows.
            report: Any = getattr(frame.f_locals.get("report"), "__self__", None)
            if hasattr(report, "format_message"):
                return f": error: {report.format_message()}"
        traceback = traceback.tb_next
    handled = None if error.__suppress_context__ else error.__context__
    return "" if handled is None else " while handling " + _line(handled)


def _show(error: BaseException) -> None:
    """Show an uncaught exception as Python does: by ``sys.excepthook``, which may fail itself."""
    values = (type(error), error, error.__traceback__)
    sys.last_type, sys.last_value, sys.last_traceback = values
    if sys.version_info >= (3, 12):
        setattr(sys, "last_exc", error)  # noqa: B010 (Python 3.8 has none)
    hook = getattr(sys, "excepthook", None)
    if hook is None:
        print("sys.excepthook is missing", file=sys.stderr)  # noqa: T201 (as Python does)
        sys.__excepthook__(*values)
        return
    failure: BaseException | None = None
    try:
        hook(*values)
    except SystemExit:
        raise
    except BaseException as error_of_hook:  # noqa: BLE001 (the script's own function)
        failure = error_of_hook
        failure.__traceback__ = failure.__traceback__ and failure.__traceback__.tb_next
    if failure is not None:
        print("Error in sys.excepthook:", file=sys.stderr)  # noqa: T201
        sys.__excepthook__(type(failure), failure, failure.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)  # noqa: T201
        sys.__excepthook__(*values)


def _note_started() -> list[tuple[str, Callable[[], int | None]]]:
    """Note the commands that the script starts from now on, each with its exit code."""
    import subprocess

    programs: list[tuple[str, Callable[[], int | None]]] = []
    system, start = os.system, subprocess.Popen.__init__

    def noted_system(command: Any) -> int:
        status = system(command)
        programs.append((os.fsdecode(command), lambda: status >> 8 or -(status & 0x7F)))
        return status

    def noted_start(process: Any, args: Any, *others: Any, **named: Any) -> None:
        start(process, args, *others, **named)
        argv = args if isinstance(args, (list, tuple)) else [args]
        programs.append((" ".join(map(os.fsdecode, argv)), process.poll))

    os.system = noted_system
    subprocess.Popen.__init__ = noted_start  # type: ignore[assignment]
    return programs


def _fail_with(end: _EndReport, started: list[tuple[str, Callable[[], int | None]]]) -> None:
    """End with the first exit code other than 0 of a launcher or a Python program, if any."""
    if started:
        import re

    for command, code_of in started:
        code = code_of() if re.search(_LAUNCHERS, command) else 0
        if code:
            code = code if code > 0 else 128 - code
            _leave(end, code, "exit code %d of %s" % (code, command[:300]))
            sys.exit(code)


def _exit(
    end: _EndReport, error: SystemExit, started: list[tuple[str, Callable[[], int | None]]]
) -> None:
    """Handle ``sys.exit`` of the script: report a failure and exit; return after a success."""
    code = _code(error.code)
    if not code:
        _fail_with(end, started)
        _let_gloo_finish(end)
        return
    if not isinstance(error.code, int):
        # Python would print it later, too late for the last lines in the record.
        print(error.code, file=sys.stderr)  # noqa: T201 (as Python does)
    reason = getattr(error, "reason", "")
    text = f"sys.exit({repr(error.code)[:500]})"
    _leave(end, code, text + reason)
    sys.exit(code)


def _become(argv: list[str]) -> ModuleType:
    """Make this process look as if Python had been started with the script; return ``__main__``."""
    entry = sys.argv[0]
    if entry.endswith("/__main__.py"):
        entry = os.path.dirname(entry)
    sys.argv[:] = argv
    # Relative before Python 3.9, as Python's own.
    path = os.path.abspath(argv[0]) if sys.version_info >= (3, 9) else argv[0]
    if getattr(sys.flags, "safe_path", False):
        # With -P, Python does not add the script's folder, but the entry's own path is still there.
        if sys.path[:1] == [entry]:
            del sys.path[0]
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    if os.environ.get(names.CLOUDJOB_EMULATED):
        sys.path.append(os.path.join(os.path.abspath(entry), "emulated"))
    # Programs that start themselves again read it. Python has it since 3.10.
    original = getattr(sys, "orig_argv", [])
    original[len(original) - len(argv) - 2 :] = argv
    module = _new_main(path)
    sys.modules["__main__"] = module
    # The user may have a module with the same name as ours.
    for name in [name for name in sys.modules if name.partition(".")[0] == "jobentry"]:
        del sys.modules[name]
    ours = (entry, os.path.abspath(entry))
    for name in [name for name in sys.path_importer_cache if name.startswith(ours)]:
        del sys.path_importer_cache[name]
    return module


def _new_main(path: str) -> ModuleType:
    """Return an empty ``__main__`` for a script, with the names that this Python gives to one.

    They are those of our own ``__main__``: ``__annotations__``, for example, until Python 3.13.
    """
    from importlib.machinery import SourceFileLoader

    module: ModuleType = type(sys)("__main__")
    values = {
        **module.__dict__,
        "__loader__": SourceFileLoader("__main__", path),
        "__annotations__": {},
        "__builtins__": builtins,
        "__file__": path,
        "__cached__": None,
    }
    module.__dict__.clear()
    for name in sys.modules["__main__"].__dict__:
        if name in values:
            module.__dict__[name] = values[name]
    return module


def _let_gloo_finish(end: _EndReport) -> None:
    """Give PyTorch's threads time to take the interpreter lock before the interpreter shuts down.

    Before that, report that the script has ended. Other ranks fail as soon as its connections are
    closed, and this process may be ended because of them long before it has exited by itself.

    After a Gloo collective, one of them needs the lock to release tensors. If the script ends
    within milliseconds, the thread gets the lock only during shutdown and aborts the process: a
    complete job fails with SIGABRT (https://github.com/pytorch/pytorch/issues/190489).
    """
    if "torch.distributed" in sys.modules:
        end.send(0, "")
        time.sleep(_GLOO_S)


def _leave(end: _EndReport, code: int, message: str) -> None:
    """Report how the script ended, and limit the time until the process has exited."""
    for stream in (sys.stdout, sys.stderr):
        try:  # noqa: SIM105 (contextlib may be a module of the script)
            stream.flush()
        except (AttributeError, OSError, ValueError):
            pass
    end.send(code, message)
    _cut_off()


def _cut_off() -> None:
    # The default action of SIGALRM ends the process in the kernel, even while C code hangs.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, _leave_s())


def _leave_s() -> float:
    try:
        with open("/proc/self/maps", "rb") as maps:
            names_of_files = [line.rpartition(b"/")[2] for line in maps]
        if not any(name.startswith(_MPI_LIBRARIES) and b".so" in name for name in names_of_files):
            return float(os.environ.get(names.CLOUDJOB_GRACE_S) or _LEAVE_S)
    except (OSError, ValueError):
        pass
    return _LEAVE_MPI_S


def _end_by_sigint() -> None:
    """End by SIGINT, so that the parent process sees the signal."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGINT)


def _code(code: object) -> int:
    """Return the exit code that Python derives from the argument of ``sys.exit``."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _line(error: BaseException) -> str:
    name = type(error).__name__
    try:
        text = str(error).strip()
    except Exception:  # noqa: BLE001 (the script's own method)
        return name
    if isinstance(error, ModuleNotFoundError) and sys.executable:
        text = f"{text.splitlines()[0]} (Python: {sys.executable})" if text else ""
    return f"{name}: {text.splitlines()[0]}" if text else name
