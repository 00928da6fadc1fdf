"""The programs that start ranks: mpirun or torchrun here, and mpirun's commands on other nodes.

A second ssh to a worker costs as much as the first one: a key exchange, a session, a shell. mpirun
is given an agent instead (``launchers/rsh_agent.py``): the head forwards the agent's command, and
the worker's entry runs it as its sshd would. What a killed mpirun leaves on a node is removed.
"""

from __future__ import annotations

import contextlib
import glob
import os
import pwd
import re
import selectors
import signal
import socket
from collections import deque
from functools import partial
from typing import Callable, Collection, Mapping, Sequence

from jobentry.contract import names
from jobentry.contract.paths import NodePaths
from jobentry.control.loop import ChildProcess, Lines, NodeLoop
from jobentry.control.peers import RemoteWorker
from jobentry.control.verdict import LaunchEnd
from jobentry.launchers import mpi, rsh_agent
from jobentry.launchers.common import Process
from jobentry.log import log_message
from jobentry.system import linux
from jobentry.system.trees import remove_below

_KEPT_LINES = 40
# Lines that say nothing: rules, and Open MPI's warning if an agent that it has forked runs before
# mpirun sets the agent's process group, which the agent has already set itself.
_MEANINGLESS = re.compile(
    r"-+$|.*plm:[rs]sh: Warning: setpgid\(\d+,\d+\) failed in parent with errno=Permission denied"
)
# The exit code of ssh when it could not run the command.
_NOT_RUN = 255
_SHELL = "/bin/sh"
_SHELLS = ("sh", "bash", "dash", "ash", "ksh", "zsh", "csh", "tcsh")
_DAEMONS = (b"orted", b"prted", b"hydra_pmi_proxy", b"hydra_bstrap_proxy")


class LaunchProcesses:
    """The processes that start ranks on this node, watched by its event loop.

    Args:
        is_quiet: Whether to stop showing their output, which is kept nevertheless.
    """

    def __init__(self, loop: NodeLoop, is_quiet: Callable[[], bool]) -> None:
        self._loop = loop
        self._is_quiet = is_quiet
        self._running: dict[str, ChildProcess] = {}
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        # Servers of the ranks with their output, and how the first of them failed.
        self._servers: dict[str, deque[str]] = {}
        self.server_end: LaunchEnd | None = None
        # The first process that failed, and its exit code, negative for a signal.
        self.name = ""
        self.code = 0
        self._wrappers: set[str] = set()
        self.were_killed = False

    @property
    def signal(self) -> int:
        """The signal from outside that killed one of them; 0 for none."""
        by_us = self.were_killed or self.name in self._wrappers
        return 0 if by_us or self.code >= 0 else -self.code

    @property
    def are_running(self) -> bool:
        """Whether any of them runs, apart from servers of the ranks."""
        for name, child in list(self._running.items()):
            end = child.end()
            if end is None:
                continue
            code, lines = end
            self._log(name, lines)
            del self._running[name]
            if name in self._servers:
                if code and not self.server_end:
                    self.server_end = LaunchEnd(name, code, self._servers[name])
            elif code and not self.code:
                self.name, self.code = name, code
        return any(name not in self._servers for name in self._running)

    @property
    def processes(self) -> list[int]:
        """The process ids of those that run."""
        return [child.id for child in self._running.values()]

    def start(self, processes: Sequence[Process], cwd: str) -> str:
        """Start the processes; return what went wrong, empty if nothing did."""
        self.lines.clear()
        self.code = 0
        self.were_killed = False
        self.server_end = None
        self._servers = {
            process.name: deque(maxlen=_KEPT_LINES) for process in processes if process.is_server
        }
        others = [process.name for process in processes if not process.is_server]
        self.name = others[0] if others else ""
        self._wrappers = {process.name for process in processes if process.is_wrapper}
        for process in processes:
            log = partial(self._log, process.name)
            try:
                child = ChildProcess(self._loop, process.argv, process.env, cwd, log)
            except OSError as error:
                self.name = process.name
                self.kill()
                return f"starting {process.argv[0]}: {error.strerror}"
            self._running[process.name] = child
        return ""

    def kill(self) -> None:
        """Kill all of them, each with its process group."""
        for child in self._running.values():
            if child.is_running:
                self.were_killed = True
                child.kill()

    def end_servers(self) -> None:
        """Kill the servers of the ranks, once no rank is left."""
        for name in self._servers:
            if name in self._running:
                self._running[name].kill()

    def _log(self, name: str, lines: Sequence[str]) -> None:
        for line in lines:
            text = line.rstrip()
            if text and not _MEANINGLESS.match(text):
                self._servers.get(name, self.lines).append(text)
                if not self._is_quiet():
                    log_message(f"{name}: {text}")


class RemoteCommands:
    """The head's side: forwards the commands of mpirun's agents to workers and returns the output.

    Before ``open`` it only collects requests: mpirun starts while workers still come up.

    Args:
        head: The host of this node. Without namespaces emulated nodes share the machine's name, so
            mpirun does not recognise its own node and asks for a daemon there, too.
    """

    def __init__(
        self, node_paths: NodePaths, loop: NodeLoop, head: str, workers: list[RemoteWorker]
    ) -> None:
        self._node_paths = node_paths
        self._head = _names(head)
        self._own = CommandRunner(node_paths, loop, self.answered)
        self._workers = {name: worker for worker in workers for name in _names(worker.host)}
        self._lines = Lines()
        self._waiting: list[int] | None = []
        # Opened for reading and writing, so that there is no end of file when an agent closes it.
        self._requests = os.open(
            node_paths.agent_requests, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
        )
        loop.selector.register(self._requests, selectors.EVENT_READ, self._read_requests)

    def open(self) -> None:
        """Forward the collected requests, and later ones at once."""
        numbers, self._waiting = self._waiting or [], None
        for number in numbers:
            self._forward(number)

    def answered(self, number: int, lines: list[str], code: int | None) -> None:
        """Send an agent its command's output, and the exit code if it has ended."""
        path = self._path(number)
        with contextlib.suppress(OSError):
            out = os.open(f"{path}-answer", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(out, "wb") as fifo:
                fifo.write(rsh_agent.answer(lines, code).encode("utf-8", "surrogateescape"))
        if code is not None:
            with contextlib.suppress(OSError):
                os.unlink(f"{path}-answer")

    def check(self) -> None:
        """Send the exit codes of commands that ran on this node."""
        self._own.check()

    def kill(self) -> None:
        """End the commands that run on this node."""
        self._own.kill()

    def _read_requests(self) -> None:
        for line in self._lines.feed(os.read(self._requests, 65536)):
            if self._waiting is None:
                self._forward(int(line))
            else:
                self._waiting.append(int(line))

    def _forward(self, number: int) -> None:
        path = self._path(number)
        with open(path, "rb") as file:
            host, command = rsh_agent.request(file.read().decode("utf-8", "surrogateescape"))
        os.unlink(path)
        if host in self._head:
            self._own.run(number, command)
            return
        worker = self._find(host)
        if worker is None:
            self.answered(number, [f"{host} is not a node of this job"], _NOT_RUN)
        else:
            worker.send("run-command", number=number, command=command)

    def _find(self, host: str) -> RemoteWorker | None:
        """Return the worker with the name ``host`` in a host file.

        In the platform's or the user's own file, names may be longer than those of the job (as with
        the MPI operator), or addresses.
        """
        short = host.partition(".")[0]
        if host in self._workers:
            return self._workers[host]
        if short in self._workers and not short.isdecimal():
            return self._workers[short]
        address = _address(host)
        workers = self._workers.items() if address else ()
        return next((worker for name, worker in workers if _address(name) == address), None)

    def _path(self, number: int) -> str:
        return os.path.join(self._node_paths.node_dir, "ask-%d" % number)


def _names(host: str) -> set[str]:
    """Return the names of a host; Open MPI 4.1 leaves out the domain."""
    return {host, host.partition(".")[0]}


def _address(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError):
        return ""


class CommandRunner:
    """The worker's side: runs the commands that the head sends.

    Args:
        on_output: Called with a command's number, lines of its output, and its exit code or None.
    """

    def __init__(
        self,
        node_paths: NodePaths,
        loop: NodeLoop,
        on_output: Callable[[int, list[str], int | None], None],
    ) -> None:
        self._loop = loop
        self._on_output = on_output
        self._running: dict[int, ChildProcess] = {}
        user = _user()
        self._shell = user.pw_shell
        self._env = session_environment(os.environ, user, node_paths.node_dir)

    def run(self, number: int, command: str) -> None:
        """Start ``command``."""
        argv = (self._shell, "-c", rsh_agent.on_this_node(command, self._env))
        home = self._env["HOME"]
        cwd = home if os.path.isdir(home) else "/"

        def on_lines(lines: list[str]) -> None:
            self._on_output(number, lines, None)

        try:
            self._running[number] = ChildProcess(self._loop, argv, self._env, cwd, on_lines)
        except OSError as error:
            self._on_output(number, [f"starting {self._shell}: {error.strerror}"], _NOT_RUN)

    def check(self) -> None:
        """Report the commands that have ended."""
        for number, child in list(self._running.items()):
            end = child.end()
            if end is not None:
                del self._running[number]
                code, lines = end
                self._on_output(number, lines, code if code >= 0 else 128 - code)

    def kill(self) -> None:
        """Kill the commands that have not been reported, and what they have started."""
        for child in self._running.values():
            child.kill()


def _user() -> pwd.struct_passwd:
    """Return the user of this process, with a shell that runs commands."""
    try:
        user = pwd.getpwuid(os.geteuid())
    except KeyError:
        name, home = "%d" % os.geteuid(), os.environ.get("HOME", "/")
        user = pwd.struct_passwd((name, "x", os.geteuid(), os.getegid(), "", home, _SHELL))
    # mpirun writes commands for the user's own shell; nologin, for example, runs none.
    is_shell = os.path.basename(user.pw_shell) in _SHELLS and os.access(user.pw_shell, os.X_OK)
    return user if is_shell else pwd.struct_passwd((*user[:6], _SHELL))


def session_environment(
    environ: Mapping[str, str], user: pwd.struct_passwd, node_dir: str
) -> dict[str, str]:
    """Return the environment of a command: what sshd gives to a session, and this node's paths.

    Its TMPDIR is removed with the job, so that mpirun's daemon leaves nothing behind.
    """
    session = {"USER": user.pw_name, "LOGNAME": user.pw_name, "SHELL": user.pw_shell}
    session["HOME"] = environ.get("HOME") or user.pw_dir
    for name in ("PATH", "LD_LIBRARY_PATH", "TMPDIR", *names.OF_DAEMONS):
        if name in environ:
            session[name] = environ[name]
    session[names.CLOUDJOB_NODE_DIR] = node_dir
    session.update(mpi.without_devices(environ))
    return session


def end_daemons(node_dir: str) -> list[int]:
    """Kill the daemons of mpirun on the node with this folder; return their process ids.

    Emulated nodes of other jobs have a folder of the same name, but see other files.
    """
    mark = b"\0CLOUDJOB_NODE_DIR=" + os.fsencode(node_dir) + b"\0"
    files = os.readlink("/proc/self/ns/mnt")
    ended = []
    for process in linux.processes():
        with contextlib.suppress(OSError):
            program = os.path.basename(linux.read(process, "cmdline").partition(b"\0")[0])
            if program not in _DAEMONS or os.readlink("/proc/%d/ns/mnt" % process) != files:
                continue
            if mark in b"\0" + linux.read(process, "environ"):
                os.kill(process, signal.SIGKILL)
                ended.append(process)
    return ended


def remove_sessions(processes: Collection[int]) -> None:
    """Remove the temporary folders that killed processes of Open MPI have left.

    Only those with these process ids, as other jobs may share the folder. 4.1 makes
    ompi.HOST.UID/pid.ID, or jf.JOB with the id in the names of its files; 5.0 makes ompi.ID and
    prted.ID.
    """
    folder = os.environ.get("TMPDIR") or "/tmp"
    top = glob.escape(folder)
    for process in processes:
        folders = glob.glob("%s/*.%d" % (top, process))
        folders += glob.glob("%s/ompi.*/pid.%d" % (top, process))
        inner = glob.glob("%s/ompi.*/jf.*/*_%d" % (top, process))
        for path in folders + [os.path.dirname(path) for path in inner]:
            if os.path.basename(path).startswith(("ompi.", "prted.", "pid.", "jf.")):
                # Other users may share the folder, and put a link to anywhere in it.
                with contextlib.suppress(OSError):
                    remove_below(folder, os.path.relpath(path, folder))
