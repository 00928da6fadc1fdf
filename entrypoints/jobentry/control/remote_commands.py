"""Commands that mpirun runs on other nodes, over the head's connection to each of them.

A second ssh to a worker costs as much as the first one: a key exchange, a session, a shell. mpirun
is given an agent instead (``launchers/rsh_agent.py``): the head forwards the agent's command, and
the worker's entry runs it as its sshd would.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import selectors
import socket
from typing import Callable, Mapping

from jobentry.contract import names
from jobentry.contract.paths import NodePaths
from jobentry.control.child_process import ChildProcess
from jobentry.control.event_loop import NodeLoop
from jobentry.control.messages import Lines
from jobentry.control.remote_worker import RemoteWorker
from jobentry.launchers import rsh_agent

# The exit code of ssh when it could not run the command.
_NOT_RUN = 255
_SHELL = "/bin/sh"
_SHELLS = ("sh", "bash", "dash", "ash", "ksh", "zsh", "csh", "tcsh")


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
        known = self._workers.items() if address else ()
        return next((worker for name, worker in known if _address(name) == address), None)

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
    return session
