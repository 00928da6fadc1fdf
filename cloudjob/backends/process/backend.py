"""The process backend: emulated nodes on this machine, no root, no containers, no daemon."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudjob
from cloudjob import times
from cloudjob.backends import handles, interpreters
from cloudjob.backends.base import Backend, Check, Devices, NativeStatus
from cloudjob.backends.follow import PIECE_BYTES, node_logs, poll, read_ends
from cloudjob.backends.process import devices, isolation, running
from cloudjob.backends.process.isolation import Mount
from cloudjob.backends.process.node import NodeRequest
from cloudjob.backends.process.state_file import STATE
from cloudjob.errors import BackendError, JobNotFound
from cloudjob.home import private_folder, writing
from cloudjob.model import grid
from cloudjob.model import submission as submissions
from cloudjob.model.status import JobState
from cloudjob.model.submission import Submission
from cloudjob.model.text import MASK
from jobentry.contract import names
from jobentry.contract.launchers import LAUNCHERS
from jobentry.trees import remove_tree

if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

_SCHEME = "process"
# The key of the job, in its run folder.
KEY = "key"
_POLL_S = 0.01
_NEEDS_LINUX = (
    "they need Linux, whose namespaces, process groups and /proc cloudjob uses",
    "run nodes in containers: --backend docker, or `engine: docker` in the emulator's settings",
)
# A Unix socket's path has at most 107 bytes, and scripts and Open MPI create sockets in TMPDIR.
_LONGEST_TMPDIR = 40
# Seconds that the processes of a job being removed have to end before they are killed.
_END_S = 10.0


@dataclass(frozen=True, slots=True)
class Machine:
    """The tools and devices of this machine.

    Args:
        path: PATH of the nodes.
        library_path: LD_LIBRARY_PATH of the nodes, empty for none.
        libmpi: The MPI library of mpirun if the interpreter would load another, else empty.
        devices: The variables that say which accelerators may be used.
        gpus: NVIDIA's GPUs among them.
        python: The interpreter of the script.
        entry_python: The interpreter of the entry.
        entry: The folder of the entry.
        places: The real paths of these names and of the folder of cloudjob's state.
        installed: The folders that ``pip install`` would change.
    """

    path: str
    library_path: str
    libmpi: str
    devices: Mapping[str, str]
    gpus: tuple[str, ...]
    python: str
    entry_python: str
    entry: str
    places: tuple[str, ...] = ()
    installed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ProcessRequest:
    """The request to the controller of a job.

    Args:
        folder: The job's folder, for its state and logs.
        run_dir: A folder with a short path, for sockets and temporary files.
        hosts: The file that is /etc/hosts on the nodes; empty when they are not isolated.
        retries: How often a failed job, or a lost worker of an elastic one, is started again.
        is_led: Whether the job ends with its head; else with the last node or the first failure.
        keeps_homes: Whether the nodes' homes stay when the job has ended.
        is_elastic: Whether the job continues without a lost worker.
        python: The interpreter that is ``python`` on nodes with files of their own.
    """

    job: str
    folder: str
    run_dir: str
    hosts: str
    hosts_text: str
    argv: tuple[str, ...]
    retries: int
    grace_s: float
    nodes: tuple[NodeRequest, ...]
    secret_names: tuple[str, ...]
    is_led: bool = True
    keeps_homes: bool = False
    is_elastic: bool = False
    python: str = ""


def need_linux() -> None:
    """Check that nodes can be processes of this machine.

    Raises:
        BackendError: It does not run Linux.
    """
    if sys.platform != "linux":
        found, hint = _NEEDS_LINUX
        raise BackendError(f"running nodes as processes of this machine: {found}", hint=hint)


class ProcessBackend(Backend[ProcessRequest]):
    """Runs jobs as processes of this machine; see ``Backend`` for what it promises."""

    poll_s = 0.01

    def __init__(self, home: Path, options: dict[str, Any]) -> None:
        self._home = home / "process"
        self._options = options

    # -- forward ------------------------------------------------------------------------------

    def checks(self, spec: JobSpec | None, _store: str) -> list[Check]:
        """Check whether nodes can have files of their own, if the job does not share them."""
        if sys.platform != "linux":
            return [Check("nodes as processes", False, *_NEEDS_LINUX)]
        if (
            self._options.get("isolation", "auto") != "auto"
            or isolation.possible_level() == "files"
        ):
            return []
        found = (
            "this machine does not allow mount namespaces (unshare), so the nodes share its /tmp, "
            "and have no /cache, /home/ma-user and /home/work"
        )
        return [Check("files of the nodes", False, found, is_needed=False)]

    def devices(self, spec: JobSpec, *, may_ask: bool) -> Devices:
        """Return the GPUs or NPUs of each node: its own, or those of this machine for one node."""
        if spec.process.gpus or spec.nodes > 1:
            return Devices(spec.process.gpus, f"process.gpus is {spec.process.gpus}")
        count, kind = devices.count(os.environ)
        return Devices(count, f"this machine has {count} {kind}s")

    def build(self, submission: Submission) -> ProcessRequest:
        """Return the request for ``submission``.

        Raises:
            BackendError: This machine does not run Linux, or lacks a program.
        """
        need_linux()
        launcher = LAUNCHERS.get(submission.spec.launcher)
        needs_mpi = launcher is None or launcher.needs_mpi
        machine = machine_of(self._options, self._home.parent, needs_mpi=needs_mpi)
        run_dir = f"{_short_temporary_folder()}/cloudjob-{grid.unique_part(submission.job)}"
        folder = str(self._home / submission.job)
        wanted = self._options.get("isolation", "auto")
        level = "none" if wanted == "none" else isolation.possible_level()
        if wanted == "names" and level == "files":
            level = "names"
        request = build(submission, machine, folder, run_dir, level)
        return with_cache(request, str(self._home.parent / "cache"))

    def show(self, request: ProcessRequest) -> dict[str, Any]:
        shown = asdict(request)
        for node in shown["nodes"]:
            node["env"].update(dict.fromkeys(request.secret_names, MASK))
        return shown

    def environments(self, request: ProcessRequest) -> tuple[Mapping[str, str], ...]:
        return tuple(node.env for node in request.nodes)

    def handle(self, request: ProcessRequest) -> str:
        return handles.write(_SCHEME, "local", request.job)

    def send(self, request: ProcessRequest) -> str:
        home, folder = self._home.parent, Path(request.folder)
        nodes = () if request.keeps_homes else request.nodes
        own = [folder for node in nodes for folder in node.own_folders]
        with writing(f"starting job {request.job}", folder):
            for path in (self._home, home / "cache"):
                private_folder(path)
            lock = running.begin(home, request.job, folder, (request.run_dir, *own))
        try:
            with writing(f"starting job {request.job}", folder):
                folder.mkdir(mode=0o700)
                Path(request.run_dir).mkdir(mode=0o700)
                _write_key(Path(request.run_dir, KEY))
                _write_commands(Path(request.run_dir, "bin"), request.python)
                if request.hosts:
                    Path(request.hosts).write_text(request.hosts_text + _hosts_of_machine())
                path = running.path_of(home, request.job)
                _start_controller(request, lock, path)
        except BaseException:
            os.close(lock)
            self._abandon(request.job, folder)
            raise
        os.close(lock)
        return self.handle(request)

    # -- back ---------------------------------------------------------------------------------

    def nodes(self, handle: str) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether the job has ended, and what is known about each node.

        Returns:
            A node has ``host, started_at, ended_at, exit_code``; the times are seconds since the
            epoch, and all but the first may be None.
        """
        job, folder = self._found(handle)
        is_alive = self._is_alive(job)
        state = _state(folder)
        if state is None:
            if is_alive:
                return False, []
            raise JobNotFound(f"looking for {handle}: this machine has no such job")
        return bool(state["ended_at"]) or not is_alive, state["nodes"]

    def end_node(self, handle: str, node: int) -> None:
        """End one node as if it had lost power."""
        _, nodes = self.nodes(handle)
        if node < len(nodes) and nodes[node]["process"] and nodes[node]["exit_code"] is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(nodes[node]["process"], signal.SIGHUP)

    def status(self, handle: str) -> NativeStatus:
        job, folder = self._found(handle)
        # The lock first: a controller that ends between the two queries has written its last state.
        is_alive = self._is_alive(job)
        try:
            state = _state(folder)
        except BackendError as error:
            if is_alive:
                return NativeStatus(JobState.RUNNING, f"running ({error.message})")
            return _lost(folder, None, error.message)
        if state is None:
            if is_alive:
                return NativeStatus(JobState.PENDING, "starting")
            raise JobNotFound(f"looking for {handle}: this machine has no such job")
        if state["ended_at"] is not None:
            return _ended(state)
        if is_alive:
            return NativeStatus(
                JobState.RUNNING, "running", started_at=times.rfc3339(state["started_at"])
            )
        with contextlib.suppress(OSError):
            running.sweep_job(self._home.parent, job)
        return _lost(folder, state, _LOST)

    def logs(self, handle: str, node: int | None, *, follow: bool) -> Iterator[tuple[int, bytes]]:
        job, folder = self._found(handle)
        offsets: dict[int, int] = {}

        def look() -> Iterator[tuple[int, bytes]]:
            for index, path in node_logs(folder).items():
                while node in (None, index) and (data := _read(path, offsets.get(index, 0))):
                    offsets[index] = offsets.get(index, 0) + len(data)
                    yield index, data

        def has_ended() -> bool:
            return self._has_ended(job, folder)

        yield from poll(look, has_ended, follow=follow, pause_s=(_POLL_S, _POLL_S))

    def log_ends(self, handle: str) -> Iterator[tuple[int, bytes]]:
        for index, path in node_logs(self._found(handle)[1]).items():
            for data in read_ends(path):
                yield index, data

    def cancel(self, handle: str, *, is_urgent: bool = False) -> None:
        job, _ = self._found(handle)
        controller = running.controller_of(self._home.parent, job)
        if controller and running.is_running(self._home.parent, job):
            _signal(controller, signal.SIGUSR1 if is_urgent else signal.SIGTERM)
            # A stopped process would never handle it.
            _signal(controller, signal.SIGCONT)

    def remove(self, handle: str) -> None:
        """Remove everything of the job; one that is running is ended first."""
        try:
            job, folder = self._found(handle)
        except JobNotFound:
            return
        self.cancel(handle, is_urgent=True)
        self._abandon(job, folder)

    def _abandon(self, job: str, folder: Path) -> None:
        """Wait for the processes of a job, kill those that hang, and remove its files."""
        home = self._home.parent
        deadline = time.monotonic() + _END_S
        while self._is_alive(job):
            if time.monotonic() > deadline:
                for process in running.processes_of(home, job):
                    _signal(process, signal.SIGKILL)
            time.sleep(_POLL_S)
        with contextlib.suppress(OSError):
            running.sweep_job(home, job)
        with writing(f"removing job {job}", folder):
            remove_tree(folder)

    def _is_alive(self, job: str) -> bool:
        """Whether the job's controller or a keeper is alive."""
        return running.is_running(self._home.parent, job)

    def _has_ended(self, job: str, folder: Path) -> bool:
        """Whether the nodes of the job have ended, or no process is left that runs them."""
        if not self._is_alive(job):
            return True
        try:
            state = _state(folder)
        except BackendError:
            return False
        return bool(state and state["ended_at"])

    def _found(self, handle: str) -> tuple[str, Path]:
        """Return a job's id and folder."""
        job = handles.read(handle, _SCHEME, 2)[1]
        folder = self._home / job
        if not folder.is_dir():
            raise JobNotFound(f"looking for {handle}: this machine has no such job")
        return job, folder


def build(
    submission: Submission, machine: Machine, folder: str, run_dir: str, level: isolation.Level
) -> ProcessRequest:
    """Return the request for ``submission`` on ``machine``; it does no I/O.

    Args:
        level: What is private to each node.
    """
    hosts = submissions.host_names(submission)
    gpus = submission.spec.process.gpus
    argv = (
        machine.entry_python,
        "-I",
        "-S",
        machine.entry,
        submission.spec.script,
        *submission.spec.args,
    )
    seen = (folder, *machine.places, submission.spec.source, *submission.code.layers)
    nodes = []
    for index, host in enumerate(hosts):
        home, cache, work = (f"{folder}/{name}-{index}" for name in ("node", "cache", "work"))
        tmp = f"{run_dir}/{index}"
        # The same folder, as the node sees it.
        run = isolation.RUN_DIR if level == "files" else run_dir
        base = {
            "PATH": machine.path,
            "LANG": "C.UTF-8",
            "TMPDIR": tmp,
            **(variables_of_own_files(machine.path) if level == "files" else {}),
            "MA_SCRIPT_INTERPRETER": machine.python,
            "HOSTNAME": host.partition(".")[0],
            names.CLOUDJOB_EMULATED: "1",
            **machine.devices,
            **open_mpi_of_one_machine(is_isolated=level != "none"),
        }
        if machine.library_path:
            base["LD_LIBRARY_PATH"] = machine.library_path
        if machine.libmpi:
            base["MPI4PY_LIBMPI"] = machine.libmpi
        node = submissions.node_env(submission, index, hosts)._replace(
            interpreter=machine.python,
            node_dir=f"{run}/{index}/node",
            control_dir=run,
            ssh_key=f"{run}/{KEY}",
        )
        env = base | submissions.variables(submission, node, home=home, address=address_of(index))
        own = devices.share(machine.gpus, len(hosts), gpus, index)
        env.update({name: own[name] for name in own if name not in submission.spec.env})
        nodes.append(
            NodeRequest(
                host=host,
                env=env,
                home=home,
                tmp=tmp,
                log=f"{folder}/node-{index}.log",
                protected=protected_in(machine, f"{folder}/python-{index}")
                if level == "files"
                else (),
                mounts=mounts_of(home, cache, work, tmp, (*seen, *argv, *env.values()))
                if level == "files"
                else (),
            )
        )
    return ProcessRequest(
        job=submission.job,
        folder=folder,
        run_dir=run_dir,
        hosts=f"{run_dir}/hosts" if level != "none" else "",
        hosts_text="".join(
            f"{address_of(index)} {host} {host.partition('.')[0]}\n"
            for index, host in enumerate(hosts)
        ),
        argv=argv,
        retries=submission.spec.retries,
        grace_s=submission.spec.grace_s,
        nodes=tuple(nodes),
        secret_names=submission.hidden_names,
        is_elastic=LAUNCHERS[submission.spec.launcher].is_elastic,
        python=machine.python,
    )


def with_cache(request: ProcessRequest, folder: str) -> ProcessRequest:
    """Return ``request`` with nodes that share ``folder`` for the inputs of all jobs."""
    nodes = tuple(
        replace(node, env={names.CLOUDJOB_CACHE_DIR: folder, **node.env}) for node in request.nodes
    )
    return replace(request, nodes=nodes)


def mounts_of(
    home: str, cache: str, work: str, tmp: str, texts: Iterable[str]
) -> tuple[Mount, ...]:
    """Return the folders that a node has for itself, as the platform's containers have them.

    Args:
        home: Its home folder on this machine.
        cache: Its folder for large files.
        work: The home folder that images of the first generation have.
        tmp: The folder of its temporary files, in the folder of the job's sockets.
        texts: What of this machine's own folders of these names stays visible.
    """
    job_dir = f"{home}/modelarts/user-job-dir"
    return (
        (f"{tmp}/tmp", isolation.TMP),
        (cache, isolation.CACHE),
        (home, isolation.HOME),
        (work, isolation.WORK),
        (f"{home}/modelarts", f"{isolation.WORK}/modelarts"),
        (job_dir, f"{isolation.HOME}/user-job-dir"),
        (job_dir, f"{isolation.WORK}/user-job-dir"),
        (tmp.rpartition("/")[0], isolation.RUN_DIR),
        *isolation.named_in(texts),
    )


def protected_in(machine: Machine, folder: str) -> tuple[tuple[str, str], ...]:
    """Return the folders of this machine whose changes stay private to a job's node.

    Args:
        folder: The start of the paths of the folders that hold the node's changes.
    """
    return tuple((path, f"{folder}-{n}") for n, path in enumerate(machine.installed))


def variables_of_own_files(path: str) -> dict[str, str]:
    """Return the variables of a node that has files of its own.

    Args:
        path: PATH of this machine.
    """
    return {
        "PATH": f"{isolation.RUN_DIR}/bin:{path}",
        "TMPDIR": isolation.TMP,
        # Debian's pip refuses to change the machine, which it does not do here.
        "PIP_BREAK_SYSTEM_PACKAGES": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        **{name: os.environ[name] for name in ("PIP_CONFIG_FILE",) if name in os.environ},
    }


def address_of(node: int) -> str:
    """Return the address of a node."""
    # Open MPI takes 127.0.0.1 for itself and every other loopback address for another machine.
    return f"127.0.{node // 254}.{node % 254 + 1}"


def open_mpi_of_one_machine(*, is_isolated: bool) -> dict[str, str]:
    """Keep Open MPI to the loopback interface: with a bridge beside it an allreduce hangs."""
    words = {"OMPI_MCA_btl_tcp_if_include": "lo", **submissions.ONE_MACHINE}
    if not is_isolated:
        # Nodes with one host name and two TMPDIRs: the shared-memory BTL crashes ranks.
        words["OPENMPI_MCA_ARGS"] = "-mca pml ob1 -mca btl tcp,self -mca plm_rsh_no_tree_spawn true"
    return words


def machine_of(options: dict[str, Any], home: Path, *, needs_mpi: bool = True) -> Machine:
    """Return the tools and devices of this machine.

    Args:
        options: The section ``process`` of a job file.
        home: The folder of cloudjob's state.
        needs_mpi: Whether mpirun starts the ranks.

    Raises:
        BackendError: It lacks what the job needs.
    """
    path = interpreters.path_with_mpirun()
    if needs_mpi and shutil.which("mpirun", path=path) is None:
        raise BackendError(
            "looking for mpirun: not found on PATH or beside cloudjob",
            hint="pip install 'cloudjob[mpi]', or apt-get install openmpi-bin; launchers such"
            " as python and torchrun need none",
        )
    python = interpreters.python_of(str(options.get("python") or ""), "process.python")
    mpirun = shutil.which("mpirun", path=path) or ""
    return Machine(
        path=path,
        library_path=os.environ.get("LD_LIBRARY_PATH", ""),
        libmpi=interpreters.libmpi_of(mpirun, python),
        devices=devices.visible(os.environ),
        gpus=devices.gpus(os.environ),
        python=python,
        entry_python=sys.executable,
        entry=interpreters.entry_of(home),
        places=tuple(
            os.path.realpath(item)
            for item in (str(home), python, sys.executable, mpirun or python, *sys.path)
        ),
        installed=interpreters.installed_in(python),
    )


def _short_temporary_folder() -> str:
    folder = tempfile.gettempdir()
    # mpirun splits the command that starts its daemons at blanks, and reads quotes and colons.
    if len(folder) > _LONGEST_TMPDIR or not re.fullmatch(r"[\w/.+-]+", folder):
        return "/tmp"
    return folder


def _write_key(path: Path) -> None:
    """Write the key with which the nodes of a job authenticate each other; ssh does not use it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(os.urandom(32).hex().encode())


def _write_commands(folder: Path, python: str) -> None:
    """Write the commands that every image of the platform has, which call ``python``."""
    folder.mkdir(mode=0o700)
    module = " -m pip"
    for name, words in (("python", ""), ("python3", ""), ("pip", module), ("pip3", module)):
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {shlex.quote(python)}{words} "$@"\n')
        path.chmod(0o700)


def _hosts_of_machine() -> str:
    try:
        return Path("/etc/hosts").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return "127.0.0.1 localhost\n"


def _start_controller(request: ProcessRequest, lock: int, path: Path) -> None:
    """Start the process that runs the job; its request goes over a pipe, never in argv.

    Args:
        lock: The descriptor of the file at ``path``, which is locked while the job runs.
    """
    roots = [str(Path(cloudjob.__file__).parents[1]), str(Path(names.__file__).parents[2])]
    code = (
        f"import sys; sys.path[:0] = {roots!r}; "
        "from cloudjob.backends.process.controller import main; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code, running.process_name(request.job)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
        start_new_session=True,
        pass_fds=(lock,),
    )
    try:
        running.note_controller(lock, process.pid)
        _send_request(process, request, path, lock)
    except BaseException:
        process.kill()
        process.wait()
        raise
    # It may outlive us; until then, it must not stay a zombie once it has ended.
    threading.Thread(target=process.wait, daemon=True).start()


def _send_request(
    process: subprocess.Popen[bytes], request: ProcessRequest, path: Path, lock: int
) -> None:
    """Send a controller its request, and wait until it is ready."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    values = {key: value for key, value in asdict(request).items() if key not in _NOT_SENT}
    values["running"], values["lock"] = str(path), lock
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(json.dumps(values).encode("ascii"))
    with process.stdout as stdout, process.stderr as stderr:
        if stdout.readline() == b"ready\n":
            return
        words = stderr.read().decode("utf-8", "replace").strip().splitlines()
        raise BackendError(
            f"starting the controller of job {request.job}: {words[-1] if words else 'it ended'}"
        )


_NOT_SENT = ("job", "hosts_text", "secret_names", "python")


def _state(folder: Path) -> dict[str, Any] | None:
    """Return the last state that the controller has written; None if there is none yet.

    Raises:
        BackendError: The file cannot be read.
    """
    path = folder / STATE
    try:
        state: dict[str, Any] = json.loads(path.read_bytes())
        if not set(state) >= _EXPECTED:
            raise ValueError("values are missing")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise BackendError(f"reading the state of a job: {path}: {error}") from error
    return state


_EXPECTED = {"started_at", "ended_at", "exit_code", "is_cancelled", "nodes"}
_LOST = "the controller of the job was killed, or the machine was restarted"


def _lost(folder: Path, state: dict[str, Any] | None, message: str) -> NativeStatus:
    """Return the status of a job whose processes were killed; the head's record has precedence."""
    started_at = state["started_at"] if state else None
    begun = (folder / STATE).stat().st_mtime
    # A keeper touches its log when its node has ended; without one nobody knows when that was.
    ended = max((path.stat().st_mtime for path in folder.glob("node-*.log")), default=begun)
    return NativeStatus(
        JobState.FAILED,
        "lost",
        None if started_at is None else times.rfc3339(started_at),
        times.rfc3339(ended) if ended > begun else None,
        137,
        message=message,
        attempt_at=times.rfc3339(state["nodes"][0]["started_at"]) if state else "",
        # An entry is sent SIGTERM when its keeper is gone; that is not a cancel.
        has_asked=not (state and state["is_cancelled"]),
        is_unwatched=True,
    )


def _ended(state: dict[str, Any]) -> NativeStatus:
    started_at = times.rfc3339(state["started_at"])
    code = state["exit_code"]
    has_asked = state.get("has_asked_head", False)
    ended_at = times.rfc3339(state["ended_at"])
    # The first node that failed caused the others to end.
    bad = [(node["ended_at"], i) for i, node in enumerate(state["nodes"]) if node["exit_code"]]
    first = min(bad)[1] if bad else 0
    if has_asked:
        # The head was asked to end because of that node.
        code = state["nodes"][first]["exit_code"]
    since = times.rfc3339(state["nodes"][0]["started_at"])
    status = NativeStatus(
        JobState.CANCELLED, "cancelled", started_at, ended_at, code, attempt_at=since
    )
    if state["is_cancelled"]:
        return status
    if code == 0:
        return replace(status, state=JobState.SUCCEEDED, native="succeeded")
    return replace(
        status,
        state=JobState.FAILED,
        native="failed",
        message=state.get("message") or _how(code),
        node=first,
        has_asked=has_asked,
        knows_cancels=True,
    )


def _how(code: int) -> str:
    """Return how a node without a record ended."""
    try:
        return f"ended by {signal.Signals(code - 128).name}, without a record"
    except ValueError:
        return f"ended without a record, with exit code {code}"


def _signal(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _read(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(PIECE_BYTES)
    except FileNotFoundError:
        return b""
