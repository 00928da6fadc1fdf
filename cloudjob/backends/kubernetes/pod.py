"""The pod of a node, the same for every operator. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from cloudjob.backends.base import RETRY_S
from cloudjob.backends.encoding import undeclared_variables
from cloudjob.backends.kubernetes.strategic_merge import merged
from cloudjob.model import submission as submissions
from cloudjob.model.submission import Submission
from jobentry.contract import env, names

if TYPE_CHECKING:
    from cloudjob.model.job import JobSpec

HOME = "/home/ma-user"
# The name of a pod's container, by which a patch finds it.
CONTAINER = "cloudjob"
JOB_LABEL = "cloudjob.job"
MANAGER_LABEL = "app.kubernetes.io/managed-by"
# In this annotation, the Job controller counts the failed pods of an index.
FAILURES = "batch.kubernetes.io/job-index-failure-count"
# The folders of the entry, the same as in our own images, and of its secrets in a pod.
ENTRY_PATH = "/opt/cloudjob"
DELIVERY_PATH = "/run/cloudjob"
# Seconds that a pod may outlive the job's own timeout.
_DEADLINE_S = 600
# The proxy of a service mesh, Istio or Linkerd, would outlive the ranks, so that no pod would end.
_NO_PROXY = {
    "labels": {"sidecar.istio.io/inject": "false"},
    "annotations": {"linkerd.io/inject": "disabled"},
}
# Without this, Open MPI prints a warning for each message between ranks (ADR 8, docker).
_OPEN_MPI = {"OMPI_MCA_btl_vader_single_copy_mechanism": "none"}
# Per node; the kubelet sets them once the pod is scheduled.
FIELDS = {
    names.MA_CURRENT_IP: "status.podIP",
    names.MA_CURRENT_HOST_IP: "status.hostIP",
    names.MA_CURRENT_INSTANCE_NAME: "metadata.name",
}
PER_NODE = (*FIELDS, names.VC_TASK_INDEX, names.VK_TASK_INDEX)


class Names(NamedTuple):
    """The names of one job's objects."""

    job: str
    namespace: str

    @property
    def name(self) -> str:
        """The name of the job's manifest and service, and the beginning of its pods' names.

        A service's name must begin with a letter (RFC 1035), but an id need not.
        """
        return self.job if self.job[0].isalpha() else f"job-{self.job}"

    @property
    def entry(self) -> str:
        """The ConfigMap that holds the entry."""
        return f"{self.name}-entry"

    @property
    def delivery(self) -> str:
        """The Secret that holds variables and the key for ssh."""
        return f"{self.name}-delivery"


class Variables(NamedTuple):
    """The variables of the pods.

    Args:
        shown: The variables in the pod's manifest.
        delivered: The variables in a Secret: secrets, and values that JSON cannot hold.
        fields: The paths of the pod's fields that are variables.
    """

    shown: Mapping[str, str]
    delivered: Mapping[str, str]
    fields: Mapping[str, str] = FIELDS


def variables(
    submission: Submission, hosts: tuple[str, ...], name: str, left_out: tuple[str, ...] = ()
) -> Variables:
    """Return the variables that all pods have in common.

    Args:
        left_out: The variables that the operator sets in each pod.
    """
    merged_env = {
        **_OPEN_MPI,
        **environment(submission, hosts, 0, name),
        names.CLOUDJOB_DELIVERY: DELIVERY_PATH,
    }
    common = {
        name: value for name, value in merged_env.items() if name not in (*PER_NODE, *left_out)
    }
    delivered = undeclared_variables(common, submission.masked_names)
    return Variables({k: v for k, v in sorted(common.items()) if k not in delivered}, delivered)


def environment(
    submission: Submission, hosts: tuple[str, ...], index: int, name: str
) -> dict[str, str]:
    """Return the variables that the entry of a node is given."""
    spec = submission.spec
    node = submissions.node_env(submission, index, hosts)
    node_env = submissions.variables(submission, node, home=HOME, address="0.0.0.0")
    return {
        **node_env,
        names.MA_VJ_NAME: name,
        **{key: value for key, value in _gpus(spec).items() if key not in spec.env},
        **env.write(node),
    }


def template(
    submission: Submission,
    job_names: Names,
    job_env: Variables,
    command: list[str],
    role_env: Mapping[str, str] | None = None,
    *,
    has_delivery: bool,
) -> dict[str, Any]:
    """Return the template of a pod.

    Args:
        command: The command that starts the entry; the script's words follow it.
        role_env: More variables, for this kind of node alone.
        has_delivery: Whether the job has a Secret.
    """
    spec = submission.spec
    options = spec.kubernetes
    plain_env = {**job_env.shown, **(role_env or {})}
    if not has_delivery:
        plain_env.pop(names.CLOUDJOB_DELIVERY)
    mounted = volumes(spec, job_names, has_delivery=has_delivery)
    mounts = [{"name": volume["name"], **mount} for volume, mount in mounted]
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": spec.image,
        "command": [exact(argument) for argument in command],
        "args": [exact(argument) for argument in (spec.script, *spec.args)],
        "workingDir": HOME,
        "env": [
            *({"name": key, "value": exact(value)} for key, value in plain_env.items()),
            *(
                {"name": key, "valueFrom": {"fieldRef": {"fieldPath": path}}}
                for key, path in job_env.fields.items()
            ),
        ],
        "volumeMounts": mounts,
    }
    container.update(_resources(spec))
    if options.image_pull_policy:
        container["imagePullPolicy"] = options.image_pull_policy
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(spec.grace_s) + RETRY_S,
        # Variables of other services would only be in the way, and a token is a secret.
        "enableServiceLinks": False,
        "automountServiceAccountToken": bool(options.service_account),
        "containers": [container],
        # A volume that is mounted at several paths is one volume.
        "volumes": list({volume["name"]: volume for volume, _ in mounted}.values()),
    }
    if deadline_s := _deadline_s(spec):
        # Counted from the start of the pod: a deadline of a job would also count its wait for room.
        pod["activeDeadlineSeconds"] = deadline_s
    pod.update(_place(spec))
    _secure(pod, container, options.user)
    pod_template = {"metadata": merged(_NO_PROXY, metadata(submission)), "spec": pod}
    patched = dict(merged(pod_template, options.pod))
    patched["metadata"] = with_own_labels(patched.get("metadata"), submission)
    return patched


def metadata(submission: Submission) -> dict[str, Any]:
    """Return the labels and annotations of the job and its pods."""
    annotations = submission.spec.kubernetes.annotations
    annotated = {"annotations": dict(annotations)} if annotations else {}
    return {**labels(submission), **annotated}


def labels(submission: Submission) -> dict[str, Any]:
    """Return the metadata of the job's other objects: its labels."""
    return with_own_labels({"labels": submission.spec.kubernetes.labels}, submission)


def with_own_labels(
    metadata_part: Mapping[str, Any] | None, submission: Submission
) -> dict[str, Any]:
    """Return metadata with the labels by which the job is found."""
    our_labels = {JOB_LABEL: submission.job, MANAGER_LABEL: "cloudjob"}
    return {
        **(metadata_part or {}),
        "labels": {**((metadata_part or {}).get("labels") or {}), **our_labels},
    }


def _deadline_s(spec: JobSpec) -> int:
    """Return the seconds after which the cluster ends a pod; 0 for never."""
    if not spec.timeout_min:
        return 0
    own_s = (spec.timeout_min + spec.start_timeout_min) * 60 + spec.grace_s
    return math.ceil(own_s) + _DEADLINE_S


def exact(text: str) -> str:
    """Return ``text`` escaped for the kubelet, which replaces ``$(NAME)`` and ``$$``."""
    return text.replace("$", "$$")


def _gpus(spec: JobSpec) -> dict[str, str]:
    """Return the variables that ModelArts sets on GPU flavors; the entry chooses interfaces."""
    gpus = spec.kubernetes.gpus
    return {names.MA_NUM_GPUS: str(gpus), "NCCL_DEBUG": "INFO"} if gpus else {}


def _resources(spec: JobSpec) -> dict[str, Any]:
    """Return a pod's requests and limits, which are equal so that no other pod can take a share."""
    options = spec.kubernetes
    limits: dict[str, Any] = {}
    if options.cpus:
        limits["cpu"] = _quantity(options.cpus, 1000, "", "m")
    if options.memory_gib:
        limits["memory"] = _quantity(options.memory_gib, 1024, "Gi", "Mi")
    if options.gpus:
        limits[options.gpu_resource] = str(options.gpus)
    return {"resources": {"limits": limits, "requests": dict(limits)}} if limits else {}


def _quantity(number: float, parts: int, whole: str, part: str) -> str:
    """Return a number as Kubernetes writes it, in the smaller unit if it is not whole."""
    if number == int(number):
        return f"{int(number)}{whole}"
    return f"{max(1, round(number * parts))}{part}"


def volumes(
    spec: JobSpec, job_names: Names, *, has_delivery: bool
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return each volume with its mount: those that every pod has, then those of the job file."""
    options = spec.kubernetes
    # In ModelArts' own images, all of HOME is the platform's, and only this subfolder is fresh.
    home = HOME if options.home == "empty" else f"{HOME}/modelarts"
    mounted: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (
            {"name": "entry", "configMap": {"name": job_names.entry}},
            {"mountPath": ENTRY_PATH, "readOnly": True},
        ),
        ({"name": "home", "emptyDir": {}}, {"mountPath": home}),
        ({"name": "cache", "emptyDir": {}}, {"mountPath": "/cache"}),
    ]
    if has_delivery:
        # The files belong to root and the pod's fsGroup. Without a user there is no fsGroup.
        mode = 0o440 if options.user else 0o444
        secret = {"secretName": job_names.delivery, "defaultMode": mode}
        mounted.append(
            ({"name": "delivery", "secret": secret}, {"mountPath": DELIVERY_PATH, "readOnly": True})
        )
    if options.shm_gib:
        size = _quantity(options.shm_gib, 1024, "Gi", "Mi")
        memory = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}}
        mounted.append((memory, {"mountPath": "/dev/shm"}))
    return [*mounted, *(split_volume(volume) for volume in options.volumes)]


_MOUNT_KEYS = ("mountPath", "subPath", "readOnly", "mountPropagation")


def split_volume(volume: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a volume of the job file as the pod's volume and the container's mount."""
    mount = {key: value for key, value in volume.items() if key in _MOUNT_KEYS}
    return {key: value for key, value in volume.items() if key not in mount}, mount


def _place(spec: JobSpec) -> dict[str, Any]:
    """Return where the pods may run, and with which permissions."""
    options = spec.kubernetes
    values = {
        "nodeSelector": dict(options.node_selector),
        "tolerations": list(options.tolerations),
        "serviceAccountName": options.service_account,
        "imagePullSecrets": [{"name": name} for name in options.image_pull_secrets],
        "priorityClassName": options.priority_class,
    }
    return {key: value for key, value in values.items() if value}


def _secure(pod: dict[str, Any], container: dict[str, Any], user: str) -> None:
    """Keep processes in the pod from becoming root, as on ModelArts, unless the user allows it."""
    uid, _, gid = user.partition(":")
    ids: dict[str, Any] = {}
    if user:
        group = int(gid or uid)
        ids = {"runAsUser": int(uid), "runAsGroup": group, "fsGroup": group}
        # Otherwise the kubelet changes every file of a volume at each start.
        ids["fsGroupChangePolicy"] = "OnRootMismatch"
        ids["runAsNonRoot"] = int(uid) != 0
    pod["securityContext"] = {**ids, "seccompProfile": {"type": "RuntimeDefault"}}
    if not user or int(uid):
        container["securityContext"] = {"allowPrivilegeEscalation": False}
    if user and int(uid):
        # The image's user may be root, whose sshd needs capabilities.
        container["securityContext"]["capabilities"] = {"drop": ["ALL"]}
