"""Kubeflow's MPI operator: its launcher is node 0 and also runs ranks, its workers are the others.

cloudjob uses the ssh key and the host file that the operator creates for each job.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cloudjob.backends.kubernetes import engine as engines
from cloudjob.backends.kubernetes import kubeflow, pod
from cloudjob.backends.kubernetes.engine import Engine, Resource, Stage, numbered
from cloudjob.backends.kubernetes.pod import Names
from cloudjob.model.status import JobState
from cloudjob.model.submission import Submission
from jobentry.contract import names

RESOURCE = Resource("kubeflow.org", "v2beta1", "mpijobs", "MPIJob")
# Where the operator puts its key: outside the home folder, which is a volume.
SSH_PATH = "/run/cloudjob-ssh"
HOST_FILE = "/etc/mpi/hostfile"

# The operator's options for Open MPI's ssh contradict the entry's. The entry's take precedence with
# 4.1 and 5.0 (tried); but 5.0 fails elsewhere on a value with "=", and a script that calls Open MPI
# itself would inherit it.
_SETUP = "unset OMPI_MCA_plm_rsh_args"
# Pods that end by themselves stay for their logs.
_RUN_POLICY = {"cleanPodPolicy": "Running", "backoffLimit": 0}


class MpiOperator(Engine):
    """Kubeflow's MPI operator."""

    name = "mpi-operator"
    resource = RESOURCE
    makes_key = True
    kueue_resumes = True
    # Once a worker was evicted.
    early_ends = (JobState.FAILED,)
    no_retries = (
        "the MPI operator restarts only its launcher, after the workers of the failed job have "
        "ended"
    )
    makers = ("", "-launcher")
    size = kubeflow.SIZE
    stopped = MappingProxyType({"runPolicy": {"suspend": True}})

    def hosts(self, name: str, nodes: int) -> tuple[str, ...]:
        """Return the network names of the nodes."""
        workers = (f"{name}-worker-{index}.{name}" for index in range(nodes - 1))
        return (f"{name}-launcher.{name}", *workers)

    def manifest(
        self, submission: Submission, job_names: Names, *, has_delivery: bool
    ) -> dict[str, Any]:
        """Return the job's manifest."""
        spec = submission.spec
        options = spec.kubernetes
        hosts = self.hosts(job_names.name, spec.nodes)
        env = pod.variables(submission, hosts, job_names.name)
        key = {names.CLOUDJOB_SSH_KEY: f"file://{SSH_PATH}/id_rsa"} if spec.nodes > 1 else {}

        def replicas(count: int, command: list[str], role_env: Mapping[str, str]) -> dict[str, Any]:
            role_env = {**role_env, **key}
            template = pod.template(
                submission, job_names, env, command, role_env, has_delivery=has_delivery
            )
            return kubeflow.replicas(count, template)

        head = {names.VC_TASK_INDEX: "0", names.OPENMPI_HOST_FILE_PATH: HOST_FILE}
        head |= _own_host_file(submission)
        specs = {"Launcher": replicas(1, kubeflow.head_command(_SETUP), head)}
        if spec.nodes > 1:
            specs["Worker"] = replicas(spec.nodes - 1, kubeflow.worker_command(), {})
        body: dict[str, Any] = {
            "slotsPerWorker": spec.ranks_per_node,
            "runLauncherAsWorker": True,
            "sshAuthMountPath": SSH_PATH,
            "launcherCreationPolicy": options.launcher_creation,
            "mpiImplementation": "OpenMPI",
            "runPolicy": kubeflow.run_policy(spec, _RUN_POLICY),
            "mpiReplicaSpecs": specs,
        }
        return engines.job_manifest(RESOURCE, submission, job_names, body)

    def environment(self, submission: Submission, job_names: Names, node: int) -> dict[str, str]:
        """Return the variables that the entry of a node is given."""
        env = super().environment(submission, job_names, node)
        if submission.spec.nodes > 1:
            env[names.CLOUDJOB_SSH_KEY] = f"file://{SSH_PATH}/id_rsa"
        if node == 0:
            env[names.OPENMPI_HOST_FILE_PATH] = HOST_FILE
        return {**env, **_own_host_file(submission)}

    def node_of(self, name: str, item: Mapping[str, Any]) -> int | None:
        """Return the node number of this pod."""
        pod_name = item["metadata"]["name"]
        if pod_name.startswith(f"{name}-launcher"):
            return 0
        worker = numbered(pod_name, f"{name}-worker-")
        return None if worker is None else worker + 1

    def stage(self, job: Mapping[str, Any], is_cancelled: bool) -> Stage:
        """Return the state of a job."""
        return kubeflow.stage_of_conditions(job, is_cancelled)


def _own_host_file(submission: Submission) -> dict[str, str]:
    """Apply the user's setting last."""
    path = submission.spec.env.get(names.OPENMPI_HOST_FILE_PATH)
    return {names.OPENMPI_HOST_FILE_PATH: path} if path else {}
