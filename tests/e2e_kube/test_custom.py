"""Custom resources on a recent API server: rules, defaults, lost versions, and jobs in a queue."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudjob.backends.kubernetes import kubeconfig, kueue
from cloudjob.backends.kubernetes.client import Client
from cloudjob.backends.kubernetes.engine import Resource
from cloudjob.backends.kubernetes.errors import ApiError
from cloudjob.backends.kubernetes.pod import JOB_LABEL
from cloudjob.backends.kubernetes.request import ENGINES
from tests.e2e_kube.conftest import Lab, bind, log_in, may_edit, new_lab
from tests.support.kube_cluster import MERGE, Cluster
from tests.support.kueue import GROUP, QUEUE_LABEL, Kueue, visibility
from tests.unit.cloudjob.backends.test_kubernetes_build import EVERYTHING, build

pytestmark = [pytest.mark.kubernetes, pytest.mark.kubernetes_custom]

CUSTOM = ("volcano", "mpi-operator", "jobset")


def add_queue(lab: Lab, name: str) -> None:
    """Create a LocalQueue."""
    path = f"/apis/{GROUP}/v1beta1/namespaces/{lab.namespace}/localqueues"
    kind = {"apiVersion": f"{GROUP}/v1beta1", "kind": "LocalQueue"}
    lab.cluster.ask("POST", path, {**kind, "metadata": {"name": name}, "spec": {}})


def client_of(lab: Lab) -> Client:
    """Return cloudjob's client for the namespace, as the user of the lab."""
    return Client(kubeconfig.find({}, lab.environ, lab.folder))


@pytest.mark.parametrize("engine", CUSTOM)
def test_a_dry_run_fills_in_defaults_and_keeps_nothing(
    request: pytest.FixtureRequest, tmp_path: Path, engine: str
):
    """The manifest passes strict decoding and the rules; the client reports a misspelt field."""
    lab = new_lab(request, tmp_path, engine)
    client, resource = client_of(lab), ENGINES[engine].resource
    body = dict(build(engine, EVERYTHING).body)
    body["metadata"] = {**body["metadata"], "namespace": lab.namespace}
    query = {"dryRun": "All", "fieldValidation": "Strict"}
    path = resource.path(lab.namespace)
    misspelt = {**body, "spec": {**body["spec"], "sechduler": "x"}}

    answer = client.post(path, body, "checking", query)
    with pytest.raises(ApiError, match=r'unknown field "spec\.sechduler"'):
        client.post(path, misspelt, "checking", query)

    assert answer["metadata"]["uid"]
    if engine == "jobset":
        assert [group["groupName"] for group in answer["spec"]["replicatedJobs"]] == ["default"]
    assert client.list(path, "listing")["items"] == []


def test_rules_of_a_resource_are_reported_in_one_line(jobset_lab: Lab):
    """The server evaluates them (CEL); a conflict, unlike them, is tried again."""
    lab = jobset_lab
    client, resource = client_of(lab), ENGINES["jobset"].resource
    body = dict(build("jobset").body)
    body["metadata"] = {**body["metadata"], "namespace": lab.namespace}
    created = client.create(resource, lab.namespace, body, JOB_LABEL)
    path = resource.path(lab.namespace, created["metadata"]["name"])

    with pytest.raises(ApiError, match=r"spec\.failurePolicy: Invalid value: Value is immutable$"):
        client.patch(path, {"spec": {"failurePolicy": {"maxRestarts": 7}}}, "changing it")
    suspended = client.patch(path, {"spec": {"suspend": True}}, "suspending it")
    again = client.create(resource, lab.namespace, body, JOB_LABEL)

    assert suspended["metadata"]["generation"] == 2
    assert again["metadata"]["uid"] == created["metadata"]["uid"], "after a lost answer"
    others = {**body, "metadata": {**body["metadata"], "labels": {JOB_LABEL: "other"}}}
    with pytest.raises(ApiError, match="already exists"):
        client.create(resource, lab.namespace, others, JOB_LABEL)


def test_lists_and_watches_outlive_a_forgotten_version(jobset_lab: Lab):
    """The server answers 410 for the next page of a list, and for a watch from an old version."""
    lab = jobset_lab
    client = client_of(lab)
    queues = Resource(GROUP, "v1beta2", "localqueues", "LocalQueue").path(lab.namespace)
    for number in range(3):
        add_queue(lab, f"q{number}")
    page = client.get(queues, "listing", {"limit": "1"})
    add_queue(lab, "q3")
    lab.cluster.compact()
    token = page["metadata"]["continue"]
    with pytest.raises(ApiError) as error:
        client.get(queues, "listing", {"limit": "1", "continue": token})
    pages = itertools.chain([page], itertools.repeat(None))

    class Interrupted(Client):
        """A client that gets its first page before the server forgets the version."""

        def get(self, path: str, doing: str, query: Any = None) -> dict[str, Any]:
            return next(pages) or super().get(path, doing, query)

    whole = Interrupted(client.cluster).list(queues, "listing")
    query = {"watch": "true", "resourceVersion": "1", "timeoutSeconds": "30"}
    with client.stream(queues, query, "watching") as pieces:
        event = json.loads(next(pieces))

    assert error.value.status == 410
    assert [item["metadata"]["name"] for item in whole["items"]] == ["q0", "q1", "q2", "q3"]
    assert (event["type"], event["object"]["code"]) == ("ERROR", 410)


@pytest.mark.parametrize(
    ("engine", "served"), [("jobset", "v1beta2"), ("mpi-operator", "v1beta2"), ("job", "v1beta1")]
)
def test_a_job_in_a_queue_is_preempted_admitted_again_and_cancelled(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    until: Callable[..., None],
    engine: str,
    served: str,
):
    """Preemption is no end of the job, and Kueue does not undo the cancel."""
    lab = new_lab(request, tmp_path, engine)
    if served == "v1beta1":
        lab.cluster.unserve(GROUP, "v1beta2")
    try:
        live_in_a_queue(lab, until)
    finally:
        if served == "v1beta1":
            lab.cluster.serve(GROUP, "v1beta2")
            lab.cluster.await_resources(GROUP, "v1beta2")


def may(lab: Lab, name: str, *rules: tuple[str, str, list[str]]) -> None:
    """Give the guest a role with these rules: a group, a resource, and verbs."""
    group = "rbac.authorization.k8s.io"
    keys = ("apiGroups", "resources", "verbs")
    items = [dict(zip(keys, ([rule[0]], [rule[1]], rule[2]), strict=True)) for rule in rules]
    role = {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": {"name": name}}
    path = f"/apis/{group}/v1/namespaces/{lab.namespace}/roles"
    lab.cluster.ask("POST", path, {**role, "rules": items})
    bind(lab, "Role", name, "guest")


def test_rights_to_kueue_decide_what_a_user_reads_of_a_queue_and_how_a_cancel_ends_the_job(
    job_lab: Lab, cluster: Cluster, until: Callable[..., None]
):
    """With ``edit`` alone, a job in a queue waits without a reason; nobody needs to be an admin."""
    lab = job_lab
    may_edit(lab, cluster, "guest")
    add_queue(lab, "research")
    lab.write(queue="research")
    may(lab, "submits", (GROUP, "localqueues", ["get"]))
    log_in(lab, cluster.guest)
    with visibility(cluster):
        jobs = [lab.submit("-n", "2") for _ in range(2)]
        queues = [Kueue(lab, job) for job in jobs]
        for queue in queues:
            queue.wait("WaitingForQuota", "4 more needed")
        for job in jobs:
            lab.phase(job, "Suspended")
        without = lab.status(jobs[1])
        may(lab, "reads", (GROUP, "workloads", ["get", "list"]))
        reason = lab.status(jobs[1])
        seen = (f"visibility.{GROUP}", "localqueues/pendingworkloads", ["get"])
        may(lab, "sees", seen)
        positions = [lab.status(job)["wait"]["message"] for job in jobs]
    cancelling = lab.start("cancel", jobs[1])
    until(lambda: lab.get(lab.path(jobs[1]))["metadata"].get("deletionTimestamp"), "its deletion")
    # As the garbage collector does when the pods have gone.
    free = {"metadata": {"finalizers": None}}
    lab.cluster.ask("PATCH", lab.path(jobs[1]), free, kind=MERGE)
    done = lab.end(cancelling)

    assert "a queue or a user may resume it" in str(without["wait"]), without
    assert reason["wait"]["message"] == "queue research: WaitingForQuota: 4 more needed"
    # Both may be of the same second.
    assert sorted(positions) == [
        f"queue research: position {number}; WaitingForQuota: 4 more needed" for number in (1, 2)
    ]
    assert done.code == 0, done
    assert queues[1].workload["spec"]["active"] is True
    assert lab.status(jobs[1])["state"] == "CANCELLED"


def live_in_a_queue(lab: Lab, until: Callable[..., None]) -> None:
    """Submit a job to a queue, and follow it through what Kueue may do."""
    add_queue(lab, "research")
    if lab.engine == "mpi-operator":
        lab.write(labels={QUEUE_LABEL: "research"})
    else:
        lab.write(queue="research")
    job = lab.submit("-n", "2")
    queue = Kueue(lab, job)
    queue.wait("WaitingForQuota", "4 more needed")
    waiting = lab.status(job)
    queue.admit()
    pods = run(lab, job)
    running = lab.status(job)
    queue.evict("Preempted", "to accommodate another")
    suspend(lab, job, pods)
    preempted = lab.status(job)
    queue.admit()
    pods = run(lab, job, again=True)
    again = lab.status(job)
    cancelling = lab.start("cancel", job)
    until(lambda: queue.workload["spec"]["active"] is False, "a Workload that is not active")
    queue.reconcile()
    suspend(lab, job, pods)
    done = lab.end(cancelling)
    queue.reconcile()

    assert done.code == 0, done
    assert "queue research: WaitingForQuota: 4 more needed" in str(waiting["wait"]), waiting
    assert "Preempted: to accommodate another" in str(preempted["wait"]), preempted
    states = [status["state"] for status in (waiting, running, preempted, again, lab.status(job))]
    assert states == ["PENDING", "RUNNING", "PENDING", "RUNNING", "CANCELLED"]
    assert queue.is_suspended
    assert kueue.queued_of(queue.workload).why.startswith("Deactivated"), queue.workload
    assert lab.run("rm", job).code == 0
    assert lab.get(lab.path(job)) is None


def run(lab: Lab, job: str, *, again: bool = False) -> list[str]:
    """Start the pods of an admitted job, and return their names."""
    pods = lab.operate(job, again=again)
    lab.begin(*pods)
    lab.phase(job, "Running")
    return pods


def suspend(lab: Lab, job: str, pods: list[str]) -> None:
    """Delete the pods of a suspended job."""
    for pod in pods:
        lab.log(pod).end()
        lab.delete(pod)
    lab.phase(job, "Suspended")
