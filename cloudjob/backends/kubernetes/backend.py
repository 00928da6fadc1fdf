"""The kubernetes backend: a job whose pods are set up as ModelArts does it.

A handle contains all that is needed to find a job again, independent of the current context:
``kubernetes://context/namespace/engine/job``; if the job file or ``$KUBECONFIG`` names files, ``+``
and their paths follow the context.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote

from cloudjob.backends import handles
from cloudjob.backends.base import Backend, Check, Devices
from cloudjob.backends.delivery import BOOT, new_ssh_key
from cloudjob.backends.kubernetes import (
    ending,
    errors,
    events,
    kubeconfig,
    kueue,
    logs,
    state,
    waiting,
)
from cloudjob.backends.kubernetes import request as requests
from cloudjob.backends.kubernetes.client import POD, Client
from cloudjob.backends.kubernetes.engine import CONFIG_MAP, SECRET, SERVICE, Engine, Stage
from cloudjob.backends.kubernetes.kubeconfig import Cluster
from cloudjob.backends.kubernetes.kueue import Deactivation
from cloudjob.backends.kubernetes.logs import Place
from cloudjob.backends.kubernetes.pod import ENTRY_PATH, JOB_LABEL, MANAGER_LABEL, Names
from cloudjob.backends.kubernetes.request import ENGINES, KubernetesRequest
from cloudjob.backends.kubernetes.state import Decision, Pod
from cloudjob.backends.native import Event, NativeStatus
from cloudjob.errors import (
    BackendError,
    CloudJobError,
    JobNotFound,
    NotAuthorised,
    Unanswered,
    Unreachable,
)
from cloudjob.home import locks, writing
from cloudjob.model import times
from cloudjob.model.progress import log_once
from cloudjob.model.status import JobState, Wait, WaitPhase
from cloudjob.model.submission import Submission
from cloudjob.retries import LIMITS, OutageLimit, RequestLimits, WaitNotices
from jobentry.contract import paths, variables

if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

_SCHEME = "kubernetes"
_POLL_S = 1.0
_LOCK = "lock"
# Marks a job whose object was deleted to stop it, and says how it ends if it was not cancelled.
_DELETED = "deleted"
# Seconds that a cancel waits for logs: for existing lines, and for those at the job's end.
_LAST_OUTPUT_S = 5.0
# Seconds between two requests for the pods and events of a job: there may be thousands.
_REREAD_S = 10.0
# Seconds between two tries of this process to end a job: it may lack the rights.
_END_AGAIN_S = 60.0
# Seconds that a head has to answer through kubectl.
_ASK_S = 60.0
# The start of kubectl's line about a command that failed in a pod, after the lines of the command.
_EXEC_FAILED = "command terminated with exit code"
# Marks the job object as cancelled, as opposed to aborted by its operator.
CANCELLED = "cloudjob.cancelled"
_AUTO = "auto"
# Objects created at a time.
_AT_ONCE = 8
_RESOURCES = {resource.kind: resource for resource in (CONFIG_MAP, SECRET, SERVICE)}
_DEFAULT_FILE = str(Path.home() / ".kube" / "config")


class _Handle(NamedTuple):
    cluster: Cluster
    engine: Engine
    job_names: Names


class KubernetesBackend(Backend[KubernetesRequest]):
    """Runs jobs on a Kubernetes cluster; see ``Backend`` for what it promises."""

    poll_s = _POLL_S

    def __init__(
        self,
        home: Path,
        options: dict[str, Any],
        *,
        environ: Mapping[str, str] | None = None,
        user_home: Path | None = None,
        limits: RequestLimits = LIMITS,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._home = home / "kubernetes"
        self._options = options
        self._environ = os.environ if environ is None else environ
        self._user_home = user_home or Path.home()
        self._limits = limits
        self._now_s = now_s
        self._found_cluster: Cluster | None = None
        self._chosen_engine: Engine | None = None
        # The checks before a submit validate this request.
        self._built: KubernetesRequest | None = None
        self._clients: dict[Cluster, Client] = {}
        self._log_saver: threading.Thread | None = None
        self._notices = WaitNotices()
        self._waiting_s: dict[str, float] = {}
        self._pod_states: dict[tuple[str, JobState], tuple[float, list[Pod], list[Wait]]] = {}
        # When this process has last tried to end a job, by handle.
        self._tried_s: dict[str, float] = {}
        # The handles of jobs that their clusters have served.
        self._seen: set[str] = set()
        # The pods of each job, by handle and uid, that the cluster was seen to end.
        self._disrupted: dict[str, dict[str, Pod]] = {}

    def checks(self, spec: JobSpec | None, store: str) -> list[Check]:
        from cloudjob.backends.kubernetes import checks

        chosen = None if spec is None else self._engine_for(spec)
        built = None if spec is None else self._built
        return checks.run(self._client(self._cluster), spec, chosen, built)

    # -- forward ------------------------------------------------------------------------------

    def devices(self, spec: JobSpec, *, may_query: bool) -> Devices:
        return Devices(spec.kubernetes.gpus, f"kubernetes.gpus is {spec.kubernetes.gpus}")

    def build(self, submission: Submission) -> KubernetesRequest:
        engine = self._engine_for(submission.spec)
        self._built = requests.build(submission, engine, self._cluster.namespace)
        return self._built

    def show(self, request: KubernetesRequest) -> dict[str, Any]:
        return requests.show(request)

    def text(self, request: KubernetesRequest) -> str:
        """Return ``request`` as YAML that kubectl takes, secrets as ``***``."""
        return requests.text(request)

    def environments(self, request: KubernetesRequest) -> Iterable[Mapping[str, str]]:
        return requests.environments(request)

    def handle(self, request: KubernetesRequest) -> str:
        return _handle(_Handle(self._cluster, request.engine, request.job_names), request.job)

    def own_handle(self, handle: str, job: str) -> str:
        theirs, ours = _parse_handle(handle), self._cluster
        doing = f"looking for {job} on Kubernetes"
        if not ours.context:
            raise BackendError(
                f"{doing}: you have no kubeconfig",
                hint="set KUBECONFIG, or kubernetes.kubeconfig in your configuration",
            )
        # The same cluster may have another name for its submitter, but not for us.
        context, contexts = theirs.cluster.context, kubeconfig.entries(ours.kubeconfig, "contexts")
        if context != ours.context and context in contexts:
            hint = "set kubernetes.context in your configuration"
            raise handles.not_ours(doing, f"your context {context}", ours.context, hint)
        namespace = theirs.job_names.namespace
        if namespace != ours.namespace:
            hint = "set kubernetes.namespace in your configuration"
            raise handles.not_ours(doing, f"the namespace {namespace}", ours.namespace, hint)
        return _handle(_Handle(ours, theirs.engine, Names(job, ours.namespace)), job)

    def send(self, request: KubernetesRequest) -> str:
        cluster = self._cluster
        client = self._client(cluster)
        where = _Handle(cluster, request.engine, request.job_names)
        key = new_ssh_key() if request.has_key else b""
        *items, body = requests.objects(request, key)
        namespace = request.job_names.namespace

        created: list[str] = []

        def create(item: dict[str, Any]) -> None:
            client.create(_RESOURCES[item["kind"]], namespace, item, JOB_LABEL)
            created.append(item["kind"])

        def remove(item: dict[str, Any]) -> None:
            kind, name = item["kind"], item["metadata"]["name"]
            client.delete(_RESOURCES[kind].path(namespace, name), f"removing the {kind} {name}")

        with self._submit_lock(request.job):
            try:
                _for_each(items, create)
                job = client.create(request.engine.resource, namespace, body, JOB_LABEL)
                self._adopt(client, where, items, job)
                if kueue.is_queued(job):
                    kueue.require_hope(client, job)
            except BaseException as error:
                try:
                    self._delete(client, where)
                    _for_each([item for item in items if item["kind"] == SERVICE.kind], remove)
                except BackendError as left:
                    # Without a login nothing was created.
                    is_refused = isinstance(error, NotAuthorised) and not created
                    if isinstance(error, BackendError) and not is_refused:
                        raise Unanswered(error.message, hint=error.hint) from left
                raise
        return _handle(where, request.job)

    @contextlib.contextmanager
    def _submit_lock(self, job: str) -> Iterator[None]:
        """Hold the lock that distinguishes a running submit from a killed one."""
        folder = self._home / job
        with writing("saving the job's logs", folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = locks.acquire(folder / _LOCK)
        try:
            yield
        finally:
            if lock is not None:
                os.close(lock)

    def _adopt(
        self,
        client: Client,
        where: _Handle,
        items: list[dict[str, Any]],
        job: Mapping[str, Any],
    ) -> None:
        """Make the job own its other objects, so that the cluster deletes them with it."""
        owner = {
            "apiVersion": job["apiVersion"],
            "kind": job["kind"],
            "name": job["metadata"]["name"],
            "uid": job["metadata"]["uid"],
        }
        body = {"metadata": {"ownerReferences": [owner]}}

        def adopt(item: dict[str, Any]) -> None:
            kind, name = item["kind"], item["metadata"]["name"]
            path = _RESOURCES[kind].path(where.job_names.namespace, name)
            with contextlib.suppress(errors.ObjectNotFound):
                client.patch(path, body, f"binding the {kind} {name} to its job")

        _for_each(items, adopt)

    # -- back ---------------------------------------------------------------------------------

    def status(self, handle: str) -> NativeStatus:
        status = self._status(handle)
        saver = self._log_saver
        if status.state.is_final and saver is not None:
            # The wait for a cancelled job ends with the job; its last lines may still arrive.
            saver.join(_LAST_OUTPUT_S)
            self._log_saver = None
        return status

    def _status(self, handle: str) -> NativeStatus:
        where = _parse_handle(handle)
        client = self._client(where.cluster)
        try:
            job = self._served(client, where, handle)
        except JobNotFound:
            note = self._deletion_note(where.job_names.job)
            if note is None:
                raise
            return state.of_deleted(ending.load(note))
        is_cancelled = CANCELLED in (job["metadata"].get("annotations") or {})
        stage = where.engine.stage(job, is_cancelled)
        now = stage.state
        if now.is_final:
            pods, waits = self._read_ended(client, where, handle, job, stage)
        else:
            pods, waits = self._read_pods(client, where, handle, job, stage)
            self._note_disrupted(handle, pods)
        decision = ending.decision_of(job)
        # Some operators consider a job ended while its head still runs.
        actual = state.stage_of(where.engine, job, pods, is_cancelled=is_cancelled)
        if (decision or is_cancelled) and not now.is_final and ending.is_left(pods):
            self._stop_again(decision, client, handle, job)
        elif not (decision or is_cancelled or actual.state.is_final):
            decision = ending.decide(job, actual, pods, waits, self._now_s())
            if decision and not self._carry_out(decision, client, handle, job, stage):
                decision = None
        current = state.status_of(
            where.engine, job, pods, is_cancelled=is_cancelled, waits=waits, decision=decision
        )
        is_idle = not pods or any(pod.is_cut_off for pod in pods)
        if is_cancelled and is_idle and not current.state.is_final:
            # Such a pod never ends, and an operator that is down ends no job: tell who waits.
            since_s = self._waiting_s.setdefault(handle, time.monotonic())
            doing = f"cancelling {where.job_names.job}: {current.native}"
            self._notices.report(since_s, doing, "`cloudjob cancel --now` does not wait for it")
        return current

    def statuses(self, handles: Sequence[str]) -> Mapping[str, NativeStatus | None]:
        """Return the status of many jobs from one list of jobs and one of pods per namespace."""
        groups: dict[tuple[Cluster, str, Engine], dict[str, Names]] = {}
        for handle in handles:
            cluster, engine, job_names = _parse_handle(handle)
            groups.setdefault((cluster, job_names.namespace, engine), {})[handle] = job_names
        status_by_handle: dict[str, NativeStatus | None] = {}
        for (cluster, namespace, engine), names_by_handle in groups.items():
            # Users who may read a job are not always allowed to list jobs.
            with contextlib.suppress(errors.AccessDenied):
                status_by_handle |= _listed(
                    self._client(cluster), namespace, engine, names_by_handle
                )
        self._seen.update(handle for handle, status in status_by_handle.items() if status)
        # Of these, only ``status`` knows that they were cancelled, or that their server starts.
        return {
            handle: status
            for handle, status in status_by_handle.items()
            if status
            or (
                handle not in self._seen
                and self._deletion_note(_parse_handle(handle).job_names.job) is None
            )
        }

    def _served(self, client: Client, where: _Handle, handle: str) -> dict[str, Any]:
        """Return the object of a job.

        A server that starts may know it only after others (kubernetes#71218).
        """
        try:
            job = self._job(client, where)
        except errors.ObjectNotFound as error:
            if error.is_of_path and handle in self._seen:
                raise Unreachable(error.message, hint=error.hint) from error
            raise
        self._seen.add(handle)
        return job

    def _read_pods(
        self, client: Client, where: _Handle, handle: str, job: Mapping[str, Any], stage: Stage
    ) -> tuple[list[Pod], list[Wait]]:
        """Return the pods of a job that has not ended, and what keeps them from running."""
        now = stage.state
        key = (handle, now)
        at, pods, waits = self._pod_states.get(key, (float("-inf"), [], []))
        if time.monotonic() < at + _REREAD_S:
            return pods, waits
        pods, _ = logs.pods(client, self._place(where, None))
        pods, waits = events.explained(client, where.job_names, pods), []
        if now is JobState.PENDING and not any(pod.is_in_trouble for pod in pods):
            queued = kueue.wait(client, job) if where.engine.kueue_resumes else None
            waits = events.waits(client, where.engine, where.job_names, job, pods)
            waits = [queued, *waits] if queued else waits
        elif now is JobState.RUNNING and _is_short(where.engine, job, _remaining(stage, pods)):
            waits = _creation(events.waits(client, where.engine, where.job_names, job, pods))
        self._pod_states[key] = (time.monotonic(), pods, waits)
        return pods, waits

    def _read_ended(
        self, client: Client, where: _Handle, handle: str, job: Mapping[str, Any], stage: Stage
    ) -> tuple[list[Pod], list[Wait]]:
        """Return the pods of a job that has ended, and why others never came or were removed."""
        pods, _ = logs.pods(client, self._place(where, None))
        self._note_disrupted(handle, pods)
        pods = self._with_disrupted(handle, pods, may_restart=stage.may_restart)
        if stage.state is not JobState.FAILED:
            return pods, []
        key = (handle, stage.state)
        at, explained, waits = self._pod_states.get(key, (float("-inf"), [], []))
        if time.monotonic() < at + _REREAD_S:
            better = {pod.uid: pod.wait for pod in explained}
            return [replace(p, wait=p.wait and better.get(p.uid, p.wait)) for p in pods], waits
        pods, waits = events.explained(client, where.job_names, pods), []
        # With retries, the events may be those of an earlier attempt.
        if not stage.may_restart and _is_short(where.engine, job, pods):
            waits = events.losses(client, where.job_names)
            waits += _creation(events.waits(client, where.engine, where.job_names, job, pods))
        self._pod_states[key] = (time.monotonic(), pods, waits)
        return pods, waits

    def _note_pods(self, handle: str, pods: list[Pod]) -> None:
        """Note what a follower has seen, which may be newer than the pods that were read last."""
        self._note_disrupted(handle, pods)
        started = {pod.uid for pod in pods if pod.has_started}
        for key, (_, read, _) in list(self._pod_states.items()):
            if key[0] == handle and started - {pod.uid for pod in read if pod.has_started}:
                self._pod_states.pop(key, None)

    def _note_disrupted(self, handle: str, pods: list[Pod]) -> None:
        """Note the pods that the cluster ends: it forgets a deleted pod, and why it was drained."""
        leaving = {pod.uid: pod for pod in pods if pod.is_leaving and pod.reason}
        self._disrupted.setdefault(handle, {}).update(leaving)

    def _with_disrupted(self, handle: str, pods: list[Pod], *, may_restart: bool) -> list[Pod]:
        """Return the pods of an ended job with those that the cluster has ended and deleted."""
        # A newer pod of the same node belongs to a later attempt, or takes the place of a lost one.
        present = {pod.node for pod in pods if may_restart or pod.has_started or pod.is_over}
        noted = list(self._disrupted.get(handle, {}).values())
        return [*pods, *(pod for pod in noted if pod.node not in present)]

    def logs(self, handle: str, node: int | None, *, follow: bool) -> Iterator[tuple[int, bytes]]:
        if follow:
            yield from self._follow(handle, node, OutageLimit())
        else:
            where = _parse_handle(handle)
            yield from logs.read_all(self._client(where.cluster), self._place(where, node))

    def log_ends(self, handle: str) -> Iterator[tuple[int, bytes]]:
        where = _parse_handle(handle)
        yield from logs.read_ends(self._client(where.cluster), self._place(where, None))

    def _follow(
        self, handle: str, node: int | None, outage: OutageLimit
    ) -> Iterator[tuple[int, bytes]]:
        where = _parse_handle(handle)

        def has_ended() -> bool:
            try:
                ended = self._status(handle).state.is_final
            except JobNotFound:
                return True
            except logs.PASSING as error:
                # A user who could never read the job is told so at once.
                if isinstance(error, NotAuthorised) and handle not in self._seen:
                    raise
                outage.pause(error)
                return False
            outage.reset()
            return ended

        client, place = self._client(where.cluster), self._place(where, node)
        yield from logs.follow(client, place, has_ended, partial(self._note_pods, handle))

    def refresh(self, handle: str, keys: Mapping[str, str]) -> None:
        """Put fresh keys of the store into the Secret, which reaches the pods within minutes."""
        where = _parse_handle(handle)
        data = base64.b64encode(variables.dump(keys)).decode("ascii")
        path = SECRET.path(where.job_names.namespace, where.job_names.delivery)
        doing = f"refreshing the keys of {handle}"
        self._client(where.cluster).patch(path, {"data": {paths.DELIVERED_KEYS: data}}, doing)

    def command_on(
        self, handle: str, node: int, arguments: Sequence[str], *, is_terminal: bool
    ) -> list[str]:
        """Return a ``kubectl exec``, as only it can pass a terminal on."""
        doing = f"entering node {node} of {handle}"
        program = shutil.which("kubectl")
        if program is None:
            raise BackendError(
                f"{doing}: kubectl not found on PATH", hint="exec, shell and stacks need it"
            )
        where = _parse_handle(handle)
        pods, _ = logs.pods(self._client(where.cluster), self._place(where, node))
        running = [pod for pod in pods if pod.has_started and not pod.is_over]
        if not running:
            raise BackendError(f"{doing}: it does not run")
        name = max(running, key=lambda pod: pod.created_at).name
        return [
            *kubeconfig.kubectl(program, where.cluster),
            "exec",
            "--stdin",
            *(["--tty"] if is_terminal else []),
            f"--container={where.engine.container}",
            name,
            "--",
            "sh",
            f"{ENTRY_PATH}/{BOOT}",
            *arguments,
        ]

    def ask(self, handle: str, request: bytes) -> bytes:
        """Ask the head from inside its pod, as only programs there can reach it."""
        doing = f"asking the nodes of {handle}"
        command = self.command_on(handle, 0, ["--ask", request.decode("ascii")], is_terminal=False)
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ASK_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise BackendError(f"{doing}: no answer in {_ASK_S:g} s") from error
        if done.returncode:
            lines = os.fsdecode(done.stderr).strip().splitlines()
            # The first lines may be notes of kubectl, and its last one has only the exit code.
            said = [line for line in lines if not line.startswith(_EXEC_FAILED)] or lines
            raise BackendError(f"{doing}: {said[-1] if said else 'kubectl failed'}")
        return done.stdout

    def cancel(self, handle: str, *, is_urgent: bool = False) -> None:
        """Cancel the job; the cluster grants its pods their grace period, then deletes them."""
        where = _parse_handle(handle)
        client = self._client(where.cluster)
        job = self._served(client, where, handle)
        pods, _ = logs.pods(client, self._place(where, None))
        if state.stage_of(where.engine, job, pods, is_cancelled=False).state.is_final:
            return
        doing = f"cancelling {handle}"
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._annotate(client, where, {CANCELLED: now}, doing)
        self._stop(client, where, job, doing, note="")
        self._save_logs(handle)
        if is_urgent:
            query = self._place(where, None).selector
            path = POD.path(where.job_names.namespace)
            client.delete(path, doing, query, gracePeriodSeconds=0)

    def _carry_out(
        self,
        decision: Decision,
        client: Client,
        handle: str,
        job: Mapping[str, Any],
        stage: Stage,
    ) -> bool:
        """End a job as decided; return whether this user may do that, and it is still right."""
        if not self._may_try(handle):
            return False
        where = _parse_handle(handle)
        pods, _ = logs.pods(client, self._place(where, None))
        head = ending.held_head(pods) or ending.lost_head(job, stage, pods)
        if ending.is_running(pods) and head is None:
            return False
        doing = f"ending {where.job_names.job}"
        try:
            self._annotate(client, where, ending.annotation(decision), doing)
        except errors.AccessDenied:
            return False
        try:
            self._stop(client, where, job, doing, ending.dump(decision))
        except errors.ApiError as error:
            # Its pods may still run, so nobody may read that it has ended.
            with contextlib.suppress(BackendError):
                self._annotate(client, where, ending.annotation(None), doing)
            log_once(f"{error.message}; the job is not ended")
            return False
        if head is not None:
            self._save_logs(handle)
        return True

    def _stop_again(
        self, decision: Decision | None, client: Client, handle: str, job: Mapping[str, Any]
    ) -> None:
        """End the pods of a job whose end is decided, or that was cancelled.

        Who has decided it may have been killed, and Volcano hears nothing while it restarts a job.
        """
        asked_s = times.seconds_of(str((job["metadata"].get("annotations") or {}).get(CANCELLED)))
        if self._now_s() >= asked_s + _END_AGAIN_S and self._may_try(handle):
            where = _parse_handle(handle)
            with contextlib.suppress(BackendError):
                doing = f"ending {where.job_names.job}"
                note = ending.dump(decision) if decision else ""
                self._stop(client, where, job, doing, note)

    def _may_try(self, handle: str) -> bool:
        """Whether it is time to try to end a job, which then counts as tried."""
        now_s = self._now_s()
        if now_s < self._tried_s.get(handle, float("-inf")) + _END_AGAIN_S:
            return False
        self._tried_s[handle] = now_s
        return True

    def _annotate(
        self, client: Client, where: _Handle, annotations: Mapping[str, str | None], doing: str
    ) -> None:
        """Change annotations of a job; None removes one."""
        path = where.engine.resource.path(where.job_names.namespace, where.job_names.name)
        client.patch(path, {"metadata": {"annotations": annotations}}, doing)

    def _stop(
        self, client: Client, where: _Handle, job: Mapping[str, Any], doing: str, note: str
    ) -> None:
        """End the pods of a job with their grace period, and keep the job if that is possible.

        Args:
            note: How it ends; empty if it was cancelled.
        """
        namespace, name = where.job_names.namespace, where.job_names.name
        is_kueues = where.engine.kueue_resumes
        stopped = kueue.deactivate(client, job, doing) if is_kueues else Deactivation.UNMANAGED
        if stopped in (Deactivation.UNMANAGED, Deactivation.ASKED_BEFORE):
            method, resource, target, body = where.engine.stop(job)
            if method == "POST":
                client.create(resource, namespace, body, JOB_LABEL)
            else:
                client.patch(resource.path(namespace, target), body, doing)
        elif stopped is Deactivation.IMPOSSIBLE:
            path = where.engine.resource.path(namespace, name)
            self._delete_stopped(client, where, path, doing, note)

    def _delete_stopped(
        self, client: Client, where: _Handle, path: str, doing: str, note: str
    ) -> None:
        """Delete a job that a queue would resume; its pods get their grace period.

        Args:
            note: How it ends; empty if it was cancelled.
        """
        folder = self._home / where.job_names.job
        with writing("saving that the job was stopped", folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (folder / _DELETED).write_text(note, encoding="utf-8")
        # In the foreground: the job exists, and its status can be read, until its pods have ended.
        client.delete(path, doing, propagationPolicy="Foreground")

    def _deletion_note(self, job: str) -> str | None:
        """Return how a job ends that this machine has stopped by deleting it; None for others."""
        try:
            return (self._home / job / _DELETED).read_text(encoding="utf-8")
        except OSError:
            return None

    def _save_logs(self, handle: str) -> None:
        """Save the pods' logs, including lines still to come: the logs are deleted with the pods.

        A log that cannot be read, or not at once, does not delay the cancel.
        """
        has_read = threading.Event()

        def keep() -> None:
            with contextlib.suppress(CloudJobError):
                for _ in self.logs(handle, None, follow=False):
                    pass
            has_read.set()
            # Give up as soon as the API server fails: nothing waits for this thread.
            # A job that is removed meanwhile takes the folder of its logs with it.
            with contextlib.suppress(CloudJobError, FileNotFoundError):
                for _ in self._follow(handle, None, OutageLimit(limit_s=0.0)):
                    pass

        self._log_saver = threading.Thread(target=keep, daemon=True)
        self._log_saver.start()
        has_read.wait(_LAST_OUTPUT_S)

    def remove(self, handle: str) -> None:
        where = _parse_handle(handle)
        client = self._client(where.cluster)
        with contextlib.suppress(JobNotFound):
            self._job(client, where)
        self._delete(client, where)
        shutil.rmtree(self._home / where.job_names.job, ignore_errors=True)

    def remove_orphans(self, handles: Iterable[str]) -> list[str]:
        """Remove the objects that killed submits left in their clusters; return the jobs' names."""
        return [
            _parse_handle(handle).job_names.job for handle in handles if self._remove_orphan(handle)
        ]

    def _remove_orphan(self, handle: str) -> bool:
        where = _parse_handle(handle)
        client, job_names = self._client(where.cluster), where.job_names
        if locks.is_held(self._home / job_names.job / _LOCK):
            return False
        path = CONFIG_MAP.path(job_names.namespace, job_names.entry)
        try:
            entry = client.get(path, f"looking for leftovers of the job {job_names.job}")
        except JobNotFound:
            return False
        try:
            self._job(client, where)
        except JobNotFound:
            # The cluster itself deletes what belongs to a deleted job.
            is_left = not entry["metadata"].get("ownerReferences")
        else:
            return False
        if is_left:
            self._delete(client, where)
        return is_left

    def events(self, handle: str) -> list[Event]:
        where = _parse_handle(handle)
        job_events = events.of_job(self._client(where.cluster), where.job_names)
        return [
            Event(
                at=waiting.moment(item),
                level="Warning" if item.get("type") == "Warning" else "Info",
                source=f"{item['involvedObject'].get('kind')}/{item['involvedObject'].get('name')}",
                message=f"{item.get('reason')}: {' '.join(str(item.get('message')).split())}",
            )
            for item in sorted(job_events, key=waiting.moment)
        ]

    # -- the cluster --------------------------------------------------------------------------

    @property
    def _cluster(self) -> Cluster:
        if self._found_cluster is None:
            self._found_cluster = kubeconfig.find(self._options, self._environ, self._user_home)
        return self._found_cluster

    def _engine_for(self, spec: JobSpec) -> Engine:
        """Return the engine that the job file names, or choose one that the cluster offers."""
        if self._chosen_engine is None:
            named = str(self._options.get("engine") or _AUTO)
            self._chosen_engine = ENGINES[named] if named != _AUTO else self._choose_engine(spec)
        return self._chosen_engine

    def _choose_engine(self, spec: JobSpec) -> Engine:
        from cloudjob.backends.kubernetes import checks

        cluster = self._cluster
        try:
            client = self._client(cluster)
            engine = checks.choose(client, spec.launcher, restarts=bool(spec.retries))
        except BackendError as error:
            error.hint = f"{error.hint}; a dry run needs no cluster if kubernetes.engine is set"
            raise
        place = f"the {engine.resource.kind} of {engine.resource.group} in {cluster.context}"
        log_once(f"kubernetes.engine auto: {engine.name}, {place}")
        return engine

    def _client(self, cluster: Cluster) -> Client:
        if cluster not in self._clients:
            self._clients[cluster] = Client(cluster, limits=self._limits)
        return self._clients[cluster]

    def _job(self, client: Client, where: _Handle) -> dict[str, Any]:
        path = where.engine.resource.path(where.job_names.namespace, where.job_names.name)
        doing = f"looking for the {where.engine.resource.kind} {where.job_names.name}"
        job = client.get(path, doing)
        labels = job["metadata"].get("labels") or {}
        if labels.get(JOB_LABEL) != where.job_names.job:
            # Somebody else's object that has this name; its other objects are not ours, either.
            raise BackendError(f"{doing}: it is no job of cloudjob: it has no label {JOB_LABEL}")
        return job

    def _place(self, where: _Handle, node: int | None) -> Place:
        job_names, node_of = where.job_names, where.engine.node_of
        return Place(
            namespace=job_names.namespace,
            job=job_names.job,
            node_of=lambda pod: node_of(job_names.name, pod),
            node=node,
            folder=self._home / job_names.job,
            labels=where.engine.selector(job_names),
            container=where.engine.container,
        )

    def _delete(self, client: Client, where: _Handle) -> None:
        namespace, job_names = where.job_names.namespace, where.job_names
        for resource, name in (
            (where.engine.resource, job_names.name),
            (SECRET, job_names.delivery),
            (CONFIG_MAP, job_names.entry),
        ):
            # Its pods, services and the like go with the job, by their owner references.
            client.delete(
                resource.path(namespace, name),
                f"removing the {resource.kind} {name}",
                propagationPolicy="Background",
            )
        if where.engine.needs_services:
            self._delete_services(client, job_names)

    def _delete_services(self, client: Client, job_names: Names) -> None:
        """Delete the services of a submit that was killed before the job owned them."""
        doing = f"removing the services of job {job_names.job}"
        query = {"labelSelector": f"{JOB_LABEL}={job_names.job}"}
        # Users who may not list services may still remove jobs; owned services go with the job.
        with contextlib.suppress(errors.AccessDenied):
            for item in client.list(SERVICE.path(job_names.namespace), doing, query)["items"]:
                client.delete(SERVICE.path(job_names.namespace, item["metadata"]["name"]), doing)


def _is_short(engine: Engine, job: Mapping[str, Any], pods: Iterable[Pod]) -> bool:
    """Whether a node of a job has no pod."""
    return len({pod.node for pod in pods if pod.node is not None}) < engine.nodes(job)


def _remaining(stage: Stage, pods: list[Pod]) -> list[Pod]:
    """Return the pods that no others will take the place of."""
    return [pod for pod in pods if not (stage.attempts and pod.is_over)]


def _creation(waits: Iterable[Wait]) -> list[Wait]:
    return [wait for wait in waits if wait.phase is WaitPhase.CREATION]


def _listed(
    client: Client, namespace: str, engine: Engine, names_by_handle: Mapping[str, Names]
) -> dict[str, NativeStatus | None]:
    """Return the status of the jobs of one namespace; those that have ended are left out.

    Args:
        names_by_handle: The names of each job's objects, by the job's handle.
    """
    doing = f"listing the jobs in {namespace}"
    ours = {"labelSelector": f"{MANAGER_LABEL}=cloudjob"}
    try:
        jobs = client.list(engine.resource.path(namespace), doing, ours)["items"]
    except errors.ObjectNotFound:
        # The operator was uninstalled, and its jobs were deleted with it.
        return dict.fromkeys(names_by_handle)
    by_name = {job["metadata"]["name"]: job for job in jobs}
    pods: dict[str, list[dict[str, Any]]] = {}
    if by_name:
        label = engine.selector(Names("x", "")).partition("=")[0]
        for pod in client.list(POD.path(namespace), doing, {"labelSelector": label})["items"]:
            pods.setdefault(f"{label}={pod['metadata']['labels'].get(label)}", []).append(pod)
    status_by_handle: dict[str, NativeStatus | None] = {}
    for handle, job_names in names_by_handle.items():
        job = by_name.get(job_names.name)
        if job is None:
            status_by_handle[handle] = None
            continue
        is_cancelled = CANCELLED in (job["metadata"].get("annotations") or {})
        nodes = [
            state.pod_of(pod, partial(engine.node_of, job_names.name), engine.container)
            for pod in pods.get(engine.selector(job_names), ())
        ]
        decision = ending.decision_of(job)
        status = state.status_of(engine, job, nodes, is_cancelled=is_cancelled, decision=decision)
        if not status.state.is_final:
            status_by_handle[handle] = status
    return status_by_handle


def _for_each(items: list[dict[str, Any]], act: Callable[[dict[str, Any]], None]) -> None:
    """Call ``act`` for each item, a few at a time: there may be hundreds of services."""
    if items:
        act(items[0])
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for _ in pool.map(act, items[1:]):
                pass


def _handle(where: _Handle, job: str) -> str:
    cluster = where.cluster
    files = f"+{quote(cluster.kubeconfig, safe='')}" if cluster.is_named else ""
    context = quote(cluster.context, safe="")
    return handles.write(
        _SCHEME, context + files, where.job_names.namespace, where.engine.name, job
    )


def _parse_handle(handle: str) -> _Handle:
    place, namespace, engine, job = handles.read(handle, _SCHEME, 4)
    if engine not in ENGINES:
        raise JobNotFound(f"looking for {handle}: there is no engine {engine}")
    context, plus, file = place.partition("+")
    name = unquote(context)
    is_inside = name == kubeconfig.IN_CLUSTER and not plus
    files = unquote(file) if plus else "" if is_inside else _DEFAULT_FILE
    cluster = Cluster(files, name, namespace, is_named=bool(plus))
    return _Handle(cluster, ENGINES[engine], Names(job, namespace))
