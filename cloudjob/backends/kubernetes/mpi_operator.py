"""Kubeflow's MPI operator: its launcher is node 0 and also runs ranks, its workers are the others.

cloudjob uses the ssh key and the host file that the operator creates for each job.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloudjob.backends.kubernetes import engine as engines
from cloudjob.backends.kubernetes import pod
from cloudjob.backends.kubernetes.engine import Engine, Resource, numbered
from cloudjob.backends.kubernetes.pod import Names
from cloudjob.model.submission import Submission
from jobentry.contract import names

RESOURCE = Resource("kubeflow.org", "v2beta1", "mpijobs", "MPIJob")
# Where the operator puts its key: outside the home folder, which is a volume.
SSH_PATH = "/run/cloudjob-ssh"
HOST_FILE = "/etc/mpi/hostfile"

_BOOT = f"{pod.ENTRY_PATH}/boot.sh"
# The operator's options for Open MPI's ssh contradict the entry's. The entry's take precedence with
# 4.1 and 5.0 (tried); but 5.0 fails elsewhere on a value with "=", and a script that calls Open MPI
# itself would inherit it.
_LAUNCHER = f'unset OMPI_MCA_plm_rsh_args; exec sh {_BOOT} "$@"'
# All workers share one template; the name of a pod ends with its index.
_WORKER = (
    f'{names.VC_TASK_INDEX}=$((${{{names.MA_CURRENT_INSTANCE_NAME}##*-}} + 1)) exec sh {_BOOT} "$@"'
)
# Pods that end by themselves stay for their logs.
_RUN_POLICY = {"cleanPodPolicy": "Running", "backoffLimit": 0}


def hosts(name: str, nodes: int) -> tuple[str, ...]:
    """Return the network names of the nodes."""
    workers = (f"{name}-worker-{index}.{name}" for index in range(nodes - 1))
    return (f"{name}-launcher.{name}", *workers)


def manifest(submission: Submission, called: Names, has_delivery: bool) -> dict[str, Any]:
    """Return the job's manifest."""
    spec = submission.spec
    options = spec.kubernetes
    given = pod.variables(submission, hosts(called.name, spec.nodes), called.name, ())
    key = {names.CLOUDJOB_SSH_KEY: f"file://{SSH_PATH}/id_rsa"} if spec.nodes > 1 else {}

    def replica(count: int, shell: str, own: Mapping[str, str]) -> dict[str, Any]:
        command = ["sh", "-c", shell, "jobentry"]
        template = pod.template(
            submission, called, given, command, {**own, **key}, has_delivery=has_delivery
        )
        # The operator has its own settings for these and warns about them here.
        policy = template["spec"].pop("restartPolicy")
        return {"replicas": count, "restartPolicy": policy, "template": template}

    launcher = {names.VC_TASK_INDEX: "0", names.OPENMPI_HOST_FILE_PATH: HOST_FILE}
    replicas = {"Launcher": replica(1, _LAUNCHER, {**launcher, **_own_host_file(submission)})}
    if spec.nodes > 1:
        replicas["Worker"] = replica(spec.nodes - 1, _WORKER, {})
    body: dict[str, Any] = {
        "slotsPerWorker": spec.ranks_per_node,
        "runLauncherAsWorker": True,
        "sshAuthMountPath": SSH_PATH,
        "launcherCreationPolicy": options.launcher_creation,
        "mpiImplementation": "OpenMPI",
        "runPolicy": engines.run_policy(spec, _RUN_POLICY, deadline_s=pod.deadline_s(spec)),
        "mpiReplicaSpecs": replicas,
    }
    return engines.job_manifest(RESOURCE, submission, called, body)


def environment(submission: Submission, called: Names, node: int) -> dict[str, str]:
    """Return the variables that the entry of a node is given."""
    names_of = hosts(called.name, submission.spec.nodes)
    given = pod.environment(submission, names_of, node, called.name)
    if submission.spec.nodes > 1:
        given[names.CLOUDJOB_SSH_KEY] = f"file://{SSH_PATH}/id_rsa"
    if node == 0:
        given[names.OPENMPI_HOST_FILE_PATH] = HOST_FILE
    return {**given, **_own_host_file(submission)}


def node_of(name: str, found: Mapping[str, Any]) -> int | None:
    """Return the number of the node that this pod is."""
    called = found["metadata"]["name"]
    if called.startswith(f"{name}-launcher"):
        return 0
    worker = numbered(called, f"{name}-worker-")
    return None if worker is None else worker + 1


def stop(job: Mapping[str, Any]) -> tuple[str, Resource, str, dict[str, Any]]:
    """Return the patch that suspends the job: the operator deletes its pods and keeps the rest."""
    body = {"spec": {"runPolicy": {"suspend": True}}}
    return "PATCH", RESOURCE, str(job["metadata"]["name"]), body


def _own_host_file(submission: Submission) -> dict[str, str]:
    """Apply the user's setting last."""
    path = submission.spec.env.get(names.OPENMPI_HOST_FILE_PATH)
    return {names.OPENMPI_HOST_FILE_PATH: path} if path else {}


ENGINE = Engine(
    name="mpi-operator",
    resource=RESOURCE,
    hosts=hosts,
    manifest=manifest,
    environment=environment,
    makes_key=True,
    node_of=node_of,
    stage=engines.stage_of_conditions,
    stop=stop,
    no_retries="the MPI operator starts only its launcher again, and the workers of a job that "
    "failed have ended",
)
