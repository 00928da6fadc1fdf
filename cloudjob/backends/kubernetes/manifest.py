"""What the manifests of several operators have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloudjob.backends.kubernetes import pod
from cloudjob.backends.kubernetes.engine import Resource
from cloudjob.backends.kubernetes.merge import merged
from cloudjob.backends.kubernetes.pod import Names
from cloudjob.model.submission import Submission

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec


def of_job(
    resource: Resource, submission: Submission, called: Names, body: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the object that an operator takes, with what the job file adds to it.

    Args:
        body: What stands under ``spec``.
    """
    options = submission.spec.section("kubernetes")
    metadata = {"name": called.name, "namespace": called.namespace}
    made = {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": {**metadata, **pod.metadata(submission, options)},
        "spec": body,
    }
    patched = dict(merged(made, options["job"]))
    # Whatever a patch replaces: by these the job is found again.
    patched["metadata"] = pod.with_own_labels(patched.get("metadata"), submission) | metadata
    return patched


def run_policy(
    spec: JobSpec, options: Mapping[str, object], own: Mapping[str, Any], *, deadline_s: int = 0
) -> dict[str, Any]:
    """Return the ``runPolicy`` of an operator of Kubeflow's kind.

    Args:
        own: What the operator's own policy begins with.
        deadline_s: When the operator ends the job; 0 is never.
    """
    policy: dict[str, Any] = dict(own)
    minutes = options["keep_min"]
    assert isinstance(minutes, (int, float))
    if minutes:
        policy["ttlSecondsAfterFinished"] = round(minutes * 60)
    if deadline_s:
        policy["activeDeadlineSeconds"] = deadline_s
    scheduling: dict[str, Any] = {"minAvailable": spec.nodes}
    if options["queue"]:
        scheduling["queue"] = options["queue"]
    if options["priority_class"]:
        scheduling["priorityClass"] = options["priority_class"]
    policy["schedulingPolicy"] = scheduling
    return policy
