"""The door of one rank: its exact environment, its log byte for byte, and an end that is seen.

mpirun starts this once a rank, and this starts the user's program. It imports next to nothing:
what it costs, every rank pays.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

from jobentry.contract import names
from jobentry.linux import ADOPT_ORPHANS, DIE_WITH_PARENT, prctl

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing costs each rank seven milliseconds
    from types import FrameType
    from typing import Callable, Mapping

# Variables of the remote shell's session; a rank has those of its node's entry, or none.
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
# How launchers number a rank, our own word first: a user may have set one of the others.
_RANK = (names.CLOUDJOB_RANK, "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "RANK", "RANK_ID")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Of what a program leaves behind, that which ends with it: who ends so within the first second was
# ended by the program, or by the end of what it wrote to.
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL, signal.SIGPIPE)
_SECOND_S = 1.0
_LOOK_S = 5.0
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


def main(words: list[str]) -> int:
    """Run the program of one rank and return its exit code."""
    environ = os.environ
    rank = next((int(environ[name]) for name in _RANK if environ.get(name)), 0)
    environment = rank_environment(environ, read_node_env(environ))
    node_dir = environ.get(names.CLOUDJOB_NODE_DIR, "")
    _wait(node_dir)
    if _is_stopping(node_dir):
        ended_by_us: int = 128 + signal.SIGTERM
        return ended_by_us
    _enter_code(environment)
    _open_log(environment, rank)
    fault = _obey(words[: words.index("--")], environment, rank)
    if fault:
        return _say(fault, 125)
    missing = [
        name
        for name in environment.get(names.CLOUDJOB_SECRET_NAMES, "").split()
        if name not in environment
    ]
    if missing:
        return _say("secret {} did not reach this node".format(", ".join(missing)), 125)
    return _run(program(words), environment, rank, node_dir)


def program(words: list[str]) -> list[str]:
    """Return the command that stands behind ``--``, without the percent signs (see launchers)."""
    at = words.index("--")
    found = words[at + 1 :]
    if "--percent" in words[:at]:
        found = [word.replace("%3A", ":").replace("%25", "%") for word in found]
    return found


def read_node_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that the entry of this node has, empty when there is no entry."""
    folder = environ.get(names.CLOUDJOB_NODE_DIR)
    if not folder:
        return {}
    try:
        with open(os.path.join(folder, "env"), "rb") as file:
            data = file.read()
    except OSError:
        return {}
    pairs = (os.fsdecode(item).partition("=") for item in data.split(b"\0") if item)
    return {name: value for name, _, value in pairs}


def rank_environment(session: Mapping[str, str], node: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a rank.

    Args:
        session: What mpirun's daemon gave to this process: its own variables, and the head's.
        node: What the entry of this node has; the truth for what differs from node to node.
    """
    result = dict(node)
    own = names.PER_NODE.union(names.CHANGED_BY_OPEN_MPI)
    for name, value in session.items():
        if name.startswith(names.CLOUDJOB_EXACT_) or (name in _SESSION and node):
            continue
        if name not in own or name not in node:
            result[name] = value
    for name, value in session.items():
        if name.startswith(names.CLOUDJOB_EXACT_):
            result[name[len(names.CLOUDJOB_EXACT_) :]] = value
    # Lines show up when they are printed, as on the platform, unless the user set it otherwise.
    result.setdefault("PYTHONUNBUFFERED", "1")
    return result


def _obey(options: list[str], environment: dict[str, str], rank: int) -> str:
    """Do what a launcher wants of its doors; return what is in the way, empty when nothing is."""
    if "--mpi-cluster" in options:
        # MindSpore's cluster on a CPU does not know what mpirun tells its ranks.
        environment["MS_NODE_ID"] = environment["RANK_ID"] = str(rank)
        environment["DEVICE_ID"] = environment.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")
    if "--gloo" in options:
        # Which interface that is differs from node to node.
        interface = environment.get(names.GLOO_SOCKET_IFNAME)
        if interface:
            environment.setdefault("HOROVOD_GLOO_IFACE", interface)
    if "--address" in options:
        import socket

        # An address and not a name, and not before now: a node may have come up before its head.
        name = options[options.index("--address") + 1]
        try:
            environment[name] = socket.gethostbyname(environment[name])
        except OSError as error:
            return f"looking up the head, {environment[name]}: {error}"
    return ""


def _enter_code(environment: Mapping[str, str]) -> None:
    """Each node has its own copy of the code; mpirun knows only the head's folder."""
    folder = environment.get("PWD")
    if folder and os.path.isdir(folder):
        os.chdir(folder)


def _open_log(environment: Mapping[str, str], rank: int) -> None:
    """Send what the program writes to its log: a file keeps every byte, whoever dies."""
    folder = environment.get(names.CLOUDJOB_LOG_DIR)
    if folder:
        log = os.open(os.path.join(folder, "rank-%d.log" % rank), _WRITE, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)


def _run(command: list[str], environment: dict[str, str], rank: int, node_dir: str) -> int:
    """Start the program, tell the entry how it goes, and return its exit code."""
    was_told: list[int] = []

    def told(number: int, _frame: FrameType | None) -> None:
        # The signal came to the whole process group, so the program has it too.
        if number != signal.SIGCHLD:
            was_told.append(number)

    wake = _listen(told)
    note, end = os.pipe()
    os.set_inheritable(end, True)
    environment[names.CLOUDJOB_END_FD] = str(end)
    # A Python script waits for its own children; a shell script may start ranks and end.
    leaves_rest = "--script" not in command[:3]
    child = _start(command, environment, adopts=leaves_rest)
    os.close(end)
    _tell(node_dir, "start %d %d %d" % (rank, os.getpid(), child))
    statuses: list[int] = []
    noted = _wait_for_note(child, note, wake, statuses)
    if noted:
        # At once, while exit handlers run: what fails on other ranks because of it comes later.
        code, at_s, message = noted
        _tell(node_dir, "fail %d %d 0 0 %s %s" % (rank, code, at_s, message))
        _wait_for_end(child, wake, statuses)
    else:
        code, number = _end_of(_wait_for_end(child, wake, statuses))
        if leaves_rest and not code:
            code, number = _wait_for_rest(node_dir, rank, wake)
        values = (rank, code, number, bool(was_told), time.time())
        _tell(node_dir, "end %d %d %d %d %.6f " % values)
    if noted:
        _tell(node_dir, "gone %d" % rank)
    _hold(node_dir)
    return code


def _listen(told: Callable[[int, FrameType | None], None]) -> int:
    """Return the descriptor on which any signal makes itself felt."""
    wake, end = os.pipe()
    for descriptor in (wake, end):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(end)
    for number in (*_SIGNALS, signal.SIGCHLD):
        signal.signal(number, told)
    return wake


def _start(command: list[str], environment: dict[str, str], *, adopts: bool = False) -> int:
    """Start the program; what it leaves behind becomes our child where this process ``adopts``."""
    # mpirun may kill this process alone, and then its child has to go as well.
    set_attribute = prctl()
    parent = os.getpid()
    if adopts:
        set_attribute(ADOPT_ORPHANS, 1)
    child = os.fork()
    if child:
        return child
    try:
        set_attribute(DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            # The kernel tells of a death only whom it knew before: it was a moment too early.
            os._exit(128 + signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        for number in (*_SIGNALS, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(command[0], command, environment)
    except FileNotFoundError:
        os._exit(_say(f"starting {command[0]}: not found on PATH", 127))
    except OSError as error:
        os._exit(_say(f"starting {command[0]}: {error.strerror}", 126))
    finally:
        os._exit(125)


def _wait_for_note(
    child: int, note: int, wake: int, statuses: list[int]
) -> tuple[int, str, str] | None:
    """Return what the script says when it ends badly; None when the program ends without a word."""
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
            # What it said just before it ended comes before its end.
            if not select.select([note], [], [], 0)[0]:
                return None


def _has_ended(child: int, statuses: list[int]) -> bool:
    """Whether the program has ended; then its status, which is there only once, is noted."""
    statuses += [status for process, status in _ended() if process == child]
    return bool(statuses)


def _ended() -> list[tuple[int, int]]:
    """Return the children that have ended, what was adopted among them, and their statuses."""
    found: list[tuple[int, int]] = []
    while True:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            process = 0
        if not process:
            return found
        found.append((process, status))


def _wait_for_rest(node_dir: str, rank: int, wake: int) -> tuple[int, int]:
    """Wait until what the program has left running has ended; return how the first ended badly."""
    bad = (0, 0)
    begun = time.monotonic()
    due_s = _SECOND_S
    while True:
        is_late = time.monotonic() - begun > _SECOND_S
        for _, status in _ended():
            code, number = _end_of(status)
            if code and not bad[0] and (is_late or number not in _ENDING):
                bad = (code, number)
        rest = _rest()
        if not rest:
            return bad
        waited_s = time.monotonic() - begun
        if waited_s >= due_s:
            due_s = max(60.0, 2 * waited_s)
            _tell(node_dir, "waits %d %d %s" % (rank, len(rest), "; ".join(rest[:3])))
        if select.select([wake], [], [], min(_LOOK_S, max(0.01, due_s - waited_s)))[0]:
            os.read(wake, 4096)


def _rest() -> list[str]:
    """Return the command lines of our children, without those with a session of their own.

    Such a one is a daemon: it was made to outlive who started it, and nobody waits for it.
    """
    found = []
    own = (os.getpid(), os.getsid(0))
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open("/proc/" + name + "/stat", "rb") as file:
                # The name of a program may hold blanks and brackets; the last bracket ends it.
                parent, _, session = file.read().rpartition(b")")[2].split()[1:4]
            with open("/proc/" + name + "/cmdline", "rb") as file:
                words = file.read(200).replace(b"\0", b" ").decode("utf-8", "replace").strip()
        except (OSError, ValueError):
            continue
        # Also those that have just ended: how, the next look shows.
        if (int(parent), int(session)) == own:
            found.append(words)
    return found


def _wait_for_end(child: int, wake: int, statuses: list[int]) -> int:
    while not _has_ended(child, statuses):
        select.select([wake], [], [])
        os.read(wake, 4096)
    return statuses[0]


def _end_of(status: int) -> tuple[int, int]:
    """Return the exit code and the signal, 0 for none, of a program that has ended."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return 128 + number, number
    return os.WEXITSTATUS(status), 0


def _tell(node_dir: str, text: str) -> None:
    """Tell the entry of this node; nobody listens when there is none."""
    if not node_dir:
        return
    try:
        events = os.open(os.path.join(node_dir, "events"), os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return
    # One write of less than PIPE_BUF bytes is never mixed with another rank's.
    line = text.replace("\n", " ").encode("utf-8", "surrogateescape")[:2000] + b"\n"
    try:
        os.write(events, line)
    except OSError:
        pass
    finally:
        os.close(events)


def _hold(node_dir: str) -> None:
    """While the entry stops the job, stay: mpirun ends every rank when the first one goes."""
    while _is_stopping(node_dir):
        time.sleep(0.05)


def _wait(node_dir: str) -> None:
    """Wait until the head has all its workers: it may have started mpirun before."""
    while node_dir and os.path.exists(os.path.join(node_dir, "waiting")):
        time.sleep(0.02)


def _is_stopping(node_dir: str) -> bool:
    return bool(node_dir) and os.path.exists(os.path.join(node_dir, "stopping"))


def _say(text: str, code: int) -> int:
    sys.stderr.write(f"jobentry: {text}\n")
    sys.stderr.flush()
    return code
