"""The controller of one job of the process backend: it starts the nodes and outlives the submitter.

It reads one request on its input, writes ``ready`` to its output, and leaves ``state.json`` in the
job's folder. It inherits the lock of the job's file in ``running/``, which shows that the job runs,
and removes that file at the very end. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from dataclasses import dataclass, field

from cloudjob.backends.process import STATE
from cloudjob.backends.process.keeper import (
    SIGNALS,
    Keeper,
    NodeRequest,
    become_subreaper,
    children_of,
    reaped,
    signal_descriptor,
)
from jobentry.contract import node_end
from jobentry.system.trees import remove_tree

# The signals that the controller handles; they are blocked until it can handle them.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD)
_POLL_S = 0.05
# Seconds that workers have to end by themselves after the head has ended.
LEAVE_S = 5.0
# Seconds that a head has to end, outputs included, after a worker has failed. It notices by
# itself or reads our report, but not while it stages code and inputs.
LOST_S = 60.0
# Seconds that the nodes of a cancelled job have after the grace period to store outputs and end.
OVERDUE_S = 15.0
# Seconds for which a controller tries to write the last state of the job.
_WRITE_S = 60.0
# Bytes that a node may add to the state: its times, its process and its exit code.
_NODE_BYTES = 128


@dataclass(slots=True)
class _Node:
    request: NodeRequest
    process: int = 0
    started_at: float = 0.0
    ended_at: float = 0.0
    exit_code: int | None = None

    @property
    def is_running(self) -> bool:
        return self.process != 0 and self.exit_code is None


@dataclass(slots=True)
class Controller:
    """One job: its nodes and its state file. Most fields come from the job's request.

    Args:
        running: The file that is locked while the job runs.
        lock: The descriptor of that file.
    """

    folder: str
    run_dir: str
    running: str
    hosts: str
    argv: list[str]
    retries: int
    grace_s: float
    nodes: list[_Node]
    is_led: bool = True
    keeps_homes: bool = False
    is_elastic: bool = False
    lock: int | None = None
    is_cancelled: bool = False
    started_at: float = field(default_factory=time.time)
    _has_asked_head: bool = False
    # When a cancelled job is killed, even if parts of it hang.
    _overdue_at: float = float("inf")
    _message: str = ""
    # The descriptor from which the number of each signal can be read.
    _wake: int = -1

    @property
    def _reserve(self) -> str:
        """The file that reserves room for the last state."""
        return os.path.join(self.folder, f"{STATE}.reserve")

    def run(self) -> None:
        """Run the job, with its retries, and write its last state."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._wake = signal_descriptor(_SIGNALS)
        try:
            code = self._attempts()
        except Exception as error:  # noqa: BLE001 (only the controller can report it)
            self._message = f"running the job: {error}"
            self._signal_nodes(signal.SIGKILL)
            code = 125
        self._kill_all_orphans()
        self._finish(code)

    def _attempts(self) -> int:
        """Run the job, with its retries; return its exit code."""
        code = 1
        for attempt in range(1 if self.is_elastic else self.retries + 1):
            self._start(attempt)
            code = self._watch()
            if code == 0 or self.is_cancelled:
                break
            self._kill_all_orphans()
        return code

    def _start(self, attempt: int) -> None:
        if attempt:
            self._log(f"the job failed; attempt {attempt + 1} of {self.retries + 1} begins")
        for node in self.nodes:
            self._prepare(node)
        for node in self.nodes:
            node.process = self._fork(node)
        self._update_state()
        if self.is_cancelled:
            self._signal_nodes(signal.SIGTERM)

    def _prepare(self, node: _Node) -> None:
        remove_tree(node.request.tmp)
        with contextlib.suppress(FileNotFoundError):
            index = self.nodes.index(node)
            os.unlink(os.path.join(self.run_dir, node_end.file_name(index)))
        for folder in node.request.own_folders:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        node.exit_code = None
        node.ended_at = 0.0
        node.started_at = time.time()

    def _fork(self, node: _Node) -> int:
        controller = os.getpid()
        # The keeper has our handlers until it sets its own, and a signal in between would be lost.
        # It unblocks the signals once it can handle them.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        child = os.fork()
        if child:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            return child
        code = 125
        try:
            signal.set_wakeup_fd(-1)
            keeper = Keeper(node.request, self.argv, self.hosts, controller, self.lock)
            code = keeper.run()
        except Exception as error:  # noqa: BLE001 (whatever it is, the log must name it)
            _append(node.request.log, f"cloudjob: starting node {node.request.host}: {error!r}\n")
        finally:
            os._exit(code)

    # -- while it runs ------------------------------------------------------------------------

    def _watch(self) -> int:
        """Wait until every node has ended; return the head's exit code."""
        deadline: float | None = None
        while any(node.is_running for node in self.nodes):
            if self._overdue_at < time.monotonic():
                self._overdue_at = float("inf")
                deadline = time.monotonic()
            wait = LEAVE_S if deadline is None else max(0.0, deadline - time.monotonic())
            self._handle_signals(wait)
            if self._reap():
                self._restart_lost_workers()
                self._update_state()
            if deadline is None and self._is_over():
                deadline = time.monotonic() + LEAVE_S
                # A worker that waits for a head that never started ends at once.
                self._signal_nodes(signal.SIGTERM)
            if self.is_led and not self.is_elastic:
                self._report_failed_workers()
                self._end_waiting_head()
            if deadline is not None and time.monotonic() > deadline:
                # SIGHUP makes a keeper end its node at once.
                self._signal_nodes(signal.SIGHUP)
                deadline = time.monotonic() + LEAVE_S
        code = self.nodes[0].exit_code if self.is_led else self._first_bad_code()
        return 1 if code is None else code

    def _is_over(self) -> bool:
        """Whether to end the nodes that still run."""
        if self.is_led:
            return not self.nodes[0].is_running
        return any(node.exit_code for node in self.nodes)

    def _first_bad_code(self) -> int:
        bad = [(node.ended_at, node.exit_code) for node in self.nodes if node.exit_code]
        return min(bad)[1] if bad else 0

    def _report_failed_workers(self) -> None:
        """Report to the head which workers have failed: it may still wait for them."""
        if self.is_cancelled or not self.nodes[0].is_running:
            return
        for index, node in enumerate(self.nodes):
            path = os.path.join(self.run_dir, node_end.file_name(index))
            if node.exit_code and not os.path.exists(path):
                with contextlib.suppress(OSError):  # no room: retried after some seconds
                    with open(path + ".new", "wb") as file:
                        file.write(node_end.dump(node.exit_code))
                    os.replace(path + ".new", path)

    def _end_waiting_head(self) -> None:
        """Ask the head to end if a worker has failed and the head continues regardless."""
        head, *workers = self.nodes
        lost = [node.ended_at for node in workers if node.exit_code]
        if self._has_asked_head or not lost or not head.is_running:
            return
        if time.time() - min(lost) > LOST_S:
            self._has_asked_head = True
            with contextlib.suppress(OSError):
                os.kill(head.process, signal.SIGTERM)

    def _restart_lost_workers(self) -> None:
        """Restart failed workers of an elastic job, up to the number of retries."""
        head, *workers = self.nodes
        for node in workers:
            may_be = self.is_elastic and self.retries > 0 and not self.is_cancelled
            if may_be and node.exit_code and head.is_running:
                self.retries -= 1
                self._log(f"{node.request.host} was lost and is restarted")
                self._prepare(node)
                node.process = self._fork(node)

    def _handle_signals(self, wait_s: float) -> None:
        """Wait for signals, at most for some seconds, and act on them."""
        is_readable = select.select([self._wake], [], [], wait_s)[0]
        for number in os.read(self._wake, 4096) if is_readable else b"":
            if number in (signal.SIGTERM, signal.SIGINT) and not self.is_cancelled:
                # Only once: the entry treats a second signal as a request to hurry.
                self.is_cancelled = True
                self._overdue_at = time.monotonic() + self.grace_s + OVERDUE_S
                self._signal_nodes(signal.SIGTERM)
            elif number == signal.SIGUSR1:
                self.is_cancelled = True
                self._signal_nodes(signal.SIGHUP)

    def _signal_nodes(self, number: int) -> None:
        for node in self.nodes:
            if node.is_running:
                with contextlib.suppress(OSError):
                    os.kill(node.process, number)
                    # A stopped process would never handle the signal.
                    os.kill(node.process, signal.SIGCONT)

    def _reap(self) -> bool:
        """Record the nodes that have ended, and end processes that a killed node left behind."""
        found = False
        for child, code in reaped():
            for node in self.nodes:
                if node.process == child and node.exit_code is None:
                    node.exit_code = code
                    node.ended_at = time.time()
                    found = True
        self._kill_orphans()
        return found

    def _kill_orphans(self) -> None:
        """End adopted children: processes of a keeper that was killed."""
        keepers = {node.process for node in self.nodes if node.is_running}
        for child in children_of(os.getpid()):
            # Its children become ours when it ends, and SIGCHLD calls this method again.
            if child not in keepers:
                with contextlib.suppress(OSError):
                    os.kill(child, signal.SIGKILL)

    def _kill_all_orphans(self) -> None:
        """End the last processes of killed keepers, which may outlive the job."""
        deadline = time.monotonic() + LEAVE_S
        while children_of(os.getpid()) and time.monotonic() < deadline:
            # A process whose parent was not our child is adopted without a signal.
            self._handle_signals(_POLL_S)
            self._reap()

    # -- the state file -----------------------------------------------------------------------

    def open_state(self) -> None:
        """Write the first state, and reserve room for the last one in case the disk is full then.

        Raises:
            OSError: The disk is full.
        """
        text = self._state()
        with open(self._reserve, "wb") as file:
            file.write(bytes(len(text) + _NODE_BYTES * (len(self.nodes) + 8)))
        self._write_state(text)

    def _update_state(self) -> None:
        """Write the state while the job runs; a failure does not stop the job."""
        with contextlib.suppress(OSError):
            self._write_state(self._state())

    def _finish(self, code: int) -> None:
        """Write the last state and remove the job's files, which may make room for it."""
        text = self._state(code)
        deadline = time.monotonic() + _WRITE_S
        while True:
            try:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._reserve)
                self._write_state(text)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    self._log(f"writing the final state of the job: {error}")
                    return  # the file in running/ stays, so the job counts as lost
                self._remove_folders()
                time.sleep(1)
        self._remove_folders()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.running)

    def _write_state(self, text: bytes) -> None:
        path = os.path.join(self.folder, STATE)
        descriptor = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
        os.replace(f"{path}.new", path)

    def _state(self, exit_code: int | None = None) -> bytes:
        is_over = exit_code is not None
        state = {
            "controller": os.getpid(),
            "started_at": self.started_at,
            "ended_at": time.time() if is_over else None,
            "exit_code": exit_code,
            "is_cancelled": self.is_cancelled,
            "has_asked_head": self._has_asked_head,
            "message": self._message,
            "nodes": [
                {
                    "host": node.request.host,
                    "process": node.process,
                    "started_at": node.started_at,
                    "ended_at": node.ended_at or None,
                    "exit_code": node.exit_code,
                }
                for node in self.nodes
            ],
        }
        return json.dumps(state).encode("ascii")

    def _remove_folders(self) -> None:
        nodes = [] if self.keeps_homes else self.nodes
        own = [folder for node in nodes for folder in node.request.own_folders]
        for folder in (self.run_dir, *own):
            with contextlib.suppress(OSError):
                remove_tree(folder)

    def _log(self, text: str) -> None:
        with contextlib.suppress(OSError):
            _append(self.nodes[0].request.log, f"cloudjob: {text}\n")


def main() -> None:
    """Run the job whose request is on standard input."""
    # A cancel may arrive before the controller can handle signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    # The descriptor stays open, so that no other file gets its number.
    with os.fdopen(0, "rb", closefd=False) as file:
        # A submitter that is killed while it writes has started nothing.
        request = json.loads(file.read())
    nodes = [_Node(NodeRequest(**node)) for node in request["nodes"]]
    controller = Controller(**{**request, "nodes": nodes})
    controller.open_state()
    with contextlib.suppress(BrokenPipeError):
        # If the submitter is killed from here on, the job runs and its record finds it.
        os.write(1, b"ready\n")
    _redirect_output(os.path.join(controller.folder, "controller.log"))
    become_subreaper()
    controller.run()


def _redirect_output(path: str) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)


def _append(path: str, text: str) -> None:
    with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
