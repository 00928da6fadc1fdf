"""The process backend: emulated nodes on this machine, no root, no containers, no daemon."""

from __future__ import annotations

import _socket
import array
import contextlib
import functools
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cloudjob import installation
from cloudjob.backends import handles, interpreters
from cloudjob.backends.base import Backend, Check, Devices
from cloudjob.backends.process import (
    SSH_CONFIG,
    devices,
    isolation,
    node_files,
    running,
    ssh_config,
)
from cloudjob.backends.process import request as requests
from cloudjob.backends.process.request import ProcessRequest
from cloudjob.errors import BackendError, JobNotFound, RunsElsewhere
from cloudjob.home import private_folder, writing
from cloudjob.model import grid, times
from cloudjob.model.submission import Submission
from cloudjob.model.text import MASK
from jobentry.contract.launchers import LAUNCHERS
from jobentry.system.trees import remove_tree

# What a submit does not need is imported where it is used.
if TYPE_CHECKING:
    from cloudjob.backends.native import NativeStatus
    from cloudjob.model.job import JobSpec

_SCHEME = "process"
_POLL_S = 0.01
# The longest wait between two looks at silent logs: at _POLL_S, following took 8 % of a CPU.
_SILENT_POLL_S = 0.1
# Seconds that the processes of a job being removed have to end before they are killed.
_END_S = 10.0
# Values of a request that only ``show`` and ``send`` use.
_NOT_SENT = ("job", "hosts_text", "secret_names", "python")


class ProcessBackend(Backend[ProcessRequest]):
    """Runs jobs as processes of this machine; see ``Backend`` for what it promises."""

    poll_s = _POLL_S

    def __init__(self, home: Path, options: dict[str, Any]) -> None:
        self._home = home
        self._jobs = home / "process"
        self._options = options
        self._early: _Controller | None = None

    # -- forward ------------------------------------------------------------------------------

    def checks(self, spec: JobSpec | None, _store: str) -> list[Check]:
        """Check whether nodes can have files of their own, if the job does not share them."""
        if sys.platform != "linux":
            return [Check("nodes as processes", False, *requests.NEEDS_LINUX)]
        if (
            self._options.get("isolation", "auto") != "auto"
            or isolation.possible_level() == "files"
        ):
            return []
        summary = (
            "this machine does not allow mount namespaces (unshare), so the nodes share its /tmp, "
            "and have no /cache, /home/ma-user and /home/work"
        )
        return [Check("files of the nodes", False, summary, is_needed=False)]

    def devices(self, spec: JobSpec, *, may_query: bool) -> Devices:
        """Return the GPUs or NPUs of each node: its own, or those of this machine for one node."""
        if spec.process.gpus or spec.nodes > 1:
            return Devices(spec.process.gpus, f"process.gpus is {spec.process.gpus}")
        count, kind = devices.count(os.environ)
        return Devices(count, f"this machine has {count} {kind}s")

    @contextlib.contextmanager
    def starting(self, job: str) -> Iterator[None]:
        # What is missing here, `build` reports.
        with contextlib.suppress(BackendError, OSError):
            requests.need_linux()
            self._early = _Controller.start(job, self._entry)
        try:
            yield
        finally:
            early, self._early = self._early, None
            if early:
                early.end()

    def build(self, submission: Submission) -> ProcessRequest:
        """Return the request for ``submission``.

        Raises:
            BackendError: This machine does not run Linux, or lacks a program.
        """
        requests.need_linux()
        launcher = LAUNCHERS.get(submission.spec.launcher)
        machine = self._machine
        if launcher is None or launcher.needs_mpi:
            requests.need_mpirun(machine)
        unique = grid.unique_part(submission.job)
        run_dir = f"{requests.short_temporary_folder()}/cloudjob-{unique}"
        folder = str(self._jobs / submission.job)
        requested = self._options.get("isolation", "auto")
        level = "none" if requested == "none" else isolation.possible_level()
        if requested == "names" and level == "files":
            level = "names"
        files = node_files.Files()
        if level == "files":
            files = node_files.files_of(submission, machine.places, self._home)
        return requests.build(submission, machine, folder, run_dir, level, files)

    @functools.cached_property
    def _machine(self) -> requests.Machine:
        # A submit builds its request twice.
        return requests.machine_of(self._options, self._home, self._entry)

    @functools.cached_property
    def _entry(self) -> str:
        return interpreters.entry_of(self._home)

    def show(self, request: ProcessRequest) -> dict[str, Any]:
        secrets = dict.fromkeys(request.secret_names, MASK)
        nodes = [{**node._asdict(), "env": node.env | secrets} for node in request.nodes]
        return {**request._asdict(), "nodes": nodes}

    def environments(self, request: ProcessRequest) -> Iterable[Mapping[str, str]]:
        return (node.env for node in request.nodes)

    def handle(self, request: ProcessRequest) -> str:
        return handles.write(_SCHEME, "local", request.job)

    def own_handle(self, handle: str, job: str) -> str:
        handles.need_folder(self._jobs / job, job)
        return handles.write(_SCHEME, "local", job)

    def send(self, request: ProcessRequest) -> str:
        folder, run_dir = Path(request.folder), Path(request.run_dir)
        nodes = () if request.keeps_homes else request.nodes
        node_folders = [folder for node in nodes for folder in node.own_folders]
        with writing(f"starting job {request.job}", folder):
            for path in (self._jobs, self._home / "cache"):
                private_folder(path)
            for written in request.nodes[0].written:
                # The folder of an output may be new.
                Path(written).mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = running.register(
                self._home, request.job, folder, (request.run_dir, *node_folders)
            )
            try:
                folder.mkdir(mode=0o700)
                with writing(f"starting job {request.job}", run_dir, "TMPDIR"):
                    run_dir.mkdir(mode=0o700)
                    _write_key(run_dir / requests.KEY)
                    _write_commands(run_dir / "bin", request.python)
                    if request.hosts:
                        Path(request.hosts).write_text(request.hosts_text + _hosts_of_machine())
                        ssh_config.write(run_dir / SSH_CONFIG)
                early, self._early = self._early, None
                controller = early or _Controller.start(request.job, request.entry)
                _start_job(controller, request, lock, running.path_of(self._home, request.job))
            except BaseException:
                os.close(lock)
                self._abandon(request.job, folder)
                raise
            os.close(lock)
        return self.handle(request)

    # -- back ---------------------------------------------------------------------------------

    def nodes(self, handle: str) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether the job has ended, and the state of each node.

        Returns:
            A node has ``host, started_at, ended_at, exit_code``; the times are seconds since the
            epoch, and all but the first may be None.
        """
        from cloudjob.backends.process import state

        job, folder = self._found(handle)
        is_alive = self._is_alive(job)
        written = state.read(folder)
        if written is None:
            if is_alive:
                return False, []
            raise JobNotFound(f"looking for {handle}: this machine has no such job")
        return bool(written["ended_at"]) or not is_alive, written["nodes"]

    def end_node(self, handle: str, node: int) -> None:
        """End a node as if it had lost power; wait for its process if it is still starting."""
        has_ended, nodes = self.nodes(handle)
        while not has_ended and not (nodes and nodes[node]["process"]):
            time.sleep(_POLL_S)
            has_ended, nodes = self.nodes(handle)
        if not has_ended and nodes[node]["exit_code"] is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(nodes[node]["process"], signal.SIGHUP)

    def status(self, handle: str) -> NativeStatus:
        from cloudjob.backends.native import Running
        from cloudjob.backends.process import state

        job, folder = self._found(handle)
        # The lock first: a controller that ends between the two queries has written its last state.
        is_alive = self._is_alive(job)
        unseen_host = "" if is_alive else running.unseen_host(self._home, job)
        try:
            written = state.read(folder)
        except BackendError as error:
            if unseen_host:
                raise RunsElsewhere("looking for", job, unseen_host) from error
            if is_alive:
                return Running(f"running ({error.message})")
            return state.lost_status(folder, None, error.message)
        if written is not None and written["ended_at"] is not None:
            return state.ended_status(written)
        if unseen_host:
            raise RunsElsewhere("looking for", job, unseen_host)
        return self._unended_status(handle, written, is_alive=is_alive)

    def _unended_status(
        self, handle: str, written: dict[str, Any] | None, *, is_alive: bool
    ) -> NativeStatus:
        """Return the status of a job whose controller has not written how it ended."""
        from cloudjob.backends.native import Running, Waiting
        from cloudjob.backends.process import state

        job, folder = self._found(handle)
        if written is None:
            if is_alive:
                return Waiting("starting")
            raise JobNotFound(f"looking for {handle}: this machine has no such job")
        if is_alive:
            started_at = times.rfc3339(written["started_at"])
            native = "running"
            if not running.is_local(self._home, job):
                native = f"runs on {running.name_of_host(self._home, job)}"
            return Running(native, started_at, state.attempt_of(written))
        with contextlib.suppress(OSError):
            running.remove_leftovers_of(self._home, job)
        return state.lost_status(folder, written, state.LOST)

    def logs(self, handle: str, node: int | None, *, follow: bool) -> Iterator[tuple[int, bytes]]:
        from cloudjob.backends.follow import node_logs, poll
        from cloudjob.backends.process import state

        job, folder = self._found(handle)
        offsets: dict[int, int] = {}

        def read_new() -> Iterator[tuple[int, bytes]]:
            for index, path in node_logs(folder).items():
                while node in (None, index) and (data := _read(path, offsets.get(index, 0))):
                    offsets[index] = offsets.get(index, 0) + len(data)
                    yield index, data

        def has_ended() -> bool:
            # The nodes have ended, or their processes are gone.
            if not self._is_alive(job):
                return True
            with contextlib.suppress(BackendError):
                written = state.read(folder)
                return bool(written and written["ended_at"])
            return False

        yield from poll(read_new, has_ended, follow=follow, pause_s=(_POLL_S, _SILENT_POLL_S))
        if follow and not self._is_alive(job):
            written = state.read(folder)
            if not (written and written["ended_at"]):
                self._need_visible(job, "following the log of")

    def log_ends(self, handle: str) -> Iterator[tuple[int, bytes]]:
        from cloudjob.backends.follow import node_logs, read_ends

        for index, path in node_logs(self._found(handle)[1]).items():
            for data in read_ends(path):
                yield index, data

    def cancel(self, handle: str, *, is_urgent: bool = False) -> None:
        job, folder = self._found(handle)
        controller = running.controller_of(self._home, job)
        if not controller:
            self._need_reachable(job, folder)
        elif self._is_alive(job):
            _signal(controller, signal.SIGUSR1 if is_urgent else signal.SIGTERM)
            # A stopped process would never handle the signal.
            _signal(controller, signal.SIGCONT)

    def command_on(
        self, handle: str, node: int, arguments: Sequence[str], *, is_terminal: bool
    ) -> list[str]:
        from cloudjob.backends.process import entering, state
        from jobentry.system import linux

        job, folder = self._found(handle)
        self._need_local(job, "entering a node of")
        written = state.read(folder) or {"entry": [], "nodes": []}
        nodes = written["nodes"]
        is_running = node < len(nodes) and nodes[node]["exit_code"] is None
        try:
            # The keeper's other children are orphans of the node, and so younger than its entry.
            children = linux.children(nodes[node]["process"]) if is_running else []
            # One that has just ended has no time of start.
            entry = sorted(children, key=lambda child: float(linux.start_ticks(child) or "inf"))[0]
            node_dir = nodes[node]["node_dir"]
            return entering.command(entry, written["entry"], node_dir, arguments)
        except (OSError, IndexError, KeyError) as error:
            raise BackendError(f"entering node {node} of {handle}: it does not run") from error

    def _need_local(self, job: str, doing: str) -> None:
        if not running.is_local(self._home, job):
            raise RunsElsewhere(doing, job, running.name_of_host(self._home, job))

    def ask(self, handle: str, request: bytes) -> bytes:
        from jobentry.system.requests import RequestError, ask

        job, _ = self._found(handle)
        doing = f"asking the nodes of {handle}"
        self._need_local(job, "asking the nodes of")
        run_dir = running.run_dir_of(self._home, job)
        if run_dir is None:
            raise BackendError(f"{doing}: it does not run")
        try:
            return ask(f"{run_dir}/0/node", request)
        except RequestError as error:
            raise BackendError(f"{doing}: {error}") from error

    def remove(self, handle: str) -> None:
        """Remove everything of the job; a job that runs on this machine is ended first."""
        try:
            job, folder = self._found(handle)
        except JobNotFound:
            return
        if self._is_alive(job):
            self.cancel(handle, is_urgent=True)
        self._abandon(job, folder)

    def _abandon(self, job: str, folder: Path) -> None:
        """Wait for the processes of a job, kill those that hang, and remove its files."""
        deadline = time.monotonic() + _END_S
        while self._is_alive(job):
            if time.monotonic() > deadline:
                processes = running.processes_of(self._home, job)
                if not processes:
                    raise RunsElsewhere("removing", job, running.name_of_host(self._home, job))
                for process in processes:
                    _signal(process, signal.SIGKILL)
            time.sleep(_POLL_S)
        with contextlib.suppress(OSError):
            running.remove_leftovers_of(self._home, job)
        with writing(f"removing job {job}", folder):
            remove_tree(folder)
            # It stays if another machine started the job.
            running.path_of(self._home, job).unlink(missing_ok=True)

    def _is_alive(self, job: str) -> bool:
        """Whether the job's controller or a keeper is alive."""
        return running.is_running(self._home, job)

    def _need_visible(self, job: str, doing: str) -> None:
        """Raise ``RunsElsewhere`` if a job without a visible lock may run on another machine."""
        host = running.unseen_host(self._home, job)
        if host:
            raise RunsElsewhere(doing, job, host)

    def _need_reachable(self, job: str, folder: Path) -> None:
        """Raise ``RunsElsewhere`` if a job may run, but has no processes that are visible here."""
        from cloudjob.backends.process import state

        with contextlib.suppress(BackendError):
            written = state.read(folder)
            if written and written["ended_at"]:
                return
        self._need_visible(job, "cancelling")
        if self._is_alive(job) and not running.is_local(self._home, job):
            raise RunsElsewhere("cancelling", job, running.name_of_host(self._home, job))

    def _found(self, handle: str) -> tuple[str, Path]:
        """Return a job's id and folder."""
        job = handles.read(handle, _SCHEME, 2)[1]
        folder = self._jobs / job
        if not folder.is_dir():
            raise JobNotFound(f"looking for {handle}: this machine has no such job")
        return job, folder


def _write_key(path: Path) -> None:
    """Write the key with which the nodes of a job authenticate each other; ssh does not use it."""
    path.touch(0o600)
    path.write_text(os.urandom(32).hex())


def _write_commands(folder: Path, python: str) -> None:
    """Write the commands that every image of the platform has, which call ``python``."""
    folder.mkdir(mode=0o700)
    module = " -m pip"
    for name, args in (("python", ""), ("python3", ""), ("pip", module), ("pip3", module)):
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {shlex.quote(python)}{args} "$@"\n')
        path.chmod(0o700)


def _hosts_of_machine() -> str:
    try:
        return Path("/etc/hosts").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return "127.0.0.1 localhost\n"


class _Controller(NamedTuple):
    """The process that runs a job, which waits for its request; it ends if we end before.

    Args:
        connection: A socket for the request, which is never in argv.
    """

    process: subprocess.Popen[bytes]
    connection: _socket.socket

    @classmethod
    def start(cls, job: str, entry: str) -> _Controller:
        """Start the controller of a job, which imports the entry while it waits."""
        name, module = running.process_name(job), "cloudjob.backends.process.controller"
        ours, theirs = _socket.socketpair()
        try:
            process = subprocess.Popen(
                installation.argv_of(module, name, entry, entry=entry),
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd="/",
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(process, ours)

    def end(self) -> None:
        """End it before it has started anything that outlives it."""
        self.connection.close()
        with self.process:
            self.process.kill()


def _start_job(controller: _Controller, request: ProcessRequest, lock: int, path: Path) -> None:
    """Let a controller run a job.

    Args:
        lock: The descriptor of the file at ``path``, which is locked while the job runs.
    """
    try:
        running.note_controller(lock, controller.process.pid)
        _send_request(controller, request, path, lock)
    except BaseException:
        controller.end()
        raise
    # The process may outlive us; if it ends before us, it must not stay a zombie.
    threading.Thread(target=controller.process.wait, daemon=True).start()


def _send_request(controller: _Controller, request: ProcessRequest, path: Path, lock: int) -> None:
    """Send a controller its request with the lock, and wait until it is ready."""
    process, connection = controller
    assert process.stdout is not None
    assert process.stderr is not None
    values = {key: value for key, value in request._asdict().items() if key not in _NOT_SENT}
    values["nodes"] = [node._asdict() for node in request.nodes]
    values["running"] = str(path)
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", [lock]))]
    with contextlib.suppress(ConnectionError), contextlib.closing(connection):
        connection.sendmsg([b"\n"], rights)
        connection.sendall(json.dumps(values).encode("ascii"))
    with process.stdout as stdout, process.stderr as stderr:
        if stdout.readline() == b"ready\n":
            return
        lines = stderr.read().decode("utf-8", "replace").strip().splitlines()
        raise BackendError(
            f"starting the controller of job {request.job}: {lines[-1] if lines else 'it ended'}"
        )


def _signal(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _read(path: Path, offset: int) -> bytes:
    from cloudjob.backends.follow import PIECE_BYTES

    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(PIECE_BYTES)
    except FileNotFoundError:
        return b""
