"""Parts that Kubeflow-style operators share: replicas, run policy and conditions. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cloudjob.backends.kubernetes.engine import Stage, held_conditions, kept_after_end, message_of
from cloudjob.backends.kubernetes.pod import ENTRY_PATH
from cloudjob.model.status import JobState
from jobentry.contract import names

if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

_BOOT = f'exec sh {ENTRY_PATH}/boot.sh "$@"'
# All workers share one template; the name of a pod ends with its index.
_INDEX = f"$((${{{names.MA_CURRENT_INSTANCE_NAME}##*-}} + 1))"

SIZE = ("spec", "runPolicy", "schedulingPolicy", "minAvailable")


def head_command(setup: str) -> list[str]:
    """Return the command of node 0, which runs a line of shell and starts the entry."""
    return ["sh", "-c", f"{setup}; {_BOOT}", "jobentry"]


def worker_command(setup: str = "") -> list[str]:
    """Return the command of the other nodes, which also determines the number of its node."""
    shell = f"{names.VC_TASK_INDEX}={_INDEX} {_BOOT}"
    return ["sh", "-c", f"{setup}; {shell}" if setup else shell, "jobentry"]


def replicas(count: int, template: dict[str, Any]) -> dict[str, Any]:
    """Return ``count`` pods of one template."""
    # The operators have a restart policy of their own, and warn about the pod's.
    policy = template["spec"].pop("restartPolicy")
    return {"replicas": count, "restartPolicy": policy, "template": template}


def run_policy(spec: JobSpec, policy_of_kind: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``runPolicy`` of a Kubeflow-style operator.

    Args:
        policy_of_kind: The fields that only this operator needs; they come first.
    """
    options = spec.kubernetes
    policy: dict[str, Any] = {**policy_of_kind, **kept_after_end(options)}
    scheduling: dict[str, Any] = {"minAvailable": spec.nodes}
    if options.queue:
        scheduling["queue"] = options.queue
    if options.priority_class:
        scheduling["priorityClass"] = options.priority_class
    policy["schedulingPolicy"] = scheduling
    return policy


def stage_of_conditions(job: Mapping[str, Any], is_cancelled: bool) -> Stage:
    """Return the state of a job from the conditions that Kubeflow's operators write."""
    status = job.get("status") or {}
    # Ordered by time; earlier conditions stay true beside later ones.
    by_type = held_conditions(status)
    for name, state in (
        ("Failed", JobState.FAILED),
        ("Succeeded", JobState.SUCCEEDED),
        ("Suspended", JobState.CANCELLED),
        ("Running", JobState.RUNNING),
        ("Restarting", JobState.RUNNING),
        ("Created", JobState.PENDING),
    ):
        if name in by_type:
            return _stage(name, state, by_type[name], status, is_cancelled)
    if by_type:
        return Stage(JobState.UNKNOWN, ", ".join(by_type))
    return Stage(JobState.PENDING, "new")


def _stage(
    name: str,
    state: JobState,
    condition: Mapping[str, Any],
    status: Mapping[str, Any],
    is_cancelled: bool,
) -> Stage:
    if name == "Suspended" and not is_cancelled:
        # Suspended by a user, who may resume it.
        state = JobState.PENDING
    if name == "Failed" and is_cancelled:
        state = JobState.CANCELLED
    ended_at = status.get("completionTime") or condition.get("lastTransitionTime") or ""
    return Stage(
        state=state,
        native=name,
        message=message_of(condition) if state is JobState.FAILED else "",
        ended_at=str(ended_at) if state.is_final else "",
        started_at=str(status.get("startTime") or "") if state is JobState.RUNNING else "",
        has_asked=name == "Suspended",
    )
