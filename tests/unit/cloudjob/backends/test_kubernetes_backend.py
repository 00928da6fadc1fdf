"""Tests of the Kubernetes backend with a fake API server; no cluster is needed."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudjob import retries
from cloudjob.backends.kubernetes import backend as backends
from cloudjob.backends.kubernetes import checks, logs
from cloudjob.backends.kubernetes import request as requests
from cloudjob.backends.kubernetes.backend import KubernetesBackend
from cloudjob.backends.kubernetes.request import ENGINES
from cloudjob.backends.native import Waiting
from cloudjob.errors import BackendError, JobNotFound, NotAuthorised, Unreachable
from cloudjob.model import progress
from cloudjob.model.status import JobState, JobStatus
from cloudjob.retries import RequestLimits
from cloudjob.tracking import Job
from tests.support import operators
from tests.support.fake_kube_api import EVENTS, NAMESPACE, PODS, FakeApi
from tests.unit.cloudjob.backends.test_kubernetes_build import submission
from tests.unit.cloudjob.tracking.test_job import record_of

QUICK = RequestLimits(total_s=5.0, answer_s=60.0, pause_s=0.05, longest_pause_s=0.5)
LIMIT_S = 180.0
# kubectl's last line about a command that failed in a pod.
ENDED = "command terminated with exit code 1"


class JobFixture:
    """A job on an API server, with the objects that an operator and kubelets would create."""

    def __init__(self, api: FakeApi, folder: Path, engine: str = "volcano", **user: Any) -> None:
        self.api = api
        self.folder = folder
        config = str(api.kubeconfig(folder, user))
        options = {"engine": engine, "kubeconfig": config}
        self.backend = KubernetesBackend(folder / "home", options, environ={}, limits=QUICK)
        self.engine = ENGINES[engine]
        self.request = self.backend.build(submission(engine, nodes=2))
        self.name = self.request.job_names.name
        self.path = self.engine.resource.path(NAMESPACE, self.name)
        self.handle = ""
        self.pods: list[str] = []

    def send(self) -> None:
        """Send the job, and create its pods as its operator would."""
        self.handle = self.backend.send(self.request)
        for pod in operators.made_of(self.api.objects[self.path]).pods:
            name = pod["metadata"]["name"]
            pod["metadata"] |= {"uid": name, "creationTimestamp": "2026-11-21T10:00:00Z"}
            pod["status"] = {"phase": "Pending"}
            self.api.objects[f"{PODS}/{name}"] = pod
            self.pods.append(name)

    def pod(self, node: int) -> dict[str, Any]:
        return self.api.objects[f"{PODS}/{self.pods[node]}"]

    def mark_running(self, *nodes: int) -> None:
        """Mark the containers of these nodes as running."""
        for node in nodes:
            pod = self.pod(node)
            pod["spec"]["nodeName"] = f"machine-{node}"
            pod["status"] = {"phase": "Running"}
            self.set_container_state(node, {"running": {"startedAt": "2026-11-21T10:00:01Z"}})

    def mark_finished(self, node: int, code: int = 0) -> None:
        at = "2026-11-21T10:00:05Z"
        terminated = {"exitCode": code, "reason": "Error", "finishedAt": at, "startedAt": at}
        self.pod(node)["status"] = {"phase": "Failed" if code else "Succeeded"}
        self.set_container_state(node, {"terminated": terminated})

    def set_container_state(self, node: int, state: dict[str, Any]) -> None:
        """Set the state of the job's container, and list a sidecar before it."""
        sidecar = {"name": "sidecar", "state": {"running": {"startedAt": "2026-11-21T10:00:00Z"}}}
        status = {"name": self.engine.container, "state": state}
        self.pod(node)["status"]["containerStatuses"] = [sidecar, status]

    def set_phase(self, phase: str, **more: Any) -> None:
        """Set the job's status as the operator would."""
        at = {"lastTransitionTime": "2026-11-21T10:00:06Z"}
        condition = {"type": phase, "status": "True", **at, **more}
        status: dict[str, Any] = {"conditions": [condition]}
        if self.engine.name == "volcano":
            status = {"state": {"phase": phase, **at}}
        elif self.engine.name == "job" and phase == "Running":
            status = {"active": 2, "ready": 1}
        elif self.engine.name == "job" and phase == "Succeeded":
            status = {"conditions": [{**condition, "type": "Complete"}]}
        self.api.objects[self.path]["status"] = status

    def record_event(
        self, object_name: str, reason: str, message: str, at: str, kind: str = "Warning"
    ) -> None:
        """Record an event of one object."""
        name = f"{object_name}.{len(self.api.objects)}"
        self.api.objects[f"{EVENTS}/{name}"] = {
            "metadata": {"name": name},
            "involvedObject": {"kind": "x", "name": object_name},
            "type": kind,
            "reason": reason,
            "message": message,
            "lastTimestamp": f"2026-11-21T{at}Z",
        }

    @property
    def native(self) -> str:
        """The native state that ``status`` reports now, without cached pod states."""
        self.backend._pod_states.clear()
        return self.backend.status(self.handle).native


@pytest.fixture
def api() -> Iterator[FakeApi]:
    fake = FakeApi()
    yield fake
    fake.close()


@pytest.fixture
def job(api: FakeApi, tmp_path: Path) -> JobFixture:
    """A running Volcano job of two nodes."""
    fixture = JobFixture(api, tmp_path)
    fixture.send()
    fixture.mark_running(0, 1)
    fixture.set_phase("Running")
    return fixture


@pytest.mark.parametrize("engine", ["volcano", "mpi-operator", "ms-operator", "job"])
def test_many_jobs_are_one_list_of_jobs_and_one_of_pods(api: FakeApi, tmp_path: Path, engine: str):
    job = JobFixture(api, tmp_path, engine)
    handles = []
    for number in range(8):
        job.request = job.backend.build(
            submission(engine, nodes=2)._replace(job=f"train-234567{number:02}")
        )
        job.name, job.pods = job.request.job_names.name, []
        job.path = job.engine.resource.path(NAMESPACE, job.name)
        job.send()
        handles.append(job.handle)
        job.set_phase("Running")
        if number == 3:
            job.mark_running(0)
            job.set_container_state(
                1, {"waiting": {"reason": "ErrImagePull", "message": "not found"}}
            )
    job.set_phase("Completed" if engine == "volcano" else "Succeeded")
    del api.objects[job.engine.resource.path(NAMESPACE, "train-23456705")]
    api.seen.clear()

    status_of = job.backend.statuses(handles)

    assert len(api.seen) == 2
    assert handles[-1] not in status_of
    assert [handle for handle in handles if status_of.get(handle, "") is None] == [handles[5]]
    natives = {status.native for status in status_of.values() if status}
    assert natives == {"Running", "Running (node 1: ErrImagePull: not found)"}


@pytest.fixture
def short_log_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop retrying unreadable logs after 1 s."""
    monkeypatch.setattr(logs, "_LAST_S", 1.0)
    monkeypatch.setattr(logs, "_END_CHECK_SILENT_S", 1.0)


def in_time(act: Callable[[], Any]) -> Any:
    """Return or raise the result of ``act``; fail if there is none within ``LIMIT_S`` seconds."""
    outcomes: list[Any] = []

    def run() -> None:
        try:
            outcomes.append(act())
        except BaseException as error:  # noqa: BLE001 (raised again below)
            outcomes.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert outcomes, "it does not end"
    if isinstance(outcomes[0], BaseException):
        raise outcomes[0]
    return outcomes[0]


# -- cancelling -----------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [500, None], ids=["500", "never"])
@pytest.mark.parametrize("is_urgent", [False, True], ids=["cancel", "cancel --now"])
def test_a_job_is_cancelled_although_a_log_cannot_be_read(
    job: JobFixture, monkeypatch: pytest.MonkeyPatch, answer: int | None, is_urgent: bool
):
    monkeypatch.setattr(backends, "_LAST_OUTPUT_S", 1.0)
    job.api.logs = {job.pods[0]: answer, job.pods[1]: b"[1] kept\n"}
    in_time(lambda: job.backend.cancel(job.handle, is_urgent=is_urgent))

    assert job.api.requests_with("POST", "/commands")
    assert bool(job.api.requests_with("DELETE", "/pods")) == is_urgent
    if answer is not None:
        (kept,) = (job.folder / "home" / "kubernetes" / job.request.job).glob("1-*.log")
        assert kept.read_bytes() == b"[1] kept\n"


def test_the_job_is_stopped_before_its_logs_are_read(job: JobFixture):
    job.backend.cancel(job.handle)

    targets = [target for _, target in job.api.seen]
    stop = next(i for i, target in enumerate(targets) if "/commands" in target)
    assert not any("/log" in target for target in targets[:stop])


def test_logs_of_other_nodes_are_shown_when_one_cannot_be_read(job: JobFixture):
    job.api.logs = {job.pods[0]: 500, job.pods[1]: b"[1] shown\n"}
    pieces: list[tuple[int, bytes]] = []
    with pytest.raises(BackendError, match="node 0: dial tcp: connection refused") as caught:
        pieces.extend(job.backend.logs(job.handle, None, follow=False))

    assert pieces == [(1, b"[1] shown\n")]
    assert "not complete" in caught.value.hint


def test_a_container_that_has_not_started_beside_a_sidecar_has_no_log(job: JobFixture):
    waiting = {"reason": "ErrImagePull", "message": "not found"}
    job.set_container_state(0, {"waiting": waiting})
    job.api.logs = {job.pods[0]: 400, job.pods[1]: b"[1] shown\n"}

    assert list(job.backend.logs(job.handle, None, follow=False)) == [(1, b"[1] shown\n")]
    assert not job.api.requests_with("GET", f"{job.pods[0]}/log")


def test_cancelling_a_job_on_a_lost_host_reports_what_it_waits_for(
    job: JobFixture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(retries, "FIRST_S", 0.0)
    job.backend.cancel(job.handle)
    job.set_phase("Aborting")
    mark_host_lost(job, 1)

    assert job.native.startswith("Aborting (node 1: its machine machine-1")
    # Threads of other tests may still log.
    (message,) = [text for text in caplog.messages if text.startswith("cancelling")]
    assert message.startswith(
        f"cancelling {job.request.job}: Aborting (node 1: its machine machine-1"
    )
    assert message.endswith("`cloudjob cancel --now` does not wait for it")


def test_cancelling_a_job_whose_operator_is_down_reports_what_it_waits_for(
    job: JobFixture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(retries, "FIRST_S", 0.0)
    for pod in job.pods:
        del job.api.objects[f"{PODS}/{pod}"]
    job.set_phase("Pending")
    job.backend.cancel(job.handle)

    assert job.native == "Pending"
    (message,) = [text for text in caplog.messages if text.startswith("cancelling")]
    assert message.startswith(f"cancelling {job.request.job}: Pending; `cloudjob cancel --now`")


def mark_host_lost(job: JobFixture, node: int) -> None:
    """Set the pod's conditions as if the host of this node had stopped reporting."""
    job.pod(node)["status"]["conditions"] = [
        {"type": "Ready", "status": "False", "lastTransitionTime": "2026-11-21T10:00:04Z"},
        {"type": "ContainersReady", "status": "True"},
    ]


# -- cancelling a job that Kueue manages ----------------------------------------------------------

SUSPENDS: dict[str, Any] = {
    "mpi-operator": lambda job: job["spec"]["runPolicy"],
    "job": lambda job: job["spec"],
}


class Kueue:
    """Kueue's rules for one job: it resumes a suspended job whose Workload is admitted and active.

    pkg/controller/jobframework/reconciler.go: steps 2, 6 and 7 of ReconcileGenericJob.
    """

    def __init__(self, job: JobFixture, version: str = "v1beta2", queue: str = "research") -> None:
        self.job = job
        self.path = f"/apis/kueue.x-k8s.io/{version}/namespaces/{NAMESPACE}/workloads/w"
        manifest = job.api.objects[job.path]
        if queue:
            manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = queue
        uid = manifest["metadata"]["uid"]
        versions = [{"version": "v1"}, {"version": version}]
        job.api.objects["/apis/kueue.x-k8s.io"] = {"versions": versions}
        job.api.objects[self.path] = {
            "metadata": {"name": "w", "ownerReferences": [{"uid": uid}]},
            "spec": {"active": True},
        }
        job.api.on_change = self.reconcile

    def reconcile(self, path: str, changed: dict[str, Any]) -> None:
        """Apply the rules to a changed object."""
        if path not in (self.path, self.job.path) or self.path not in self.job.api.objects:
            return
        policy = SUSPENDS[self.job.engine.name](self.job.api.objects[self.job.path])
        policy["suspend"] = not self.job.api.objects[self.path]["spec"]["active"]

    @property
    def is_suspended(self) -> bool:
        return bool(SUSPENDS[self.job.engine.name](self.job.api.objects[self.job.path])["suspend"])


@pytest.fixture(params=["mpi-operator", "job"])
def queued_job(request: pytest.FixtureRequest, api: FakeApi, tmp_path: Path) -> JobFixture:
    """A running job of two nodes, once with each engine whose jobs Kueue manages."""
    fixture = JobFixture(api, tmp_path, request.param)
    fixture.send()
    fixture.mark_running(0, 1)
    fixture.set_phase("Running")
    fixture.api.logs = dict.fromkeys(fixture.pods, b"[0] kept\n")
    return fixture


@pytest.mark.parametrize("version", ["v1beta2", "v1beta1"])
@pytest.mark.parametrize("queue", ["research", ""], ids=["with a label", "without"])
def test_a_cancelled_job_is_not_resumed_by_kueue(queued_job: JobFixture, version: str, queue: str):
    job, kueue = queued_job, Kueue(queued_job, version, queue)
    # A job that is only suspended is resumed.
    policy: dict[str, Any] = {"suspend": True}
    is_mpi = job.engine.name == "mpi-operator"
    body = {"spec": {"runPolicy": policy} if is_mpi else policy}
    job.backend._client(job.backend._cluster).patch(job.path, body, "suspending it")
    assert not kueue.is_suspended

    job.backend.cancel(job.handle)

    assert kueue.is_suspended
    assert job.api.objects[kueue.path]["spec"]["active"] is False
    job.set_phase("Suspended")
    for pod in job.pods:
        del job.api.objects[f"{PODS}/{pod}"]
    assert job.backend.status(job.handle).state is JobState.CANCELLED


@pytest.mark.parametrize(
    "forbidden",
    [{("PATCH", "/workloads/")}, {("GET", "/workloads")}],
    ids=["may only read", "may not even read"],
)
def test_a_user_who_may_not_change_workloads_cancels_a_job_by_deleting_it(
    queued_job: JobFixture, forbidden: set[tuple[str, str]]
):
    """Its logs are saved first, and it stays cancelled for this machine."""
    job = queued_job
    Kueue(job)
    job.api.forbidden = forbidden

    job.backend.cancel(job.handle)

    assert job.path not in job.api.objects
    assert job.backend.status(job.handle).state is JobState.CANCELLED
    assert job.handle not in job.backend.statuses([job.handle]), "status knows more"
    assert list(job.backend.logs(job.handle, 0, follow=False)) == [(0, b"[0] kept\n")]
    for pod in job.pods:
        del job.api.objects[f"{PODS}/{pod}"]
    assert list(job.backend.logs(job.handle, 0, follow=False)) == [(0, b"[0] kept\n")]


def test_a_job_in_a_default_queue_is_deleted_if_its_workload_may_not_be_changed(
    queued_job: JobFixture,
):
    """The job has no label, but its Workload shows that Kueue manages it."""
    job = queued_job
    Kueue(job, queue="")
    job.api.forbidden = {("PATCH", "/workloads/")}

    job.backend.cancel(job.handle)

    assert job.path not in job.api.objects


def test_a_queued_job_without_a_workload_is_deleted(queued_job: JobFixture):
    """Kueue has not seen it yet, and would admit it later."""
    job = queued_job
    del job.api.objects[Kueue(job).path]

    job.backend.cancel(job.handle)

    assert job.path not in job.api.objects


def test_the_workload_of_another_job_is_not_touched(queued_job: JobFixture):
    job = queued_job
    kueue = Kueue(job, queue="")
    job.api.objects[kueue.path]["metadata"]["ownerReferences"] = [{"uid": "another"}]
    job.api.on_change = lambda path, body: None

    job.backend.cancel(job.handle)

    assert job.api.objects[kueue.path]["spec"]["active"] is True
    assert kueue.is_suspended


def test_a_cluster_without_kueue_suspends_a_cancelled_job(queued_job: JobFixture):
    job = queued_job
    job.api.objects[job.path]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "research"

    job.backend.cancel(job.handle)

    assert SUSPENDS[job.engine.name](job.api.objects[job.path])["suspend"] is True


def test_a_failed_head_of_an_indexed_job_is_not_cancelled(api: FakeApi, tmp_path: Path):
    """Another pod has not ended, but the job has: a cancel leaves it as it is."""
    job = JobFixture(api, tmp_path, "job")
    job.send()
    job.api.objects[job.path]["status"] = {"active": 1, "failedIndexes": "0"}

    job.backend.cancel(job.handle)

    assert "suspend" not in job.api.objects[job.path]["spec"]
    assert job.backend.status(job.handle).state is JobState.FAILED


# -- following ------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [500, None], ids=["500", "never"])
@pytest.mark.parametrize("is_lost", [False, True], ids=["ended", "machine lost"])
@pytest.mark.usefixtures("short_log_timeouts")
def test_a_follower_ends_with_a_job_whose_log_cannot_be_read(
    job: JobFixture, answer: int | None, is_lost: bool
):
    job.api.logs = {job.pods[0]: b"2026-11-21T10:00:02Z [0] shown\n", job.pods[1]: answer}
    job.mark_finished(0, 1)
    if not is_lost:
        job.mark_finished(1, 1)
    job.set_phase("Failed")
    pieces: list[tuple[int, bytes]] = []
    with pytest.raises(BackendError, match="following the log of node 1: "):
        in_time(lambda: pieces.extend(job.backend.logs(job.handle, None, follow=True)))

    assert b"".join(data for _, data in pieces) == b"[0] shown\n"


@pytest.mark.usefixtures("short_log_timeouts")
def test_a_follower_ends_with_a_job_whose_host_stops_reporting(job: JobFixture):
    """The stream stays open, and the cluster reports the pod as running for ever."""
    job.api.logs = {job.pods[0]: b"", job.pods[1]: [b"2026-11-21T10:00:02Z [1] shown\n"]}
    job.mark_finished(0, 1)
    mark_host_lost(job, 1)
    job.set_phase("Failed")
    pieces: list[tuple[int, bytes]] = []
    with pytest.raises(
        BackendError, match="following the log of node 1: the machine machine-1 does not"
    ):
        in_time(lambda: pieces.extend(job.backend.logs(job.handle, None, follow=True)))

    assert b"".join(data for _, data in pieces) == b"[1] shown\n"


@pytest.mark.usefixtures("short_log_timeouts")
def test_a_log_that_fails_for_a_while_is_reported_and_followed_to_its_end(
    job: JobFixture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(retries, "FIRST_S", 0.0)
    job.api.logs = {job.pods[0]: 500, job.pods[1]: b""}
    pieces = job.backend.logs(job.handle, None, follow=True)
    while (
        "following the log of node 0: dial tcp: connection refused; trying again"
        not in caplog.messages
    ):
        next(pieces)
    job.api.logs[job.pods[0]] = b"2026-11-21T10:00:02Z [0] late\n"
    job.mark_finished(0)
    job.mark_finished(1)
    job.set_phase("Completed")

    assert in_time(lambda: b"".join(data for _, data in pieces)) == b"[0] late\n"


# How the server is away, in the order of the phases of a job: it closes connections (0), refuses
# every request, rejects the login, or does not know the roles or the operators yet, as after a
# restart (404).
OUTAGES = {
    "volcano": (0, 503, 404),
    "mpi-operator": (503, 404, 401),
    "ms-operator": (404, 401, 503),
    "job": (403, 503, 0),
    "jobset": (0, 403, 403),
}
ENDS = {"volcano": "Completed", "jobset": "Completed"}


@pytest.mark.parametrize("engine", ENGINES)
def test_followers_and_waits_outlast_an_api_server_that_is_away(
    api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
):
    """While the job waits, while it runs, and while it ends, for longer than requests are retried.

    The job continues without them.
    """
    for name in ("_REOPEN_S", "_END_CHECK_S"):
        monkeypatch.setattr(logs, name, 0.05)
    job = JobFixture(api, tmp_path, engine)
    job.send()
    job.backend._limits = QUICK._replace(total_s=0.2)
    job.backend._clients.clear()
    record = record_of(tmp_path, job=job.request.job, backend="kubernetes", handle=job.handle)
    statuses: list[JobStatus] = []
    waiting = Job(record, job.backend, tmp_path)
    waiter = threading.Thread(target=lambda: statuses.append(waiting.wait()), daemon=True)
    waiter.start()
    pieces = job.backend.logs(job.handle, None, follow=True)
    for phase, status in enumerate(OUTAGES[engine]):
        job.backend._pod_states.clear()
        until_asked(pieces, api, job.path)
        api.outage, api.unserved = (None, job.path) if status == 404 else (status, "")
        until_asked(pieces, api, job.path)
        if phase == 1:
            line = [b"2026-11-21T10:00:02Z [0] begun\n"]
            api.logs = {pod: [*line] for pod in job.pods}
            job.mark_running(0, 1)
            job.set_phase("Running")
        elif phase == 2:
            for node, pod in enumerate(job.pods):
                api.logs[pod] = b"".join(api.logs[pod]) + b"2026-11-21T10:00:03Z [0] ended\n"
                job.mark_finished(node)
            job.set_phase(ENDS.get(engine, "Succeeded"))
        api.outage, api.unserved = None, ""

    text = in_time(lambda: b"".join(data for _, data in pieces))
    waiter.join(LIMIT_S)
    assert text.count(b"[0] begun\n") == text.count(b"[0] ended\n") == 2, text
    assert [status.state for status in statuses] == [JobState.SUCCEEDED]


def until_asked(pieces: Iterator[tuple[int, bytes]], api: FakeApi, path: str) -> None:
    """Follow until the job itself was asked for twice more."""
    seen, end_at = len(api.seen), time.monotonic() + LIMIT_S
    while len([path for _, target in api.seen[seen:] if target == path]) < 2:
        next(pieces)
        assert time.monotonic() < end_at, api.seen[seen:]


def test_a_job_is_not_gone_while_a_starting_server_does_not_know_its_kind(job: JobFixture):
    """Neither in a list nor for a cancel; a later list has it again."""
    assert job.backend.statuses([job.handle])[job.handle]
    job.api.unserved = job.path.rpartition("/")[0]

    assert job.backend.statuses([job.handle]) == {}
    for ask in (job.backend.status, job.backend.cancel):
        with pytest.raises(Unreachable):
            ask(job.handle)
    job.api.unserved = ""
    assert job.backend.statuses([job.handle])[job.handle]
    del job.api.objects[job.path]
    with pytest.raises(JobNotFound):
        job.backend.status(job.handle)


def test_a_follower_who_may_not_read_the_job_is_told_so_at_once(job: JobFixture):
    """Unlike one who could, as the server may have started again."""
    job.api.forbidden = {("GET", job.path)}
    pieces = job.backend.logs(job.handle, None, follow=True)

    with pytest.raises(NotAuthorised):
        in_time(lambda: list(pieces))


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            ["E1128 couldn't get the API group list", "its head ended while it answered", ENDED],
            "its head ended while it answered",
        ),
        (["E1128 dial tcp: refused", "The connection was refused"], "The connection was refused"),
        ([ENDED], ENDED),
        ([], "kubectl failed"),
    ],
)
def test_a_question_that_fails_reports_why(
    job: JobFixture, monkeypatch: pytest.MonkeyPatch, lines: list[str], reason: str
):
    """Notes of kubectl come before the lines of the command in the pod, its exit code after."""
    program = job.folder / "kubectl"
    program.write_text(
        "#!/bin/sh\ncat >&2 <<'END'\n" + "".join(map("{}\n".format, lines)) + "END\nexit 1\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(job.folder), prepend=os.pathsep)

    with pytest.raises(BackendError) as caught:
        job.backend.ask(job.handle, b"{}")
    assert caught.value.message == f"asking the nodes of {job.handle}: {reason}"


def test_a_refused_log_is_retried_with_a_pause(job: JobFixture):
    job.api.logs = dict.fromkeys(job.pods, 500)
    job.mark_finished(0, 1)
    pieces = job.backend.logs(job.handle, 0, follow=True)
    end_at = time.monotonic() + 2
    while time.monotonic() < end_at:
        next(pieces)

    assert 1 <= len(job.api.requests_with("GET", f"{job.pods[0]}/log")) < 10
    pieces.close()  # type: ignore[attr-defined]


def test_threads_end_silently_when_their_reader_has_stopped(
    job: JobFixture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(retries, "FIRST_S", 0.0)
    before = set(threading.enumerate())
    job.api.logs = {pod: [b"2026-11-21T10:00:02Z [0] early\n"] for pod in job.pods}
    pieces = job.backend.logs(job.handle, None, follow=True)
    while not next(pieces)[1]:
        pass
    pieces.close()  # type: ignore[attr-defined]
    readers = [thread for thread in set(threading.enumerate()) - before if thread.name == "log"]
    job.api.close()
    for reader in readers:
        reader.join(30)

    assert readers
    assert not any(reader.is_alive() for reader in readers)
    # Threads of other tests may still log.
    idents = {reader.ident for reader in readers}
    assert [record.getMessage() for record in caplog.records if record.thread in idents] == []


# -- status ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["volcano", "mpi-operator", "ms-operator", "job"])
def test_our_container_counts_and_not_a_sidecar_before_it(
    api: FakeApi, tmp_path: Path, engine: str
):
    job = JobFixture(api, tmp_path, engine)
    job.send()
    job.mark_running(0, 1)
    at = "2026-11-21T10:00:05Z"
    terminated = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": at, "startedAt": at}
    for node in (0, 1):
        sidecar = {"name": "sidecar", "resources": {"limits": {"memory": "1Mi"}}}
        job.pod(node)["spec"]["containers"].insert(0, sidecar)
        job.pod(node)["spec"]["containers"][1]["resources"] = {"limits": {"memory": "4Gi"}}
        job.set_container_state(node, {"terminated": terminated})
    job.set_phase("Failed")

    status = job.backend.status(job.handle)
    assert str(status.reason) == (
        f"out of memory: node 0 ({job.pods[0]}), node 1 ({job.pods[1]}), limited to 4Gi; raise "
        "kubernetes.memory_gib, to which /dev/shm counts"
    )
    assert status.exit_code == 137


def test_a_host_that_is_not_ready_is_named_while_the_job_runs(job: JobFixture):
    mark_host_lost(job, 1)

    status = job.backend.status(job.handle)
    assert status.state is JobState.RUNNING
    assert status.native == (
        "Running (node 1: its machine machine-1 no longer reports to the cluster; it may be lost)"
    )


def test_a_container_that_is_not_ready_is_not_taken_for_a_lost_host(job: JobFixture):
    job.pod(1)["status"]["conditions"] = [
        {"type": "Ready", "status": "False"},
        {"type": "ContainersReady", "status": "False"},
    ]

    assert job.native == "Running"


@pytest.fixture
def pending_job(api: FakeApi, tmp_path: Path) -> JobFixture:
    """A Volcano job of two nodes whose pods are not scheduled."""
    fixture = JobFixture(api, tmp_path)
    fixture.send()
    fixture.set_phase("Pending")
    return fixture


def set_pod_group_conditions(job: JobFixture, *conditions: tuple[str, str]) -> None:
    """Store the job's pod group with these conditions and transition times."""
    uid = job.api.objects[job.path]["metadata"]["uid"]
    path = f"/apis/scheduling.volcano.sh/v1beta1/namespaces/{NAMESPACE}/podgroups/{job.name}-{uid}"
    status_conditions = [
        {
            "type": kind,
            "status": "True",
            "reason": "NotEnoughResources"
            if kind == "Unschedulable"
            else "tasks in gang are ready",
            "message": "2/2 tasks in gang unschedulable",
            "lastTransitionTime": f"2026-11-21T{at}Z",
        }
        for kind, at in conditions
    ]
    job.api.objects[path] = {
        "metadata": {"name": job.name},
        "status": {"conditions": status_conditions},
    }


GANG = "Pending (NotEnoughResources: 2/2 tasks in gang unschedulable)"


def test_a_node_whose_log_is_followed_waits_for_no_scheduler(pending_job: JobFixture):
    """What a status has read is used for ten seconds, unless the follower has seen more."""
    waiting = pending_job.backend.status(pending_job.handle)
    assert isinstance(waiting, Waiting)
    assert waiting.wait
    assert waiting.wait.message == "node 0: waiting for the scheduler, and 1 more"

    pending_job.mark_running(1)
    pieces = pending_job.backend.logs(pending_job.handle, None, follow=True)
    next(pieces)
    waiting = pending_job.backend.status(pending_job.handle)
    assert isinstance(waiting, Waiting)
    assert waiting.wait
    assert waiting.wait.message == "node 0: waiting for the scheduler"
    pieces.close()  # type: ignore[attr-defined]


def test_the_queues_reason_is_shown_until_the_job_is_scheduled(pending_job: JobFixture):
    set_pod_group_conditions(pending_job, ("Scheduled", "09:00:00"), ("Unschedulable", "10:00:00"))
    assert pending_job.native == GANG

    set_pod_group_conditions(pending_job, ("Unschedulable", "10:00:00"), ("Scheduled", "10:00:01"))
    pending_job.record_event(f"{pending_job.name}-u", "Unschedulable", "no room", "10:00:00")
    assert pending_job.native == "Pending"


def test_a_quota_is_named_before_the_queue_until_the_pods_are_there(pending_job: JobFixture):
    set_pod_group_conditions(pending_job, ("Unschedulable", "10:00:09"))
    pending_job.record_event(pending_job.name, "FailedCreate", "exceeded quota: gpus", "10:00:02")
    assert pending_job.native == "Pending (FailedCreate: exceeded quota: gpus)"

    for node in (0, 1):
        pending_job.pod(node)["metadata"]["creationTimestamp"] = "2026-11-21T10:00:05Z"
    assert pending_job.native == GANG


def test_a_waiting_follower_does_not_list_events_every_second(
    pending_job: JobFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(backends, "_REREAD_S", 1000.0)
    for _ in range(3):
        pending_job.backend.status(pending_job.handle)
    pieces = pending_job.backend.logs(pending_job.handle, None, follow=True)
    while len(pending_job.api.requests_with("GET", pending_job.path)) < 6:
        next(pieces)

    event_requests = pending_job.api.requests_with("GET", "/events")
    assert 1 <= len(event_requests) <= 2, event_requests
    assert all("fieldSelector=involvedObject.name" in target for target in event_requests)
    pieces.close()  # type: ignore[attr-defined]


def test_the_events_of_an_ended_job_are_not_read_again_at_once(job: JobFixture):
    """A wait for its record asks for its status every second."""
    job.mark_finished(0, 1)
    del job.api.objects[f"{PODS}/{job.pods[1]}"]
    job.set_phase("Failed")
    states = [job.backend.status(job.handle)]
    event_requests = len(job.api.requests_with("GET", "/events"))
    states += [job.backend.status(job.handle) for _ in range(3)]

    assert states == states[:1] * 4
    assert 1 <= event_requests == len(job.api.requests_with("GET", "/events"))


def preempt(job: JobFixture, node: int) -> None:
    """Mark the pod of this node as the scheduler does before it deletes it."""
    pod = job.pod(node)
    pod["metadata"]["deletionTimestamp"] = "2026-11-21T10:00:04Z"
    pod["status"]["conditions"] = [
        {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "PreemptionByScheduler",
            "message": "for a pod of higher priority",
        }
    ]


def test_a_pod_of_an_earlier_attempt_is_not_blamed(job: JobFixture):
    """Volcano has started the job again since the pod was preempted."""
    preempt(job, 1)
    assert "PreemptionByScheduler" in job.native
    again = job.pod(1)
    del again["metadata"]["deletionTimestamp"]
    again["metadata"]["uid"] = "another"
    job.mark_finished(0, 3)
    job.mark_finished(1, 0)
    job.set_phase("Failed")

    status = job.backend.status(job.handle)
    assert status.failure.message == f"node 0 ({job.pods[0]}) ended with exit code 3"


# -- choosing an engine ---------------------------------------------------------------------------

SERVED = {
    "volcano": ("/apis/batch.volcano.sh/v1alpha1", "jobs"),
    "mpi-operator": ("/apis/kubeflow.org/v2beta1", "mpijobs"),
    "ms-operator": ("/apis/mindspore.gitee.com/v1", "msjobs"),
    "job": ("/apis/batch/v1", "jobs"),
    "jobset": ("/apis/jobset.x-k8s.io/v1alpha2", "jobsets"),
}


def offer(
    api: FakeApi, *engines: str, version: str = "v1.33.1+k3s1", denied: tuple[str, ...] = ()
) -> None:
    """Serve the resources of these engines, and permit everything but the denied verbs.

    Args:
        denied: Verb, resource and group, as in ``create jobs.batch``.
    """
    api.objects["/version"] = {"gitVersion": version}
    for engine in engines:
        path, plural = SERVED[engine]
        api.objects[path] = {"resources": [{"name": plural}]}

    def review(path: str, body: dict[str, Any]) -> None:
        if "accessreviews" not in path:
            return
        asked = body["spec"]["resourceAttributes"]
        group = f".{asked['group']}" if asked["group"] else ""
        body["status"] = {"allowed": f"{asked['verb']} {asked['resource']}{group}" not in denied}

    api.on_change = review


def auto_backend(api: FakeApi, folder: Path, engine: str = "auto") -> KubernetesBackend:
    """Return a backend whose job file names this engine."""
    options = {"engine": engine, "kubeconfig": str(api.kubeconfig(folder))}
    return KubernetesBackend(folder / "home", options, environ={}, limits=QUICK)


@pytest.mark.parametrize(
    ("offered", "denied", "choice"),
    [
        (("volcano", "mpi-operator", "ms-operator", "job"), (), ("mpirun", "volcano")),
        (("mpi-operator", "ms-operator", "job"), (), ("mpirun", "mpi-operator")),
        (("ms-operator", "job"), (), ("msrun", "ms-operator")),
        # That operator starts only MindSpore's cluster.
        (("ms-operator", "job"), (), ("mpirun", "job")),
        (("job",), (), ("mpirun", "job")),
        (("job", "jobset"), (), ("mpirun", "job")),
        (("volcano", "job"), ("create jobs.batch.volcano.sh",), ("mpirun", "job")),
        (("volcano", "job"), ("create jobs.batch", "create secrets"), ("mpirun", "volcano")),
    ],
)
def test_auto_chooses_the_first_engine_that_the_user_can_use(
    api: FakeApi,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    offered: tuple[str, ...],
    denied: tuple[str, ...],
    choice: tuple[str, str],
):
    """A launcher and its engine; the choice is reported in one line, once."""
    launcher, expected = choice
    progress.log_once.cache_clear()
    offer(api, *offered, denied=denied)
    backend = auto_backend(api, tmp_path)
    job_requests = [backend.build(submission("volcano", launcher=launcher)) for _ in range(2)]

    assert [item.engine.name for item in job_requests] == [expected] * 2
    resource = ENGINES[expected].resource
    (message,) = [text for text in caplog.messages if text.startswith("kubernetes.engine")]
    assert message == (
        f"kubernetes.engine auto: {expected}, the {resource.kind} of {resource.group} in test"
    )


@pytest.mark.parametrize(
    ("offered", "expected"),
    [
        (("volcano", "job", "jobset"), "volcano"),
        (("mpi-operator", "job", "jobset"), "jobset"),
        (("mpi-operator", "job"), "job"),
    ],
)
def test_auto_chooses_an_engine_that_can_restart_a_job_with_retries(
    api: FakeApi, tmp_path: Path, offered: tuple[str, ...], expected: str
):
    offer(api, *offered)
    job_request = auto_backend(api, tmp_path).build(
        submission("volcano", launcher="mpirun", retries=2)
    )

    assert job_request.engine.name == expected


@pytest.mark.parametrize(
    ("offered", "version", "denied", "expected"),
    [
        (
            (),
            "v1.33.1",
            (),
            "volcano: not installed: there is no Job of batch.volcano.sh/v1alpha1; ",
        ),
        (("job",), "v1.28.9-gke.1", (), "; job: needs Kubernetes 1.29, and this is v1.28.9-gke.1"),
        (("job",), "no version", (), "; job: needs Kubernetes 1.29, and this is no version"),
        (
            ("job",),
            "v1.33.1",
            ("create jobs.batch", "create services"),
            "; job: not allowed in lab: create jobs.batch, create services",
        ),
    ],
)
def test_a_cluster_without_a_usable_engine_is_refused_with_what_each_lacks(
    api: FakeApi,
    tmp_path: Path,
    offered: tuple[str, ...],
    version: str,
    denied: tuple[str, ...],
    expected: str,
):
    offer(api, *offered, version=version, denied=denied)
    with pytest.raises(BackendError) as caught:
        auto_backend(api, tmp_path).build(submission("volcano"))

    assert caught.value.message.startswith("choosing an engine in test: you can use none: volcano:")
    assert expected in caught.value.message
    assert "a dry run needs no cluster if kubernetes.engine is set" in caught.value.hint


def test_a_named_engine_is_never_replaced(api: FakeApi, tmp_path: Path):
    """The cluster lacks it, so the check before the submit fails."""
    offer(api, "volcano", "job")
    backend = auto_backend(api, tmp_path, "mpi-operator")
    job_request = backend.build(submission("mpi-operator"))
    failed = [check for check in backend.checks(job_request.submission.spec, "") if not check.is_ok]

    assert job_request.engine.name == "mpi-operator"
    assert [(check.name, check.found, check.is_needed) for check in failed] == [
        (
            "engine mpi-operator",
            "not installed: there is no MPIJob of kubeflow.org/v2beta1",
            True,
        )
    ]


def test_the_checks_without_a_job_are_a_table_of_engines(api: FakeApi, tmp_path: Path):
    """One usable engine is enough."""
    denied = ("create jobs.batch.volcano.sh", "watch pods")
    offer(api, "volcano", "mpi-operator", "job", version="v1.28.0", denied=denied)
    backend = auto_backend(api, tmp_path)
    rows = backend.checks(None, "")

    assert [(row.name, row.is_ok, row.found, row.is_needed) for row in rows] == [
        ("cluster", True, "test, Kubernetes v1.28.0", True),
        (
            "engine volcano",
            False,
            "not allowed in lab: create jobs.batch.volcano.sh, watch pods",
            True,
        ),
        ("engine mpi-operator", False, "not allowed in lab: watch pods", True),
        (
            "engine ms-operator",
            False,
            "not installed: there is no MSJob of mindspore.gitee.com/v1",
            True,
        ),
        ("engine job", False, "needs Kubernetes 1.29, and this is v1.28.0", True),
        (
            "engine jobset",
            False,
            "not installed: there is no JobSet of jobset.x-k8s.io/v1alpha2",
            True,
        ),
    ]
    assert all(row.hint for row in rows[1:])

    offer(api, version="v1.29.0", denied=denied[:1])
    rows = backend.checks(None, "")
    assert {row.name: row.is_ok for row in rows if row.is_needed} == {"cluster": True}
    usable = {row.name: row.found for row in rows[1:] if row.is_ok}
    assert usable == dict.fromkeys(["engine mpi-operator", "engine job"], "usable in lab")


@pytest.mark.parametrize(
    ("has_kueue", "has_queue", "expected"),
    [
        (False, False, (False, "the cluster has no Kueue")),
        (True, False, (False, "there is no queue research")),
        (True, True, (True, "research")),
    ],
)
def test_the_queue_of_an_indexed_job_is_checked(
    api: FakeApi, tmp_path: Path, has_kueue: bool, has_queue: bool, expected: tuple[bool, str]
):
    """A job with an unknown queue would wait for ever, and without Kueue run at once."""
    offer(api, "job")
    if has_kueue:
        api.objects["/apis/kueue.x-k8s.io"] = {"versions": [{"version": "v1beta2"}]}
    if has_queue:
        path = f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{NAMESPACE}/localqueues/research"
        api.objects[path] = {"metadata": {"name": "research"}}
    backend = auto_backend(api, tmp_path)
    spec = submission("job", {"queue": "research"}).spec

    (check,) = [check for check in backend.checks(spec, "") if check.name == "queue"]
    assert (check.is_ok, check.found) == expected


def test_a_field_that_older_servers_may_drop_stops_no_submit(api: FakeApi, tmp_path: Path):
    """Kubernetes 1.29 and 1.30 have no success policy; the entries end their pods without it."""
    job = JobFixture(api, tmp_path, "job")
    api.dropped = ("successPolicy",)

    assert manifest_check(job) == [(True, "the cluster accepts the Job")]
    assert "successPolicy" in job.request.body["spec"]


# -- checks before sending ------------------------------------------------------------------------


def manifest_check(job: JobFixture) -> list[tuple[bool, str]]:
    """Return the checks of the job's manifest before it is sent."""
    client = job.backend._client(job.backend._cluster)
    return [(check.is_ok, check.found) for check in checks._manifest(client, job.request)]


def test_a_field_that_the_cluster_drops_is_found_before_anything_is_sent(
    api: FakeApi, tmp_path: Path
):
    job = JobFixture(api, tmp_path)
    api.dropped = ("terminationGracePeriodSeconds", "mountPath")

    ((is_ok, text),) = manifest_check(job)
    assert not is_ok
    template = "spec.tasks[0].template.spec"
    assert text == (
        f"the cluster does not know {template}.terminationGracePeriodSeconds, "
        f"{template}.containers[0].volumeMounts[0].mountPath, "
        f"{template}.containers[0].volumeMounts[1].mountPath, and 3 more"
    )
    assert api.objects == {}
    assert "fieldValidation=Strict" in api.requests_with("POST", "dryRun=All")[0]


def test_a_manifest_is_not_checked_by_a_cluster_without_dry_runs(api: FakeApi, tmp_path: Path):
    job = JobFixture(api, tmp_path)
    assert manifest_check(job) == [(True, "the cluster accepts the Job")]
    api.dry_run = (400, {"message": "admission webhook x does not support dry run"})
    assert manifest_check(job) == []
    api.dry_run = (422, {"message": "Job is invalid: spec.queue"})
    ((is_ok, text),) = manifest_check(job)
    assert (is_ok, text) == (False, f"validating the Job {job.name}: Job is invalid: spec.queue")


# -- orphans --------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["volcano", "ms-operator", "job"])
def test_what_a_killed_submit_has_left_is_removed(api: FakeApi, tmp_path: Path, engine: str):
    job = JobFixture(api, tmp_path, engine)
    handle = job.backend.handle(job.request)
    for item in requests.objects(job.request, b"key")[:-1]:
        resource = backends._RESOURCES[item["kind"]]
        api.objects[resource.path(NAMESPACE, item["metadata"]["name"])] = item
    kinds = {item["kind"] for item in api.objects.values()}
    assert kinds == {"ConfigMap", "Secret", *["Service"] * (engine in ("ms-operator", "job"))}

    with job.backend._submit_lock(job.request.job):
        assert job.backend.remove_orphans([handle]) == [], "the submit is still at work"
    assert job.backend.remove_orphans([handle]) == [job.request.job]
    assert api.objects == {}
    assert job.backend.remove_orphans([handle]) == []


def test_existing_jobs_and_their_objects_are_no_orphans(job: JobFixture):
    before = dict(job.api.objects)
    assert job.backend.remove_orphans([job.handle]) == []
    assert job.api.objects == before

    del job.api.objects[job.path]
    assert job.backend.remove_orphans([job.handle]) == [], "the cluster removes the rest"


# -- logging in -----------------------------------------------------------------------------------


def test_requests_impersonate_the_user_named_in_the_kubeconfig(api: FakeApi, tmp_path: Path):
    user = {
        "token": "t",
        "as": "ann",
        "as-uid": "7",
        "as-groups": ["lab", "gpu"],
        "as-user-extra": {"Scopes/x": ["a", "b"]},
    }
    JobFixture(api, tmp_path, **user).send()

    for headers in api.headers:
        assert [pair for pair in headers if pair[0].startswith(("Imp", "auth"))] == [
            ("authorization", "Bearer t"),
            ("Impersonate-User", "ann"),
            ("Impersonate-Uid", "7"),
            ("Impersonate-Group", "lab"),
            ("Impersonate-Group", "gpu"),
            ("Impersonate-Extra-scopes%2Fx", "a"),
            ("Impersonate-Extra-scopes%2Fx", "b"),
        ]


def exec_user(*argv: str) -> dict[str, Any]:
    """Return a kubeconfig user whose credentials come from a program."""
    version = "client.authentication.k8s.io/v1beta1"
    command, *args = argv
    run = {"apiVersion": version, "command": command, "args": args, "interactiveMode": "Never"}
    return {"exec": run}


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        (exec_user("sh", "-c", "echo please log in >&2; exit 3"), "returned 3. please log in"),
        (exec_user("/nowhere/plugin"), "No such file or directory: '/nowhere/plugin'"),
        (exec_user("echo", "{}"), "malformed response"),
        ({"token": "t", "as-groups": ["lab"]}, "the user has as-groups without `as`"),
    ],
    ids=["fails", "missing", "no answer", "groups alone"],
)
def test_a_failed_login_sends_no_request(
    api: FakeApi, tmp_path: Path, capfd: pytest.CaptureFixture[str], user: Any, expected: str
):
    with pytest.raises(NotAuthorised, match=re.escape(expected)) as caught:
        JobFixture(api, tmp_path, **user).send()

    assert api.seen == []
    assert "\n" not in caught.value.message
    assert capfd.readouterr().err == "", "the client library logs nothing of its own"


def test_a_context_with_an_unknown_user_is_refused(api: FakeApi, tmp_path: Path):
    job = JobFixture(api, tmp_path)
    config = next(tmp_path.glob("kubeconfig-*"))
    config.write_text(config.read_text().replace("user: test", "user: tset"))

    with pytest.raises(NotAuthorised, match="the user tset, which the kubeconfig lacks"):
        job.send()
    assert api.seen == []
