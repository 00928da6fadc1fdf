"""Kubernetes itself: the pods of one Indexed Job are the nodes, and a headless Service names them.

Facts: the types of ``batch/v1`` up to Kubernetes 1.37, and the documentation of Jobs. The head
alone decides how a job ends: the controller also waits for pods that never end, such as one on a
machine that is gone. With retries, all entries of an attempt fail with the head, so that the
controller, which starts each failed index again, starts the whole job again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cloudjob.backends.kubernetes import engine as engines
from cloudjob.backends.kubernetes import pod
from cloudjob.backends.kubernetes.engine import Engine, Resource, Stage
from cloudjob.backends.kubernetes.pod import ENTRY_PATH, FAILURES, JOB_LABEL, Names
from cloudjob.model.status import JobState
from cloudjob.model.submission import Submission
from jobentry.contract import names

RESOURCE = Resource("batch", "v1", "jobs", "Job")
INDEX = "batch.kubernetes.io/job-completion-index"
# The Job controller sets this variable in each pod.
_INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
_COMMAND = f'{names.VC_TASK_INDEX}="${_INDEX_VARIABLE}" exec sh {ENTRY_PATH}/boot.sh "$@"'
# This one has the number of failed pods of the index, which the controller annotates. A job may not
# set a variable with this prefix.
_FAILURES_VARIABLE = "CLOUDJOB_INDEX_FAILURES"
_NUMBERED = f"{names.CLOUDJOB_ATTEMPT}=$((${{{_FAILURES_VARIABLE}:-0}} + 1)) {_COMMAND}"
# A list of indexes is in ascending order: "0,2-5".
_HAS_HEAD = re.compile(r"0(?!\d)", re.ASCII)


class IndexedJob(Engine):
    """A Job of Kubernetes, without any operator."""

    name = "job"
    resource = RESOURCE
    # The first version in which backoffLimitPerIndex and podReplacementPolicy are on.
    min_version = (1, 29)
    restarts_each_node = True
    needs_services = True
    reads_pods = True
    kueue_resumes = True
    queues_in_kueue = True
    # On since 1.31. Older servers drop it, and then pods that outlive the head end by themselves.
    optional = ("successPolicy",)
    size = ("spec", "completions")

    def hosts(self, name: str, nodes: int) -> tuple[str, ...]:
        """Return the network names of the nodes: the pods' host names in the Service's domain."""
        return tuple(f"{name}-{index}.{name}" for index in range(nodes))

    def manifest(
        self, submission: Submission, job_names: Names, *, has_delivery: bool
    ) -> dict[str, Any]:
        """Return the job's manifest."""
        spec = submission.spec
        hosts = self.hosts(job_names.name, spec.nodes)
        body = body_of(
            submission, job_names, hosts, has_delivery=has_delivery, retries=spec.retries
        )
        body["template"]["spec"].setdefault("subdomain", job_names.name)
        return engines.queued_manifest(RESOURCE, submission, job_names, body)

    def services(self, submission: Submission, job_names: Names) -> list[dict[str, Any]]:
        """Return the Service whose domain has the names of all nodes."""
        labels = pod.labels(submission)
        return [
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": job_names.name, "namespace": job_names.namespace, **labels},
                "spec": {
                    "clusterIP": "None",
                    # The head looks up the workers before these are ready.
                    "publishNotReadyAddresses": True,
                    "selector": {JOB_LABEL: job_names.job},
                },
            }
        ]

    def node_of(self, name: str, item: Mapping[str, Any]) -> int | None:
        """Return the node number of this pod, which the controller writes into an annotation."""
        return index_of(item)

    def stage(self, job: Mapping[str, Any], is_cancelled: bool) -> Stage:
        """Return the state of a job."""
        status = job.get("status") or {}
        conditions = {str(item.get("type")): item for item in status.get("conditions") or ()}
        held = engines.held_conditions(status)
        native, state = _state(status, held, is_cancelled=is_cancelled)
        condition = held.get("Failed") or held.get("Complete") or {}
        ended_at = status.get("completionTime") or condition.get("lastTransitionTime") or ""
        resumed = conditions.get("Suspended") or {}
        retries = int((job.get("spec") or {}).get("backoffLimitPerIndex") or 0)
        is_again = bool(retries and status.get("failed"))
        is_resumed = resumed.get("status") == "False" and not is_again
        return Stage(
            state=state,
            native=native,
            message=engines.message_of(condition) if state is JobState.FAILED else "",
            ended_at=str(ended_at) if state.is_final else "",
            started_at=str(status.get("startTime") or "") if state is JobState.RUNNING else "",
            attempt_at=str(resumed.get("lastTransitionTime") or "") if is_resumed else "",
            is_again=is_again,
            has_asked="Suspended" in held,
            may_restart=retries > 0,
            attempts=retries and retries + 1,
        )


def body_of(
    submission: Submission,
    job_names: Names,
    hosts: tuple[str, ...],
    *,
    has_delivery: bool,
    retries: int = 0,
) -> dict[str, Any]:
    """Return the ``spec`` of the Job whose pods are the nodes.

    Args:
        retries: How many times the controller starts each node again.
    """
    spec = submission.spec
    variables = pod.variables(submission, hosts, job_names.name)
    command = _COMMAND
    if retries:
        command = _NUMBERED
        failures = {_FAILURES_VARIABLE: f"metadata.annotations['{FAILURES}']"}
        plain_variables = {**variables.shown, names.CLOUDJOB_ENDS_TOGETHER: "1"}
        variables = variables._replace(shown=plain_variables, fields={**pod.FIELDS, **failures})
    words = ["sh", "-c", command, "jobentry"]
    template = pod.template(submission, job_names, variables, words, has_delivery=has_delivery)
    return {
        "completionMode": "Indexed",
        "completions": spec.nodes,
        "parallelism": spec.nodes,
        # The entries notice that a node has failed. With a limit for the whole Job, the
        # controller would end the head before it has written its record.
        "backoffLimitPerIndex": retries,
        # A pod is replaced only when it has ended: two attempts of a node never overlap.
        "podReplacementPolicy": "Failed",
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "template": template,
    }


def index_of(item: Mapping[str, Any]) -> int | None:
    """Return the index of a pod of an Indexed Job; None for any other pod."""
    index = str((item["metadata"].get("annotations") or {}).get(INDEX) or "")
    return int(index) if index.isascii() and index.isdecimal() else None


def _state(
    status: Mapping[str, Any], held: Mapping[str, Any], *, is_cancelled: bool
) -> tuple[str, JobState]:
    """Return the native state and ours.

    Args:
        held: The conditions that are true, by type.
    """
    # The controller announces an end with the last two, and reports it when all pods have ended.
    ends = ("Complete", "Failed", "SuccessCriteriaMet", "FailureTarget")
    end = next((kind for kind in ends if kind in held), "")
    # A worker that fails after its head has succeeded changes nothing.
    if end == "Complete" or _has_head(status, "completedIndexes"):
        return end or "Running, but its head has succeeded", JobState.SUCCEEDED
    if end == "Failed" or _has_head(status, "failedIndexes"):
        state = JobState.CANCELLED if is_cancelled else JobState.FAILED
        return end or "Running, but its head has failed", state
    if "Suspended" in held:
        return "Suspended", of_suspended(status, is_cancelled=is_cancelled)
    if end or _has_begun(status):
        return end or "Running", JobState.RUNNING
    return "Pending" if status else "new", JobState.PENDING


def of_suspended(status: Mapping[str, Any], *, is_cancelled: bool) -> JobState:
    """Return the state of a suspended job, whose pods may still end."""
    if status.get("active") or status.get("terminating"):
        return JobState.RUNNING
    # Suspended by a queue or a user, who may resume it.
    return JobState.CANCELLED if is_cancelled else JobState.PENDING


def _has_begun(status: Mapping[str, Any]) -> bool:
    """Whether a pod runs, or has run."""
    return any(status.get(key) for key in ("ready", "succeeded", "failed"))


def _has_head(status: Mapping[str, Any], key: str) -> bool:
    return _HAS_HEAD.match(str(status.get(key) or "")) is not None
