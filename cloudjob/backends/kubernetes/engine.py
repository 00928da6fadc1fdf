"""What all operators have in common: resources, manifests and states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from cloudjob.backends.kubernetes import pod as pods
from cloudjob.backends.kubernetes.pod import CONTAINER, JOB_LABEL, Names
from cloudjob.backends.kubernetes.strategic_merge import merged
from cloudjob.model.status import JobState
from cloudjob.model.submission import Submission

if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec


class Resource(NamedTuple):
    """A resource of the API.

    Args:
        group: Empty for the API's own core.
        plural: Its name in paths.
    """

    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        """What a manifest says of it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str, name: str = "") -> str:
        """Return the path of all such objects of a namespace, or of one."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        tail = f"/{name}" if name else ""
        return f"{root}/namespaces/{namespace}/{self.plural}{tail}"


class Stage(NamedTuple):
    """The state of a job as its operator reports it.

    Args:
        message: Why, where the operator says so.
        ended_at: RFC 3339 as the API writes it; empty when it has not ended, or not said when.
        started_at: When it began to run; empty when that is not said.
        attempt_at: When the last attempt began; empty while there was only one.
        has_asked: Whether the operator itself ended the pods.
    """

    state: JobState
    native: str
    message: str = ""
    ended_at: str = ""
    started_at: str = ""
    attempt_at: str = ""
    has_asked: bool = False


def own_selector(called: Names) -> str:
    """Return the selector of the label that we give to pods."""
    return f"{JOB_LABEL}={called.job}"


def no_services(_submission: Submission, _called: Names) -> list[dict[str, Any]]:
    """Return no services: the operator gives network names to all nodes."""
    return []


class Engine(NamedTuple):
    """An operator.

    Args:
        hosts: The network names of the nodes, from the job's name and how many there are.
        manifest: The job's manifest.
        left_out: Variables that the operator gives to each pod.
        makes_key: Whether the operator makes a key for ssh.
        node_of: The number of the node that a pod is, from the job's name and the pod; None for
            none.
        stage: Where a job stands, from its manifest with its status, and whether we have
            cancelled it.
        stop: What ends the pods of a job and keeps its manifest: method, resource, name and body.
        no_retries: Why it cannot start a job again; empty when it can.
        container: The name that the container has in its pods.
        launchers: Those that it can be used with; empty for all.
        runs: What these are, in words.
        selector: What finds the pods of a job, as a selector of labels.
        services: The services that the nodes need and the operator does not make.
        is_early: Whether it takes a job for ended while the head may still have work to do.
    """

    name: str
    resource: Resource
    hosts: Callable[[str, int], tuple[str, ...]]
    manifest: Callable[[Submission, Names, bool], dict[str, Any]]
    environment: Callable[[Submission, Names, int], dict[str, str]]
    makes_key: bool
    node_of: Callable[[str, Mapping[str, Any]], int | None]
    stage: Callable[[Mapping[str, Any], bool], Stage]
    stop: Callable[[Mapping[str, Any]], tuple[str, Resource, str, dict[str, Any]]]
    no_retries: str = ""
    container: str = CONTAINER
    launchers: tuple[str, ...] = ()
    runs: str = ""
    selector: Callable[[Names], str] = own_selector
    services: Callable[[Submission, Names], list[dict[str, Any]]] = no_services
    is_early: bool = False


def numbered(pod: str, prefix: str) -> int | None:
    """Return the number that follows the prefix in the name of a pod."""
    number = pod.removeprefix(prefix)
    if pod.startswith(prefix) and number.isascii() and number.isdecimal():
        return int(number)
    return None


def job_manifest(
    resource: Resource, submission: Submission, called: Names, body: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the object that an operator takes, with what the job file adds to it.

    Args:
        body: The value of ``spec``.
    """
    metadata = {"name": called.name, "namespace": called.namespace}
    made = {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": {**metadata, **pods.metadata(submission)},
        "spec": body,
    }
    patched = dict(merged(made, submission.spec.kubernetes.job))
    # After the patch, which must not change them: they find the job again.
    patched["metadata"] = pods.with_own_labels(patched.get("metadata"), submission) | metadata
    return patched


def run_policy(spec: JobSpec, own: Mapping[str, Any], *, deadline_s: int = 0) -> dict[str, Any]:
    """Return the ``runPolicy`` of an operator of Kubeflow's kind.

    Args:
        own: What the operator's own policy begins with.
        deadline_s: When the operator ends the job; 0 is never.
    """
    policy: dict[str, Any] = dict(own)
    options = spec.kubernetes
    if options.keep_min:
        policy["ttlSecondsAfterFinished"] = round(options.keep_min * 60)
    if deadline_s:
        policy["activeDeadlineSeconds"] = deadline_s
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
    held = [item for item in status.get("conditions") or [] if item.get("status") == "True"]
    # Ordered by time; earlier conditions stay true beside later ones.
    by_type = {str(item.get("type")): item for item in held}
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
        # Suspended by somebody; it may be resumed.
        state = JobState.PENDING
    if name == "Failed" and is_cancelled:
        state = JobState.CANCELLED
    words = [str(condition.get(key) or "") for key in ("reason", "message")]
    ended_at = status.get("completionTime") or condition.get("lastTransitionTime") or ""
    return Stage(
        state=state,
        native=name,
        message=": ".join(word for word in words if word) if state is JobState.FAILED else "",
        ended_at=str(ended_at) if state.is_final else "",
        started_at=str(status.get("startTime") or "") if state is JobState.RUNNING else "",
        has_asked=name == "Suspended",
    )
