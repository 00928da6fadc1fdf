"""The rank wrapper: gives a rank its exact environment and log, and reports how it ended.

The launcher starts this process for each rank, and it starts the user's program. It imports as
little as possible, as every rank pays for it.
"""

from __future__ import annotations

import os
import select
import sys
import time

from jobentry.contract import names, variables
from jobentry.system import linux

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing costs each rank seven milliseconds, and the enums of signal four
    import signal
    from types import FrameType
    from typing import Callable, Mapping
else:
    import _signal as signal

# Variables set by the remote shell's session; a rank gets those of its node's entry, or none.
_SESSION = frozenset(
    [
        "_",
        "MAIL",
        "OLDPWD",
        "SHLVL",
        "SSH_CLIENT",
        "SSH_CONNECTION",
        "SSH_TTY",
        "LANG",
        "SHELL",
        "USER",
        "LOGNAME",
    ]
)
# Variables in which launchers give a rank's number; ours first, as a user may set the others.
_RANK = (names.CLOUDJOB_RANK, "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "RANK", "RANK_ID")
_ASKS_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SIGNALS = (*_ASKS_TO_END, signal.SIGUSR1, signal.SIGUSR2)
# A process that the program left behind and that ends with one of these signals in the first second
# was ended by the program itself, or by a pipe that closed with it; this is not a failure.
_ENDING = (*_ASKS_TO_END, signal.SIGKILL, signal.SIGPIPE)
_SETTLE_S = 1.0
_RECHECK_S = 5.0


def main(argv: list[str]) -> int:
    """Run the program of one rank and return its exit code."""
    environ = os.environ
    rank = rank_of(environ)
    environment = rank_environment(environ, read_node_env(environ))
    node_dir = environ.get(names.CLOUDJOB_NODE_DIR, "")
    _wait_for_workers(node_dir)
    if _is_stopping(node_dir):
        ended_by_us: int = 128 + signal.SIGTERM
        return ended_by_us
    _enter_code(environment)
    problem = _open_output(node_dir, rank) or _apply_options(
        argv[: argv.index("--")], environment, rank
    )
    if problem:
        return _write_error(problem, 125)
    missing = [
        name
        for name in environment.get(names.CLOUDJOB_SECRET_NAMES, "").split()
        if name not in environment
    ]
    if missing:
        return _write_error("secret {} did not reach this node".format(", ".join(missing)), 125)
    return _run(program(argv), environment, rank, node_dir)


def rank_of(environ: Mapping[str, str]) -> int:
    """Return the number of the rank with this environment."""
    return next((int(environ[name]) for name in _RANK if environ.get(name)), 0)


def program(argv: list[str]) -> list[str]:
    """Return the command after ``--``, percent-decoded if ``--percent`` is given."""
    at = argv.index("--")
    command = argv[at + 1 :]
    if "--percent" in argv[:at]:
        command = [argument.replace("%3A", ":").replace("%25", "%") for argument in command]
    return command


def read_node_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of this node's entry; empty if there is no entry."""
    folder = environ.get(names.CLOUDJOB_NODE_DIR)
    if not folder:
        return {}
    try:
        with open(os.path.join(folder, "env"), "rb") as file:
            return variables.load(file.read())
    except OSError:
        return {}


def rank_environment(session: Mapping[str, str], node: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a rank.

    Args:
        session: The variables of this process: those of mpirun's daemon and those of the head.
        node: The variables of this node's entry, which win for those that differ between nodes.
    """
    result = dict(node)
    of_rank = names.PER_NODE.union(names.CHANGED_BY_OPEN_MPI)
    for name, value in session.items():
        if name.startswith(names.CLOUDJOB_EXACT_) or (name in _SESSION and node):
            continue
        if names.WITHOUT_DEVICES.get(name) == value:
            continue  # for mpirun and its daemons only
        if name not in of_rank or name not in node:
            result[name] = value
    for name, value in session.items():
        if name.startswith(names.CLOUDJOB_EXACT_):
            result[name[len(names.CLOUDJOB_EXACT_) :]] = value
    # As on the platform, printed lines appear at once, unless the user sets this variable.
    result.setdefault("PYTHONUNBUFFERED", "1")
    return result


def _apply_options(options: list[str], environment: dict[str, str], rank: int) -> str:
    """Change ``environment`` as the launcher's options ask; return an error message or ``""``."""
    if "--mpi-cluster" in options:
        # MindSpore's cluster on a CPU does not read the variables of mpirun.
        environment["MS_NODE_ID"] = environment["RANK_ID"] = str(rank)
        environment["DEVICE_ID"] = environment.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")
    if "--address" in options:
        from jobentry.system.addresses import address_of

        # MindSpore needs an address. Looked up only now, as a node may start before its head.
        name = options[options.index("--address") + 1]
        try:
            environment[name] = address_of(environment[name])
        except OSError as error:
            return f"looking up the head, {environment[name]}: {error}"
    return ""


def _enter_code(environment: Mapping[str, str]) -> None:
    """Change to this node's copy of the code; mpirun knows only the folder of the head."""
    folder = environment.get("PWD")
    if folder and os.path.isdir(folder):
        os.chdir(folder)


def _open_output(node_dir: str, rank: int) -> str:
    """Write the program's output to a pipe that the entry reads; return an error message or ``""``.

    A pipe, as a program that opens ``/dev/stderr`` by its path would truncate a file.
    """
    name = "output-%d-%d" % (rank, os.getpid())
    path = os.path.join(node_dir, name)
    try:
        if not node_dir or not os.path.exists(os.path.join(node_dir, "events")):
            return ""
        os.mkfifo(path, 0o600)
        # The program may start others as another user, which open /dev/stderr by its path, too.
        os.chmod(path, 0o622)
        is_read = _report(node_dir, name.replace("-", " "))
        # Returns when the entry has opened the other end.
        output = os.open(path, os.O_WRONLY | os.O_CLOEXEC) if is_read else os.dup(1)
        os.unlink(path)
    except OSError as error:
        return f"opening the output of rank {rank}: {path}: {error.strerror}"
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    return ""


def _run(command: list[str], environment: dict[str, str], rank: int, node_dir: str) -> int:
    """Run the program, report its start and end to the entry, and return its exit code."""
    signals: list[int] = []

    def note_signal(number: int, _frame: FrameType | None) -> None:
        # Not passed on: the whole process group gets the signal, and so does the program.
        if number in _ASKS_TO_END:
            signals.append(number)

    wake = _watch_signals(note_signal)
    note, end = os.pipe()
    os.set_inheritable(end, True)
    environment[names.CLOUDJOB_END_FD] = str(end)
    # A Python script waits for its children; a shell script may start processes and exit.
    leaves_rest = "--script" not in command[:3]
    child = _start(command, environment, adopts=leaves_rest)
    os.close(end)
    _report(node_dir, "start %d %d %d" % (rank, os.getpid(), child))
    statuses: list[int] = []
    noted = _wait_for_note(child, note, wake, statuses)
    were_signals = len(signals)
    if noted and noted[0]:
        # Reported at once, while exit handlers run, so that failures it causes on other ranks
        # are reported later.
        code, at_s, message = noted
        _report(node_dir, "fail %d %d 0 0 %s %s" % (rank, code, at_s, message))
        _wait_for_end(child, wake, statuses)
    else:
        code, number = _end_of(_wait_for_end(child, wake, statuses))
        if leaves_rest and not code:
            code, number = _wait_for_rest(node_dir, rank, wake)
        at_s = "%.6f" % time.time()
        if noted and (not code or signal.SIGTERM in signals[were_signals:]):
            # The script had ended well before it was asked to end.
            code, at_s = 0, noted[1]
            del signals[were_signals:]
        if code == 128 + signal.SIGKILL:
            import resource

            # Of the largest process; the kernel keeps it when it ends one for lack of memory.
            peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
            _report(node_dir, "peak %d %d" % (rank, peak_kib))
        _report(node_dir, "end %d %d %d %d %s " % (rank, code, number, bool(signals), at_s))
    if noted and noted[0]:
        _report(node_dir, "gone %d" % rank)
    _wait_while_stopping(node_dir)
    return code


def _watch_signals(handler: Callable[[int, FrameType | None], None]) -> int:
    """Install ``handler`` for all signals; return a descriptor that is readable after a signal."""
    wake, end = os.pipe()
    for descriptor in (wake, end):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(end)
    for number in (*_SIGNALS, signal.SIGCHLD):
        signal.signal(number, handler)
    return wake


def _start(command: list[str], environment: dict[str, str], *, adopts: bool = False) -> int:
    """Start the program; with ``adopts``, processes that it leaves behind become our children."""
    # mpirun may kill only this process; then its child must end as well.
    set_attribute = linux.prctl()
    parent = os.getpid()
    if adopts:
        set_attribute(linux.ADOPT_ORPHANS, 1)
    child = os.fork()
    if child:
        return child
    try:
        set_attribute(linux.DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            # The parent died before the prctl call, which therefore has no effect.
            os._exit(128 + signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        for number in (*_SIGNALS, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(command[0], command, environment)
    except FileNotFoundError:
        os._exit(_write_error(f"starting {command[0]}: not found on PATH", 127))
    except OSError as error:
        os._exit(_write_error(f"starting {command[0]}: {error.strerror}", 126))
    finally:
        os._exit(125)


def _wait_for_note(
    child: int, note: int, wake: int, statuses: list[int]
) -> tuple[int, str, str] | None:
    """Return exit code, time and message of a script that has ended; None if it reports none."""
    while True:
        ready = select.select([note, wake], [], [])[0]
        if note in ready:
            text = os.read(note, 4096).decode("utf-8", "replace")
            if not text:
                return None
            code, at_s, message = text.split(" ", 2)
            return int(code), at_s, message
        os.read(wake, 4096)
        if _has_ended(child, statuses):
            os.set_blocking(note, False)
            # A message written just before the end still counts.
            if not select.select([note], [], [], 0)[0]:
                return None


def _has_ended(child: int, statuses: list[int]) -> bool:
    """Whether the program has ended; its status can be read only once and is added to the list."""
    statuses += [status for process, status in _ended() if process == child]
    return bool(statuses)


def _ended() -> list[tuple[int, int]]:
    """Return process id and status of each child that has ended, including adopted ones."""
    processes: list[tuple[int, int]] = []
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            process = 0
        if not process:
            return processes
        processes.append((process, status))


def _wait_for_rest(node_dir: str, rank: int, wake: int) -> tuple[int, int]:
    """Wait for processes that the program left; return code and signal of the first failure."""
    first_failure = (0, 0)
    begun = time.monotonic()
    due_s = _SETTLE_S
    while True:
        is_late = time.monotonic() - begun > _SETTLE_S
        for _, status in _ended():
            code, number = _end_of(status)
            if code and not first_failure[0] and (is_late or number not in _ENDING):
                first_failure = (code, number)
        running = _left_running()
        if not running:
            return first_failure
        waited_s = time.monotonic() - begun
        if waited_s >= due_s:
            due_s = max(60.0, 2 * waited_s)
            _report(node_dir, "waits %d %d %s" % (rank, len(running), "; ".join(running[:3])))
        if select.select([wake], [], [], min(_RECHECK_S, max(0.01, due_s - waited_s)))[0]:
            os.read(wake, 4096)


def _left_running() -> list[str]:
    """Return the command lines of our children in our session.

    A child with its own session is a daemon, meant to outlive its parent, so it is not waited for.
    """
    command_lines = []
    us = (os.getpid(), os.getsid(0))
    for process in linux.processes():
        try:
            parent, _, session = linux.stat(process)[1:4]
            # Includes children that have just ended; the next call of ``_ended`` reaps them.
            if (int(parent), int(session)) == us:
                command_line = linux.read(process, "cmdline")[:200].replace(b"\0", b" ")
                command_lines.append(command_line.decode("utf-8", "replace").strip())
        except (OSError, ValueError):
            continue
    return command_lines


def _wait_for_end(child: int, wake: int, statuses: list[int]) -> int:
    while not _has_ended(child, statuses):
        select.select([wake], [], [])
        os.read(wake, 4096)
    return statuses[0]


def _end_of(status: int) -> tuple[int, int]:
    """Return the exit code and the signal (0 for none) of a wait status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return 128 + number, number
    return os.WEXITSTATUS(status), 0


def _report(node_dir: str, text: str) -> bool:
    """Send one line to the entry of this node, if there is one; return whether it was sent."""
    if not node_dir:
        return False
    try:
        events = os.open(os.path.join(node_dir, "events"), os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    # A write of less than PIPE_BUF bytes is atomic, so lines of several ranks do not mix.
    line = text.replace("\n", " ").encode("utf-8", "surrogateescape")[:2000] + b"\n"
    try:
        return os.write(events, line) > 0
    except OSError:
        return False
    finally:
        os.close(events)


def _wait_while_stopping(node_dir: str) -> None:
    """Wait while the entry stops the job: mpirun ends all ranks as soon as the first one exits."""
    while _is_stopping(node_dir):
        time.sleep(0.05)


def _wait_for_workers(node_dir: str) -> None:
    """Wait until the head has all its workers; it may start mpirun before."""
    while node_dir and os.path.exists(os.path.join(node_dir, "waiting")):
        time.sleep(0.02)


def _is_stopping(node_dir: str) -> bool:
    return bool(node_dir) and os.path.exists(os.path.join(node_dir, "stopping"))


def _write_error(text: str, code: int) -> int:
    sys.stderr.write(f"jobentry: {text}\n")
    sys.stderr.flush()
    return code
