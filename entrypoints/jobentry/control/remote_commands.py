"""Commands that mpirun wants run on other nodes, over the line that the head has to each already.

A second ssh to a worker costs as much as the first one: a key exchange, a session, a shell. mpirun
is given an agent instead (``launchers/agent.py``), the head sends on what that asks for, and the
worker's entry runs it as its sshd would.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import selectors
import signal
import socket
import subprocess
from typing import Callable, Mapping

from jobentry.contract import names
from jobentry.contract.paths import NodePaths
from jobentry.control.event_loop import NodeLoop
from jobentry.control.messages import Lines
from jobentry.control.worker_link import Peer
from jobentry.launchers import agent

# What ssh ends with when it has not run the command.
_NOT_RUN = 255
_SHELL = "/bin/sh"
_SHELLS = ("sh", "bash", "dash", "ash", "ksh", "zsh", "csh", "tcsh")


class Desk:
    """The head's side: passes the commands of mpirun's agents to workers and returns the output.

    Before ``open`` it only takes in what they ask for: mpirun starts while workers still come up.

    Args:
        head: The host of this node. Without namespaces emulated nodes share the machine's name, so
            mpirun does not recognise its own node and asks for a daemon there, too.
    """

    def __init__(self, where: NodePaths, loop: NodeLoop, head: str, workers: list[Peer]) -> None:
        self._where = where
        self._head = _names(head)
        self._own = Errands(where, loop, self._ran)
        self._workers = {name: peer for peer in workers for name in _names(peer.host)}
        self._lines = Lines()
        self._waiting: list[int] | None = []
        # Read and write: so it never ends when an agent closes it.
        self._asks = os.open(where.agent_requests, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        loop.selector.register(self._asks, selectors.EVENT_READ, self._hear)

    def open(self) -> None:
        """Take to the workers what was asked for, and at once what will be."""
        numbers, self._waiting = self._waiting or [], None
        for number in numbers:
            self._take(number)

    def answered(self, number: int, lines: list[str], code: int | None) -> None:
        """Give an agent what its command wrote, and how it ended if it has; it may be gone."""
        path = self._path(number)
        with contextlib.suppress(OSError):
            out = os.open(f"{path}-answer", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(out, "wb") as fifo:
                fifo.write(agent.answer(lines, code).encode("utf-8", "surrogateescape"))
        if code is not None:
            with contextlib.suppress(OSError):
                os.unlink(f"{path}-answer")

    def look(self) -> None:
        """Give the agents of commands that ran on this node and have ended their exit codes."""
        self._own.look()

    def kill(self) -> None:
        """End the commands that run on this node."""
        self._own.kill()

    def _ran(self, _word: str, *, number: int, lines: list[str], code: int | None) -> None:
        self.answered(number, lines, code)

    def _hear(self) -> None:
        for line in self._lines.feed(os.read(self._asks, 65536)):
            if self._waiting is None:
                self._take(int(line))
            else:
                self._waiting.append(int(line))

    def _take(self, number: int) -> None:
        path = self._path(number)
        with open(path, "rb") as file:
            host, command = agent.request(file.read().decode("utf-8", "surrogateescape"))
        os.unlink(path)
        if host in self._head:
            self._own.run(number, command)
            return
        worker = self._find(host)
        if worker is None:
            self.answered(number, [f"{host} is no node of this job"], _NOT_RUN)
        else:
            worker.tell("run", number=number, command=command)

    def _find(self, host: str) -> Peer | None:
        """Return the worker that a host file calls ``host``; the platform's or the user's own may.

        It may say more of a name than the job does (the MPI operator's), or name an address.
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
        return os.path.join(self._where.node_dir, "ask-%d" % number)


def _names(host: str) -> set[str]:
    """Open MPI 4.1 leaves out the domain of a host."""
    return {host, host.partition(".")[0]}


def _address(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError):
        return ""


class Errands:
    """The worker's side: runs what the head asks for.

    Args:
        tell: Says a word to the head.
    """

    def __init__(self, where: NodePaths, loop: NodeLoop, tell: Callable[..., None]) -> None:
        self._loop = loop
        self._tell = tell
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._text: dict[int, Lines] = {}
        user = _user()
        self._shell = user.pw_shell
        self._env = session_environment(os.environ, user, where.node_dir)

    def run(self, number: int, command: str) -> None:
        """Start ``command``."""
        try:
            process = subprocess.Popen(
                [self._shell, "-c", command],
                env=self._env,
                cwd=self._env["HOME"] if os.path.isdir(self._env["HOME"]) else "/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            lines = [f"starting {self._shell}: {error.strerror}"]
            self._tell("ran", number=number, lines=lines, code=_NOT_RUN)
            return
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._running[number] = process
        self._text[number] = Lines()
        self._loop.own.add(process.pid)
        hear = lambda: self._hear(number)  # noqa: E731 (as the loop takes it)
        self._loop.selector.register(process.stdout, selectors.EVENT_READ, hear)

    def look(self) -> None:
        """Tell the head of those that have ended."""
        for number, process in list(self._running.items()):
            code = process.poll()
            if code is None:
                continue
            lines = self._read(number)
            assert process.stdout is not None
            with contextlib.suppress(KeyError, ValueError):
                self._loop.selector.unregister(process.stdout)
            process.stdout.close()
            self._loop.own.discard(process.pid)
            del self._running[number], self._text[number]
            self._tell("ran", number=number, lines=lines, code=code if code >= 0 else 128 - code)

    def kill(self) -> None:
        """End what still runs."""
        for process in self._running.values():
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)

    def _hear(self, number: int) -> None:
        lines = self._read(number)
        if lines:
            self._tell("ran", number=number, lines=lines, code=None)

    def _read(self, number: int) -> list[str]:
        stdout = self._running[number].stdout
        assert stdout is not None
        try:
            data = os.read(stdout.fileno(), 65536)
        except BlockingIOError:
            return []
        if not data:
            # It has closed its output and goes on, as a daemon may.
            with contextlib.suppress(KeyError, ValueError):
                self._loop.selector.unregister(stdout)
        return [line.decode("utf-8", "replace") for line in self._text[number].feed(data)]


def _user() -> pwd.struct_passwd:
    """Return who we are, with a shell that runs commands."""
    try:
        user = pwd.getpwuid(os.geteuid())
    except KeyError:
        name, home = "%d" % os.geteuid(), os.environ.get("HOME", "/")
        user = pwd.struct_passwd((name, "x", os.geteuid(), os.getegid(), "", home, _SHELL))
    # mpirun writes its commands for the user's own shell; one that runs none is no shell (nologin).
    is_shell = os.path.basename(user.pw_shell) in _SHELLS and os.access(user.pw_shell, os.X_OK)
    return user if is_shell else pwd.struct_passwd((*user[:6], _SHELL))


def session_environment(
    environ: Mapping[str, str], user: pwd.struct_passwd, node_dir: str
) -> dict[str, str]:
    """Return the environment of a command: what sshd gives to a session, and this node's paths.

    With its TMPDIR a daemon of mpirun leaves nothing behind, as the folder goes with the job.
    """
    session = {"USER": user.pw_name, "LOGNAME": user.pw_name, "SHELL": user.pw_shell}
    session["HOME"] = environ.get("HOME") or user.pw_dir
    for name in ("PATH", "LD_LIBRARY_PATH", "TMPDIR"):
        if name in environ:
            session[name] = environ[name]
    session[names.CLOUDJOB_NODE_DIR] = node_dir
    return session
