"""The command line against a real API server."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cloudjob.backends.kubernetes import request as requests
from cloudjob.backends.kubernetes.request import ENGINES
from cloudjob.store import certificates
from jobentry.contract import variables
from tests.e2e_kube.conftest import PLURALS, RESOURCES, Lab, bind, cluster_of, log_in, may_edit
from tests.support import kubelet, operators
from tests.support.kube_cluster import MERGE, ROOT, Cluster
from tests.support.servers import ACCESS_KEY, SECRET_KEY, Server
from tests.unit.cloudjob.backends.test_kubernetes_build import EVERYTHING, build, strict

pytestmark = pytest.mark.kubernetes

# The phase that an operator reports for a cancelled job.
CANCELLED_PHASES = {
    "volcano": "Aborted",
    "mpi-operator": "Suspended",
    "ms-operator": "Failed",
    "job": "Suspended",
}


def missing(sent: Any, returned: Any, where: str = "") -> list[str]:
    """Return the sent fields that the server did not return."""
    if isinstance(sent, dict) and isinstance(returned, dict):
        return [
            problem
            for key, value in sent.items()
            # Empty values may be dropped, and stringData comes back as data.
            for problem in (
                missing(value, returned[key], f"{where}.{key}")
                if key in returned
                else [f"{where}.{key} is gone"]
                * (value not in ({}, [], "") and key != "stringData")
            )
        ]
    if isinstance(sent, list) and isinstance(returned, list):
        if len(sent) != len(returned):
            return [f"{where}: {len(sent)} items were sent, {len(returned)} came back"]
        pairs = enumerate(zip(sent, returned, strict=True))
        return [problem for i, (a, b) in pairs for problem in missing(a, b, f"{where}[{i}]")]
    return [] if sent == returned else [f"{where}: {sent!r} became {returned!r}"]


def path_of(item: dict[str, Any]) -> str:
    """Return the path of the objects of a kind, without their namespace."""
    engine = {engine.resource.api_version: name for name, engine in ENGINES.items()}.get(
        item["apiVersion"], ""
    )
    return RESOURCES[engine] if engine else f"/api/v1/namespaces/{{}}/{PLURALS[item['kind']]}"


def applied(cluster: Cluster, namespace: str, item: dict[str, Any]) -> dict[str, Any]:
    """Create an object and return it as the server stored it; a recent one refuses other fields."""
    path = path_of(item)
    sent = {**item, "metadata": {**item["metadata"], "namespace": namespace}}
    cluster.ask("POST", path.format(namespace) + "?fieldValidation=Strict", sent)
    kept: dict[str, Any] = cluster.ask(
        "GET", f"{path.format(namespace)}/{item['metadata']['name']}"
    )
    return kept


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("nodes", [1, 3])
def test_the_api_server_keeps_every_field_that_is_applied(
    request: pytest.FixtureRequest, engine: str, options: dict[str, Any], nodes: int
):
    """No field of a manifest, or of the pods that the operator creates from it, is dropped."""
    cluster = cluster_of(request, engine)
    namespace = cluster.namespace()
    job_request = build(engine, options, nodes=nodes)
    our_objects = requests.objects(job_request, b"key" * job_request.has_key)
    body = copy.deepcopy(dict(job_request.body))
    body["metadata"]["namespace"] = namespace
    from_operator = operators.made_of(body)
    pods = [without_owner(item) for item in from_operator.pods]
    problems = [
        problem
        for item in [*our_objects, *from_operator.objects, *pods]
        for problem in missing(
            {k: v for k, v in item.items() if k != "metadata"}, applied(cluster, namespace, item)
        )
    ]

    assert problems == []


def without_owner(pod: dict[str, Any]) -> dict[str, Any]:
    """Return a pod without the reference to its owner, which does not exist."""
    bare = copy.deepcopy(pod)
    bare["metadata"].pop("ownerReferences")
    return bare


@pytest.fixture(scope="module")
def openapi(cluster: Cluster) -> dict[str, Any]:
    """Return the server's own schemas, changed so that they reject unknown fields."""
    definitions = strict(cluster.ask("GET", "/openapi/v2")["definitions"])
    for definition in definitions.values():
        if definition.get("format") == "int-or-string":
            definition["type"] = ["integer", "string"]
    return definitions


def schema_errors(openapi: dict[str, Any], item: dict[str, Any]) -> list[str]:
    """Return the errors that the server's own schema finds in a core object."""
    schema = {
        "$ref": f"#/definitions/io.k8s.api.core.v1.{item['kind']}",
        "definitions": openapi,
    }
    errors = jsonschema.Draft202012Validator(schema).iter_errors(item)
    return [f"{'/'.join(map(str, error.path))}: {error.message}" for error in errors]


@pytest.mark.parametrize("engine", ENGINES)
def test_kubernetes_itself_knows_every_field(engine: str, openapi: dict[str, Any]):
    """Core objects are validated strictly, even pod fields that no CRD of an operator checks."""
    job_request = build(engine, EVERYTHING)
    items = [
        *requests.objects(job_request, b"")[:-1],
        *operators.made_of(dict(job_request.body)).pods,
    ]

    kinds = {"ConfigMap", "Secret", "Pod", *["Service"] * (engine in ("ms-operator", "job"))}
    assert {item["kind"] for item in items} == kinds
    assert [problem for item in items for problem in schema_errors(openapi, item)] == []


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ({"hostNetwrk": True}, "hostNetwrk"),
        ({"tolerations": [{"key": "a", "efect": "NoSchedule"}]}, "efect"),
        ({"terminationGracePeriodSeconds": "soon"}, "'soon' is not of type"),
    ],
)
def test_fields_that_kubernetes_does_not_know_are_found(
    openapi: dict[str, Any], patch: dict[str, Any], message: str
):
    """Mistakes that a user can make in ``kubernetes.pod``."""
    job_request = build("volcano", {"pod": {"spec": patch}})
    (pod, *_) = operators.made_of(dict(job_request.body)).pods

    assert any(message in problem for problem in schema_errors(openapi, pod))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_field_that_the_server_drops_is_found(request: pytest.FixtureRequest, engine: str):
    """Check the comparison itself, with a pod field that no version of Kubernetes has.

    A recent server refuses the field, and the old one drops it.
    """
    cluster = cluster_of(request, engine)
    job_request = build(engine, {"pod": {"spec": {"hostNetwrk": True}}})
    body = dict(job_request.body)

    if engine != "ms-operator":
        with pytest.raises(urllib.error.HTTPError, match="400"):
            applied(cluster, cluster.namespace(), body)
        return
    problems = missing(body["spec"], applied(cluster, cluster.namespace(), body)["spec"])

    assert problems
    assert all(problem.endswith("hostNetwrk is gone") for problem in problems)


def test_the_cluster_accepts_what_a_dry_run_prints(operator_lab: Lab):
    """An apply on the server accepts all documents, and each one can be created.

    Without ``--server-side``, kubectl copies the document into an annotation, for which the entry
    is too large.
    """
    lab = operator_lab
    lab.write(
        **{
            key: value
            for key, value in EVERYTHING.items()
            if key not in ("volumes", "image_pull_secrets")
        }
    )
    done = lab.run("submit", "--config", "job.yaml", "-n", "2", "--show-request", "train.py")
    assert done.code == 0, done
    documents = list(yaml.safe_load_all(done.out))
    # As `kubectl apply --server-side --dry-run=server` does; the kubectl of the old API server asks
    # for descriptions of resources that the recent one no longer has.
    for item in documents:
        path = f"{path_of(item).format(lab.namespace)}/{item['metadata']['name']}"
        query = "?dryRun=All&fieldManager=kubectl"
        lab.cluster.ask("PATCH", path + query, item, kind="application/apply-patch+yaml")

    for item in documents:
        assert (
            missing(item["metadata"], applied(lab.cluster, lab.namespace, item)["metadata"]) == []
        )
    assert documents[0]["kind"] == "ConfigMap"


def test_the_engine_defaults_to_one_that_the_cluster_has(lab: Lab):
    """``auto`` takes the first known operator in the cluster; this cluster has all of them."""
    lab.write(engine="auto")
    done = lab.run("submit", "--config", "job.yaml", "--show-request", "train.py")

    launcher = "dynamic-cluster" if lab.engine == "ms-operator" else "mpirun"
    assert "apiVersion: batch.volcano.sh/v1alpha1\nkind: Job\n" in done.out, (launcher, done)
    assert "kubernetes.engine auto: volcano, the Job of batch.volcano.sh in test" in done.err, done


# -- a job's life ---------------------------------------------------------------------------------


def test_a_job_is_followed_from_submission_to_end_and_removed(lab: Lab, until: Callable[..., None]):
    """The job is pending, running and ended; the log of each node arrives; `rm` leaves nothing."""
    job = lab.submit("-n", "2")
    assert lab.status(job)["state"] == "PENDING"
    pods = lab.operate(job)
    lab.begin(*pods)
    lab.phase(job, "Running")
    assert lab.status(job)["state"] == "RUNNING"
    following = lab.start("logs", job, "-f")
    for index, pod in enumerate(pods):
        lab.log(pod).write(b"[%d] one" % index, b"[%d] two" % index)
    for pod in pods:
        lab.finish(pod)
    lab.phase(job, "Completed" if lab.engine == "volcano" else "Succeeded")

    followed = lab.end(following)
    status = lab.status(job)
    assert sorted(followed.out.split("\n")[:-1]) == ["[0] one", "[0] two", "[1] one", "[1] two"]
    assert followed.code == 0, followed
    assert status["state"] == "SUCCEEDED"
    assert status["exit_code"] == 0
    assert status["started_at"] <= status["ended_at"]
    assert lab.run("logs", job, "--node", "1").out == "[1] one\n[1] two\n"
    assert lab.run("rm", job).code == 0
    assert lab.get(lab.path(job)) is None
    assert objects_of(lab, job) == []


def objects_of(lab: Lab, job: str) -> list[str]:
    """Return the names of the ConfigMaps and Secrets that are left of a job."""
    return [
        item["metadata"]["name"]
        for kind in ("ConfigMap", "Secret")
        for item in lab.get(lab.core(kind))["items"]
        if item["metadata"]["name"].startswith(job)
        and "-svc" not in item["metadata"]["name"]
        # Without a garbage collector, the operator's own objects stay.
        and not item["metadata"]["name"].endswith(("-config", "-ssh"))
    ]


def test_the_objects_of_a_job_are_owned_by_it(lab: Lab):
    job = lab.submit("-n", "2", "-e", "A=b")
    uid = lab.get(lab.path(job))["metadata"]["uid"]

    expected = {
        "volcano": [("ConfigMap", "entry"), ("Secret", "delivery")],
        "mpi-operator": [("ConfigMap", "entry")],
        "ms-operator": [("ConfigMap", "entry"), ("Secret", "delivery"), ("Service", "worker-0")],
        "job": [("ConfigMap", "entry"), ("Secret", "delivery"), ("Service", "")],
    }
    for kind, name in expected[lab.engine]:
        owners = lab.get(lab.core(kind, f"{job}-{name}".rstrip("-")))["metadata"]["ownerReferences"]
        assert [owner["uid"] for owner in owners] == [uid]


def test_a_job_that_cannot_run_is_reported_with_the_reason(volcano_lab: Lab):
    """The reason comes from the scheduler or the kubelet."""
    lab = volcano_lab
    job = lab.submit("-n", "2")
    pods = lab.operate(job)
    lab.phase(job, "Pending")
    reason = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    reason["message"] = "0/4 nodes are available"
    lab.pod_status(pods[1], {"conditions": [reason]})
    assert lab.status(job)["native_state"] == (
        "Pending (node 1: Unschedulable: 0/4 nodes are available)"
    )

    waiting = {"waiting": {"reason": "ErrImagePull", "message": "not found"}}
    state = {"name": "cloudjob", "image": "x", "imageID": "", "restartCount": 0, "ready": False}
    lab.pod_status(pods[0], {"containerStatuses": [{**state, "state": waiting}]})
    assert "node 0: ErrImagePull: not found, and 1 more" in lab.status(job)["native_state"]


def test_a_job_whose_image_is_missing_is_ended_by_whoever_sees_it(
    lab: Lab, until: Callable[..., None]
):
    job = lab.submit("-n", "2", "--start-timeout-min", "0.05")
    pods = lab.operate(job)
    lab.phase(job, "Pending" if lab.engine == "volcano" else "Created")
    container = "mindspore" if lab.engine == "ms-operator" else "cloudjob"
    state = {"name": container, "image": "x", "imageID": "", "restartCount": 0, "ready": False}
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "manifest unknown"}}
    lab.pod_status(pods[1], {"containerStatuses": [{**state, "state": waiting}]})
    until(lambda: lab.status(job)["state"] == "FAILED", "end of the job")

    status = lab.status(job)
    assert (status["cause"], status["exit_code"]) == ("platform", 1)
    text = "it cannot start: node 1: ErrImagePull: manifest unknown; check the job's image"
    assert status["failure"]["message"].startswith(text)
    assert stopped(lab, job)
    (listed,) = json.loads(lab.run("list", "--json").out)
    assert listed["state"] == "FAILED"


def test_a_list_shows_the_same_status_as_status(lab: Lab):
    jobs = [lab.submit("-n", "2") for _ in range(3)]
    for job in jobs[:2]:
        lab.operate(job)
    lab.phase(jobs[0], "Running")
    lab.cluster.ask("DELETE", lab.path(jobs[2]), {"propagationPolicy": "Background"})

    listed = json.loads(lab.run("list", "--json").out)

    states = [item["state"] for item in listed]
    statuses = [lab.status(job) for job in reversed(jobs)]
    # These take longer to find, so a list has none of them.
    without_phases = [{**status, "phases": []} for status in statuses]
    assert [status.pop("git_commit") for status in without_phases] == [""] * 3
    assert listed == without_phases
    assert states == ["UNKNOWN", "PENDING", "RUNNING"]


def test_a_waiting_submit_reports_why_the_job_waits(volcano_lab: Lab, until: Callable[..., None]):
    lab = volcano_lab
    submitting = lab.start("submit", "--config", "job.yaml", "train.py")
    until(lambda: lab.get(lab.path())["items"], "job")
    job = lab.get(lab.path())["items"][0]["metadata"]["name"]
    (pod,) = lab.operate(job)
    lab.phase(job, "Pending")
    reason = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    lab.pod_status(pod, {"conditions": [{**reason, "message": "no room"}]})
    assert submitting.stderr is not None
    line = ""
    while "Unschedulable" not in line:
        line = submitting.stderr.readline()
        assert line, "it has ended without output"
    assert f"job {job} waits: node 0: Unschedulable: no room" in line
    lab.begin(pod)
    lab.finish(pod)
    lab.phase(job, "Completed")
    assert lab.end(submitting).code == 0


def test_a_queue_that_is_full_is_named(lab: Lab):
    """Volcano reports it in the job's pod group, which each operator names differently."""
    job = lab.submit("-n", "2")
    uid = lab.get(lab.path(job))["metadata"]["uid"]
    group = {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "PodGroup",
        "metadata": {"name": f"{job}-{uid}" if lab.engine == "volcano" else job},
        "spec": {"minMember": 2},
    }
    condition = {"reason": "NotEnoughResources", "message": "2/2 tasks in gang unschedulable"}
    group["status"] = {"conditions": [{"type": "Unschedulable", "status": "True", **condition}]}
    path = f"/apis/scheduling.volcano.sh/v1beta1/namespaces/{lab.namespace}/podgroups"
    lab.cluster.ask("POST", path, group)
    lab.phase(job, "Pending" if lab.engine == "volcano" else "Created")

    native_state = lab.status(job)["native_state"]
    assert native_state.endswith("(NotEnoughResources: 2/2 tasks in gang unschedulable)"), (
        native_state
    )


def test_a_quota_that_blocks_the_job_is_named(volcano_lab: Lab):
    """There is no pod that could have the reason, but an event of the controller has it."""
    lab = volcano_lab
    job = lab.submit("-n", "2")
    lab.phase(job, "Pending")
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{job}.1", "namespace": lab.namespace},
        "involvedObject": {"kind": "Job", "name": job, "namespace": lab.namespace},
        "type": "Warning",
        "reason": "FailedCreate",
        "message": "pods is forbidden: exceeded quota: gpus",
        "lastTimestamp": "2026-11-21T10:00:00Z",
    }
    lab.cluster.ask("POST", f"/api/v1/namespaces/{lab.namespace}/events", event)

    assert lab.status(job)["native_state"] == (
        "Pending (FailedCreate: pods is forbidden: exceeded quota: gpus)"
    )
    events = lab.run("events", job)
    assert "FailedCreate: pods is forbidden: exceeded quota: gpus" in events.out, events


def test_a_node_that_ran_out_of_memory_is_named_by_status(lab: Lab):
    job = lab.submit("-n", "2")
    pods = lab.operate(job)
    lab.begin(*pods)
    lab.finish(pods[1], 137, "OOMKilled")
    lab.finish(pods[0], 1)
    lab.phase(job, "Failed")

    status = lab.status(job)
    assert status["state"] == "FAILED"
    assert f"out of memory: node 1 ({pods[1]})" in status["failure"]["message"]
    assert status["cause"] == "platform"


def test_an_evicted_node_is_reported_with_the_message_of_the_kubelet(lab: Lab):
    """The cause is the platform, not the script."""
    job = lab.submit("-n", "2")
    pods = lab.operate(job)
    lab.begin(*pods)
    lab.finish(pods[0], 1)
    eviction = {"reason": "Evicted", "message": "The node was low on resource: memory."}
    lab.pod_status(pods[1], {"phase": "Failed", **eviction})
    lab.phase(job, "Aborted" if lab.engine == "volcano" else "Failed")

    status = lab.status(job)
    assert (status["state"], status["cause"]) == ("FAILED", "platform"), status
    message = f"node 1 ({pods[1]}): Evicted: The node was low on resource: memory; "
    assert message in status["failure"]["message"], status


def test_a_submit_refused_by_a_quota_leaves_nothing(mindspore_lab: Lab):
    """The error has the server's message and a hint, and no object of the job remains."""
    lab = mindspore_lab
    path = f"/api/v1/namespaces/{lab.namespace}/resourcequotas"
    limits = {"count/msjobs.mindspore.gitee.com": "0"}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}}
    lab.cluster.ask("POST", path, {**quota, "spec": {"hard": limits}})
    # Set the counts, as the quota controller would.
    used = {"status": {"hard": limits, "used": limits}}
    lab.cluster.ask("PATCH", f"{path}/none/status", used, kind=MERGE)
    done = lab.run("submit", "--config", "job.yaml", "-n", "2", "train.py")

    assert done.code == 5, done
    assert "exceeded quota: none" in done.err
    assert "kubectl describe quota" in done.err
    assert lab.get(lab.path())["items"] == []
    for kind in ("ConfigMap", "Secret"):
        assert lab.get(lab.core(kind))["items"] == []
    assert lab.run("list", "--json").out.strip() == "[]"


def test_a_job_that_the_cluster_has_deleted_after_its_time_is_still_known(lab: Lab):
    """``keep_min`` sets the operator's TTL; state and logs that were shown once are kept."""
    lab.write(keep_min=1)
    job = lab.submit("-n", "2")
    manifest = lab.get(lab.path(job))["spec"]
    assert manifest.get("runPolicy", manifest)["ttlSecondsAfterFinished"] == 60
    pods = lab.operate(job)
    lab.begin(*pods)
    lab.log(pods[0]).write(b"[0] one")
    for pod in pods:
        lab.finish(pod)
    lab.phase(job, "Completed" if lab.engine == "volcano" else "Succeeded")
    assert lab.status(job)["state"] == "SUCCEEDED"
    assert lab.run("logs", job).out == "[0] one\n"
    lab.cluster.ask("DELETE", lab.path(job), {"propagationPolicy": "Background"})
    for pod in pods:
        lab.delete(pod)

    assert lab.status(job)["state"] == "SUCCEEDED"
    assert lab.run("logs", job).out == "[0] one\n"
    assert lab.run("rm", job).code == 0


# -- cancelling and removing ----------------------------------------------------------------------


def stopped(lab: Lab, job: str) -> bool:
    """Whether the operator was asked to stop the pods of a job."""
    if lab.engine == "volcano":
        path = f"/apis/bus.volcano.sh/v1alpha1/namespaces/{lab.namespace}/commands"
        return bool(lab.get(path)["items"])
    spec = lab.get(lab.path(job))["spec"]
    policy = spec if lab.engine == "job" else spec["runPolicy"]
    return bool(policy.get("suspend") or policy.get("activeDeadlineSeconds") == 0)


def test_cancelling_asks_the_operator(lab: Lab, until: Callable[..., None]):
    """Volcano gets a command, the others a field of the job; the log is saved locally."""
    job = lab.submit("-n", "2")
    pods = lab.operate(job)
    lab.begin(*pods)
    lab.phase(job, "Running")
    log = lab.log(pods[0])
    log.write(b"[0] before the end")
    cancelling = lab.start("cancel", job)
    until(lambda: stopped(lab, job), "request to stop the job")
    manifest = lab.get(lab.path(job))
    assert "cloudjob.cancelled" in manifest["metadata"]["annotations"]
    if lab.engine == "volcano":
        path = f"/apis/bus.volcano.sh/v1alpha1/namespaces/{lab.namespace}/commands"
        (command,) = lab.get(path)["items"]
        assert command["action"] == "AbortJob"
        assert command["target"]["uid"] == manifest["metadata"]["uid"]
    elif lab.engine == "mpi-operator":
        assert manifest["spec"]["runPolicy"]["suspend"] is True
    elif lab.engine == "job":
        assert manifest["spec"]["suspend"] is True
    else:
        assert manifest["spec"]["runPolicy"]["cleanPodPolicy"] == "Running"
    requests = lab.cluster.kubelet.requests
    until(lambda: any(pods[0] in path and "follow=true" in path for path in requests), "a stream")
    log.write(b"[0] in its grace")
    for pod in pods:
        lab.log(pod).end()
        lab.delete(pod)
    lab.phase(job, CANCELLED_PHASES[lab.engine])
    done = lab.end(cancelling)
    assert done.code == 0, done
    status = lab.status(job)
    assert status["state"] == "CANCELLED"
    assert status["cause"] == "cancelled"
    assert lab.run("logs", job).out == "[0] before the end\n[0] in its grace\n"
    assert lab.run("cancel", job).code == 0


def test_the_log_of_a_deleted_pod_is_read_from_the_saved_copy(
    volcano_lab: Lab, until: Callable[..., None]
):
    lab = volcano_lab
    job = lab.submit("-n", "1")
    (pod,) = lab.operate(job)
    lab.begin(pod)
    lab.phase(job, "Running")
    following = lab.start("logs", job, "-f")
    lab.log(pod).write(b"[0] first")
    requests = lab.cluster.kubelet.requests
    until(lambda: any(pod in path and "follow=true" in path for path in requests), "a stream")
    lab.log(pod).end()
    lab.delete(pod)
    lab.cluster.kubelet.forget(lab.namespace, pod)
    manifest = lab.get(lab.path(job))
    (again,) = operators.made_of(manifest, manifest["metadata"]["uid"]).pods
    del again["spec"]["schedulerName"]
    until(lambda: lab.get(lab.core("Pod", pod)) is None, "end of the pod")
    lab.cluster.ask("POST", lab.core("Pod"), again)
    lab.log(pod).write(b"[0] second")
    lab.begin(pod)
    lab.finish(pod)
    lab.phase(job, "Completed")

    assert lab.end(following).out == "[0] first\n[0] second\n"
    assert lab.run("logs", job).out == "[0] first\n[0] second\n"


def test_the_cluster_itself_deletes_what_belongs_to_a_job(
    cluster: Cluster, volcano_lab: Lab, until: Callable[..., None]
):
    lab = volcano_lab
    cluster.controllers("garbagecollector")
    job = lab.submit("-n", "2")
    lab.operate(job)
    lab.cluster.ask("DELETE", lab.path(job), {"propagationPolicy": "Background"})

    until(lambda: objects_of(lab, job) == [], "end of ConfigMap and Secret")
    until(lambda: lab.get(lab.core("Pod"))["items"] == [], "end of the pods")
    status = lab.status(job)
    assert status["state"] == "UNKNOWN", json.dumps(status)


def test_pods_with_signed_addresses_need_no_keys_of_the_store(
    volcano_lab: Lab,
    seaweedfs: Server,
    new_bucket: Callable[[Server], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    lab = volcano_lab
    lab.write(presigned_h=1, volumes=[])
    lab.environ |= {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_ENDPOINT_URL": seaweedfs.endpoint,
        "AWS_REGION": "cn-north-4",
    }
    # Nodes would also get the authorities that this machine trusts.
    for name in certificates.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    uri = f"s3://{new_bucket(seaweedfs)}/jobs"
    job = lab.submit("--store", uri, "--launcher", "python")
    (pod,) = lab.operate(job)
    lab.begin(pod)
    lab.phase(job, "Running")
    kinds = ("ConfigMap", "Secret")
    items = [{**x, "kind": kind} for kind in kinds for x in lab.get(lab.core(kind))["items"]]
    started = kubelet.container(
        lab.get(lab.core("Pod", pod)), kubelet.Objects(items), ip="127.0.0.1"
    )
    delivered = variables.load(started.files["/run/cloudjob/env"].data)
    assert set(delivered) == {"CLOUDJOB_SIGNED_URIS"}
    assert SECRET_KEY.encode() not in b"".join(file.data for file in started.files.values())

    (tmp_path / "delivery").mkdir()
    (tmp_path / "delivery" / "env").write_bytes(started.files["/run/cloudjob/env"].data)
    home = str(tmp_path / "home")
    environ = {name: value.replace("/home/ma-user", home) for name, value in started.env.items()}
    done = subprocess.run(
        [sys.executable, "-I", "-S", ROOT / "cloudjob" / "jobentry.pyz", *started.args],
        env={**environ, "PATH": os.environ["PATH"], "CLOUDJOB_DELIVERY": f"{tmp_path}/delivery"},
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done
    assert b"hello" in done.stdout, done
    lab.finish(pod)
    lab.phase(job, "Completed")
    status = lab.status(job)
    assert (status["state"], status["cause"]) == ("SUCCEEDED", None), status
    assert [phase["name"] for phase in status["phases"]][:1] == ["stage"], "it left its record"


# -- permissions ----------------------------------------------------------------------------------


def test_missing_permissions_are_reported(volcano_lab: Lab):
    """The missing permissions are named before anything is packed or sent; exit code 5."""
    lab = volcano_lab
    config = lab.cluster.kubeconfig(token=lab.cluster.guest, namespace=lab.namespace)
    lab.environ["KUBECONFIG"] = str(config)
    done = lab.run("submit", "--config", "job.yaml", "train.py")

    assert done.code == 5, done
    assert "not allowed" in done.err
    assert "create jobs" in done.err
    assert "create secrets" in done.err
    assert "list pods" not in done.err
    assert "Traceback" not in done.err
    assert lab.get(lab.core("ConfigMap"))["items"] == []


def give_role(lab: Lab, engine: str) -> None:
    """Log in as a user with the roles of the documentation for this engine, and no others."""
    page = (ROOT / "docs" / "guides" / "kubernetes-permissions.md").read_text()
    text = next(part for part in page.split("```") if part.startswith("yaml\napiVersion: rbac"))
    roles = list(yaml.safe_load_all(text.removeprefix("yaml\n")))
    assert {role["metadata"]["name"] for role in roles} == {
        "cloudjob",
        *(f"cloudjob-{name}" for name in ENGINES),
    }
    path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{lab.namespace}"
    for role in roles:
        name = role["metadata"]["name"]
        if name not in ("cloudjob", f"cloudjob-{engine}"):
            continue
        lab.cluster.ask("POST", f"{path}/roles", role)
        bind(lab, "Role", name, "guest")
    log_in(lab, lab.cluster.guest)


def test_the_role_in_the_documentation_is_enough(lab: Lab, until: Callable[..., None]):
    """It covers a job from submission to removal in one namespace."""
    give_role(lab, lab.engine)

    job = lab.submit("-n", "2")
    pods = lab.operate(job)
    lab.begin(*pods)
    lab.phase(job, "Running")
    lab.log(pods[0]).write(b"[0] hello")
    assert lab.status(job)["state"] == "RUNNING"
    assert lab.run("logs", job).out == "[0] hello\n"
    assert lab.run("events", job).code == 0
    cancelling = lab.start("cancel", "--now", job)
    until(lambda: stopped(lab, job), "request to stop the job")
    until(lambda: not lab.get(lab.core("Pod"))["items"], "end of the pods")
    lab.phase(job, CANCELLED_PHASES[lab.engine])
    assert lab.end(cancelling).code == 0
    done = lab.run("rm", job)
    assert done.code == 0, done
    assert objects_of(lab, job) == []


@pytest.mark.parametrize("lab_of", ["job_lab", "volcano_lab"])
def test_users_with_the_same_role_share_the_jobs_of_a_namespace(
    request: pytest.FixtureRequest, lab_of: str, cluster: Cluster, until: Callable[..., None]
):
    """One submits, and another with other records follows and cancels; ``edit`` is enough."""
    lab: Lab = request.getfixturevalue(lab_of)
    if lab.engine == "job":
        may_edit(lab, cluster, "guest", "peer")
    else:
        give_role(lab, lab.engine)
        for name in ("cloudjob", f"cloudjob-{lab.engine}"):
            bind(lab, "Role", name, "peer")
    log_in(lab, lab.cluster.guest)
    job = lab.submit("-n", "2")
    pods = lab.operate(job)
    lab.begin(*pods)
    lab.phase(job, "Running")
    lab.log(pods[1]).write(b"[1] hello")

    store = (lab.folder / "store").as_uri()
    lab.environ["CLOUDJOB_HOME"] = str(lab.folder / "another-home")
    log_in(lab, lab.cluster.peer)
    listed = json.loads(lab.run("list", "--store", store, "--json").out)
    assert [item["job"] for item in listed] == [job]
    assert lab.status(f"{store}/{job}")["state"] == "RUNNING"
    assert lab.run("logs", job).out == "[1] hello\n"
    outputs = lab.run("outputs", job)
    assert (outputs.code, outputs.out) == (0, ""), outputs
    cancelling = lab.start("cancel", job)
    until(lambda: stopped(lab, job), "request to stop the job")
    for pod in pods:
        lab.log(pod).end()
        lab.delete(pod)
    lab.phase(job, CANCELLED_PHASES[lab.engine])
    done = lab.end(cancelling)
    assert done.code == 0, done

    lab.environ["CLOUDJOB_HOME"] = str(lab.folder / "home")
    log_in(lab, lab.cluster.guest)
    status = lab.status(job)
    assert (status["state"], status["cause"]) == ("CANCELLED", "cancelled"), status


def test_a_volume_that_the_nodes_cannot_share_stops_the_submit(job_lab: Lab):
    """The claim is that of a real API server; nothing is sent."""
    lab = job_lab
    path = f"/api/v1/namespaces/{lab.namespace}/persistentvolumeclaims"
    body = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "data"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}},
            "storageClassName": "",
        },
    }
    lab.cluster.ask("POST", path, body)
    wish = ("submit", "--config", "job.yaml", "--detach", "-n", "2", "--input")
    unbound = lab.run(*wish, "DATA=pvc://data", "train.py")
    lab.cluster.ask("PATCH", f"{path}/data/status", {"status": {"phase": "Bound"}}, kind=MERGE)
    alone = lab.run(*wish, "DATA=pvc://data", "train.py")
    missing = lab.run(*wish, "DATA=secret://none", "train.py")

    assert "PersistentVolumeClaim data: it has no volume" in unbound.err, unbound
    assert "PersistentVolumeClaim data: only one machine can mount it at a time" in alone.err, alone
    assert f"Secret none: there is none in {lab.namespace}" in missing.err, missing
    assert [done.code for done in (unbound, alone, missing)] == [5, 5, 5]
    assert lab.get(lab.core("ConfigMap"))["items"] == []
    done = lab.run(*wish[:-3], "--input", "DATA=pvc://data", "train.py")
    assert done.code == 0, done
    assert "hostPath" in done.err


def test_invalid_credentials_are_reported(volcano_lab: Lab):
    """The token is invalid."""
    lab = volcano_lab
    config = lab.cluster.kubeconfig(token="nobody", namespace=lab.namespace)
    lab.environ["KUBECONFIG"] = str(config)
    done = lab.run("submit", "--config", "job.yaml", "train.py")

    assert done.code == 5, done
    assert "Unauthorized" in done.err
    assert "credentials" in done.err
    assert "Traceback" not in done.err


def test_doctor_checks_the_cluster(volcano_lab: Lab):
    """It reports the version, and what each engine lacks."""
    lab = volcano_lab
    done = lab.run("doctor", "--backend", "kubernetes")

    assert done.code == 0, done
    assert "Kubernetes v1.20" in done.out
    rows = [line.split(maxsplit=3) for line in done.out.splitlines() if line.startswith("engine")]
    assert [row[1:3] for row in rows] == [
        ["volcano", "OK"],
        ["mpi-operator", "OK"],
        ["ms-operator", "OK"],
        ["job", "no"],
        ["jobset", "no"],
    ]
    assert rows[0][3] == f"usable in {lab.namespace}"
    assert rows[3][3].startswith("needs Kubernetes 1.29, and this is v1.20")


def test_doctor_names_the_missing_permissions_for_each_engine(volcano_lab: Lab):
    lab = volcano_lab
    config = lab.cluster.kubeconfig(token=lab.cluster.guest, namespace=lab.namespace)
    lab.environ["KUBECONFIG"] = str(config)
    done = lab.run("doctor", "--backend", "kubernetes", "--json")

    assert done.code == 1, done
    rows = {row["name"]: row for row in json.loads(done.out)}
    text = rows["engine mpi-operator"]["found"]
    assert text.startswith(f"not allowed in {lab.namespace}: create mpijobs.kubeflow.org, get ")
    assert "list pods" not in text
    assert "create services" in rows["engine ms-operator"]["found"]
    assert rows["engine mpi-operator"]["is_needed"], "no engine is usable"


def test_auto_chooses_kubernetes_itself_if_only_that_is_allowed(
    job_lab: Lab, until: Callable[..., None]
):
    """The permission decides, not only the operators that are installed."""
    lab = job_lab
    lab.write(engine="auto")
    give_role(lab, lab.engine)
    job = lab.submit("-n", "2")

    assert lab.get(lab.path(job))["spec"]["completionMode"] == "Indexed"


def test_a_missing_queue_is_reported_before_anything_is_sent(volcano_lab: Lab):
    """Volcano would accept the job but never run it."""
    lab = volcano_lab
    lab.write(queue="reserach")
    done = lab.run("submit", "--config", "job.yaml", "train.py")

    assert done.code == 5, done
    assert "there is no queue reserach" in done.err


def test_a_submit_to_a_missing_namespace_leaves_nothing(volcano_lab: Lab):
    """The error is one line with a hint, and the records contain no job."""
    lab = volcano_lab
    lab.write(namespace="nowhere")
    done = lab.run("submit", "--config", "job.yaml", "train.py")

    assert done.code == 5, done
    assert 'namespaces "nowhere" not found' in done.err
    assert "kubernetes.namespace" in done.err
    assert lab.run("list", "--json").out.strip() == "[]"


def test_a_typo_in_a_pod_is_found_before_the_upload(lab: Lab):
    lab.write(pod={"spec": {"hostNetwrk": True}})
    done = lab.run("submit", "--config", "job.yaml", "train.py")

    assert done.code == 5, done
    # Servers since 1.25 refuse unknown fields in a dry run; older ones drop them.
    is_refused = "strict decoding error" in done.err and "hostNetwrk" in done.err
    is_missed = "manifest: the cluster does not know spec." in done.err
    is_new = lab.engine == "job" or (lab.cluster.custom_port and lab.engine != "ms-operator")
    assert is_refused if is_new else is_missed, done
    assert is_new or "template.spec.hostNetwrk" in done.err
    assert [path for path in (lab.folder / "store").rglob("*") if path.is_file()] == []
    assert lab.run("list", "--json").out.strip() == "[]"


@pytest.mark.docker
def test_the_remains_of_a_killed_submit_are_orphans(volcano_lab: Lab):
    """ConfigMap and Secret are created before the job, which becomes their owner only then."""
    lab = volcano_lab
    job = lab.submit("-n", "2")
    assert "0 orphans" in lab.run("rm", "--orphans").err
    for kind, name in (("ConfigMap", f"{job}-entry"), ("Secret", f"{job}-delivery")):
        alone = {"metadata": {"ownerReferences": None}}
        lab.cluster.ask("PATCH", lab.core(kind, name), alone, kind=MERGE)
    lab.cluster.ask("DELETE", lab.path(job))

    done = lab.run("rm", "--orphans")
    assert f"removed the leftovers of {job}" in done.err, done
    assert objects_of(lab, job) == []


def test_a_namesake_created_by_others_is_not_taken_for_our_job(cluster: Cluster, volcano_lab: Lab):
    """An object with the same name but without our label stays unchanged."""
    job_request = build("volcano", nodes=1)
    config = requests.objects(job_request, b"")[0]
    name = config["metadata"]["name"]
    other = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        "data": {"a": "b"},
    }
    cluster.ask("POST", volcano_lab.core("ConfigMap"), other)
    with pytest.raises(urllib.error.HTTPError, match="409"):
        cluster.ask("POST", volcano_lab.core("ConfigMap"), {**config, "metadata": {"name": name}})
