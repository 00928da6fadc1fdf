"""The interface of all engines: resources, manifests and states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from cloudjob.backends.kubernetes import pod as pods
from cloudjob.backends.kubernetes.pod import CONTAINER, JOB_LABEL, Names
from cloudjob.backends.kubernetes.strategic_merge import merged
from cloudjob.model.sections import Kubernetes
from cloudjob.model.status import JobState
from cloudjob.model.submission import Submission

if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

# The annotations of a job's object after which minutes cloudjob ends it if no node starts.
START_TIMEOUT = "cloudjob.start-timeout-min"
PENDING = "cloudjob.pending-min"
# The label that puts a job into a queue of Kueue.
KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"


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
        """The ``apiVersion`` in a manifest."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str, name: str = "") -> str:
        """Return the path of all such objects of a namespace, or of one."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        tail = f"/{name}" if name else ""
        return f"{root}/namespaces/{namespace}/{self.plural}{tail}"


CONFIG_MAP = Resource("", "v1", "configmaps", "ConfigMap")
SECRET = Resource("", "v1", "secrets", "Secret")
SERVICE = Resource("", "v1", "services", "Service")


class Stage(NamedTuple):
    """The state of a job as its operator reports it.

    Args:
        message: The reason, if the operator gives one.
        ended_at: RFC 3339 as the API writes it; empty if it has not ended, or if unknown.
        started_at: When it began to run; empty if unknown.
        attempt_at: When the last attempt began; empty while there was only one, or if unknown.
        is_again: Whether this is not the first attempt.
        has_asked: Whether the operator itself ended the pods.
        may_restart: Whether the operator may start the job again after a failure.
        attempts: How many attempts the job may have; 0 if pods do not tell which one this is.
        is_unwatched: Whether only the record of the head can say that it has succeeded.
    """

    state: JobState
    native: str
    message: str = ""
    ended_at: str = ""
    started_at: str = ""
    attempt_at: str = ""
    is_again: bool = False
    has_asked: bool = False
    may_restart: bool = False
    attempts: int = 0
    is_unwatched: bool = False


class Engine(ABC):
    """What runs a job, an operator or Kubernetes: its resource, and how its pods become nodes.

    Attributes:
        min_version: The first version of Kubernetes that it works with; 0.0 for any.
        makes_key: Whether the operator makes a key for ssh.
        no_retries: Why it cannot restart a job; empty if it can.
        restarts_each_node: Whether it restarts nodes one by one, so that a job ends as a whole only
            by its entries.
        no_pod_metadata: Why pods have no labels and annotations of the user; empty if they have.
        makers: What follows the job's name in the names of the objects that make its pods.
        container: The name that the container has in its pods.
        launchers: The launchers that it supports; empty for all.
        runs: What these launchers start, for messages.
        needs_services: Whether the nodes need services that the operator does not make.
        early_ends: How it considers a job ended while the head may still have work to do.
        reads_pods: Whether only the pods tell that the job runs, as its controller counts them.
        kueue_resumes: Whether Kueue manages such jobs, and resumes one that we suspend.
        queues_in_kueue: Whether ``kubernetes.queue`` is a LocalQueue of Kueue.
        optional: The fields of ``spec`` that older servers may drop.
        size: Where a job's manifest has the number of its nodes.
        stopped: The fields of ``spec`` that let the operator delete only the pods of a job.
    """

    name: str
    resource: Resource
    min_version = (0, 0)
    makes_key = False
    no_retries = ""
    restarts_each_node = False
    no_pod_metadata = ""
    makers: tuple[str, ...] = ("",)
    container = CONTAINER
    launchers: tuple[str, ...] = ()
    runs = ""
    needs_services = False
    early_ends: tuple[JobState, ...] = ()
    reads_pods = False
    kueue_resumes = False
    queues_in_kueue = False
    optional: tuple[str, ...] = ()
    size: tuple[str | int, ...]
    stopped: Mapping[str, Any] = MappingProxyType({"suspend": True})

    @abstractmethod
    def hosts(self, name: str, nodes: int) -> tuple[str, ...]:
        """Return the network names of the nodes of the job with this name."""

    @abstractmethod
    def manifest(
        self, submission: Submission, job_names: Names, *, has_delivery: bool
    ) -> dict[str, Any]:
        """Return the job's manifest.

        Args:
            has_delivery: Whether the job has a Secret.
        """

    @abstractmethod
    def node_of(self, name: str, pod: Mapping[str, Any]) -> int | None:
        """Return the node number of a pod of this job; None if the pod is not a node."""

    @abstractmethod
    def stage(self, job: Mapping[str, Any], is_cancelled: bool) -> Stage:
        """Return the state of a job from its manifest with its status.

        Args:
            is_cancelled: Whether cloudjob has cancelled it.
        """

    def stop(self, job: Mapping[str, Any]) -> tuple[str, Resource, str, dict[str, Any]]:
        """Return the request that ends the pods of a job and keeps its manifest.

        Returns:
            Method, resource, name and body.
        """
        return "PATCH", self.resource, str(job["metadata"]["name"]), {"spec": dict(self.stopped)}

    def environment(self, submission: Submission, job_names: Names, node: int) -> dict[str, str]:
        """Return the variables that the entry of a node is given."""
        hosts = self.hosts(job_names.name, submission.spec.nodes)
        return pods.environment(submission, hosts, node, job_names.name)

    def selector(self, job_names: Names) -> str:
        """Return the label selector of a job's pods, by default the label that we give them."""
        return f"{JOB_LABEL}={job_names.job}"

    def services(self, submission: Submission, job_names: Names) -> list[dict[str, Any]]:
        """Return the services that the nodes need and the operator does not make."""
        return []

    def nodes(self, job: Mapping[str, Any]) -> int:
        """Return the number of nodes of a job; 0 if its manifest was changed so as to lack it."""
        value: Any = job
        try:
            for key in self.size:
                value = value[key]
            return int(value)
        except (LookupError, TypeError, ValueError):
            return 0


def _with_limits(metadata: Mapping[str, Any], spec: JobSpec) -> dict[str, Any]:
    """Return metadata with the limits of the job, so that every machine knows them."""
    limits = {START_TIMEOUT: spec.start_timeout_min, PENDING: spec.kubernetes.pending_min}
    limiting = {name: f"{minutes:g}" for name, minutes in limits.items() if minutes}
    return {**metadata, "annotations": {**(metadata.get("annotations") or {}), **limiting}}


def numbered(pod: str, prefix: str) -> int | None:
    """Return the number that follows the prefix in the name of a pod."""
    number = pod.removeprefix(prefix)
    if pod.startswith(prefix) and number.isascii() and number.isdecimal():
        return int(number)
    return None


def held_conditions(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the conditions of a status that are true, by type."""
    items = status.get("conditions") or ()
    return {str(item.get("type")): item for item in items if item.get("status") == "True"}


def message_of(condition: Mapping[str, Any]) -> str:
    """Return the reason and the message of a condition, as far as it has them."""
    parts = [str(condition.get(key) or "") for key in ("reason", "message")]
    return ": ".join(part for part in parts if part)


def kept_after_end(options: Kubernetes) -> dict[str, int]:
    """Return the field after whose seconds the cluster deletes an ended job; none to keep it."""
    return {"ttlSecondsAfterFinished": round(options.keep_min * 60)} if options.keep_min else {}


def queued_manifest(
    resource: Resource, submission: Submission, job_names: Names, body: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the object of a job that Kueue queues and the cluster deletes later, if wanted."""
    options = submission.spec.kubernetes
    manifest = job_manifest(resource, submission, job_names, {**body, **kept_after_end(options)})
    if options.queue:
        manifest["metadata"]["labels"].setdefault(KUEUE_QUEUE, options.queue)
    return manifest


def job_manifest(
    resource: Resource, submission: Submission, job_names: Names, body: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the operator's job object, with the additions of the job file.

    Args:
        body: The value of ``spec``.
    """
    metadata = {"name": job_names.name, "namespace": job_names.namespace}
    manifest = {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": {**metadata, **_with_limits(pods.metadata(submission), submission.spec)},
        "spec": body,
    }
    patched = dict(merged(manifest, submission.spec.kubernetes.job))
    # Set after the patch, which must not change them: cloudjob finds the job by these.
    patched["metadata"] = pods.with_own_labels(patched.get("metadata"), submission) | metadata
    return patched
