"""Volcano: one task whose pods are the nodes; ModelArts' variables are those of Volcano."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloudjob.backends.kubernetes import engine as engines
from cloudjob.backends.kubernetes import pod
from cloudjob.backends.kubernetes.engine import Engine, Resource, Stage, numbered
from cloudjob.backends.kubernetes.pod import Names
from cloudjob.model.status import JobState
from cloudjob.model.submission import Submission
from jobentry.contract import names

RESOURCE = Resource("batch.volcano.sh", "v1alpha1", "jobs", "Job")
COMMAND = Resource("bus.volcano.sh", "v1alpha1", "commands", "Command")
POD_GROUP = Resource("scheduling.volcano.sh", "v1beta1", "podgroups", "PodGroup")
TASK = "worker"

# The plugins env and svc give these to each pod.
_OWN_VARIABLES = (names.VC_WORKER_HOSTS, names.VC_WORKER_NUM)
_STATES = {
    "": JobState.PENDING,
    "Pending": JobState.PENDING,
    "Inqueue": JobState.PENDING,
    "Running": JobState.RUNNING,
    "Restarting": JobState.RUNNING,
    "Completing": JobState.RUNNING,
    "Aborting": JobState.RUNNING,
    "Terminating": JobState.RUNNING,
    "Completed": JobState.SUCCEEDED,
    "Failed": JobState.FAILED,
    "Aborted": JobState.FAILED,
    "Terminated": JobState.FAILED,
}


class Volcano(Engine):
    """Volcano."""

    name = "volcano"
    resource = RESOURCE
    size = ("spec", "minAvailable")

    def hosts(self, name: str, nodes: int) -> tuple[str, ...]:
        """Return the network names of the nodes, as the plugin svc makes them."""
        return tuple(f"{name}-{TASK}-{node}.{name}" for node in range(nodes))

    def manifest(
        self, submission: Submission, job_names: Names, *, has_delivery: bool
    ) -> dict[str, Any]:
        """Return the job's manifest."""
        spec = submission.spec
        options = spec.kubernetes
        hosts = self.hosts(job_names.name, spec.nodes)
        env = pod.variables(submission, hosts, job_names.name, _OWN_VARIABLES)
        command = ["sh", f"{pod.ENTRY_PATH}/boot.sh"]
        template = pod.template(submission, job_names, env, command, has_delivery=has_delivery)
        body: dict[str, Any] = {
            "schedulerName": "volcano",
            # All nodes or none: a part of a job would only block resources.
            "minAvailable": spec.nodes,
            "maxRetry": spec.retries + 1,
            # A node looks up the others by name before they are ready.
            "plugins": {"env": [], "svc": ["--publish-not-ready-addresses=true"]},
            "policies": _policies(spec.retries),
            "tasks": [{"name": TASK, "replicas": spec.nodes, "template": template}],
        }
        if options.queue:
            body["queue"] = options.queue
        if options.priority_class:
            body["priorityClassName"] = options.priority_class
        body.update(engines.kept_after_end(options))
        return engines.job_manifest(RESOURCE, submission, job_names, body)

    def node_of(self, name: str, pod_item: Mapping[str, Any]) -> int | None:
        """Return the node number of this pod."""
        return numbered(pod_item["metadata"]["name"], f"{name}-{TASK}-")

    def stage(self, job: Mapping[str, Any], is_cancelled: bool) -> Stage:
        """Return the state of a job."""
        status = job.get("status") or {}
        current = status.get("state") or {}
        phase = str(current.get("phase") or "")
        state = _STATES.get(phase, JobState.UNKNOWN)
        message = engines.message_of(current)
        if state is JobState.FAILED and is_cancelled:
            state = JobState.CANCELLED
        elif phase in ("Aborted", "Terminated"):
            message = message or "a pod was evicted, or the job was suspended"
        changed_at = str(current.get("lastTransitionTime") or "")
        # Volcano counts a restart before it begins, and writes the phases after it with new times.
        is_again = bool(status.get("retryCount")) and not state.is_final
        return Stage(
            state=state,
            native=phase or "new",
            message=message,
            ended_at=changed_at if state.is_final else "",
            started_at=changed_at if phase == "Running" else "",
            attempt_at=changed_at if is_again else "",
            has_asked=phase in ("Aborted", "Terminated") or bool(status.get("retryCount")),
            may_restart=int((job.get("spec") or {}).get("maxRetry") or 0) > 1,
        )

    def stop(self, job: Mapping[str, Any]) -> tuple[str, Resource, str, dict[str, Any]]:
        """Return the command object that Volcano's own `vcctl job suspend` creates."""
        metadata = job["metadata"]
        target = {
            "apiVersion": RESOURCE.api_version,
            "kind": RESOURCE.kind,
            "name": metadata["name"],
            "uid": metadata["uid"],
            "controller": True,
        }
        body = {
            "apiVersion": COMMAND.api_version,
            "kind": COMMAND.kind,
            "metadata": {
                "generateName": f"{metadata['name']}-abort-",
                "namespace": metadata["namespace"],
                "ownerReferences": [target],
            },
            "action": "AbortJob",
            "target": target,
        }
        return "POST", COMMAND, "", body


def _policies(retries: int) -> list[dict[str, str]]:
    """Return the policies for a lost pod.

    The entries notice by themselves that a node has failed, and the head then writes its record, so
    no policy may end it before. But Volcano replaces a deleted pod with a new one, which would wait
    for nodes that have ended.
    """
    if not retries:
        return [{"event": "PodEvicted", "action": "AbortJob"}]
    return [
        {"event": "PodEvicted", "action": "RestartJob"},
        {"event": "PodFailed", "action": "RestartJob"},
    ]
