"""The keeper of one emulated node: all processes there are its descendants and end with it.

It takes the place of a machine: it starts the entry, reaps processes, and ends the processes that
are left after the entry. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, NoReturn

from cloudjob.backends.process.isolation import Mount, is_on_machine, isolate
from jobentry.system import linux
from jobentry.system.trees import remove_tree

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# The signals that a keeper handles; they are blocked until it can handle them.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
# The exit code of a node that was ended from outside.
_POWERED_OFF = 128 + signal.SIGKILL


class NodeRequest(NamedTuple):
    """One node of a job.

    Args:
        env: The environment of its entry.
        home: Its home folder.
        tmp: Its folder for temporary files.
        log: The file for its entry's output.
        mounts: Folders and files with their paths on the node; empty to share all files.
        protected: Folders of this machine whose changes stay private to the node, each with the
            folder that holds the changes.
        named: More of them: the folders and files that the job names.
        shown: Folders and files that the node can only read, with their paths there.
    """

    host: str
    env: dict[str, str]
    home: str
    tmp: str
    log: str
    mounts: Sequence[Mount] = ()
    protected: Sequence[tuple[str, str]] = ()
    named: Sequence[tuple[str, str]] = ()
    shown: Sequence[Mount] = ()

    @property
    def written(self) -> list[str]:
        """The folders of this machine that its entry writes to, and that outlive the job."""
        return [source for source, target in self.mounts if is_on_machine(target)]

    @property
    def own_folders(self) -> list[str]:
        """The folders of this machine that are made for this node."""
        others = self.written
        sources = [source for source, _ in self.mounts if source not in others]
        changes = [folder for _, folder in (*self.protected, *self.named)]
        return list(dict.fromkeys([self.tmp, self.home, *sources, *changes]))


class Keeper:
    """Runs one node, in a process of its own.

    Args:
        become: Turns a new process on the node into its entry.
    """

    def __init__(
        self,
        request: NodeRequest,
        become: Callable[[NodeRequest], NoReturn],
        hosts: str,
        controller: int,
        lock: int | None = None,
    ) -> None:
        self._request = request
        self._become = become
        self._hosts = hosts
        self._controller = controller
        # Entries hold the lock, too: a job runs until they have ended, whichever process is killed.
        self._kept = (0, 1, 2) if lock is None else (0, 1, 2, lock)
        self._prctl = ctypes.CDLL(None).prctl
        self._process = 0
        self._entry = 0
        self._code: int | None = None

    def run(self) -> int:
        """Keep the node until its entry has ended, and return the entry's exit code."""
        os.setsid()
        self._process = os.getpid()
        become_subreaper()
        # This node must end with the controller.
        self._prctl(_PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0)
        if os.getppid() != self._controller:
            # The controller died before our prctl call.
            return _POWERED_OFF
        wake = signal_descriptor(SIGNALS)
        self._start_entry()
        while self._code is None:
            self._handle_signals(os.read(wake, 4096))
        self._kill_rest()
        self._report_changes()
        with contextlib.suppress(OSError):
            # If no controller is left, the time of the log shows when the node ended.
            os.utime(self._request.log)
        with contextlib.suppress(OSError):
            # The folder contains secrets, so it is removed even if the controller was killed.
            remove_tree(self._request.tmp)
        return self._code

    # -- processes ----------------------------------------------------------------------------

    def _start_entry(self) -> None:
        request = self._request
        log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        # Our handlers in the entry would ignore a signal that it gets before it has its own.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self._entry = os.fork()
        if not self._entry:
            self._become_entry(log)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.close(log)

    def _become_entry(self, log: int) -> NoReturn:
        request = self._request
        try:
            os.setsid()
            for number, descriptor in enumerate((os.open(os.devnull, os.O_RDWR), log, log)):
                os.dup2(descriptor, number)
            self._enter_node()
            # Needed only if the keeper is killed; otherwise it ends the entry itself.
            self._prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != self._process:
                os._exit(_POWERED_OFF)
            for name in os.listdir("/proc/self/fd"):
                if int(name) not in self._kept:
                    with contextlib.suppress(OSError):  # that of the listing
                        os.close(int(name))
            _reset_signals()
            self._become(request)
        except Exception as error:  # noqa: BLE001 (whatever it is, the log must name it)
            os.write(2, f"cloudjob: starting node {request.host}: {error}\n".encode())
        finally:
            os._exit(125)

    def _enter_node(self) -> None:
        """Enter the node: only the entry and its children see its names and files."""
        request = self._request
        home = request.home
        if self._hosts:
            changed = (*request.protected, *request.named)
            isolate(request.host, self._hosts, request.mounts, changed, request.shown)
            home = next((path for source, path in request.mounts if source == home), home)
        os.chdir(home)

    def _kill_rest(self) -> None:
        """End every process that is left on this node."""
        for _ in range(1000):
            rest = descendants_of(self._process)
            if not rest:
                return
            # The entry last: if we are killed first, it ends the others.
            rest.sort(key=lambda process: process == self._entry)
            for process in rest:
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGKILL)
            # We adopt the others when their parents end.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass

    def _report_changes(self) -> None:
        """Say which folders of this machine the script has written to, on the node only."""
        for path, changes in self._request.named:
            name = _file_below(os.path.join(changes, "changes"))
            if name:
                _log(
                    self._request.log,
                    f"{os.path.join(path, name)} was written on {self._request.host} only and is"
                    " removed with it: nodes have their own version of what a job names in"
                    f" {path}; to keep files, use --output",
                )

    def _handle_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGHUP:
                self._code = _POWERED_OFF
            elif number != signal.SIGCHLD and self._entry:
                with contextlib.suppress(OSError):
                    os.kill(self._entry, number)
                    # A stopped process would never handle the signal.
                    os.kill(self._entry, signal.SIGCONT)
        for child, code in reaped():
            if child == self._entry:
                self._code = code


def _file_below(folder: str) -> str:
    """Return the relative path of a file below a folder; empty if there is none."""
    for parent, folders, names in os.walk(folder):
        # Python writes its bytecode beside every module.
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            path = os.path.join(parent, name)
            # The mark of a file that was removed is a device.
            if os.path.isfile(path) and not os.path.islink(path):
                return os.path.relpath(path, folder)
    return ""


def _log(path: str, text: str) -> None:
    # A script chooses the names of its files.
    visible = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
    line = f"cloudjob: {visible}\n".encode("utf-8", "backslashreplace")
    with contextlib.suppress(OSError), open(path, "ab") as file:
        file.write(line)


def become_subreaper() -> None:
    """Adopt descendants of this process whose parents have ended."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reaped() -> Iterator[tuple[int, int]]:
    """Yield each child that has ended, and its exit code: 128 plus the signal that killed it."""
    while True:
        try:
            child, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not child:
            return
        code = os.waitstatus_to_exitcode(status)
        yield child, code if code >= 0 else 128 - code


def execute(argv: Sequence[str], node: NodeRequest) -> NoReturn:
    """Become the program that is the entry of a node.

    Raises:
        OSError: It cannot be started.
    """
    # Python ignores them, and a program would, too.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.execve(argv[0], list(argv), node.env)


def _reset_signals() -> None:
    """Handle signals as a process does that was just started."""
    signal.set_wakeup_fd(-1)
    for number in (*SIGNALS, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def signal_descriptor(numbers: Sequence[int]) -> int:
    """Return a descriptor from which the number of each signal to this process can be read."""
    wake, end = os.pipe()
    os.set_blocking(end, False)
    signal.set_wakeup_fd(end)
    for number in numbers:
        # Without a handler nothing would be written.
        signal.signal(number, lambda _number, _frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    return wake


def descendants_of(ancestor: int) -> list[int]:
    """Return the processes below ``ancestor``, parents before their children."""
    descendants = linux.children(ancestor)
    for process in descendants:  # it grows while it is read
        descendants += linux.children(process)
    return descendants
