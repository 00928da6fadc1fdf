"""Why Kueue has not admitted a job, and jobs that it will never admit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudjob.backends.kubernetes import kueue
from cloudjob.backends.native import Waiting
from cloudjob.errors import BackendError
from cloudjob.model.status import JobState, WaitPhase
from tests.support.fake_kube_api import NAMESPACE, FakeApi
from tests.unit.cloudjob.backends.test_kubernetes_backend import JobFixture

GROUP = "/apis/kueue.x-k8s.io"
WORKLOADS = f"{GROUP}/v1beta2/namespaces/{NAMESPACE}/workloads"
NO_QUOTA = "insufficient unused quota for cpu in flavor default, 4 more needed"
TOO_MUCH = "insufficient quota for cpu in flavor default, request > maximum capacity (64 > 16)"


def condition(kind: str, status: str, reason: str, message: str = "") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def workload(*conditions: dict[str, str], active: bool = True, uid: str = "") -> dict[str, Any]:
    return {
        "metadata": {"name": "w", "namespace": NAMESPACE, "ownerReferences": [{"uid": uid}]},
        "spec": {"active": active, "queueName": "research"},
        "status": {"conditions": list(conditions)},
    }


@pytest.mark.parametrize(
    ("conditions", "why", "is_hopeless"),
    [
        ([], "", False),
        ([condition("QuotaReserved", "False", "PendingEvaluation", "waits")], "", False),
        (
            [condition("QuotaReserved", "False", "WaitingForQuota", NO_QUOTA)],
            f"WaitingForQuota: {NO_QUOTA}",
            False,
        ),
        (
            [condition("QuotaReserved", "False", "Pending", NO_QUOTA)],
            f"Pending: {NO_QUOTA}",
            False,
        ),
        (
            [condition("QuotaReserved", "False", "ExceedsMaxQuota", TOO_MUCH)],
            f"ExceedsMaxQuota: {TOO_MUCH}",
            True,
        ),
        (
            [condition("QuotaReserved", "False", "Misconfigured", "LocalQueue x doesn't exist")],
            "Misconfigured: LocalQueue x doesn't exist",
            True,
        ),
        (
            [
                condition("QuotaReserved", "True", "QuotaReserved"),
                condition("Admitted", "False", "UnsatisfiedAdmissionChecks", "waits for a node"),
            ],
            "UnsatisfiedAdmissionChecks: waits for a node",
            False,
        ),
        (
            # The order of conditions means nothing.
            [
                condition("QuotaReserved", "False", "WaitingForQuota", NO_QUOTA),
                condition("PodsReady", "False", "PodsReady"),
                condition("Evicted", "True", "Preempted", "to accommodate workload b"),
                condition("Requeued", "True", "Preempted"),
            ],
            f"Preempted: to accommodate workload b; WaitingForQuota: {NO_QUOTA}",
            False,
        ),
        (
            [condition("Evicted", "False", "QuotaReserved"), condition("Admitted", "True", "x")],
            "",
            False,
        ),
        ([{"type": "QuotaReserved"}, {}], "", False),
    ],
)
def test_the_reason_of_a_workload(
    conditions: list[dict[str, str]], why: str, is_hopeless: bool
) -> None:
    queued = kueue.queued_of(workload(*conditions))
    assert (queued.queue, queued.why, queued.is_hopeless) == ("research", why, is_hopeless)


def test_a_workload_without_status_waits_for_an_unknown_reason() -> None:
    assert kueue.queued_of({"metadata": {}}) == kueue.Queued("", "")


def test_a_deactivated_workload_waits_for_ever() -> None:
    queued = kueue.queued_of(workload(active=False))
    assert queued.why == "Deactivated: it was stopped for good"


# -- on an API server -----------------------------------------------------------------------------


@pytest.fixture
def api() -> Iterator[FakeApi]:
    fake = FakeApi()
    fake.objects[GROUP] = {"versions": [{"version": "v1beta2"}]}
    yield fake
    fake.close()


@pytest.fixture(params=["mpi-operator", "job"])
def job(request: pytest.FixtureRequest, api: FakeApi, tmp_path: Path) -> JobFixture:
    """A job that was not sent yet, once with each engine whose jobs Kueue manages."""
    fixture = JobFixture(api, tmp_path, request.param)
    fixture.request.body["metadata"].setdefault("labels", {})["kueue.x-k8s.io/queue-name"] = (
        "research"
    )
    return fixture


def manage(job: JobFixture, *conditions: dict[str, str]) -> None:
    """Make a Workload for the job as soon as it exists, as Kueue does."""

    def reconcile(path: str, body: dict[str, Any]) -> None:
        if path == job.path:
            uid = job.api.objects[job.path]["metadata"]["uid"]
            job.api.objects[f"{WORKLOADS}/w"] = workload(*conditions, uid=uid)

    job.api.on_change = reconcile


def suspended(job: JobFixture) -> None:
    """Leave the job as it is before Kueue admits it: suspended, and without pods."""
    job.api.objects[job.path]["status"] = {
        "conditions": [{"type": "Suspended", "status": "True", "reason": "JobSuspended"}]
    }


def test_status_says_why_a_job_waits_in_its_queue(job: JobFixture) -> None:
    manage(job, condition("QuotaReserved", "False", "WaitingForQuota", NO_QUOTA))
    job.handle = job.backend.send(job.request)
    suspended(job)

    status = job.backend.status(job.handle)

    assert status.state is JobState.PENDING
    assert status.native == f"Suspended (queue research: WaitingForQuota: {NO_QUOTA})"
    assert isinstance(status, Waiting)
    assert status.wait is not None
    assert (status.wait.phase, f"Suspended ({status.wait.message})") == (
        WaitPhase.QUEUE,
        status.native,
    )


def test_status_says_the_position_in_the_queue_where_the_cluster_tells_it(job: JobFixture) -> None:
    manage(job, condition("QuotaReserved", "False", "WaitingForQuota", NO_QUOTA))
    job.handle = job.backend.send(job.request)
    suspended(job)
    root = "/apis/visibility.kueue.x-k8s.io"
    job.api.objects[root] = {"preferredVersion": {"version": "v1beta2"}}
    path = f"{root}/v1beta2/namespaces/{NAMESPACE}/localqueues/research/pendingworkloads"
    job.api.objects[path] = {
        "items": [
            {"metadata": {"name": "other"}, "positionInLocalQueue": 0},
            {"metadata": {"name": "w"}, "positionInLocalQueue": 1},
        ]
    }

    assert job.native.startswith("Suspended (queue research: position 2; WaitingForQuota: ")


def test_a_preempted_job_is_pending_again_and_says_so(job: JobFixture) -> None:
    manage(job, condition("Admitted", "True", "Admitted"))
    job.send()
    job.mark_running(0, 1)
    job.set_phase("Running")
    assert job.backend.status(job.handle).state is JobState.RUNNING

    for pod in job.pods:
        job.mark_finished(job.pods.index(pod), 143)
        del job.api.objects[f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}"]
    suspended(job)
    job.api.objects[f"{WORKLOADS}/w"]["status"]["conditions"] = [
        condition("QuotaReserved", "False", "WaitingForQuota", NO_QUOTA),
        condition("Evicted", "True", "Preempted", "Preempted to accommodate a workload"),
    ]

    status = job.backend.status(job.handle)

    assert status.state is JobState.PENDING
    assert "Preempted: Preempted to accommodate a workload; WaitingForQuota" in status.native


@pytest.mark.parametrize("reason", ["ExceedsMaxQuota", "Misconfigured"])
def test_a_job_that_would_wait_for_ever_is_refused_and_leaves_nothing(
    job: JobFixture, reason: str
) -> None:
    manage(job, condition("QuotaReserved", "False", reason, TOO_MUCH))
    before = set(job.api.objects)

    with pytest.raises(BackendError) as refusal:
        job.backend.send(job.request)

    assert f"it would wait for ever: {reason}: {TOO_MUCH}" in refusal.value.message
    assert refusal.value.hint.startswith("request fewer nodes")
    assert set(job.api.objects) - before <= {f"{WORKLOADS}/w"}


@pytest.mark.parametrize(
    "forbidden", [set(), {("GET", "/workloads")}], ids=["Kueue is slow", "may not read"]
)
def test_a_job_that_kueue_has_not_judged_is_submitted(
    job: JobFixture, forbidden: set[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kueue, "_JUDGE_S", 0.5)
    manage(job)
    job.api.forbidden = forbidden

    job.handle = job.backend.send(job.request)
    suspended(job)

    assert job.backend.status(job.handle).state is JobState.PENDING
    assert job.path in job.api.objects
