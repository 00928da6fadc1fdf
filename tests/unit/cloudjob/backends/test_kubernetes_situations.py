"""What a user is told in each situation of a job on a cluster, with each engine; no server runs.

The objects are those that an API server would return: pods that the operators' rules make of the
stored manifest, with the conditions, reasons and messages of Kubernetes 1.29 to 1.37, Kueue 0.19
and JobSet 0.12.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cloudjob.backends.kubernetes import backend as backends
from cloudjob.backends.kubernetes import ending, errors, reasons, waiting
from cloudjob.backends.kubernetes.backend import CANCELLED, KubernetesBackend
from cloudjob.backends.kubernetes.engine import Resource
from cloudjob.backends.kubernetes.request import ENGINES
from cloudjob.backends.kubernetes.state import Decision
from cloudjob.backends.native import Ended, Running, Waiting
from cloudjob.model import summary, times
from cloudjob.model.status import Attempt, JobState, Outlook, WaitPhase, exit_code
from cloudjob.tracking import verdict
from jobentry.contract.exits import Cause, ExitRecord, Outcome
from tests.support import jobset, operators
from tests.support.fake_kube_api import EVENTS, NAMESPACE, PODS, is_in
from tests.support.statuses import status_of
from tests.unit.cloudjob.backends.test_kubernetes_build import build

Object = dict[str, Any]
AT = "2026-11-21T10:00:0{}Z"
IMAGE = "registry.example.com/base:1"
NO_FOLDER = (
    'MountVolume.SetUp failed for volume "hub" : hostPath type check failed: /mnt/data is not a '
    "directory"
)
NO_ROOM = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."
QUOTA = 'pods "x" is forbidden: exceeded quota: gpus, requested: 8, used: 8, limited: 8'
SMALL_QUOTA = (
    'pods "x" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=8, '
    "used: requests.nvidia.com/gpu=0, limited: requests.nvidia.com/gpu=12"
)
UNHELPFUL = (
    "no new claims to deallocate, preemption: 0/{0} nodes are available: {0} Preemption is not "
    "helpful for scheduling."
)
NO_MACHINE = (
    "0/3 nodes are available: 1 node(s) had untolerated taint "
    "{node-role.kubernetes.io/control-plane: }, 2 node(s) didn't match Pod's node affinity/selector"
)
_PHASES = {
    "volcano": {"Created": "Pending", "Succeeded": "Completed"},
    "job": {"Created": "", "Running": "", "Succeeded": "Complete"},
    "jobset": {"Created": "", "Running": "", "Succeeded": "Completed"},
}


class Recorded:
    """The objects of a cluster, with the methods of a client; writes are only noted."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.written: list[tuple[str, Object]] = []
        # Whether the user may write.
        self.is_forbidden = self.is_forbidden_workload = False
        # The status with which the server refuses to stop pods; 0 if it does not.
        self.stop_refused = 0
        self.refusals = 0

    def refuse(self, doing: str, status: int) -> None:
        self.refusals += 1
        raise errors.api_error(doing, status, b"", is_made=True)

    def patch(self, path: str, body: Object, doing: str) -> None:
        if self.is_forbidden or (self.is_forbidden_workload and "/workloads/" in path):
            self.refuse(doing, 403)
        if self.stop_refused and "annotations" not in str(body):
            self.refuse(doing, self.stop_refused)
        self.written.append((path, body))
        annotations = body.get("metadata", {}).get("annotations", {})
        if annotations:
            self.objects[path]["metadata"].setdefault("annotations", {}).update(annotations)

    def stream(self, path: str, query: Object, doing: str) -> Any:
        raise errors.api_error(doing, 404, b"")

    def create(self, resource: Resource, namespace: str, body: Object, label: str) -> Object:
        if self.stop_refused:
            self.refuse("creating", self.stop_refused)
        self.written.append((resource.path(namespace), body))
        return body

    def delete(self, path: str, doing: str, query: Object | None = None, **body: Any) -> None:
        self.objects.pop(path)
        self.written.append((path, body))

    def get(self, path: str, doing: str, query: Mapping[str, str] | None = None) -> Object:
        if path not in self.objects:
            raise errors.api_error(doing, 404, b'{"reason": "NotFound"}')
        return self.objects[path]

    def list(self, path: str, doing: str, query: Mapping[str, str] | None = None) -> Object:
        items = [o for name, o in self.objects.items() if is_in(name, path, query or {}, o)]
        return {"items": items, "metadata": {}}


class Job:
    """A job of two nodes whose pods exist, and are not scheduled yet."""

    def __init__(self, engine: str, folder: Path, **values: Any) -> None:
        self.engine = ENGINES[engine]
        self.client = Recorded()
        job_request = build(engine, nodes=2, **values)
        self.name = job_request.job_names.name
        self.job = copy.deepcopy(job_request.body)
        self.job["metadata"] |= {"uid": "u", "creationTimestamp": AT.format(0)}
        self.client.objects[self.engine.resource.path(NAMESPACE, self.name)] = self.job
        self.pods: dict[int, Object] = {}
        for pod in operators.made_of(self.job).pods:
            name = pod["metadata"]["name"]
            pod["metadata"] |= {"uid": name, "creationTimestamp": AT.format(1)}
            pod["status"] = {"phase": "Pending"}
            node = self.engine.node_of(self.name, pod)
            assert node is not None
            self.pods[node] = self.client.objects[f"{PODS}/{name}"] = pod
        self.set_phase("Created")
        self.handle = f"kubernetes://test/{NAMESPACE}/{engine}/{job_request.job}"
        self.now_s = times.seconds_of(AT.format(9))
        self.backend = KubernetesBackend(folder, {}, environ={}, now_s=lambda: self.now_s)
        cluster = backends._parse_handle(self.handle).cluster
        self.backend._clients[cluster] = self.client  # type: ignore[assignment]

    @property
    def has_stopped(self) -> bool:
        """Whether the job's pods were asked to end."""
        return any("annotations" not in str(body) for _, body in self.client.written)

    def set_phase(self, phase: str, **status: Any) -> None:
        """Set the job's status as its controller would."""
        word = _PHASES.get(self.engine.name, {}).get(phase, phase)
        if self.engine.name == "volcano":
            status["state"] = {"phase": word, "lastTransitionTime": AT.format(9)}
        elif word:
            condition = {"type": word, "status": "True", "lastTransitionTime": AT.format(9)}
            status["conditions"] = [condition]
        if self.engine.name == "job" and phase == "Running":
            status |= {"active": 2, "ready": 1}
        self.job["status"] = status or {"active": 2}

    def place(self, *nodes: int) -> None:
        """Schedule these nodes; their containers do not start yet."""
        for node in nodes:
            self.pods[node]["spec"]["nodeName"] = f"gpu-{node}"
            self.condition(node, "PodScheduled", "True", "")

    def condition(self, node: int, kind: str, value: str, reason: str, message: str = "") -> None:
        condition = {"type": kind, "status": value, "reason": reason, "message": message}
        condition["lastTransitionTime"] = AT.format(2)
        self.pods[node]["status"].setdefault("conditions", []).append(condition)

    def container(self, node: int, state: Object, *, init: str = "") -> None:
        """Set the state of the job's container, or of an init container."""
        key = "initContainerStatuses" if init else "containerStatuses"
        name = init or self.engine.container
        self.pods[node]["status"][key] = [{"name": name, "state": state}]

    def hold(self, node: int, reason: str, message: str, *, init: str = "") -> None:
        """Place this node on a machine that cannot start its container."""
        self.place(node)
        self.container(node, {"waiting": {"reason": reason, "message": message}}, init=init)

    def run(self, *nodes: int) -> None:
        self.place(*nodes)
        for node in nodes:
            self.pods[node]["status"]["phase"] = "Running"
            self.container(node, {"running": {"startedAt": AT.format(3)}})
        self.set_phase("Running")

    def end(self, node: int, code: int, reason: str = "Error") -> None:
        """End the container of a node."""
        ended = {"exitCode": code, "reason": reason, "finishedAt": AT.format(5)}
        self.pods[node]["status"]["phase"] = "Failed" if code else "Succeeded"
        self.container(node, {"terminated": {**ended, "startedAt": AT.format(3)}})

    def fail(self, node: int, reason: str, message: str = "") -> None:
        """Fail a pod as the kubelet does, and the job with it; the head notices a lost worker."""
        self.end(0, 1)
        self.pods[node]["status"] = {"phase": "Failed", "reason": reason, "message": message}
        self.set_phase("Failed")

    def disrupt(self, node: int, reason: str) -> None:
        """Delete the pod of a running node as the cluster does, while somebody looks at the job."""
        self.run(0, 1)
        self.condition(node, "DisruptionTarget", "True", reason, "why")
        self.pods[node]["metadata"]["deletionTimestamp"] = AT.format(4)
        assert reason in self.backend.status(self.handle).native
        self.remove(node)
        if node:
            self.end(0, 1)
        self.set_phase("Failed")

    def remove(self, *nodes: int) -> None:
        for node in nodes:
            del self.client.objects[f"{PODS}/{self.pods[node]['metadata']['name']}"]

    def event(self, name: str, reason: str, message: str, at: int = 4, kind: str = "") -> None:
        """Record an event: a warning unless a kind is given."""
        event = {"involvedObject": {"kind": "Pod", "name": name}, "reason": reason}
        event |= {"message": message, "type": kind or "Warning", "lastTimestamp": AT.format(at)}
        self.client.objects[f"{EVENTS}/{len(self.client.objects)}"] = event

    def pod_event(self, node: int, reason: str, message: str, at: int = 4, kind: str = "") -> None:
        self.event(self.pods[node]["metadata"]["name"], reason, message, at, kind)

    def refuse(self, *nodes: int, why: str) -> None:
        """Refuse to create the pods of these nodes."""
        self.remove(*nodes)
        self.event(f"{self.name}{self.engine.makers[-1]}", "FailedCreate", f"Error creating: {why}")

    def queue(self, *conditions: tuple[str, str, str, str]) -> None:
        """Let Kueue suspend the job, with these conditions of its Workload."""
        self.remove(0, 1)
        self.set_phase("Suspended")
        self.client.objects["/apis/kueue.x-k8s.io"] = {"versions": [{"version": "v1beta2"}]}
        keys = ("type", "status", "reason", "message")
        at = {"lastTransitionTime": AT.format(2)}
        rows = [dict(zip(keys, condition, strict=True)) | at for condition in conditions]
        path = f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{NAMESPACE}/workloads/w"
        self.client.objects[path] = {
            "metadata": {"name": "w", "ownerReferences": [{"uid": "u"}]},
            "spec": {"queueName": "lab"},
            "status": {"conditions": rows},
        }

    def queue_in_volcano(self) -> None:
        """Let Volcano have no room for all pods, which then do not exist."""
        self.remove(0, 1)
        name = f"{self.name}-u" if self.engine.name == "volcano" else self.name
        condition = {"type": "Unschedulable", "status": "True", "reason": "NotEnoughResources"}
        condition |= {"message": "2/2 tasks in gang unschedulable"}
        condition |= {"lastTransitionTime": AT.format(2)}
        path = f"/apis/scheduling.volcano.sh/v1beta1/namespaces/{NAMESPACE}/podgroups/{name}"
        self.client.objects[path] = {"status": {"conditions": [condition]}}

    def cancel(self) -> None:
        self.job["metadata"]["annotations"] = {CANCELLED: AT.format(6)}
        is_asked = self.engine.name in ("mpi-operator", "job", "jobset")
        word = "Suspended" if is_asked else "Aborted" if self.engine.name == "volcano" else "Failed"
        self.set_phase(word)


def pull(job: Job) -> None:
    job.run(0)
    job.place(1)
    job.set_phase("Created")
    took = f'Successfully pulled image "{IMAGE}" in 31.2s (1m2.5s including waiting).'
    job.pod_event(0, "Pulled", took, kind="Normal")
    job.pod_event(1, "Pulling", f'Pulling image "{IMAGE}"', kind="Normal")


def back_off(job: Job) -> None:
    """Before Kubernetes 1.32, only an event says why."""
    job.hold(1, "ImagePullBackOff", f'Back-off pulling image "{IMAGE}"')
    job.pod_event(1, "Failed", f'Failed to pull image "{IMAGE}": manifest unknown')
    job.pod_event(1, "BackOff", f'Back-off pulling image "{IMAGE}"', at=5, kind="Normal")


def mount_times_out(job: Job) -> None:
    """A kubelet's summary of what it waits for hides the reason."""
    job.place(0)
    text = 'MountVolume.SetUp failed for volume "hub" : secret "hub" not found'
    job.pod_event(0, "FailedMount", text)
    text = "Unable to attach or mount volumes: unmounted volumes=[hub]: timed out"
    job.pod_event(0, "FailedMount", text, at=5)


def unschedulable(why: str, *event: str) -> Callable[[Job], None]:
    """Return what leaves a node without a machine, and what an autoscaler says about it."""

    def arrange(job: Job) -> None:
        job.condition(0, "PodScheduled", "False", "Unschedulable", why)
        job.pod_event(0, "FailedScheduling", why)
        if event:
            job.pod_event(0, *event, at=5, kind="Normal")

    return arrange


def with_sidecar(job: Job, code: int) -> None:
    """The container of the head ends, and a container beside it does not."""
    job.run(0, 1)
    job.end(0, code)
    job.pods[0]["status"]["phase"] = "Running"
    job.pods[0]["status"]["containerStatuses"].append({"name": "proxy", "state": {"running": {}}})


def mounted_at_last(job: Job) -> None:
    job.place(0, 1)
    job.pod_event(0, "FailedMount", "timed out", at=3)
    job.pod_event(0, "Created", "Created container", at=4, kind="Normal")


def head_is_late(job: Job) -> None:
    """A worker has waited for the head until start_timeout_min."""
    job.run(1)
    job.end(1, 125)
    job.hold(0, "ErrImagePull", "not found")
    job.set_phase("Created")


def head_is_refused(job: Job) -> None:
    job.run(1)
    job.end(1, 125)
    job.refuse(0, why=QUOTA)
    job.set_phase("Created")


def preempted(job: Job) -> None:
    """The worker was told to end, and its pod is deleted after that of the head."""
    job.run(0, 1)
    job.end(1, 143)
    job.queue(PENDING_QUOTA)
    job.pods[1]["metadata"]["deletionTimestamp"] = AT.format(6)
    job.client.objects[f"{PODS}/{job.pods[1]['metadata']['name']}"] = job.pods[1]


def preempted_unseen(job: Job) -> None:
    """The machine of the head does not report that the pod has ended."""
    head_is_lost(job)
    job.queue(PENDING_QUOTA)
    job.client.objects[f"{PODS}/{job.pods[0]['metadata']['name']}"] = job.pods[0]


def worker_is_slow(job: Job) -> None:
    job.run(0)
    job.end(0, 125)
    job.place(1)
    job.pod_event(1, "Pulling", f'Pulling image "{IMAGE}"', kind="Normal")
    job.set_phase("Failed")


def worker_is_late(job: Job) -> None:
    job.run(0)
    job.end(0, 125)
    job.condition(1, "PodScheduled", "False", "Unschedulable", NO_ROOM)
    job.set_phase("Failed")


def worker_is_refused(job: Job) -> None:
    """The head ends the job when the worker has not come in time."""
    job.run(0)
    job.refuse(1, why=QUOTA)
    assert (
        f"Running (FailedCreate: Error creating: {QUOTA})" == job.backend.status(job.handle).native
    )
    job.end(0, 125)
    job.set_phase("Failed")


def lost(job: Job, node: int) -> None:
    job.run(0, 1)
    job.condition(node, "Ready", "False", "")
    job.condition(node, "ContainersReady", "True", "")


def head_is_lost(job: Job) -> None:
    """The cluster has given up the pod of the head, whose machine cannot end it."""
    lost(job, 0)
    job.pods[0]["metadata"]["deletionTimestamp"] = AT.format(6)


def with_retries(job: Job) -> None:
    limits = {"maxRetry": 2, "failurePolicy": {"maxRestarts": 1}, "backoffLimitPerIndex": 1}
    job.job["spec"] |= limits


def never_given_up(code: int) -> Callable[[Job], None]:
    """The pod of the head tolerates for ever that its machine does not report."""

    def arrange(job: Job) -> None:
        lost(job, 0)
        job.end(1, code)
        if job.engine.name == "ms-operator":
            job.set_phase("Failed" if code else "Succeeded")

    return arrange


def ended_early(phase: str, arrange: Callable[[Job], None]) -> Callable[[Job], None]:
    """Return what happens to a head that stores outputs when its operator has ended the job."""

    def arrange_all(job: Job) -> None:
        job.run(0, 1)
        arrange(job)
        job.end(1, 0 if phase == "Succeeded" else 1)
        job.set_phase(phase)

    return arrange_all


def drained(job: Job) -> None:
    job.condition(0, "DisruptionTarget", "True", "EvictionByEvictionAPI", "why")
    job.pods[0]["metadata"]["deletionTimestamp"] = AT.format(6)


def again_without_worker(job: Job) -> None:
    """A queue preempted the job when the worker had ended, and has admitted it again."""
    job.run(0, 1)
    job.end(1, 0)
    job.pods[0]["metadata"]["creationTimestamp"] = AT.format(7)
    job.end(0, 125)
    job.set_phase("Failed")


def given_up(job: Job) -> None:
    """The operator has ended the job for the sake of its worker."""
    job.run(0, 1)
    job.pods[1]["status"] = {"phase": "Failed", "reason": "Evicted", "message": "low on memory"}
    job.set_phase("Failed")


def resumed(job: Job) -> None:
    job.run(0, 1)
    condition = {"type": "Suspended", "status": "False", "lastTransitionTime": AT.format(2)}
    job.job["status"].setdefault("conditions", []).insert(0, condition)


def removed_unseen(job: Job) -> None:
    """Nobody looked at the job then, but the cluster keeps events for an hour."""
    job.run(0, 1)
    job.remove(0)
    job.set_phase("Failed")
    job.pod_event(0, "Pulled", "Container image is present", kind="Normal")
    job.pod_event(0, "TaintManagerEviction", "Cancelling deletion of Pod", at=5, kind="Normal")
    job.pod_event(0, "Preempted", "Preempted by pod x on node gpu-0", kind="Normal")


def preempted_by_volcano(job: Job) -> None:
    job.run(0, 1)
    job.remove(0, 1)
    job.set_phase("Failed")
    job.pod_event(0, "Evict", "Pod is evicted, because of preempt", at=5)


def replaced(job: Job) -> None:
    """A controller has replaced the evicted worker, whose new pod waits for room."""
    job.disrupt(1, "EvictionByEvictionAPI")
    name = f"{job.pods[1]['metadata']['name']}"
    job.client.objects[f"{PODS}/{name}"] = {
        **job.pods[1],
        "metadata": {**job.pods[1]["metadata"], "uid": "new", "deletionTimestamp": None},
        "status": {"phase": "Pending"},
    }


def ended_by_kubelet(job: Job) -> None:
    job.run(0, 1)
    job.end(0, 1)
    job.end(1, 137)
    job.condition(1, "DisruptionTarget", "True", "TerminationByKubelet", "why")
    job.set_phase("Failed")


def init_fails(job: Job) -> None:
    job.end(0, 1)
    job.pods[1]["status"] = {"phase": "Failed"}
    job.container(1, {"terminated": {"exitCode": 9, "reason": "Error"}}, init="fetch")
    job.set_phase("Failed")


def ended(code: int, reason: str = "Error") -> Callable[[Job], None]:
    def arrange(job: Job) -> None:
        job.run(0, 1)
        job.end(0, code, reason)
        job.end(1, 0, "Completed")
        job.set_phase("Failed" if code else "Succeeded")

    return arrange


def refused(why: str) -> Callable[[Job], None]:
    return lambda job: job.refuse(0, 1, why=why)


class Situation(NamedTuple):
    """What happens to a job, and what its user is told: all of these words."""

    arrange: Callable[[Job], None]
    state: JobState
    words: tuple[str, ...] = ()
    code: int = 1
    engines: tuple[str, ...] = tuple(ENGINES)


WAITS = {
    "no controller": (lambda job: job.remove(0, 1), "it has no pods yet"),
    "quota": (refused(QUOTA), "exceeded quota: gpus", "kubectl describe quota"),
    "quota needs limits": (
        refused("failed quota: q: must specify limits.cpu for: cloudjob; limits.memory for: x"),
        "limits.cpu for: cloudjob",
        "kubernetes.cpus",
    ),
    "pod security": (refused('violates PodSecurity "restricted:v1.33"'), "kubernetes.user"),
    "limit range": (refused("maximum cpu usage per Pod is 1"), "describe limitrange"),
    "webhook refuses": (refused('admission webhook "x" denied the request: no'), "refuses the pod"),
    "policy refuses": (refused("ValidatingAdmissionPolicy 'x' denied request"), "refuses the pod"),
    "webhook is down": (refused('failed calling webhook "x": timeout'), "does not answer"),
    "service account": (refused('serviceaccount "bot" not found'), "kubernetes.service_account"),
    "priority class": (refused("no PriorityClass with name x was found"), "priority_class"),
    "no room": (
        lambda job: job.condition(1, "PodScheduled", "False", "Unschedulable", NO_ROOM),
        f"node 1: Unschedulable: {NO_ROOM}",
        "ask for less",
    ),
    "gated": (
        lambda job: job.condition(0, "PodScheduled", "False", "SchedulingGated", "blocked"),
        "node 0: SchedulingGated: blocked",
    ),
    "scheduler": (lambda job: None, "node 0: waiting for the scheduler, and 1 more"),
    "starting": (lambda job: job.place(0, 1), "node 0: gpu-0 starts its container, and 1 more"),
    "image missing": (
        lambda job: job.hold(0, "ErrImagePull", "not found"),
        "node 0: ErrImagePull: not found; check the job's image",
    ),
    "image back-off": (back_off, "node 1: ImagePullBackOff: Failed to pull", "manifest unknown;"),
    "registry is down": (
        lambda job: job.hold(0, "ErrImagePull", "dial tcp: connect: connection refused"),
        "connection refused; check the job's image",
    ),
    "image never pulled": (
        lambda job: job.hold(0, "ErrImageNeverPull", "not present with pull policy of Never"),
        "kubernetes.image_pull_policy is Never",
    ),
    "image of an init container": (
        lambda job: job.hold(1, "ErrImagePull", "not found", init="fetch"),
        "node 1: ErrImagePull: not found",
    ),
    "init container": (
        lambda job: (job.place(1), job.container(1, {"running": {}}, init="fetch"))[0],
        "node 0: waiting for the scheduler",
    ),
    "secret missing": (
        lambda job: job.hold(0, "CreateContainerConfigError", 'secret "x" not found'),
        'CreateContainerConfigError: secret "x" not found; check the Secrets',
    ),
    "sandbox": (
        lambda job: (job.place(0), job.condition(0, "PodReadyToStartContainers", "False", ""))[0],
        "node 0: gpu-0 prepares its volumes and its network",
    ),
    "mount": (
        lambda job: (job.place(0), job.pod_event(0, "FailedMount", "no such PVC"))[0],
        "node 0: FailedMount: no such PVC; check kubernetes.volumes",
    ),
    "attach": (
        lambda job: (job.place(0), job.pod_event(0, "FailedAttachVolume", "Multi-Attach error"))[0],
        "node 0: FailedAttachVolume: Multi-Attach error",
    ),
    "mount of a missing secret": (
        mount_times_out,
        'node 0: FailedMount: MountVolume.SetUp failed for volume "hub" : secret "hub" not found;',
    ),
    "folder missing on its machine": (
        lambda job: (job.place(0), job.pod_event(0, "FailedMount", NO_FOLDER))[0],
        f"node 0: FailedMount: {NO_FOLDER}; check kubernetes.volumes",
    ),
    "quota is too small": (refused(SMALL_QUOTA), "limited: requests.nvidia.com/gpu=12"),
    "no machine fits": (unschedulable(NO_MACHINE), f"node 0: Unschedulable: {NO_MACHINE}"),
    "every machine is too small": (
        unschedulable("0/2 nodes are available: 2 Insufficient cpu. " + UNHELPFUL.format(2)),
        "2 Insufficient cpu.",
    ),
    "claim missing": (
        unschedulable('0/2 nodes are available: persistentvolumeclaim "data" not found.'),
        'persistentvolumeclaim "data" not found',
    ),
    "one machine is full": (
        unschedulable(
            "0/2 nodes are available: 1 Insufficient cpu, 1 node(s) didn't match Pod's node "
            "affinity/selector. preemption: 0/2 nodes are available: 1 No preemption victims "
            "found for incoming pod, 1 Preemption is not helpful for scheduling."
        ),
        "1 Insufficient cpu",
    ),
    "one machine is cordoned": (
        unschedulable(
            "0/2 nodes are available: 1 node(s) didn't match Pod's node affinity/selector, "
            "1 node(s) were unschedulable. " + UNHELPFUL.format(2)
        ),
        "1 node(s) were unschedulable",
    ),
    "autoscaler adds a machine": (
        unschedulable(NO_MACHINE, "TriggeredScaleUp", "pod triggered scale-up: [{pool 0->1}]"),
        NO_MACHINE,
    ),
    "autoscaler has its limit": (
        unschedulable(NO_MACHINE, "NotTriggerScaleUp", "1 max node group size reached"),
        NO_MACHINE,
    ),
    "autoscaler cannot help": (
        unschedulable(NO_MACHINE, "NotTriggerScaleUp", "1 node(s) didn't match Pod's affinity"),
        NO_MACHINE,
    ),
    "mounted at last": (mounted_at_last, "node 0: gpu-0 starts its container"),
    "network": (
        lambda job: (job.place(0), job.pod_event(0, "FailedCreatePodSandBox", "cni"))[0],
        "the machine's network is not ready",
    ),
}
# Of these waits, those that somebody must end.
STUCK = (
    *("quota needs limits", "quota is too small", "pod security", "limit range", "webhook refuses"),
    *("policy refuses", "service account", "priority class", "image missing", "image back-off"),
    *("image never pulled", "image of an init container", "secret missing", "no machine fits"),
    *("mount of a missing secret", "every machine is too small", "claim missing"),
    *("autoscaler cannot help", "folder missing on its machine"),
)
QUEUED = ("job", "jobset", "mpi-operator")
# Those of operators, which Volcano can schedule.
OTHERS = ("volcano", "mpi-operator", "ms-operator")
EARLY = ("mpi-operator", "ms-operator")
# These take a job for a success while its head stores outputs.
STORING = ("ms-operator",)
PULLS = f"node 1: pulling the image {IMAGE} (node 0 took 31 s)"
ADMITTED = ("Admitted", "True", "Admitted", "")
PENDING_QUOTA = ("QuotaReserved", "False", "WaitingForQuota", "4 more needed")
REASONS = {
    "Evicted": "low on memory; its machine ran short of memory or disk; request",
    "NodeLost": "its machine no longer reports",
    "Preempting": "critical pod",
    "Terminated": "its machine shut down",
    "NodeShutdown": "was shutting down",
    "OutOfnvidia.com/gpu": "its machine refused the pod",
    "UnexpectedAdmissionError": "a device of its machine",
    "TopologyAffinityError": "cannot place CPUs and devices together",
    "DeadlineExceeded": "timeout_min",
}
DISRUPTIONS = {
    "PreemptionByScheduler": "a pod of higher priority took its place; set kubernetes.priority",
    "DeletionByTaintManager": "its machine was drained or does not report; submit the job again",
    "EvictionByEvictionAPI": "its machine was drained or scaled down; submit the job again",
    "DeletionByPodGC": "its machine was removed from the cluster; submit the job again",
    "TerminationByKubelet": "its machine ran short of memory or disk, or shut down; submit",
    "NewInKubernetes2": "why",
}
DELETED = {"propagationPolicy": "Foreground"}
FAILED, RUNNING = JobState.FAILED, JobState.RUNNING
SITUATIONS = {
    **{
        name: Situation(row[0], JobState.PENDING, tuple(row[1:]))  # type: ignore[arg-type]
        for name, row in WAITS.items()
    },
    "pulling": Situation(pull, JobState.PENDING, (PULLS,), engines=OTHERS),
    # With these, a job runs as soon as one of its nodes does.
    "pulling beside a running head": Situation(pull, RUNNING, (PULLS,), engines=("job", "jobset")),
    "never admitted": Situation(
        lambda job: job.queue(PENDING_QUOTA),
        JobState.PENDING,
        ("queue lab: WaitingForQuota: 4 more needed",),
        engines=QUEUED,
    ),
    "never admitted by Volcano": Situation(
        lambda job: job.queue_in_volcano(),
        JobState.PENDING,
        ("2/2 tasks in gang unschedulable",),
        engines=OTHERS,
    ),
    "preempted by Volcano": Situation(
        preempted_by_volcano,
        FAILED,
        ("the pod", "was removed: Evict", "Volcano gave its place to another job"),
        engines=OTHERS,
    ),
    "preempted in its queue": Situation(
        lambda job: job.queue(PENDING_QUOTA, ("Evicted", "True", "Preempted", "for another")),
        JobState.PENDING,
        ("Preempted: for another; WaitingForQuota",),
        engines=QUEUED,
    ),
    # The machine may come back, and the job starts again when it is admitted.
    "preempted, and the machine of its head does not report": Situation(
        preempted_unseen, JobState.PENDING, ("WaitingForQuota",), engines=QUEUED
    ),
    # Kueue may leave its other conditions as they were (kueue#14811).
    "preempted, and still admitted": Situation(
        lambda job: job.queue(ADMITTED, ("Evicted", "True", "PodsReadyTimeout", "too slow")),
        JobState.PENDING,
        ("queue lab: PodsReadyTimeout: too slow",),
        engines=QUEUED,
    ),
    "preempted, and a worker has not gone yet": Situation(
        preempted, JobState.PENDING, ("WaitingForQuota",), engines=QUEUED
    ),
    "suspended": Situation(
        lambda job: (job.remove(0, 1), job.set_phase("Suspended"))[0],
        JobState.PENDING,
        ("a queue or a user may resume it",),
        engines=QUEUED,
    ),
    "worker is refused by the MPI operator": Situation(
        lambda job: (job.remove(1), job.event(job.name, "MPIJobFailed", f"failed: {QUOTA}"))[0],
        JobState.PENDING,
        ("MPIJobFailed: failed: pods", "kubectl describe quota"),
        engines=("mpi-operator",),
    ),
    "job is refused by a quota of jobs": Situation(
        lambda job: (job.remove(0, 1), job.event(job.name, "JobCreationFailed", QUOTA))[0],
        JobState.PENDING,
        ("JobCreationFailed: pods", "kubectl describe quota"),
        engines=("jobset",),
    ),
    "success": Situation(ended(0, "Completed"), JobState.SUCCEEDED, code=0),
    # Volcano replaces a worker whose machine was removed after its end (volcano#3296).
    "success, and then a worker fails": Situation(
        lambda job: (ended(0)(job), job.end(1, 125), job.set_phase("Failed"))[0],
        JobState.SUCCEEDED,
        code=0,
        engines=("volcano", "ms-operator"),
    ),
    "success, and then its pods are removed": Situation(
        lambda job: (ended(0)(job), job.remove(1))[0], JobState.SUCCEEDED, code=0
    ),
    "failure": Situation(ended(3), FAILED, ("node 0 (", "exit code 3"), 3),
    "killed": Situation(ended(137), FAILED, ("node 0 (", "exit code 137"), 137),
    "out of memory": Situation(
        ended(137, "OOMKilled"),
        FAILED,
        ("out of memory: node 0", "raise kubernetes.memory_gib"),
        137,
    ),
    "no python in the image": Situation(
        ended(128, "StartError"), FAILED, ("StartError; does the image have python3",), 128
    ),
    "worker out of memory": Situation(
        lambda job: (ended(1)(job), job.end(1, 137, "OOMKilled"))[0],
        FAILED,
        ("out of memory: node 1 (", "raise kubernetes.memory_gib"),
    ),
    "init container fails": Situation(
        init_fails, FAILED, ("node 1 (", "Init:Error: its init container fetch ended with exit co")
    ),
    # Kueue lets its controller continue, which leaves a condition that is not true.
    "resumed": Situation(resumed, RUNNING, ("Running",), engines=QUEUED),
    "restarts, and has no pods": Situation(
        lambda job: (job.remove(0, 1), job.set_phase("Restarting"))[0],
        RUNNING,
        ("it has no pods yet",),
        engines=OTHERS,
    ),
    # The MPI operator does so once a worker was evicted, and cleans up when the launcher has ended.
    "ended by its operator before its head": Situation(
        given_up, RUNNING, ("Failed, but its head is still running",), engines=EARLY
    ),
    "machine does not report": Situation(
        lambda job: lost(job, 1), RUNNING, ("node 1: its machine gpu-1 no longer reports",)
    ),
    "head is lost": Situation(
        head_is_lost, FAILED, ("node 0 (", "NodeLost; its machine no longer")
    ),
    # Its pod may tolerate that its machine does not report, and then nothing marks it.
    "head is cut off when its operator has failed the job": Situation(
        ended_early("Failed", lambda job: lost(job, 0)), FAILED, ("node 1 (",), engines=EARLY
    ),
    "head is lost while it stores": Situation(
        ended_early("Succeeded", head_is_lost), FAILED, ("node 0 (", "NodeLost"), engines=STORING
    ),
    "head is drained while it stores": Situation(
        ended_early("Succeeded", drained),
        RUNNING,
        ("node 0: EvictionByEvictionAPI: why",),
        engines=STORING,
    ),
    "head is removed while it stores": Situation(
        ended_early("Succeeded", lambda job: job.remove(0)),
        FAILED,
        ("node 0: its pod was removed",),
        engines=STORING,
    ),
    "starts again without a worker that had ended": Situation(
        again_without_worker,
        FAILED,
        ("node 1 (", "ended before the pod of node 0 was created"),
        125,
        engines=QUEUED,
    ),
    "head is late": Situation(head_is_late, FAILED, ("node 0: ErrImagePull: not found",)),
    "head is refused": Situation(head_is_refused, FAILED, ("exceeded quota",)),
    "worker is late": Situation(
        worker_is_late, FAILED, (f"node 1: Unschedulable: {NO_ROOM}",), 125
    ),
    "worker is slow": Situation(
        worker_is_slow, FAILED, ("node 0 (", f"node 1: pulling the image {IMAGE}"), 125
    ),
    "worker is refused": Situation(worker_is_refused, FAILED, ("exceeded quota",), 125),
    "head removed": Situation(
        lambda job: (job.run(0, 1), job.remove(0), job.set_phase("Failed"))[0],
        FAILED,
        ("node 0: its pod was removed: drained, preempted or deleted",),
    ),
    "head removed, by events": Situation(
        removed_unseen, FAILED, ("was removed: Preempted: Preempted by pod x on node gpu-0; a pod",)
    ),
    "worker removed": Situation(
        lambda job: (job.run(0, 1), job.remove(1), job.end(0, 1), job.set_phase("Failed"))[0],
        FAILED,
        ("node 0 (", "exit code 1"),
    ),
    "worker replaced": Situation(replaced, FAILED, ("node 1 (", "EvictionByEvictionAPI: why")),
    **{
        f"{reason} of node {node}": Situation(
            lambda job, node=node, reason=reason: job.fail(node, reason, "low on memory"),  # type: ignore[misc]
            FAILED,
            (f"node {node} (", reason, words),
        )
        for reason, words in REASONS.items()
        for node in (0, 1)
    },
    **{
        f"{reason} of node {node}": Situation(
            lambda job, node=node, reason=reason: job.disrupt(node, reason),  # type: ignore[misc]
            FAILED,
            (f"node {node} (", f"{reason}: why", words),
        )
        for reason, words in DISRUPTIONS.items()
        for node in (0, 1)
    },
    "image name": Situation(
        lambda job: job.hold(0, "InvalidImageName", "couldn't parse"),
        FAILED,
        ("it cannot start: node 0: InvalidImageName: couldn't parse; correct the job's image",),
    ),
    "success beside a sidecar": Situation(
        lambda job: with_sidecar(job, 0), JobState.SUCCEEDED, code=0
    ),
    "failure beside a sidecar": Situation(
        lambda job: with_sidecar(job, 3), FAILED, ("node 0 (", "exit code 3"), 3
    ),
    # The pod is still there: nobody has deleted it yet.
    "ended by the kubelet": Situation(
        ended_by_kubelet, FAILED, ("node 1 (", "TerminationByKubelet: why; its machine ran short")
    ),
    "cancelled while it waits": Situation(
        lambda job: (job.remove(0, 1), job.cancel())[0], JobState.CANCELLED
    ),
    "cancelled while it pulls its image": Situation(
        lambda job: (job.place(0, 1), job.remove(0, 1), job.cancel())[0], JobState.CANCELLED
    ),
    "cancelled while it stores": Situation(
        lambda job: (job.run(0, 1), job.end(1, 0), job.end(0, 143), job.cancel())[0],
        JobState.CANCELLED,
        code=143,
    ),
    "cancelled while it runs": Situation(
        lambda job: (job.run(0, 1), job.end(0, 143), job.end(1, 143), job.cancel())[0],
        JobState.CANCELLED,
        code=143,
    ),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_user_is_told_the_truth(name: str, tmp_path: Path):
    situation = SITUATIONS[name]
    for engine in situation.engines:
        job = Job(engine, tmp_path)
        situation.arrange(job)

        native = job.backend.status(job.handle)

        status = status_of(state=native.state, native_state=native.native)
        text = native.native
        assert not isinstance(native, Waiting) or native.wait, engine
        if isinstance(native, (Waiting, Running)) and native.wait:
            assert native.wait.since, engine
            text = summary.wait(status_of(wait=native.wait))
        elif isinstance(native, Ended):
            status = status_of(state=native.state, exit_code=native.exit_code)
            status = verdict.with_record(status, native, None, "", lambda node: ())
            text = status.failure.message if status.failure else ""
            assert exit_code(status) == situation.code, (engine, text)
        assert status.state is situation.state, (engine, text)
        told = {word: text.count(word) for word in situation.words}
        assert told == dict.fromkeys(situation.words, 1), (engine, text)


@pytest.mark.parametrize("name", WAITS)
def test_a_job_that_cannot_start_ends_and_one_that_waits_for_others_does_not(
    name: str, tmp_path: Path
):
    """Whoever sees it ends it, and everybody reads why; a user who may not end it sees the wait."""
    for engine in ENGINES:
        job = Job(engine, tmp_path)
        WAITS[name][0](job)  # type: ignore[operator]
        job.now_s += 590
        assert isinstance(job.backend.status(job.handle), Waiting), engine

        job.now_s += 1e7 if name not in STUCK else 10
        job.client.is_forbidden = True
        assert isinstance(job.backend.status(job.handle), Waiting), engine
        job.client.is_forbidden = False
        job.now_s += 60
        ended = job.backend.status(job.handle)

        if name not in STUCK:
            assert isinstance(ended, Waiting), (engine, ended)
            assert job.client.written == [], engine
            continue
        assert isinstance(ended, Ended), engine
        assert ended.cause is Cause.PLATFORM
        assert ended.failure
        for words in WAITS[name][1:]:
            assert str(words) in ended.failure.message, engine
        assert job.has_stopped
        writes = len(job.client.written)
        assert job.backend.status(job.handle) == ended
        assert len(job.client.written) == writes


def test_a_job_ends_when_it_has_waited_as_long_as_its_user_allows(tmp_path: Path):
    for engine in ENGINES:
        job = Job(engine, tmp_path)
        job.job["metadata"]["annotations"]["cloudjob.pending-min"] = "60"
        unschedulable(NO_ROOM)(job)
        job.now_s = times.seconds_of(AT.format(0)) + 3599
        assert isinstance(job.backend.status(job.handle), Waiting)

        job.now_s += 1
        ended = job.backend.status(job.handle)

        assert isinstance(ended, Ended)
        assert ended.failure
        text = "it has not started in 1 h (kubernetes.pending_min): node 0: Unschedulable"
        assert ended.failure.message.startswith(text)


LOSSES = {
    "its operator waits for it": (
        lambda job: (head_is_lost(job), with_retries(job), job.remove(1))[0],
        ("volcano", "jobset", "job"),
    ),
    "never given up": (never_given_up(1), ("volcano", "job", "jobset", "mpi-operator")),
    "never given up, and no worker has failed": (never_given_up(0), tuple(ENGINES)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_job_ends_when_only_the_return_of_the_machine_of_its_head_could_end_it(
    name: str, tmp_path: Path
):
    """Its record counts: the head may have succeeded since."""
    arrange, engines = LOSSES[name]
    for engine in engines:
        job = Job(engine, tmp_path)
        arrange(job)
        job.now_s = times.seconds_of(AT.format(5 if "never" in name else 6)) + 599
        running = job.backend.status(job.handle)
        # JobSet's controller waits to start the job again.
        assert isinstance(running, (Running, Waiting)), engine
        assert running.wait
        assert running.wait.message == "node 0: its machine gpu-0 no longer reports to the " + (
            "cluster; it may be lost"
        )
        assert running.wait.since == "2026-11-21T10:00:02.000Z"
        # Any other cancel waits for the pod.
        assert "cancel --now" in running.wait.hint
        assert job.client.written == []
        job.now_s += 1
        job.backend._pod_states.clear()
        ended = job.backend.status(job.handle)

        assert isinstance(ended, Ended), engine
        assert ended.failure
        assert "NodeLost; its machine no longer reports" in ended.failure.message
        assert job.has_stopped
        record = ExitRecord("train", Outcome(0), ended_at=AT.format(8))
        status = verdict.with_record(status_of(), ended, record, "", lambda node: ())
        assert (status.state, status.exit_code) == (JobState.SUCCEEDED, 0), engine


@pytest.mark.parametrize("arrange", [lambda job: lost(job, 0), preempted_unseen])
def test_a_lost_head_ends_no_job_that_others_may_continue(
    arrange: Callable[[Job], None], tmp_path: Path
):
    """Its worker still talks to it, or a queue starts the job again."""
    for engine in QUEUED:
        job = Job(engine, tmp_path)
        arrange(job)
        job.now_s += 1e7
        assert isinstance(job.backend.status(job.handle), (Running, Waiting)), engine
        assert job.client.written == []


def test_a_cancel_that_volcano_did_not_hear_is_repeated(tmp_path: Path):
    """While it restarts a job, it ignores the command, and new pods follow."""
    job = Job("volcano", tmp_path)
    with_retries(job)
    job.run(0, 1)
    job.job["metadata"]["annotations"] = {CANCELLED: AT.format(6)}
    job.set_phase("Pending", retryCount=1)
    job.now_s = times.seconds_of(AT.format(6)) + 59
    job.backend.status(job.handle)
    assert not job.has_stopped
    for _ in range(2):
        job.now_s += 1
        job.backend.status(job.handle)

    assert [body["action"] for _, body in job.client.written] == ["AbortJob"]


@pytest.mark.parametrize("is_allowed", [True, False], ids=["stopped", "deleted"])
def test_a_job_that_its_queue_will_never_admit_ends(is_allowed: bool, tmp_path: Path):
    """Kueue would resume a suspended job; who may not change its Workload deletes the job."""
    for engine in QUEUED:
        job = Job(engine, tmp_path / engine)
        job.queue(("QuotaReserved", "False", "ExceedsMaxQuota", "8 gpus of 4"))
        if not is_allowed:
            job.client.is_forbidden_workload = True
        job.now_s += 600
        ended = job.backend.status(job.handle)

        assert isinstance(ended, Ended)
        assert ended.failure
        assert "it cannot start: queue lab: ExceedsMaxQuota: 8 gpus of 4" in ended.failure.message
        assert job.backend.status(job.handle).state is FAILED
        (_, body) = job.client.written[-1]
        assert body == ({"spec": {"active": False}} if is_allowed else DELETED)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("worker", ["Pending", "Running", "Unknown", "Failed", "leaving", "early"])
def test_a_cancel_ends_a_job_whatever_its_pods_do(engine: str, worker: str, tmp_path: Path):
    """Its operator then deletes the pods that have not ended; a pod that never ends is no job."""
    job = Job(engine, tmp_path)
    given_up(job)
    if worker != "early":
        job.set_phase("Running")
    if worker == "leaving":
        job.pods[1]["metadata"]["deletionTimestamp"] = AT.format(4)
    elif worker != "early":
        job.pods[1]["status"]["phase"] = worker
    job.backend.cancel(job.handle)

    # Every other operator has ended the pods of a job that it considers ended.
    assert job.has_stopped is (worker != "early" or engine in EARLY)
    if job.has_stopped:
        job.cancel()
        job.pods[0]["metadata"]["deletionTimestamp"] = AT.format(7)
        assert job.backend.status(job.handle).state is JobState.CANCELLED
        job.remove(0)
        assert job.backend.status(job.handle).state is JobState.CANCELLED


@pytest.mark.parametrize("engine", ENGINES)
def test_the_record_of_a_cancelled_head_has_its_exit_code(engine: str, tmp_path: Path):
    """The operator has ended the pods, but only because the user wanted it."""
    job = Job(engine, tmp_path)
    job.run(0, 1)
    job.remove(0, 1)
    job.cancel()
    native = job.backend.status(job.handle)
    assert isinstance(native, Ended)

    record = ExitRecord("train", Outcome(143, Cause.CANCELLED), ended_at=AT.format(8))
    status = verdict.with_record(status_of(), native, record, "", lambda node: ())
    assert (status.state, status.exit_code) == (JobState.CANCELLED, 143)


@pytest.mark.parametrize("engine", QUEUED)
def test_a_second_cancel_stops_a_job_that_kueue_has_given_up_and_that_still_runs(
    engine: str, tmp_path: Path
):
    """Kueue may be down, or no longer manage such jobs (kueue#8387); nothing resumes the job."""
    job = Job(engine, tmp_path)
    job.queue(ADMITTED)
    job.client.objects |= {f"{PODS}/{p['metadata']['name']}": p for p in job.pods.values()}
    job.run(0, 1)
    job.backend.cancel(job.handle)
    path, body = job.client.written[-1]
    assert body == {"spec": {"active": False}}
    job.client.objects[path]["spec"]["active"] = False
    job.backend.cancel(job.handle)

    assert job.client.written[-1][1] == {"spec": dict(job.engine.stopped)}


def test_a_head_that_was_cancelled_while_it_stored_outputs_was_no_success(tmp_path: Path):
    """MindSpore's operator had called the job a success, as its workers had ended."""
    job = Job("ms-operator", tmp_path)
    job.run(0, 1)
    job.end(1, 0)
    job.set_phase("Succeeded")
    job.backend.cancel(job.handle)
    assert job.has_stopped
    job.remove(0)

    assert job.backend.status(job.handle).state is JobState.CANCELLED


def image_is_missing(engine: str, folder: Path) -> Job:
    """Return a job that has waited for start_timeout_min for an image that does not exist."""
    job = Job(engine, folder)
    job.hold(1, "ErrImagePull", "manifest unknown")
    job.now_s += 600
    return job


def test_a_reader_who_may_not_end_a_job_tries_it_once_a_minute(tmp_path: Path):
    job = image_is_missing("job", tmp_path)
    job.client.is_forbidden = True
    for _ in range(60):
        assert isinstance(job.backend.status(job.handle), Waiting)
        job.now_s += 1
    assert job.client.refusals == 1

    job.backend.status(job.handle)
    assert job.client.refusals == 2


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("status", [403, 404, 422])
def test_a_job_whose_pods_cannot_be_stopped_has_not_ended(engine: str, status: int, tmp_path: Path):
    """Its image may appear, and then it runs: nobody may read that it has failed."""
    job = image_is_missing(engine, tmp_path)
    job.client.stop_refused = status

    assert isinstance(job.backend.status(job.handle), Waiting)
    assert ending.decision_of(job.job) is None
    job.client.stop_refused, job.now_s = 0, job.now_s + 60
    assert job.backend.status(job.handle).state is FAILED
    assert job.has_stopped


@pytest.mark.parametrize("engine", ENGINES)
def test_pods_are_stopped_of_a_job_that_a_killed_command_has_ended(engine: str, tmp_path: Path):
    job = image_is_missing(engine, tmp_path)
    decision = Decision(None, "it cannot start")
    job.job["metadata"]["annotations"] |= ending.annotation(decision)

    job.client.is_forbidden = True
    assert job.backend.status(job.handle).state is FAILED
    job.client.is_forbidden, job.now_s = False, job.now_s + 60
    assert job.backend.status(job.handle).state is FAILED
    assert job.has_stopped
    writes = len(job.client.written)
    for pod in job.pods.values():
        pod["metadata"]["deletionTimestamp"] = AT.format(9)
    job.backend._pod_states.clear()
    job.now_s += 60
    assert job.backend.status(job.handle).state is FAILED
    assert len(job.client.written) == writes


def test_a_head_that_starts_beside_a_sidecar_of_a_worker_is_not_ended(tmp_path: Path):
    """It may have started after the decision was taken from older pods."""
    job = Job("job", tmp_path)
    job.hold(0, "ErrImagePull", "manifest unknown")
    job.end(1, 125)
    job.pods[1]["status"]["phase"] = "Running"
    job.pods[1]["status"]["containerStatuses"].append({"name": "x", "state": {"running": {}}})
    job.backend.status(job.handle)
    job.now_s += 600
    job.container(0, {"running": {"startedAt": AT.format(3)}})

    job.backend.status(job.handle)
    assert job.client.written == []


@pytest.mark.parametrize(("code", "state"), [(0, JobState.SUCCEEDED), (3, FAILED)])
def test_a_job_that_was_deleted_to_end_it_beside_a_sidecar_ends_as_its_head(
    code: int, state: JobState, tmp_path: Path
):
    """Kueue would resume it, and its user may not change Workloads."""
    job = Job("job", tmp_path)
    job.queue(ADMITTED)
    job.client.objects |= {f"{PODS}/{p['metadata']['name']}": p for p in job.pods.values()}
    with_sidecar(job, code)
    job.client.is_forbidden_workload = True
    assert job.backend.status(job.handle).state is state

    assert job.client.written[-1][1] == DELETED
    ended = job.backend.status(job.handle)
    assert isinstance(ended, Ended)
    assert (ended.state, ended.exit_code) == (state, code)


@pytest.mark.parametrize("engine", ["jobset", "ms-operator"])
def test_the_wait_of_a_later_attempt_counts_from_its_first_pod(engine: str, tmp_path: Path):
    job = Job(engine, tmp_path)
    job.job["metadata"]["annotations"]["cloudjob.pending-min"] = "60"
    job.set_phase("" if engine == "jobset" else "Running", restarts=1)
    for pod in job.pods.values():
        pod["metadata"]["creationTimestamp"] = "2026-11-21T13:00:00Z"
    job.now_s = times.seconds_of("2026-11-21T13:59:59Z")
    assert not isinstance(job.backend.status(job.handle), Ended)

    job.now_s += 1
    assert isinstance(job.backend.status(job.handle), Ended)


def test_a_later_attempt_without_pods_has_not_waited(tmp_path: Path):
    job = Job("jobset", tmp_path)
    job.job["metadata"]["annotations"]["cloudjob.pending-min"] = "60"
    job.set_phase("", restarts=1)
    job.remove(0, 1)
    job.now_s += 36000
    assert isinstance(job.backend.status(job.handle), Waiting)


# -- attempts of an Indexed Job, whose earlier pods stay -----------------------------------------

AGAIN = "its last attempt has failed, and the cluster starts it again"


class Tries(Job):
    """An Indexed Job with two retries that runs.

    Its controller counts a failed pod in the job's status only after it has replaced the pod.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__("job", folder, retries=2)
        self.failures = {0: 0, 1: 0}
        self.replaced = 0
        self.run(0, 1)

    def fails(self, code: int, *nodes: int, reason: str = "Error") -> None:
        """End the containers of these nodes."""
        for node in nodes:
            self.end(node, code, reason)
            self.failures[node] += 1
        bad = [str(node) for node, count in self.failures.items() if count > 2]
        status = {"failed": self.replaced + len(bad), "failedIndexes": ",".join(bad)}
        self.job["status"] = {"active": 0, "ready": 0, **status}

    def again(self, *nodes: int, is_running: bool = True) -> None:
        """Replace the pods of these nodes."""
        for pod in operators.indexed_job(self.job, failures=self.failures).pods:
            name, node = pod["metadata"]["name"], self.engine.node_of(self.name, pod)
            if node in nodes:
                pod["metadata"] |= {"uid": name, "creationTimestamp": AT.format(6)}
                pod["status"] = {"phase": "Pending"}
                self.pods[node] = self.client.objects[f"{PODS}/{name}"] = pod
        self.replaced += len(nodes)
        self.job["status"] |= {"failed": self.replaced}
        if is_running:
            status = self.job["status"]
            self.run(*nodes)
            self.job["status"] = status | {"ready": len(nodes)}


def last_attempt(job: Tries) -> None:
    for _ in range(2):
        job.fails(137, 0, 1, reason="OOMKilled")
        job.again(0, 1)


def preempted_between(job: Tries) -> None:
    job.fails(3, 0, 1)
    pods = dict(job.client.objects)
    job.queue(PENDING_QUOTA)
    job.client.objects |= pods


def refused_again(job: Tries) -> None:
    job.fails(3, 0, 1)
    job.event(job.name, "FailedCreate", f"Error creating: {QUOTA}", at=7)


class Try(NamedTuple):
    """What happens to an Indexed Job with two retries, and what its user is told."""

    arrange: Callable[[Tries], object]
    state: JobState
    words: tuple[str, ...] = ()
    attempt: int = 1
    code: int | None = None


TRIES = {
    "its head has failed": Try(lambda job: job.fails(3, 0, 1), RUNNING, (AGAIN,)),
    "a worker has failed, and its head stores": Try(lambda job: job.fails(3, 1), RUNNING),
    "its worker is back before its head has ended": Try(
        lambda job: (job.fails(137, 1), job.again(1)), RUNNING
    ),
    "its worker has not ended yet": Try(
        lambda job: (job.fails(3, 0), job.again(0, is_running=False)),
        RUNNING,
        ("node 0: ",),
        attempt=2,
    ),
    "its head was deleted": Try(
        lambda job: (job.fails(143, 0), job.fails(125, 1), job.remove(0)), RUNNING, (AGAIN,), 0
    ),
    "its head was deleted, and its worker stores": Try(
        lambda job: job.fails(143, 0), RUNNING, (AGAIN,)
    ),
    "the status has not counted the pods that were replaced": Try(
        lambda job: (job.fails(3, 0, 1), job.again(0, 1), job.job["status"].update(failed=0)),
        RUNNING,
        attempt=2,
    ),
    "out of memory before": Try(
        lambda job: (job.fails(137, 0, 1, reason="OOMKilled"), job.again(0, 1)),
        RUNNING,
        attempt=2,
    ),
    "no room for the next attempt": Try(
        lambda job: (
            job.fails(3, 0, 1),
            job.again(0, 1, is_running=False),
            job.condition(0, "PodScheduled", "False", "Unschedulable", NO_ROOM),
        ),
        JobState.PENDING,
        (f"node 0: Unschedulable: {NO_ROOM}",),
        attempt=0,
    ),
    "its worker has given up, and there is no room for its head": Try(
        lambda job: (
            job.fails(3, 0, 1),
            job.again(0, 1, is_running=False),
            job.run(1),
            job.fails(125, 1),
            job.condition(0, "PodScheduled", "False", "Unschedulable", NO_ROOM),
        ),
        JobState.PENDING,
        (f"node 0: Unschedulable: {NO_ROOM}",),
    ),
    "a quota refuses the next attempt": Try(refused_again, RUNNING, ("exceeded quota: gpus",)),
    "its machine does not report": Try(
        lambda job: (job.fails(3, 0, 1), job.again(0, 1), lost(job, 0)),
        RUNNING,
        ("node 0: its machine gpu-0 no longer reports",),
        attempt=2,
    ),
    "success in the second attempt": Try(
        lambda job: (
            job.fails(3, 0, 1),
            job.again(0, 1),
            job.end(0, 0),
            job.job["status"].update(completedIndexes="0"),
        ),
        JobState.SUCCEEDED,
        attempt=2,
        code=0,
    ),
    "success, and nobody has counted it yet": Try(
        lambda job: (job.fails(3, 0, 1), job.again(0, 1), job.end(0, 0)),
        JobState.SUCCEEDED,
        attempt=2,
        code=0,
    ),
    "all attempts are used": Try(
        lambda job: (last_attempt(job), job.fails(3, 0), job.fails(3, 1)),
        FAILED,
        ("node 0 (", "exit code 3"),
        attempt=3,
        code=3,
    ),
    "all attempts are used, and its first head was newer than its worker": Try(
        lambda job: (
            job.pods[0]["metadata"].update(creationTimestamp=AT.format(2)),
            last_attempt(job),
            job.fails(3, 0, 1),
        ),
        FAILED,
        ("node 0 (", "exit code 3"),
        attempt=3,
        code=3,
    ),
    "all attempts are used, and a worker runs": Try(
        lambda job: (last_attempt(job), job.fails(3, 0)),
        FAILED,
        ("node 0 (", "exit code 3"),
        attempt=3,
        code=3,
    ),
    "evicted in the last attempt": Try(
        lambda job: (
            last_attempt(job),
            job.fails(137, 1, reason="Evicted"),
            job.fails(137, 0),
        ),
        FAILED,
        ("node 1 (", "Evicted"),
        attempt=3,
        code=137,
    ),
    "preempted by Kueue between attempts": Try(
        preempted_between, JobState.PENDING, ("queue lab: WaitingForQuota: 4 more needed",), 0
    ),
    "cancelled between attempts": Try(
        lambda job: (job.fails(3, 0, 1), job.cancel()), JobState.CANCELLED, code=3
    ),
    "cancelled in the second attempt": Try(
        lambda job: (
            job.fails(3, 0, 1),
            job.again(0, 1),
            job.end(0, 143),
            job.end(1, 143),
            job.cancel(),
        ),
        JobState.CANCELLED,
        code=143,
    ),
}


@pytest.mark.parametrize("name", TRIES)
def test_a_user_is_told_the_truth_about_each_attempt(name: str, tmp_path: Path):
    row = TRIES[name]
    job = Tries(tmp_path)
    row.arrange(job)

    native = job.backend.status(job.handle)

    text = native.native
    if isinstance(native, (Waiting, Running)) and row.words:
        assert native.wait
        assert native.wait.since
        text = summary.wait(status_of(wait=native.wait))
    elif isinstance(native, Ended):
        text = native.failure.message if native.failure else ""
        assert native.exit_code == row.code
    assert native.state is row.state, text
    assert {word: text.count(word) for word in row.words} == dict.fromkeys(row.words, 1), text
    if isinstance(native, (Running, Ended)):
        # A suspended job has lost the pods of its last attempt.
        is_told = row.attempt and row.state is not JobState.CANCELLED
        assert native.attempt == (Attempt(row.attempt, 3) if is_told else None)


def test_the_record_of_an_earlier_attempt_is_not_that_of_the_last(tmp_path: Path):
    """The head of the first attempt wrote it when the worker had been replaced already."""
    job = Tries(tmp_path)
    job.fails(137, 1)
    job.again(1)
    job.fails(3, 0)
    job.again(0)
    job.failures |= {0: 2, 1: 2}
    job.fails(137, 0, 1)
    record = ExitRecord("train", Outcome(3), ended_at=AT.format(5))

    ended = job.backend.status(job.handle)

    assert isinstance(ended, Ended)
    status = verdict.with_record(status_of(), ended, record, "", lambda node: ())
    assert status.exit_code == 137


def test_a_job_has_started_with_its_first_attempt(tmp_path: Path):
    job = Tries(tmp_path)
    job.fails(3, 0, 1)
    job.again(0, 1)
    for node in (0, 1):
        job.container(node, {"running": {"startedAt": AT.format(8)}})

    native = job.backend.status(job.handle)

    assert isinstance(native, Running)
    assert times.seconds_of(native.started_at or "") == times.seconds_of(AT.format(3))


def test_a_pause_between_attempts_is_no_wait_for_a_start(tmp_path: Path):
    """The first attempt has lasted longer than the job may wait."""
    job = Tries(tmp_path)
    job.job["metadata"]["annotations"]["cloudjob.pending-min"] = "1"
    job.fails(3, 0, 1)
    job.now_s += 1e4
    assert isinstance(job.backend.status(job.handle), Running)
    job.backend._pod_states.clear()

    job.again(0, 1, is_running=False)
    job.now_s = times.seconds_of(AT.format(6)) + 59
    assert isinstance(job.backend.status(job.handle), Waiting)
    job.now_s += 1

    assert isinstance(job.backend.status(job.handle), Ended)


def test_pods_that_are_drained_are_not_said_to_be_missing(tmp_path: Path):
    job = Tries(tmp_path)
    for pod in job.pods.values():
        pod["metadata"]["deletionTimestamp"] = AT.format(9)
    job.job["status"] = {"active": 0, "terminating": 2, "ready": 0}

    native = job.backend.status(job.handle)

    assert isinstance(native, Waiting)
    assert native.wait is None


@pytest.mark.parametrize("are_kept", [True, False])
def test_a_wait_in_a_queue_counts_after_a_failed_attempt_too(are_kept: bool, tmp_path: Path):
    """Kueue has preempted the job, with or without the pods of that attempt."""
    job = Tries(tmp_path)
    job.job["metadata"]["annotations"]["cloudjob.pending-min"] = "1"
    preempted_between(job)
    if not are_kept:
        job.remove(0, 1)
    job.job["status"]["failed"] = 2
    job.now_s = times.seconds_of(AT.format(9)) + 59
    assert isinstance(job.backend.status(job.handle), Waiting)
    job.now_s += 1

    assert isinstance(job.backend.status(job.handle), Ended)


def test_the_next_attempt_ends_if_it_cannot_start(tmp_path: Path):
    job = Tries(tmp_path)
    job.fails(3, 0, 1)
    job.again(0, 1, is_running=False)
    job.hold(0, "ImagePullBackOff", "not found")
    job.now_s += 1e4

    ended = job.backend.status(job.handle)

    assert isinstance(ended, Ended)
    assert ended.failure
    assert "it cannot start: node 0: " in ended.failure.message
    assert job.has_stopped


@pytest.mark.parametrize("engine", ENGINES)
def test_the_end_beside_a_sidecar_stays_when_the_pods_are_gone(engine: str, tmp_path: Path):
    job = Job(engine, tmp_path)
    with_sidecar(job, 3)
    assert job.backend.status(job.handle).state is FAILED
    assert job.has_stopped

    job.remove(0, 1)
    job.set_phase(
        "Suspended" if engine in QUEUED else "Aborted" if engine == "volcano" else "Failed"
    )
    ended = job.backend.status(job.handle)

    assert isinstance(ended, Ended)
    assert (ended.state, ended.exit_code) == (FAILED, 3)


def test_a_machine_that_is_away_for_a_moment_ends_no_job(tmp_path: Path):
    """Its pods wait for room all day; that no machine fits counts from when it is said."""
    job = Job("job", tmp_path)
    unschedulable(NO_MACHINE)(job)
    job.pod_event(0, "FailedScheduling", NO_ROOM, at=8)
    job.pod_event(0, "FailedScheduling", NO_MACHINE, at=9)
    job.now_s += 599
    assert isinstance(job.backend.status(job.handle), Waiting)

    job.now_s += 1
    assert isinstance(job.backend.status(job.handle), Ended)


def test_a_registry_that_was_away_ends_no_job_when_it_comes_back(tmp_path: Path):
    """Its first answers may be refusals; only these count."""
    job = Job("job", tmp_path)
    job.hold(1, "ErrImagePull", "manifest unknown")
    for at, why in ((3, "503 Service Unavailable"), (9, "manifest unknown")):
        job.pod_event(1, "Failed", f'Failed to pull image "{IMAGE}": {why}', at=at)
    job.now_s += 599
    assert isinstance(job.backend.status(job.handle), Waiting)

    job.now_s += 1
    assert isinstance(job.backend.status(job.handle), Ended)


@pytest.mark.parametrize(
    ("message", "nodes", "expected"),
    [
        (SMALL_QUOTA, 1, Outlook.OPEN),
        (SMALL_QUOTA, 2, Outlook.STUCK),
        (
            "exceeded quota: q, requested: memory=16Gi, used: memory=0, limited: memory=15G",
            1,
            "stuck",
        ),
        (
            "exceeded quota: q, requested: cpu=500m,pods=1, used: cpu=0, limited: cpu=1,pods=9",
            2,
            "open",
        ),
        (
            "exceeded quota: q, requested: count/jobs.batch=1, limited: count/jobs.batch=1",
            3,
            "open",
        ),
        (
            "exceeded quota: q, requested: services=1, used: services=5, limited: services=5",
            8,
            "open",
        ),
        (
            "exceeded quota: q, requested: memory=4Gi, used: memory=0, limited: memory=64e9",
            1,
            "open",
        ),
        ("exceeded quota: q, requested: x=., used: x=0, limited: x=.", 1, "open"),
        ("exceeded quota: q, requested: x=1.2.3, used: x=, limited: x=0", 1, "open"),
        ("exceeded quota", 9, "open"),
        ('Pod "x" is invalid: spec.y: Forbidden: no', 1, "stuck"),
        ('failed calling webhook "x": denied: timeout', 1, "open"),
    ],
)
def test_a_quota_ends_a_wait_only_if_it_has_the_room(message: str, nodes: int, expected: str):
    assert reasons.outlook_of_refusal(message, nodes) == expected


@pytest.mark.parametrize("retries", [0, 1, 2])
def test_a_jobset_fails_when_its_restarts_are_used_up(retries: int, tmp_path: Path):
    """The worker is drained in the first attempt, which costs no restart; then its script fails."""
    job = Job("jobset", tmp_path, retries=retries)
    (group,) = job.job["spec"]["replicatedJobs"]
    for attempt in range(retries + 2):
        job.run(0, 1)
        job.pods[1]["status"].pop("conditions")
        if attempt == 0:
            job.condition(1, "DisruptionTarget", "True", "EvictionByEvictionAPI")
        job.end(0, 3)
        job.end(1, 143)
        reason = jobset.end_of_job(group["template"]["spec"], [*job.pods.values()])
        restarted = jobset.after_failure(job.job, reason)
        if not restarted:
            break
        job.backend._pod_states.clear()
        assert job.backend.status(job.handle).state is RUNNING
        job.job["status"] = restarted
    job.set_phase("Failed", **restarted)
    ended = job.backend.status(job.handle)

    assert attempt == (retries and retries + 1)
    assert isinstance(ended, Ended)
    assert (ended.state, ended.exit_code) == (FAILED, 3)


@pytest.mark.parametrize("engine", QUEUED)
def test_a_worker_that_fails_at_once_on_a_slow_clock_was_not_left_out(engine: str, tmp_path: Path):
    """Its machine tells when it ended, and the API server when the pods were created."""
    job = Job(engine, tmp_path)
    job.run(0, 1)
    job.end(1, 1)
    ended = job.pods[1]["status"]["containerStatuses"][0]["state"]["terminated"]
    ended |= {"startedAt": AT.format(0), "finishedAt": AT.format(0)}
    job.end(0, 1)
    job.set_phase("Failed")
    native = job.backend.status(job.handle)

    assert isinstance(native, Ended)
    assert native.reason == ""


@pytest.mark.parametrize("engine", ["volcano", "jobset", "job"])
def test_a_loss_of_an_earlier_attempt_explains_nothing(engine: str, tmp_path: Path):
    job = Job(engine, tmp_path)
    with_retries(job)
    job.remove(0, 1)
    job.pod_event(1, "Preempted", "Preempted by pod x", kind="Normal")
    job.event(f"{job.name}{job.engine.makers[-1]}", "FailedCreate", QUOTA, at=1)
    job.set_phase("Failed", retryCount=2, restarts=1)

    native = job.backend.status(job.handle)
    assert isinstance(native, Ended)
    assert native.reason == ""


def test_a_failed_mpi_job_is_no_missing_pod(tmp_path: Path):
    """Its operator deletes workers that still run, and has one reason for both."""
    job = Job("mpi-operator", tmp_path)
    job.run(0, 1)
    job.end(0, 3)
    job.remove(1)
    job.set_phase("Failed")
    job.event(job.name, "MPIJobFailed", "MPIJob lab/x has failed", at=6)

    native = job.backend.status(job.handle)
    assert isinstance(native, Ended)
    assert native.reason == ""


def test_a_wait_lasts_since_the_first_of_its_repeated_events(tmp_path: Path):
    job = Job("job", tmp_path)
    job.place(0)
    job.pod_event(0, "FailedMount", "no such PVC", at=9)
    event = job.client.objects[f"{EVENTS}/{len(job.client.objects) - 1}"]
    event["firstTimestamp"] = AT.format(4)

    native = job.backend.status(job.handle)
    assert isinstance(native, Waiting)
    assert native.wait
    assert native.wait.since == "2026-11-21T10:00:04.000Z"


def test_the_policy_of_a_cluster_is_blamed_only_for_a_pod_that_it_refused():
    text = "open /x: permission denied"
    assert waiting.trouble(WaitPhase.STARTING, "", "CreateContainerError", text).hint == ""


@pytest.mark.parametrize("text", ["in 1.2.3s", "in ..s", f"in {'9' * 400}s"])
def test_a_forged_duration_of_a_pull_is_no_error(text: str):
    assert waiting.pull_time(0, [{"reason": "Pulled", "message": f"x {text}"}]) == ""


@pytest.mark.parametrize(
    "text", ["", "[]", '{"exit_code": "x", "message": ""}', '{"message": ""}',
             '{"exit_code": Infinity, "message": ""}',
             '{"exit_code": 1' + 400 * "0" + ', "message": ""}']
)  # fmt: skip
def test_a_decision_that_others_have_changed_is_none(text: str):
    assert ending.load(text) is None
