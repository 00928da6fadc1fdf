"""The controller of one job of the process backend: it starts the nodes and outlives the submitter.

It waits for one request on its input, writes ``ready`` to its output, and leaves ``state.json`` in
the job's folder. With the request comes the lock of the job's file in ``running/``, which shows
that the job runs; it removes that file at the very end. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from cloudjob.backends import attempts, supervision
from cloudjob.backends.attempts import FailedAttempt, Rules
from cloudjob.backends.process import STATE, node_logs
from cloudjob.backends.process.keeper import (
    SIGNALS,
    Keeper,
    NodeRequest,
    become_subreaper,
    execute,
    reaped,
    signal_descriptor,
)
from cloudjob.backends.supervision import Deed, Lead, Past, Policy
from jobentry.contract import exits, names, node_end, paths
from jobentry.system import linux
from jobentry.system.trees import remove_tree

# The signals that the controller handles; they are blocked until it can handle them.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD)
_POLL_S = 0.05
# Seconds that workers have to end by themselves after the head has ended.
LEAVE_S = 5.0
# Seconds that a head has to end after a worker has failed.
LOST_S = 60.0
# Seconds that the nodes of a cancelled job have after the grace period to store outputs and end.
OVERDUE_S = 15.0
# Seconds after which a look is taken, whatever happens: a report may have failed for want of room.
_LOOK_S = 5.0
# Seconds for which orphans are ended, as long as there are other ones each LEAVE_S.
_ORPHANS_S = 60.0
# Seconds that an attempt has at least, although the time limit of the job is nearly over.
_SHORTEST_S = 0.1
# Seconds for which a controller tries to write the last state of the job.
_WRITE_S = 60.0
# Bytes that a node may add to the state: its times, its process and its exit code.
_NODE_BYTES = 128
# How many words of a command start the entry: python -I -S ENTRY SCRIPT …
_ENTRY_WORDS = 4
# What is noted when a deed was done.
_NOTES = {
    Deed.CANCEL: "is_cancel_told",
    Deed.END: "is_end_told",
}


class _Node:
    def __init__(self, request: NodeRequest) -> None:
        self.request, self.process = request, 0
        self.started_at = self.ended_at = 0.0
        self.exit_code: int | None = None
        # The end on the monotonic clock.
        self.ended_s = float("inf")
        self.is_reported = False

    @property
    def is_running(self) -> bool:
        return self.process != 0 and self.exit_code is None

    @property
    def seen(self) -> supervision.Node:
        """What the rules of supervision see of it."""
        return supervision.Node(self.is_running, self.exit_code, self.ended_s, self.is_reported)


class Controller:
    """One job: its nodes and its state file."""

    def __init__(self, request: Mapping[str, Any], lock: int | None) -> None:
        self.folder: str = request["folder"]
        self.log = os.path.join(self.folder, "controller.log")
        self.run_dir: str = request["run_dir"]
        # The file that is locked while the job runs, and its descriptor.
        self.running: str = request["running"]
        self.lock = lock
        self.hosts: str = request["hosts"]
        self.argv: list[str] = request["argv"]
        # The folder of the entry that argv starts; empty if argv is another program.
        self.entry: str = request["entry"]
        self._become: Callable[[NodeRequest], NoReturn] = partial(execute, self.argv)
        on = tuple(request["retry_on"])
        self.rules = Rules(request["retries"], on, request["backoff_s"])
        self.grace_s: float = request["grace_s"]
        self.nodes = [_Node(NodeRequest(**node)) for node in request["nodes"]]
        self.is_led: bool = request["is_led"]
        self.keeps_homes: bool = request["keeps_homes"]
        self.started_at = time.time()
        # The attempts that have failed, and the sizes of the logs when the present one began.
        self._failed: list[FailedAttempt] = []
        self._log_sizes: Sequence[int] = ()
        self._attempt = 1
        self._begun_s = time.monotonic()
        # What was done to the nodes, by the monotonic clock.
        self._past = Past()
        self._message = ""
        # The descriptor from which the number of each signal can be read.
        self._wake = -1

    @property
    def is_cancelled(self) -> bool:
        """Whether somebody has cancelled the job."""
        return self._past.cancelled_at is not None

    @property
    def _policy(self) -> Policy:
        """How long the nodes may take; equal nodes have their grace period to end."""
        lead = Lead.HEAD if self.is_led else Lead.ALL
        leave_s = LEAVE_S if self.is_led else max(LEAVE_S, self.grace_s)
        return Policy(lead, leave_s, self.grace_s + OVERDUE_S, LOST_S)

    @property
    def _reserve(self) -> str:
        """The file that reserves room for the last state."""
        return os.path.join(self.folder, f"{STATE}.reserve")

    def run(self) -> None:
        """Run the job, with its retries, and write its last state."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._wake = signal_descriptor(_SIGNALS)
        try:
            if self.entry and _is_utf_8():
                self._import_entry()
            code = self._attempts()
        except Exception as error:  # noqa: BLE001 (only the controller can report it)
            self._message = f"running the job: {error}"
            _signal(self.nodes, signal.SIGKILL)
            code = 125
        self._kill_all_orphans()
        self._finish(code)

    def _import_entry(self) -> None:
        """Import the entry once for all nodes, which begin as forks of this process."""
        from cloudjob.backends.process import forked_entry

        self._become = lambda node: forked_entry.run(self.argv, node.env, self.entry)

    def _attempts(self) -> int:
        """Run the job, with its retries; return its exit code."""
        while True:
            self._start()
            code = self._watch()
            if code == 0 or self.is_cancelled or not self._has_attempts:
                return code
            self._kill_all_orphans()
            if not self._begin_again():
                return code

    @property
    def _has_attempts(self) -> bool:
        """Whether the job may start again."""
        return self.rules.max_retries > 0

    def _start(self) -> None:
        self._attempt = len(self._failed) + 1
        if self._has_attempts:
            self._log_sizes = node_logs.sizes(self._logs)
        for node in self.nodes:
            self._prepare(node)
        self._past = Past(
            cancelled_at=self._past.cancelled_at,
            is_urgent=self._past.is_urgent,
        )
        for node in self.nodes:
            node.process = self._fork(node)
        self._update_state()

    # -- one attempt after another ------------------------------------------------------------

    def _begin_again(self) -> bool:
        """Say what follows from the end of an attempt, and wait until the next one begins.

        Returns:
            Whether there is another one; a cancel during the wait prevents it.
        """
        self._failed.append(self._failed_attempt())
        decision = attempts.decide(self._failed, self.rules, self._left_s)
        self._log(attempts.explain(self._failed, self.rules, decision))
        if not decision.is_again:
            return False
        self._keep_record()
        self._update_state()
        end_s = time.monotonic() + decision.pause_s
        while not self.is_cancelled and time.monotonic() < end_s:
            self._handle_signals(end_s - time.monotonic())
            self._reap()
        return not self.is_cancelled

    def _failed_attempt(self) -> FailedAttempt:
        # A head that we have asked to end says that it was cancelled, and knows nothing else.
        record = None if self._past.is_head_asked else node_logs.record(self._record)
        outcome = record.outcome if record else None
        failure = (outcome.failure if outcome else None) or exits.Failure()
        came = attempts.progress_of(node_logs.new_lines(self._logs, self._log_sizes))
        return FailedAttempt(attempts.kind_of(outcome), failure, came)

    @property
    def _logs(self) -> list[str]:
        return [node.request.log for node in self.nodes]

    @property
    def _record(self) -> str:
        """The file in which the head leaves its record, for us."""
        return os.path.join(self.run_dir, paths.RECORD)

    @property
    def _left_s(self) -> float | None:
        """The seconds until the time limit, which is that of all attempts; None without one."""
        limit_s = float(self.nodes[0].request.env.get(names.CLOUDJOB_TIMEOUT_S) or 0)
        return self._begun_s + limit_s - time.monotonic() if limit_s else None

    def _keep_record(self) -> None:
        """Move the record of an attempt to a folder of its own, where the next one finds it."""
        folder = os.path.join(self.run_dir, paths.attempt_name(len(self._failed)))
        with contextlib.suppress(OSError):
            os.mkdir(folder, 0o700)
            os.replace(self._record, os.path.join(folder, paths.RECORD))
        with contextlib.suppress(OSError):  # of no use to the next attempt
            os.unlink(self._record)

    def _variables(self, node: _Node) -> dict[str, str]:
        """Return the variables that differ from one attempt to another."""
        if not self._has_attempts:
            return {}
        values = {names.CLOUDJOB_ATTEMPT: str(self._attempt)}
        if self._failed:
            folder = paths.attempt_name(len(self._failed))
            run_dir = node.request.env.get(names.CLOUDJOB_CONTROL_DIR, self.run_dir)
            values[names.CLOUDJOB_PREVIOUS_CAUSE] = self._failed[-1].kind.value
            values[names.CLOUDJOB_PREVIOUS_DIR] = f"{run_dir}/{folder}"
            if self._left_s is not None:
                # Zero would be no limit at all.
                values[names.CLOUDJOB_TIMEOUT_S] = repr(max(_SHORTEST_S, self._left_s))
        return values

    def _prepare(self, node: _Node) -> None:
        remove_tree(node.request.tmp)
        with contextlib.suppress(FileNotFoundError):
            index = self.nodes.index(node)
            os.unlink(os.path.join(self.run_dir, node_end.file_name(index)))
        for folder in node.request.own_folders:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        node.exit_code = None
        node.is_reported = False
        node.ended_at, node.ended_s = 0.0, float("inf")
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
            env = {**node.request.env, **self._variables(node)}
            request = node.request._replace(env=env)
            keeper = Keeper(request, self._become, self.hosts, controller, self.lock)
            code = keeper.run()
        except Exception as error:  # noqa: BLE001 (whatever it is, the log must name it)
            _append(node.request.log, f"cloudjob: starting node {node.request.host}: {error!r}\n")
        finally:
            os._exit(code)

    # -- while it runs ------------------------------------------------------------------------

    def _watch(self) -> int:
        """Wait until every node has ended; return the exit code of the job."""
        while any(node.is_running for node in self.nodes):
            seen = [node.seen for node in self.nodes]
            for action in supervision.decide(seen, self._policy, self._past, time.monotonic()):
                self._act(action.deed, [self.nodes[index] for index in action.nodes])
            kill_s = supervision.kill_at(seen, self._policy, self._past) - time.monotonic()
            self._handle_signals(max(0.0, min(_LOOK_S, kill_s)))
            if self._reap():
                self._update_state()
        seen = [node.seen for node in self.nodes]
        return supervision.exit_code(seen, self._policy.lead)

    def _act(self, deed: Deed, nodes: list[_Node]) -> None:
        """Carry out what the rules of supervision demand, and note that it was done."""
        if deed is Deed.REPORT:
            for node in nodes:
                self._report(node)
        elif deed is Deed.KILL:
            # SIGHUP makes a keeper end its node at once.
            _signal(nodes, signal.SIGHUP)
            self._past = self._past._replace(killed_at=time.monotonic())
        else:
            # A worker that waits for a head that never started ends at once.
            _signal(nodes, signal.SIGTERM)
            is_asked = deed is Deed.ASK_HEAD
            note = {"head_asked_at": time.monotonic()} if is_asked else {_NOTES[deed]: True}
            self._past = self._past._replace(**note)

    def _report(self, node: _Node) -> None:
        """Report to the head that a worker has failed: it may still wait for it."""
        path = os.path.join(self.run_dir, node_end.file_name(self.nodes.index(node)))
        with contextlib.suppress(OSError):  # no room: retried after some seconds
            with open(path + ".new", "wb") as file:
                file.write(node_end.dump(node.exit_code or 0))
            os.replace(path + ".new", path)
            node.is_reported = True

    def _handle_signals(self, wait_s: float) -> None:
        """Wait for signals, at most for some seconds, and act on them."""
        is_readable = select.select([self._wake], [], [], wait_s)[0]
        for number in os.read(self._wake, 4096) if is_readable else b"":
            if number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1) and not self.is_cancelled:
                self._past = self._past._replace(cancelled_at=time.monotonic())
            if number == signal.SIGUSR1:
                self._past = self._past._replace(is_urgent=True, killed_at=None)

    def _reap(self) -> bool:
        """Record the nodes that have ended, and end processes that a killed node left behind."""
        has_reaped = False
        for child, code in reaped():
            for node in self.nodes:
                if node.process == child and node.exit_code is None:
                    node.exit_code = code
                    node.ended_at, node.ended_s = time.time(), time.monotonic()
                    has_reaped = True
        self._kill_orphans()
        return has_reaped

    def _kill_orphans(self) -> None:
        """End adopted children: processes of a keeper that was killed."""
        keepers = {node.process for node in self.nodes if node.is_running}
        for child in linux.children(os.getpid()):
            # Its children become ours when it ends, and SIGCHLD calls this method again.
            if child not in keepers:
                with contextlib.suppress(OSError):
                    os.kill(child, signal.SIGKILL)

    def _kill_all_orphans(self) -> None:
        """End the last processes of killed keepers, which may outlive the job."""
        end = time.monotonic() + _ORPHANS_S
        before, deadline = None, 0.0
        while (children := linux.children(os.getpid())) and time.monotonic() < end:
            if children != before:
                # On a busy machine, a long chain of them takes a while.
                before, deadline = children, time.monotonic() + LEAVE_S
            if time.monotonic() > deadline:
                return
            # A process whose parent was not our child is adopted without a signal.
            self._handle_signals(_POLL_S)
            self._reap()

    # -- the state file -----------------------------------------------------------------------

    def open_state(self) -> None:
        """Write the first state, and reserve room for the last one in case the disk is full then.

        The logs are created now, as a node or a controller without one cannot say why it ends.

        Raises:
            OSError: The disk is full.
        """
        text = self._state()
        for log in (*self._logs, self.log):
            os.close(_opened(log))
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
            "has_asked_head": self._past.is_head_asked,
            "message": self._message,
            # What starts the node half beside an entry.
            "entry": self.argv[:_ENTRY_WORDS],
            "attempts": self._attempts_state() if self._has_attempts else None,
            "nodes": [
                {
                    "host": node.request.host,
                    "node_dir": node.request.env.get(names.CLOUDJOB_NODE_DIR, ""),
                    "process": node.process,
                    "started_at": node.started_at,
                    "ended_at": node.ended_at or None,
                    "exit_code": node.exit_code,
                }
                for node in self.nodes
            ],
        }
        return json.dumps(state).encode("ascii")

    def _attempts_state(self) -> dict[str, object]:
        before = self._failed[self._attempt - 2].kind.value if self._attempt > 1 else ""
        most = attempts.total(self._failed, self.rules)
        return {"number": self._attempt, "most": most, "previous_cause": before}

    def _remove_folders(self) -> None:
        nodes = [] if self.keeps_homes else self.nodes
        node_folders = [folder for node in nodes for folder in node.request.own_folders]
        for folder in (self.run_dir, *node_folders):
            with contextlib.suppress(OSError):
                remove_tree(folder)

    def _log(self, text: str) -> None:
        with contextlib.suppress(OSError):
            _append(self.nodes[0].request.log, f"cloudjob: {text}\n")


def main() -> None:
    """Run the job whose request is on standard input."""
    # A cancel may arrive before the controller can handle signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    if sys.argv[2:] and _is_utf_8() and not select.select([0], [], [], 0)[0]:
        # The submit is still being prepared.
        from cloudjob.backends.process import forked_entry  # noqa: F401

    request, lock = _read_request()
    controller = Controller(request, lock)
    controller.open_state()
    with contextlib.suppress(BrokenPipeError):
        # If the submitter is killed from here on, the job runs and its record finds it.
        os.write(1, b"ready\n")
    _redirect_output(controller.log)
    become_subreaper()
    controller.run()
    # At once: an interpreter that shuts down takes milliseconds, and nothing is left to write.
    os._exit(0)


def _is_utf_8() -> bool:
    return sys.getfilesystemencoding() == "utf-8"


def _read_request() -> tuple[dict[str, Any], int | None]:
    """Return the request on standard input, and the descriptor that came with it."""
    with socket.socket(fileno=os.dup(0)) as connection:
        data, descriptors, flags, _ = socket.recv_fds(connection, 1, 1)
    if not data:
        # The submit has failed, or was killed.
        os._exit(0)
    if flags & socket.MSG_CTRUNC:
        # Without its lock, the job would seem to have ended.
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    for descriptor in descriptors:
        os.set_inheritable(descriptor, True)
    # Descriptor 0 stays open, so that no other file gets its number.
    with os.fdopen(0, "rb", closefd=False) as file:
        # A submitter that is killed while it writes has started nothing.
        return json.loads(file.read()), next(iter(descriptors), None)


def _signal(nodes: list[_Node], number: int) -> None:
    for node in nodes:
        if node.is_running:
            with contextlib.suppress(OSError):
                os.kill(node.process, number)
                # A stopped process would never handle the signal.
                os.kill(node.process, signal.SIGCONT)


def _redirect_output(path: str) -> None:
    log = _opened(path)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)


def _opened(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def _append(path: str, text: str) -> None:
    with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
