"""JobSet: one Indexed Job whose pods are the nodes, with a Service, and restarted as a whole.

Facts: ``jobset.x-k8s.io/v1alpha2``, the only version up to JobSet 0.12, and its documentation. Its
controller makes the Service.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloudjob.backends.kubernetes import engine as engines
from cloudjob.backends.kubernetes.engine import Engine, Resource, Stage
from cloudjob.backends.kubernetes.indexed_job import body_of, index_of, of_suspended
from cloudjob.backends.kubernetes.pod import Names
from cloudjob.model.status import JobState
from cloudjob.model.submission import Submission

RESOURCE = Resource("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet")
# The only Job of the set; its index and this name are part of the pods' host names.
_GROUP = "node"
# The first of these is planned as the later name of the second.
_SUCCEEDED = ("Complete", "Completed")
# A pod that the cluster ends: preempted, drained, or its machine is gone.
_DISRUPTED = [{"type": "DisruptionTarget", "status": "True"}]


class JobSet(Engine):
    """JobSet, which restarts all nodes of a job together."""

    name = "jobset"
    resource = RESOURCE
    # As for the Jobs that it makes.
    min_version = (1, 29)
    reads_pods = True
    kueue_resumes = True
    queues_in_kueue = True
    # The Job makes the pods.
    makers = ("", f"-{_GROUP}-0")
    size = ("spec", "replicatedJobs", 0, "template", "spec", "completions")

    def hosts(self, name: str, nodes: int) -> tuple[str, ...]:
        """Return the network names of the nodes: the pods' host names in the Service's domain."""
        return tuple(f"{name}-{_GROUP}-0-{index}.{name}" for index in range(nodes))

    def manifest(
        self, submission: Submission, job_names: Names, *, has_delivery: bool
    ) -> dict[str, Any]:
        """Return the job's manifest."""
        spec = submission.spec
        hosts = self.hosts(job_names.name, spec.nodes)
        job = body_of(submission, job_names, hosts, has_delivery=has_delivery)
        policy: dict[str, Any] = {
            "maxRestarts": spec.retries,
            # The next attempt starts when the last one has ended: two never write the same outputs.
            "restartStrategy": "BlockingRecreate",
        }
        if spec.retries:
            rule = {"action": "FailJob", "onPodConditions": _DISRUPTED}
            job["podFailurePolicy"] = {"rules": [rule]}
            policy["rules"] = [
                {
                    "name": "disrupted",
                    "action": "RestartJobSetAndIgnoreMaxRestarts",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                }
            ]
        body = {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [{"name": _GROUP, "replicas": 1, "template": {"spec": job}}],
            "failurePolicy": policy,
        }
        return engines.queued_manifest(RESOURCE, submission, job_names, body)

    def node_of(self, name: str, item: Mapping[str, Any]) -> int | None:
        """Return the node number of this pod, which the Job's controller writes into it."""
        return index_of(item)

    def stage(self, job: Mapping[str, Any], is_cancelled: bool) -> Stage:
        """Return the state of a job; only its pods tell that it runs."""
        status = job.get("status") or {}
        held = engines.held_conditions(status)
        native, state = _state(status, held, is_cancelled=is_cancelled)
        condition = held.get(native, {}) if state.is_final else {}
        return Stage(
            state=state,
            native=native,
            message=engines.message_of(condition) if state is JobState.FAILED else "",
            ended_at=str(condition.get("lastTransitionTime") or ""),
            is_again=bool(status.get("restarts")),
            has_asked="Suspended" in held,
            may_restart=bool(_restarts(job)),
        )


def _restarts(job: Mapping[str, Any]) -> int:
    policy = (job.get("spec") or {}).get("failurePolicy") or {}
    return int(policy.get("maxRestarts") or 0)


def _state(
    status: Mapping[str, Any], held: Mapping[str, Any], *, is_cancelled: bool
) -> tuple[str, JobState]:
    """Return the native state and ours.

    Args:
        held: The conditions that are true, by type.
    """
    success = next((kind for kind in _SUCCEEDED if kind in held), "")
    if success:
        return success, JobState.SUCCEEDED
    if "Failed" in held:
        return "Failed", JobState.CANCELLED if is_cancelled else JobState.FAILED
    if "Suspended" in held:
        jobs = status.get("replicatedJobsStatus") or ()
        active = sum(int(item.get("active") or 0) for item in jobs)
        return "Suspended", of_suspended({"active": active}, is_cancelled=is_cancelled)
    return "Pending" if status else "new", JobState.PENDING
