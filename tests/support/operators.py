"""The objects that operators and Kubernetes' own Job controller create from a job's manifest.

Operators follow their source code, the Job controller its documentation (Jobs, and the comments of
``k8s.io/api/batch/v1/types.go``).

Volcano: ``pkg/controllers/job/job_controller_util.go`` (createJobPod), ``plugins/{env,svc}``.
MPI operator: ``pkg/controller/mpi_job_controller.go`` (newLauncherPodTemplate, newWorker,
setupSSHOnPod, newConfigMap). MindSpore's operator: ``pkg/controllers/v1/msjob_controller.go``
(createNewPod, CreateNewService, SetClusterSpec) and its defaults. Only fields that our manifests
use are supported; any other field is an error.
"""

from __future__ import annotations

import base64
import copy
import random
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

Object = dict[str, Any]


class Made(NamedTuple):
    """What an operator creates: pods, and the objects that they read."""

    pods: list[Object]
    objects: list[Object]


def made_of(job: Object, uid: str = "") -> Made:
    """Return the objects that the operator creates from this manifest."""
    is_builtin = job["apiVersion"] == "batch/v1"
    of_kind = {"Job": volcano, "MPIJob": mpi_operator, "MSJob": ms_operator, "JobSet": job_set}
    return indexed_job(job, uid) if is_builtin else of_kind[job["kind"]](job, uid)


# -- Kubernetes' own Job controller ---------------------------------------------------------------

INDEX = "batch.kubernetes.io/job-completion-index"
FAILURES = "batch.kubernetes.io/job-index-failure-count"


def indexed_job(job: Object, uid: str = "", failures: Mapping[int, int] | None = None) -> Made:
    """Return the pods of an Indexed Job; the Service is part of the job's own manifests.

    Args:
        failures: How many pods of each index have failed before.
    """
    spec, name = job["spec"], job["metadata"]["name"]
    known_fields = {
        *("completionMode", "completions", "parallelism", "backoffLimitPerIndex", "suspend"),
        *("podReplacementPolicy", "successPolicy", "ttlSecondsAfterFinished", "template"),
        # What an API server adds.
        *("selector", "backoffLimit"),
    }
    assert set(spec) <= known_fields, "what other fields do is not known here"
    assert spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == spec["completions"], "else some nodes would start later"
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "backoffLimitPerIndex needs it"
    owner = _owner(job, uid)
    pods = []
    for index in range(spec["completions"]):
        pod_name = _random(f"{name}-{index}")
        pod = _pod(spec["template"], pod_name, job["metadata"]["namespace"], owner)
        host = f"{name}-{index}"
        assert len(host) <= 63, "the API server refuses a Job whose pods have no valid host names"
        pod["spec"].setdefault("hostname", host)
        metadata = pod["metadata"]
        counts = {INDEX: str(index), FAILURES: str((failures or {}).get(index, 0))}
        metadata["annotations"] = {**(metadata.get("annotations") or {}), **counts}
        metadata["labels"] |= {
            "batch.kubernetes.io/job-name": name,
            "job-name": name,
            INDEX: str(index),
        }
        source = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
        for container in pod["spec"]["containers"]:
            variable = {"name": "JOB_COMPLETION_INDEX", "valueFrom": source}
            container.setdefault("env", []).append(variable)
        pods.append(pod)
    return Made(pods, [])


# -- JobSet ---------------------------------------------------------------------------------------


def job_set(manifest: Object, uid: str = "") -> Made:
    """Return the pods of the only Job of a JobSet, and the Service that its controller makes."""
    spec, metadata = manifest["spec"], manifest["metadata"]
    name, namespace = metadata["name"], metadata["namespace"]
    assert spec["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    (group,) = spec["replicatedJobs"]
    assert group["replicas"] == 1
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"{name}-{group['name']}-0", "namespace": namespace},
        "spec": {**group["template"]["spec"]},
    }
    # It says when the Job fails (``tests.support.jobset``), not how its pods look.
    job["spec"].pop("podFailurePolicy", None)
    owner = _owner(manifest, uid)
    pods = []
    for item in indexed_job(job, uid).pods:
        item["metadata"]["ownerReferences"] = owner
        item["metadata"]["labels"]["jobset.sigs.k8s.io/jobset-name"] = name
        item["spec"].setdefault("subdomain", name)
        pods.append(item)
    service = _service_of(name, namespace, owner)
    service["spec"]["selector"] = {"jobset.sigs.k8s.io/jobset-name": name}
    return Made(pods, [service])


# -- Volcano ------------------------------------------------------------------------------------


def volcano(job: Object, uid: str = "") -> Made:
    """Return what Volcano's job controller creates, with the job's plugins."""
    assert job["apiVersion"] == "batch.volcano.sh/v1alpha1"
    spec, name = job["spec"], job["metadata"]["name"]
    namespace = job["metadata"]["namespace"]
    assert set(spec["plugins"]) <= {"env", "svc"}, "what other plugins do is not known here"
    assert set(spec["plugins"]["svc"]) <= {"--publish-not-ready-addresses=true"}
    owner = _owner(job, uid)
    objects = [_service_of(name, namespace, owner), _volcano_hosts(job, owner)]
    pods = []
    for task in spec["tasks"]:
        for index in range(task["replicas"]):
            pod = _pod(task["template"], f"{name}-{task['name']}-{index}", namespace, owner)
            pod["metadata"]["labels"] |= {
                "volcano.sh/job-name": name,
                "volcano.sh/task-spec": task["name"],
                "volcano.sh/task-index": str(index),
                "volcano.sh/job-namespace": namespace,
            }
            pod["metadata"].setdefault("annotations", {})["volcano.sh/task-index"] = str(index)
            pod["spec"].setdefault("schedulerName", spec["schedulerName"])
            _volcano_env(pod, index)
            _volcano_svc(pod, job)
            pods.append(pod)
    return Made(pods, objects)


def _volcano_env(pod: Object, index: int) -> None:
    """plugins/env: OnPodCreate."""
    for container in pod["spec"]["containers"]:
        container.setdefault("env", []).extend(
            {"name": key, "value": str(index)} for key in ("VK_TASK_INDEX", "VC_TASK_INDEX")
        )


def _volcano_svc(pod: Object, job: Object) -> None:
    """plugins/svc: OnPodCreate."""
    name = job["metadata"]["name"]
    pod["spec"].setdefault("hostname", pod["metadata"]["name"])
    pod["spec"].setdefault("subdomain", name)
    for container in pod["spec"]["containers"]:
        for task in job["spec"]["tasks"]:
            task_name = task["name"].replace("-", "_").upper()
            for key in (f"VC_{task_name}_HOSTS", f"VC_{task_name}_NUM"):
                source = {"configMapKeyRef": {"name": f"{name}-svc", "key": key}}
                container["env"].append({"name": key, "valueFrom": source})
        mount = {"name": f"{name}-svc", "mountPath": "/etc/volcano"}
        container.setdefault("volumeMounts", []).append(mount)
    volume = {"name": f"{name}-svc", "configMap": {"name": f"{name}-svc"}}
    pod["spec"].setdefault("volumes", []).append(volume)


def _volcano_hosts(job: Object, owner: list[Object]) -> Object:
    """plugins/svc: GenerateHosts."""
    name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
    data = {}
    for task in job["spec"]["tasks"]:
        hosts = [f"{name}-{task['name']}-{i}.{name}" for i in range(task["replicas"])]
        task_name = task["name"].replace("-", "_").upper()
        data[f"{task['name']}.host"] = "\n".join(hosts)
        data[f"VC_{task_name}_NUM"] = str(len(hosts))
        data[f"VC_{task_name}_HOSTS"] = ",".join(hosts)
    return _config_map(f"{name}-svc", namespace, data, owner)


# -- the MPI operator ---------------------------------------------------------------------------


def mpi_operator(job: Object, uid: str = "") -> Made:
    """Return what the MPI operator creates, and the launcher's pod, which its batch Job creates."""
    assert job["apiVersion"] == "kubeflow.org/v2beta1"
    spec, name = job["spec"], job["metadata"]["name"]
    namespace = job["metadata"]["namespace"]
    assert spec["runLauncherAsWorker"]
    assert spec["mpiImplementation"] == "OpenMPI"
    owner = _owner(job, uid)
    replicas = spec["mpiReplicaSpecs"]
    workers = replicas.get("Worker", {"replicas": 0})["replicas"]
    slots = spec.get("slotsPerWorker", 1)
    hosts = [f"{name}-launcher", *(f"{name}-worker-{i}" for i in range(workers))]
    file = "".join(f"{host}.{name}.{namespace}.svc slots={slots}\n" for host in hosts)
    objects = [
        _service_of(name, namespace, owner),
        _config_map(
            f"{name}-config",
            namespace,
            {"hostfile": file, "discover_hosts.sh": "#!/bin/sh\n"},
            owner,
        ),
        _ssh_secret(name, namespace, owner),
    ]
    pods = [_launcher(job, namespace, owner, slots)]
    for index in range(workers):
        pod = _pod(replicas["Worker"]["template"], f"{name}-worker-{index}", namespace, owner)
        pod["spec"]["restartPolicy"] = replicas["Worker"]["restartPolicy"]
        _mpi_labels(pod, name, "worker", index + 1)
        pod["spec"]["hostname"], pod["spec"]["subdomain"] = f"{name}-worker-{index}", name
        container = pod["spec"]["containers"][0]
        assert container.get("command") or container.get("args"), "else it would be an sshd"
        container.setdefault("env", []).append({"name": "K_MPI_JOB_ROLE", "value": "worker"})
        _mpi_ssh(pod, job)
        pods.append(pod)
    return Made(pods, objects)


def _launcher(job: Object, namespace: str, owner: list[Object], slots: int) -> Object:
    name = job["metadata"]["name"]
    replica = job["spec"]["mpiReplicaSpecs"]["Launcher"]
    pod = _pod(replica["template"], _random(f"{name}-launcher"), namespace, owner)
    pod["spec"]["restartPolicy"] = replica["restartPolicy"]
    _mpi_labels(pod, name, "launcher", 0)
    pod["spec"]["hostname"], pod["spec"]["subdomain"] = f"{name}-launcher", name
    container = pod["spec"]["containers"][0]
    container.setdefault("env", []).extend(
        [
            {"name": "K_MPI_JOB_ROLE", "value": "launcher"},
            {"name": "OMPI_MCA_orte_keep_fqdn_hostnames", "value": "true"},
            {"name": "OMPI_MCA_orte_default_hostfile", "value": "/etc/mpi/hostfile"},
            {"name": "OMPI_MCA_plm_rsh_args", "value": "-o ConnectionAttempts=10"},
            {"name": "OMPI_MCA_orte_set_default_slots", "value": str(slots)},
        ]
    )
    _mpi_ssh(pod, job)
    items = [
        {"key": "hostfile", "path": "hostfile", "mode": 0o444},
        {"key": "discover_hosts.sh", "path": "discover_hosts.sh", "mode": 0o555},
    ]
    volume = {"name": f"{name}-config", "items": items}
    pod["spec"].setdefault("volumes", []).append({"name": "mpi-job-config", "configMap": volume})
    container.setdefault("volumeMounts", []).append(
        {"name": "mpi-job-config", "mountPath": "/etc/mpi"}
    )
    return pod


def _mpi_labels(pod: Object, name: str, role: str, index: int) -> None:
    pod["metadata"]["labels"] |= {
        "training.kubeflow.org/operator-name": "mpi-operator",
        "training.kubeflow.org/job-name": name,
        "training.kubeflow.org/job-role": role,
        "training.kubeflow.org/replica-index": str(index),
    }


def _mpi_ssh(pod: Object, job: Object) -> None:
    """setupSSHOnPod: with the default mode of a secret, except in root's folder."""
    path = job["spec"]["sshAuthMountPath"]
    secret: Object = {
        "secretName": f"{job['metadata']['name']}-ssh",
        "items": [
            {"key": "ssh-privatekey", "path": "id_rsa"},
            {"key": "ssh-publickey", "path": "id_rsa.pub"},
            {"key": "ssh-publickey", "path": "authorized_keys"},
        ],
    }
    assert not path.startswith("/root"), "there the mode would be another"
    pod["spec"].setdefault("volumes", []).append({"name": "ssh-auth", "secret": secret})
    container = pod["spec"]["containers"][0]
    container.setdefault("volumeMounts", []).append({"name": "ssh-auth", "mountPath": path})


def _ssh_secret(name: str, namespace: str, owner: list[Object]) -> Object:
    """newSSHAuthSecret: ECDSA P-521, as PEM in the format of SEC 1."""
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder, "key")
        argv = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-f"]
        subprocess.run([*argv, str(key)], check=True)
        data = {
            "ssh-privatekey": key.read_bytes(),
            "ssh-publickey": key.with_suffix(".pub").read_bytes(),
        }
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/ssh-auth",
        "metadata": {"name": f"{name}-ssh", "namespace": namespace, "ownerReferences": owner},
        "data": {name: base64.b64encode(value).decode() for name, value in data.items()},
    }


# -- MindSpore's operator -------------------------------------------------------------------------

MS_ROLES = {"scheduler": "MS_SCHED", "worker": "MS_WORKER"}
# The address that the API server would assign to the service.
CLUSTER_IP = "10.96.77.7"


def ms_operator(job: Object, uid: str = "") -> Made:
    """Return what MindSpore's operator creates: unnamed pods, and the scheduler's service."""
    assert job["apiVersion"] == "mindspore.gitee.com/v1"
    replicas, name = job["spec"]["msReplicaSpecs"], job["metadata"]["name"]
    namespace = job["metadata"]["namespace"]
    assert set(replicas) <= {"Scheduler", "Worker"}
    assert "Worker" in replicas, "a job without workers never ends"
    owner = _owner(job, uid)
    services, pods = [], []
    if "Scheduler" in replicas:
        services.append(_ms_service(job, replicas["Scheduler"], owner))
    for kind, replica in replicas.items():
        role = kind.lower()
        for index in range(replica["replicas"]):
            pod = _pod(replica["template"], f"{name}-{role}-{index}", namespace, owner)
            pod["metadata"]["labels"] |= _ms_labels(name, role, index)
            assert "restartPolicy" not in pod["spec"], "it would warn of it"
            pod["spec"]["restartPolicy"] = replica["restartPolicy"]
            for container in pod["spec"]["containers"]:
                if services and container["name"] == "mindspore":
                    workers = str(replicas["Worker"]["replicas"])
                    container.setdefault("env", []).extend(_ms_env(role, services[0], workers))
            pods.append(pod)
    return Made(pods, services)


def _ms_labels(name: str, role: str, index: int) -> dict[str, str]:
    """GenLabels of kubeflow/common 0.4.1, and those of createNewPod."""
    return {
        "training.kubeflow.org/operator-name": "msjob-controller",
        "group-name": "mindspore.gitee.com",
        "training.kubeflow.org/job-name": name,
        "job-name": name,
        "replica-type": role,
        "replica-index": str(index),
        "training.kubeflow.org/replica-type": role,
        "training.kubeflow.org/replica-index": str(index),
    }


def _ms_service(job: Object, replica: Object, owner: list[Object]) -> Object:
    """CreateNewService: with its own address, and only the ports of the container."""
    name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
    (container,) = [
        c for c in replica["template"]["spec"]["containers"] if c["name"] == "mindspore"
    ]
    labels = _ms_labels(name, "scheduler", 0)
    ports = [{"name": item["name"], "port": item["containerPort"]} for item in container["ports"]]
    assert any(item["name"] == "msjob-port" for item in ports), "else it would add 2222"
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": f"{name}-scheduler-0",
            "namespace": namespace,
            "labels": labels,
            "ownerReferences": owner,
        },
        "spec": {"selector": labels, "ports": ports},
    }


def _ms_env(role: str, service: Object, workers: str) -> list[Object]:
    """SetClusterSpec: applied after the manifest, so these take precedence."""
    (port,) = [x["port"] for x in service["spec"]["ports"] if x["name"] == "msjob-port"]
    own_ip = {"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    host = own_ip if role == "scheduler" else {"value": CLUSTER_IP}
    return [
        {"name": "MS_SCHED_HOST", **host},
        {"name": "MS_NODE_ID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "MS_SCHED_PORT", "value": str(port)},
        {"name": "MS_SERVER_NUM", "value": "0"},
        {"name": "MS_WORKER_NUM", "value": workers},
        {"name": "MS_ROLE", "value": MS_ROLES[role]},
    ]


# -- all ---------------------------------------------------------------------------------------


def _pod(template: Object, name: str, namespace: str, owner: list[Object]) -> Object:
    pod = copy.deepcopy(template)
    metadata = pod.get("metadata") or {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **metadata,
            "labels": dict(metadata.get("labels") or {}),
            "name": name,
            "namespace": namespace,
            "ownerReferences": owner,
        },
        "spec": pod["spec"],
    }


def _random(name: str) -> str:
    """Return the name of a pod of a Job, which no later pod has; its host name is without it."""
    return f"{name}-{''.join(random.choices('bcdfghjklmnpqrstvwxz2456789', k=5))}"


def _owner(job: Object, uid: str) -> list[Object]:
    return [
        {
            "apiVersion": job["apiVersion"],
            "kind": job["kind"],
            "name": job["metadata"]["name"],
            "uid": uid or "00000000-0000-0000-0000-000000000000",
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]


def _service_of(name: str, namespace: str, owner: list[Object]) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace, "ownerReferences": owner},
        "spec": {"clusterIP": "None", "selector": {"volcano.sh/job-name": name}},
    }


def _config_map(name: str, namespace: str, data: dict[str, str], owner: list[Object]) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace, "ownerReferences": owner},
        "data": data,
    }
