"""MindSpore's operator: its scheduler is node 0 and also runs ranks, its workers are the others.

Facts: the operator's source (ms-operator e361e2b, its last commit, with kubeflow/common 0.4.1). It
creates a service only for the scheduler, open on one port, and considers a job ended when its
workers have ended; this module compensates for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cloudjob.backends.kubernetes import engine as engines
from cloudjob.backends.kubernetes import kubeflow, pod
from cloudjob.backends.kubernetes.engine import Engine, Resource, Stage, numbered
from cloudjob.backends.kubernetes.pod import Names
from cloudjob.model.status import JobState
from cloudjob.model.submission import Submission
from jobentry.contract import names

if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

RESOURCE = Resource("mindspore.gitee.com", "v1", "msjobs", "MSJob")
# Only a container of this name gets the scheduler's address, and only its exit code counts.
CONTAINER = "mindspore"
# Its CRD drops the labels and annotations of pods, so they are found by the operator's own label.
_LABEL = "training.kubeflow.org/job-name"
SCHEDULER_PORT = "MS_SCHED_PORT"
# The operator finds the port by this name and opens it; the number is its default.
_PORT_NAME, _PORT = "msjob-port", 2222

# The operator's variables make each pod one rank, or the scheduler. The entry sets them for its own
# ranks, so only the port of the service stays.
_UNSET = "unset MS_ROLE MS_NODE_ID MS_WORKER_NUM MS_SERVER_NUM MS_SCHED_HOST"
_HEAD, _WORKER = kubeflow.head_command(_UNSET), kubeflow.worker_command(_UNSET)
# Any other policy would end the head with the workers, and the head must end last.
_RUN_POLICY = {"cleanPodPolicy": "None"}


class MsOperator(Engine):
    """MindSpore's operator."""

    name = "ms-operator"
    resource = RESOURCE
    no_retries = "the MindSpore operator cannot restart a whole job"
    no_pod_metadata = "the MindSpore operator drops labels and annotations of pods"
    container = CONTAINER
    launchers = ("dynamic-cluster", "msrun")
    runs = "MindSpore's cluster"
    needs_services = True
    early_ends = (JobState.SUCCEEDED, JobState.FAILED)
    size = kubeflow.SIZE
    # It can neither suspend a job nor abort it, but deletes the pods of one that has expired. With
    # this policy, those that have ended stay, for their logs. It looks at the deadline only when
    # something changes, so none is left.
    stopped = MappingProxyType(
        {"runPolicy": {"activeDeadlineSeconds": 0, "cleanPodPolicy": "Running"}}
    )

    def hosts(self, name: str, nodes: int) -> tuple[str, ...]:
        """Return the network names of the nodes: services, the operator's and ours."""
        if nodes == 1:
            return (f"{name}-worker-0",)
        return (f"{name}-scheduler-0", *(f"{name}-worker-{index}" for index in range(nodes - 1)))

    def manifest(
        self, submission: Submission, job_names: Names, *, has_delivery: bool
    ) -> dict[str, Any]:
        """Return the job's manifest."""
        spec = submission.spec
        hosts = self.hosts(job_names.name, spec.nodes)
        env = pod.variables(submission, hosts, job_names.name)

        def replicas(count: int, *, is_head: bool) -> dict[str, Any]:
            command = _HEAD if is_head else _WORKER
            role_env = {names.VC_TASK_INDEX: "0"} if is_head else {}
            template = pod.template(
                submission, job_names, env, command, role_env, has_delivery=has_delivery
            )
            del template["metadata"]
            return kubeflow.replicas(count, template)

        if spec.nodes == 1:
            # A job without workers never ends for the operator, and its scheduler is not needed.
            specs = {"Worker": replicas(1, is_head=True)}
        else:
            specs = {
                "Scheduler": replicas(1, is_head=True),
                "Worker": replicas(spec.nodes - 1, is_head=False),
            }
        body: dict[str, Any] = {
            "runPolicy": kubeflow.run_policy(spec, _RUN_POLICY),
            "successPolicy": "AllWorkers",
            "msReplicaSpecs": specs,
        }
        manifest = engines.job_manifest(RESOURCE, submission, job_names, body)
        _name_containers(manifest, _port(spec))
        return manifest

    def services(self, submission: Submission, job_names: Names) -> list[dict[str, Any]]:
        """Return a service for each worker, by whose name the head reaches it."""
        job_labels = pod.labels(submission)
        port = int(pod.environment(submission, ("localhost",), 0, "")[names.SSHD_PORT])
        return [
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": name, "namespace": job_names.namespace, **job_labels},
                "spec": {
                    "clusterIP": "None",
                    # Clients look up the workers before these are ready.
                    "publishNotReadyAddresses": True,
                    "selector": {
                        _LABEL: job_names.name,
                        "replica-type": "worker",
                        "replica-index": str(index),
                    },
                    "ports": [{"name": "ssh", "port": port, "protocol": "TCP"}],
                },
            }
            for index, name in enumerate(self.hosts(job_names.name, submission.spec.nodes)[1:])
        ]

    def environment(self, submission: Submission, job_names: Names, node: int) -> dict[str, str]:
        """Return the variables that the entry of a node is given."""
        env = super().environment(submission, job_names, node)
        if submission.spec.nodes > 1:
            env[SCHEDULER_PORT] = str(_port(submission.spec))
        return env

    def node_of(self, name: str, pod_item: Mapping[str, Any]) -> int | None:
        """Return the node number of this pod."""
        # The only worker of a one-node job has the same name as the first of several.
        for container in (pod_item.get("spec") or {}).get("containers") or ():
            if {"name": names.VC_TASK_INDEX, "value": "0"} in (container.get("env") or ()):
                return 0
        worker = numbered(pod_item["metadata"]["name"], f"{name}-worker-")
        return None if worker is None else worker + 1

    def selector(self, job_names: Names) -> str:
        """Return the label selector of a job's pods."""
        return f"{_LABEL}={job_names.name}"

    def stage(self, job: Mapping[str, Any], is_cancelled: bool) -> Stage:
        """Return the state of a job."""
        of_conditions = kubeflow.stage_of_conditions(job, is_cancelled)
        has_begun = bool((job.get("status") or {}).get("startTime"))
        if is_cancelled and not has_begun and not of_conditions.state.is_final:
            # It waits in a queue; if it is scheduled, the operator ends it at once.
            return of_conditions._replace(state=JobState.CANCELLED)
        return of_conditions._replace(has_asked=of_conditions.state is JobState.CANCELLED)


def _name_containers(job: Mapping[str, Any], port: int) -> None:
    """Rename our container as the operator requires; job files use one name for all operators."""
    for replica in job["spec"]["msReplicaSpecs"].values():
        for container in replica["template"]["spec"]["containers"]:
            if container["name"] == pod.CONTAINER:
                container["name"] = CONTAINER
                port_there = {"name": _PORT_NAME, "containerPort": port, "protocol": "TCP"}
                container["ports"] = [*container.get("ports", ()), port_there]


def _port(spec: JobSpec) -> int:
    """Return the port of MindSpore's scheduler; the entry refuses an invalid number."""
    text = spec.env.get(SCHEDULER_PORT, "")
    return int(text) if text.isascii() and text.isdecimal() else _PORT
