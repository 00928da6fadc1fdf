"""The docker backend: one container per node on one engine, set up as ModelArts does it.

A job whose submitter is gone needs no process of ours: the entry on each node learns how the job
ends, so its containers end by themselves. The engine keeps them until the next cloudjob command on
this machine checks the job, saves each node's log and final state, and removes the containers.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudjob.backends import follow as following
from cloudjob.backends import handles, supervision
from cloudjob.backends.base import RETRY_S, Backend, Check, Devices
from cloudjob.backends.delivery import BOOT
from cloudjob.backends.docker import delivery, engine, logs
from cloudjob.backends.docker import request as requests
from cloudjob.backends.docker.logs import LogSource
from cloudjob.backends.docker.request import (
    GRACE_LABEL,
    JOB_LABEL,
    OWNER_LABEL,
    DockerRequest,
)
from cloudjob.backends.docker.start import needs_entry, start
from cloudjob.backends.docker.state import (
    Container,
    absent_nodes,
    all_removed,
    container,
    dump,
    ended_status,
    load,
    nodes_among,
    removed,
    seen_nodes,
    unended_status,
    with_failed_node,
)
from cloudjob.backends.native import Ended, NativeStatus
from cloudjob.backends.supervision import Action, Deed, Lead, Past, Policy
from cloudjob.errors import BackendError, JobNotFound, Unreachable
from cloudjob.home import locks, writing
from cloudjob.model.submission import Submission
from cloudjob.retries import OutageLimit
from jobentry.contract.exits import Failure

if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

_SCHEME = "docker"
# Seconds that workers have to end by themselves after the head has ended.
_LEAVE_S = 30.0
# Seconds that the head has to end after a worker has failed.
_LOST_S = 60.0
# Seconds between two checks of a job while its log is followed.
_SUPERVISE_S = 1.0
# Seconds that the engine may take to end or remove the containers of a job, and between two looks.
_REMOVAL_S, _REMOVAL_POLL_S = 10.0, 0.1
# Programs that pass a terminal on to a container.
_CLIENTS = ("docker", "podman")
_STATE, _LOCK, _CANCELLED, _END_REQUESTED = "state.json", "lock", "cancelled", "asked"


class _Unsettled(JobNotFound):
    """A job has no container at the moment, as another process submits or saves it."""


class DockerBackend(Backend[DockerRequest]):
    """Runs jobs as containers; see ``Backend`` for what it promises."""

    poll_s = 0.01

    def __init__(self, home: Path, options: dict[str, Any]) -> None:
        self._home = home / "docker"
        self._options = options
        # The containers whose end we have reported to the head of their job.
        self._reported: set[str] = set()

    def checks(self, spec: JobSpec | None, _store: str) -> list[Check]:
        """Ask the engine for the job's image, before anything is sent.

        Raises:
            BackendError: There is no engine, or it cannot run the image.
        """
        if spec is not None:
            reference = spec.image or requests.DEFAULT_IMAGE
            needs_entry(engine.image(self._client, reference), reference)
        return []

    # -- forward ------------------------------------------------------------------------------

    def devices(self, spec: JobSpec, *, may_query: bool) -> Devices:
        return Devices(spec.docker.gpus, f"docker.gpus is {spec.docker.gpus}")

    def build(self, submission: Submission) -> DockerRequest:
        return requests.build(submission, self.owner())

    def show(self, request: DockerRequest) -> dict[str, Any]:
        return requests.show(request)

    def environments(self, request: DockerRequest) -> Iterable[Mapping[str, str]]:
        return map(requests.environment, request.nodes)

    def handle(self, request: DockerRequest) -> str:
        return handles.write(_SCHEME, "local", request.job)

    def own_handle(self, handle: str, job: str) -> str:
        handles.need_folder(self._home / job, job)
        return handles.write(_SCHEME, "local", job)

    def send(self, request: DockerRequest) -> str:
        image = engine.image(self._client, request.image)
        folder = self._home / request.job
        with _writing_to(folder), locks.hold(folder / _LOCK):
            try:
                start(self._client, request, image)
            except BaseException:
                self._remove(request.job)
                shutil.rmtree(folder, ignore_errors=True)
                for written in request.written:
                    # The folder of the record is new; those of outputs may hold files.
                    with contextlib.suppress(OSError):
                        Path(written).rmdir()
                raise
        return self.handle(request)

    # -- back ---------------------------------------------------------------------------------

    def nodes(self, handle: str) -> list[Container]:
        """Return what the engine knows about each node; nothing is removed."""
        return self._inspected(self._containers(_job(handle)))

    def signal(self, handle: str, signal: str, node: int | None = None) -> None:
        """Send a signal to all nodes, or to one."""
        containers = [item for item in self._containers(_job(handle)) if node in (None, item.node)]
        self._kill([item for item in containers if item.is_alive], signal)

    def restart(self, handle: str) -> None:
        """Restart containers that have ended, with the same files and command."""

        def restart(item: Container) -> None:
            with engine.translate_errors(f"starting node {item.node} again"):
                self._client.start(item.id)

        engine.for_each(self._containers(_job(handle)), restart)

    def status(self, handle: str) -> NativeStatus:
        """Return the job's status; once the job has ended, save it and free its resources."""
        job = _job(handle)
        saved = _saved_status(self._home / job)
        if saved is not None:
            return saved
        give_up_at = time.monotonic() + _REMOVAL_S
        while True:
            try:
                return self._status_now(job)
            except BackendError as error:
                # Another process may have saved the job and removed its containers in the meantime.
                saved = _saved_status(self._home / job)
                if saved is not None:
                    return saved
                is_gone = engine.status_code(error) in engine.GONE
                is_going = is_gone or isinstance(error, _Unsettled)
                if not is_going or time.monotonic() > give_up_at:
                    raise
            # Somebody removes containers of the job one after the other, or creates the first one.
            time.sleep(_REMOVAL_POLL_S)

    def _status_now(self, job: str) -> NativeStatus:
        folder = self._home / job
        # The lock first: a submit that ends between the two queries has started all nodes.
        is_sending = locks.is_held(folder / _LOCK)
        containers = self._containers(job)
        if not containers:
            return self._save_removed(job)
        if not is_sending and any(item.is_new for item in containers):
            return self._save_interrupted(job)
        containers = self._with_removed(containers, folder, is_sending=is_sending)
        actions = self._actions(containers, folder)
        if _has_ended(containers, actions):
            return self._save(job)
        self._act(actions, containers, folder)
        return unended_status(containers)

    def logs(self, handle: str, node: int | None, *, follow: bool) -> Iterator[tuple[int, bytes]]:
        job = _job(handle)
        folder = self._home / job
        if _saved_status(folder) is None:
            containers = self._containers(job)
            if containers:
                chosen = [item for item in containers if node in (None, item.node)]
                sources = [self._source(item, folder) for item in chosen]
                pieces = logs.read_all(self._client, sources, follow=follow)
                yield from self._supervised(job, pieces) if follow else pieces
                return
            # Raises if nothing is left of the job.
            self.status(handle)
        for index, path in following.node_logs(folder).items():
            if node in (None, index):
                for piece in following.read_file(path):
                    yield index, piece

    def log_ends(self, handle: str) -> Iterator[tuple[int, bytes]]:
        folder = self._home / _job(handle)
        for item in self._containers(_job(handle)):
            source = self._source(item, folder)
            for data in logs.read_ends(self._client, source):
                yield source.node, data

    def cancel(self, handle: str, *, is_urgent: bool = False) -> None:
        job = _job(handle)
        folder = self._home / job
        containers = [] if _saved_status(folder) else self._containers(job)
        if not any(item.is_alive for item in containers):
            return
        with _writing_to(folder):
            (folder / _CANCELLED).touch()
        # Each entry reports to the head and ends by itself; a signal to all of them counts once.
        alive = [item for item in containers if item.is_alive]
        self._kill(alive, "SIGKILL" if is_urgent else "SIGTERM")
        # A stopped process would never handle the signal.
        self._kill(alive, "SIGCONT")

    def refresh(self, handle: str, keys: Mapping[str, str]) -> None:
        """Put fresh keys of the store into the containers of a job."""
        for item in self._containers(_job(handle)):
            with engine.translate_errors(f"refreshing the keys of {handle}: node {item.node}"):
                self._client.put_archive(item.id, requests.DELIVERED, delivery.fresh_keys(keys))

    def command_on(
        self, handle: str, node: int, arguments: Sequence[str], *, is_terminal: bool
    ) -> list[str]:
        """Return a ``docker exec``, as only its client can pass a terminal on."""
        doing = f"entering node {node} of {handle}"
        program = next(filter(None, map(shutil.which, _CLIENTS)), None)
        if program is None:
            raise BackendError(
                f"{doing}: neither docker nor podman found on PATH",
                hint="apt-get install docker-cli, or the client of your engine",
            )
        with engine.translate_errors(doing):
            running = [item for item in self._containers(_job(handle)) if item.native == "running"]
            container = next((item.id for item in running if item.node == node), None)
            if container is None:
                raise BackendError(f"{doing}: it does not run")
            boot = self._boot_of(container)
        terminal = ["--tty"] if is_terminal else []
        host = ["--host", engine.host()] if program.endswith("docker") else []
        return [program, *host, "exec", "--interactive", *terminal, container, boot, *arguments]

    def _boot_of(self, container: str) -> str:
        """Return the path of the program that starts the node half in a container."""
        entrypoint = self._client.inspect_container(container)["Config"]["Entrypoint"] or []
        return next((path for path in entrypoint if path.endswith(BOOT)), BOOT)

    def ask(self, handle: str, request: bytes) -> bytes:
        """Ask the head from inside its container, as only programs there can reach it."""
        doing = f"asking the nodes of {handle}"
        heads = [item for item in self._containers(_job(handle)) if item.node == 0]
        with engine.translate_errors(doing):
            for head in heads:
                command = [self._boot_of(head.id), "--ask", request.decode("ascii")]
                run = self._client.exec_create(head.id, command)
                answer, message = self._client.exec_start(run, demux=True)
                if self._client.exec_inspect(run)["ExitCode"] == 0:
                    return bytes(answer or b"")
                raise BackendError(f"{doing}: {os.fsdecode(message or answer or b'').strip()}")
        raise BackendError(f"{doing}: its head has no container")

    def remove(self, handle: str) -> None:
        job = _job(handle)
        self._remove(job)
        shutil.rmtree(self._home / job, ignore_errors=True)

    def statuses(self, handles: Sequence[str]) -> Mapping[str, NativeStatus | None]:
        """Return the status of many jobs from one list of the engine's containers.

        A job that was cancelled, or of which a container has ended, is left to ``status``, which
        also ends containers that do not end by themselves.
        """
        with engine.translate_errors("looking for the containers of all jobs"):
            listed = self._listed(JOB_LABEL)
        containers: dict[str, list[Container]] = {}
        for item in listed:
            containers.setdefault(item["Labels"][JOB_LABEL], []).append(container(item))
        status_of: dict[str, NativeStatus | None] = {}
        for handle in handles:
            job = _job(handle)
            folder, nodes = self._home / job, containers.get(job, [])
            # Only its network may be left of a job that this machine knows.
            if not nodes and not folder.exists():
                status_of[handle] = None
            elif (
                nodes
                and all(node.native == "running" for node in nodes)
                and not (folder / _CANCELLED).exists()
            ):
                status_of[handle] = unended_status(nodes)
        return status_of

    def remove_orphans(self, known_jobs: Collection[str]) -> list[str]:
        """Remove the leftovers of our jobs not in ``known_jobs``; return these jobs' names."""
        with engine.translate_errors("looking for leftovers of jobs"):
            ours = f"{OWNER_LABEL}={self.owner()}"
            listed = [*self._listed(ours), *self._client.networks(filters={"label": ours})]
        jobs = sorted({item["Labels"][JOB_LABEL] for item in listed} - set(known_jobs))
        removed = []
        for job in jobs:
            # A submit holds this lock until its job is recorded.
            if not locks.is_held(self._home / job / _LOCK):
                self.remove(handles.write(_SCHEME, "local", job))
                removed.append(job)
        return removed

    # -- the end ------------------------------------------------------------------------------

    def _supervised(
        self, job: str, pieces: Iterator[tuple[int, bytes]]
    ) -> Iterator[tuple[int, bytes]]:
        """Check a job while its log is followed, as no other process may do so until it ends."""
        supervise_at = time.monotonic() + _SUPERVISE_S
        outage = OutageLimit()
        for piece in pieces:
            yield piece
            if time.monotonic() >= supervise_at:
                try:
                    self._supervise(job)
                    outage.reset()
                except Unreachable as error:
                    outage.pause(error)
                except BackendError as error:
                    # A container was removed; its log ends, and then the status shows it.
                    if engine.status_code(error) not in engine.GONE:
                        raise
                supervise_at = time.monotonic() + _SUPERVISE_S

    def _supervise(self, job: str) -> None:
        """Do once what the rules of supervision demand."""
        folder = self._home / job
        is_sending = locks.is_held(folder / _LOCK)
        containers = self._with_removed(self._containers(job), folder, is_sending=is_sending)
        self._act(self._actions(containers, folder), containers, folder)

    def _with_removed(
        self, containers: list[Container], folder: Path, *, is_sending: bool
    ) -> list[Container]:
        """Return the nodes of a job, by node, with those whose container somebody has removed.

        Args:
            is_sending: Whether a container that is not there may not be created yet.
        """
        if is_sending or not containers:
            return containers
        absent = [
            (node, _noticed_at(folder / f"removed-{node}")) for node in absent_nodes(containers)
        ]
        lost = [removed(node, containers[0], at) for node, at in absent if at is not None]
        return sorted([*containers, *lost], key=lambda item: item.node)

    def _actions(self, containers: list[Container], folder: Path) -> tuple[Action, ...]:
        """Return what is to be done to the nodes of a job, from its containers."""
        if not any(item.is_alive for item in containers):
            return ()
        over = self._inspected(item for item in containers if not item.is_alive)
        nodes = seen_nodes([*over, *(item for item in containers if item.is_alive)], self._reported)
        return supervision.decide(nodes, _policy(containers[0]), _past(folder), time.time())

    def _act(self, actions: Iterable[Action], containers: list[Container], folder: Path) -> None:
        """Carry out what the rules of supervision demand."""
        for deed, numbers in actions:
            chosen = [item for item in containers if item.node in numbers]
            if deed is Deed.REPORT:
                for head in (item for item in containers if item.node == 0):
                    self._report(head, self._inspected(chosen))
                continue
            if deed is Deed.ASK_HEAD:
                with _writing_to(folder):
                    (folder / _END_REQUESTED).touch()
            # A worker that the head has reached ends by itself and ignores SIGTERM by now.
            self._kill(chosen, "SIGKILL" if deed is Deed.KILL else "SIGTERM")

    def _report(self, head: Container, ended: list[Container]) -> None:
        """Report to the head which nodes have failed: it may still wait for them."""

        def put(item: Container) -> None:
            report = delivery.report(item.node, item.exit_code or 0)
            self._client.put_archive(head.id, requests.DELIVERED, report)
            self._reported.add(item.id)

        engine.for_each_existing(ended, put)

    def _save(self, job: str) -> Ended:
        """Save the logs and state of an ended job, then free its resources in the engine."""
        folder = self._home / job
        with _writing_to(folder), locks.hold(folder / _LOCK):
            saved = _saved_status(folder)
            if saved is not None:
                return saved
            containers = self._killed(job)
            if not containers:
                raise _Unsettled(f"looking for job {job}: its containers were removed")
            nodes = self._with_removed(containers, folder, is_sending=False)
            status = ended_status(nodes, is_cancelled=(folder / _CANCELLED).exists())
            if (folder / _END_REQUESTED).exists():
                status = with_failed_node(status, nodes)
            for item in containers:
                self._save_log(self._source(item, folder))
            _write(folder / _STATE, dump(status))
            self._remove(job)
        return status

    def _save_interrupted(self, job: str) -> NativeStatus:
        """Save the end of a job whose submit was killed, unless that has begun only now."""
        folder = self._home / job
        with _writing_to(folder), locks.hold(folder / _LOCK):
            containers = self._containers(job)
        if containers and not any(item.is_new for item in containers):
            return unended_status(containers)
        return self._save(job)

    def _killed(self, job: str) -> list[Container]:
        """Kill the containers of a job that run, and return all of them, inspected."""
        give_up_at = time.monotonic() + _REMOVAL_S
        while True:
            containers = self._containers(job)
            self._kill([item for item in containers if item.is_alive], "SIGKILL")
            containers = self._inspected(containers)
            # Somebody may start a container again meanwhile, whose exit code is then unknown.
            are_over = all(item.is_new or not item.is_alive for item in containers)
            if are_over or time.monotonic() > give_up_at:
                return containers
            time.sleep(_REMOVAL_POLL_S)

    def _save_removed(self, job: str) -> Ended:
        """Save the end of a job whose containers were removed; its network shows that it was here.

        Raises:
            JobNotFound: Nothing is left of the job on this engine.
        """
        ours = {"label": f"{JOB_LABEL}={job}"}
        with engine.translate_errors(f"looking for the network of job {job}"):
            networks = self._client.networks(filters=ours)
        folder = self._home / job
        if not networks:
            raise JobNotFound(f"looking for job {job}: the engine has no such job")
        if locks.is_held(folder / _LOCK):
            raise _Unsettled(f"looking for job {job}: the engine has none of its containers")
        status = all_removed(is_cancelled=(folder / _CANCELLED).exists())
        with _writing_to(folder), locks.hold(folder / _LOCK):
            saved = _saved_status(folder)
            if saved is not None:
                return saved
            _write(folder / _STATE, dump(status))
            self._remove(job)
        return status

    def _save_log(self, source: LogSource) -> None:
        new = source.saved.with_suffix(".new")
        with new.open("wb") as file:
            for piece in logs.read(self._client, source, follow=False):
                file.write(piece)
        new.replace(source.saved)

    def _remove(self, job: str) -> None:
        client = self._client
        ours = f"{JOB_LABEL}={job}"
        with engine.translate_errors(f"removing the containers and networks of job {job}"):
            containers = self._listed(ours)
            networks = client.networks(filters={"label": ours})
        engine.for_each_existing(
            containers, lambda item: client.remove_container(item["Id"], force=True, v=True)
        )
        engine.for_each_existing(networks, lambda item: client.remove_network(item["Id"]))

    # -- the engine ---------------------------------------------------------------------------

    @cached_property
    def _client(self) -> Any:
        return engine.connect()

    def _containers(self, job: str) -> list[Container]:
        """Return the containers of a job by node."""
        with engine.translate_errors(f"looking for the containers of job {job}"):
            listed = self._listed(f"{JOB_LABEL}={job}")
        return sorted((container(item) for item in listed), key=lambda item: item.node)

    def _listed(self, label: str) -> list[Mapping[str, Any]]:
        """Return the containers of jobs that have a label, as the engine lists them."""
        listed = self._client.containers(all=True, filters={"label": label})
        return nodes_among(listed)

    def _inspected(self, containers: Iterable[Container]) -> list[Container]:
        def inspect(item: Container) -> Container:
            if item.is_removed:
                return item
            with engine.translate_errors(f"inspecting node {item.node}"):
                return item.inspected(self._client.inspect_container(item.id))

        return engine.for_each(containers, inspect)

    def _kill(self, containers: Iterable[Container], signal: str) -> None:
        engine.for_each_existing(containers, lambda item: self._client.kill(item.id, signal))

    def _source(self, item: Container, folder: Path) -> LogSource:
        with engine.translate_errors(f"inspecting node {item.node}"):
            config = self._client.inspect_container(item.id)["HostConfig"]
        driver = config["LogConfig"]["Type"]
        return LogSource(item.node, item.id, driver, folder / f"node-{item.node}.log")

    def owner(self) -> str:
        """Return the label that distinguishes our jobs from those of other users of the engine."""
        path = self._home / "owner"
        if not path.exists():
            with _writing_to(self._home), locks.hold(self._home / "owner.lock"):
                if not path.exists():
                    _write(path, os.urandom(8).hex().encode("ascii"))
        return path.read_text(encoding="ascii")


# -- what the rules of supervision get -------------------------------------------------------------


def _policy(item: Container) -> Policy:
    """Return how long the nodes of a job may take, from the labels of one of its containers."""
    cancel_s = float(item.labels.get(GRACE_LABEL, "0")) + RETRY_S
    return Policy(Lead.HEAD, _LEAVE_S, cancel_s, _LOST_S)


def _past(folder: Path) -> Past:
    """Return what any process of this machine has done to a job, from the files in its folder."""
    # Who cancels a job tells its nodes.
    return Past(
        _noted_at(folder / _CANCELLED),
        is_cancel_told=True,
        head_asked_at=_noted_at(folder / _END_REQUESTED),
    )


def _noted_at(path: Path) -> float | None:
    """Return when something was noted in the folder of a job; None if it was not."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


def _noticed_at(path: Path) -> float | None:
    """Note something in the folder of a job, and return when it was first noted.

    None for a job that was removed in the meantime.
    """
    with writing("saving the state of a job", path), contextlib.suppress(FileNotFoundError):
        if not path.exists():
            path.touch()
    return _noted_at(path)


def _has_ended(containers: list[Container], actions: tuple[Action, ...]) -> bool:
    """Whether a job is over: all of its nodes are, or those that stay after its head hang."""
    head = next((item for item in containers if item.node == 0), None)
    is_led = head is not None and head.is_alive
    hangs = any(action.deed is Deed.KILL for action in actions) and head is not None and not is_led
    return hangs or not any(item.is_alive for item in containers)


# -- what is saved here ----------------------------------------------------------------------------


def _job(handle: str) -> str:
    return handles.read(handle, _SCHEME, 2)[1]


@contextlib.contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    """Create our folder; turn ``OSError`` into a readable error."""
    with writing("saving the state of a job", folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield


def _saved_status(folder: Path) -> Ended | None:
    """Return how a job ended, if that was saved."""
    try:
        return load((folder / _STATE).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        # The file is written when the job has ended; the head's record may still show how.
        message = f"reading the state of a job: {folder / _STATE}: {error}"
        return Ended("lost", failure=Failure(message=message), is_unwatched=True)


def _write(path: Path, data: bytes) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(data)
    new.replace(path)
