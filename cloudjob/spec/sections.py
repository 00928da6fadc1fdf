"""The sections of a job file: the settings of each backend, store and framework.

Each key is declared here and nowhere else; the JSON Schema, the reference in ``docs/job-file.md``
and ``config show`` follow from it.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cloudjob import mindspore
from cloudjob.spec.types import (
    Labels,
    Number,
    OneOf,
    Text,
    Texts,
    Tree,
    TreeList,
    Values,
    Whole,
)
from jobentry.contract import env

STORE_SECTIONS = ("s3", "obs")
ADDRESSINGS = ("auto", "path", "virtual")
_DAY_MIN = 1440
# No platform lets a job live a year.
_YEAR_MIN = 525_600

# Nodes that fetch over a slow line bear less than a folder on this machine.
_SOURCE_LIMIT = Field(
    default=0.0,
    ge=0,
    description="The largest source folder to pack for this backend, in megabytes; 0 uses "
    "source_limit_mb.",
)


# fmt: off
class Process(Values):
    """Settings of the process backend."""

    python: Text = Field(default="",
        description="The interpreter that runs the script; by default the one of the active "
                    "virtual environment, or else the one that runs cloudjob.")
    isolation: Annotated[str, OneOf("auto", "none")] = Field(default="auto",
        description="Whether to isolate the emulated nodes from each other.")
    gpus: Whole = Field(default=0, ge=0, le=64,
        description="NVIDIA GPUs reserved for each node; with 0 all nodes share the GPUs that "
                    "this shell sees.")
    source_limit_mb: Number = _SOURCE_LIMIT


class Docker(Values):
    """Settings of the docker backend."""

    cpus: Number = Field(default=0.0, ge=0, le=4096,
        description="CPUs that each node may use; 0 is all of the machine.")
    memory_gib: Number = Field(default=0.0, ge=0, le=65_536,
        description="Memory that each node may use; 0 is all of the machine.")
    shm_gib: Number = Field(default=2.0, ge=0, le=65_536,
        description="Size of /dev/shm, where ranks of one node exchange data.")
    gpus: Whole = Field(default=0, ge=0, le=64, description="GPUs reserved for each node.")
    source_limit_mb: Number = _SOURCE_LIMIT


class ModelArts(Values):
    """Settings of the modelarts backend."""

    region: Text = Field(default="",
        description="The region, cn-north-4 for example; by default $HW_REGION_NAME.")
    endpoint: Text = Field(default="",
        description="The URL of the service, if it is not the public one of the region.")
    iam_endpoint: Text = Field(default="",
        description="The URL of IAM, if it is not the public one of the region.")
    auth: Annotated[str, OneOf("sign", "token")] = Field(default="sign",
        description="How to authenticate: sign signs each request with the keys; token exchanges "
                    "them for a token of IAM, which some private clouds require.")
    project_id: Text = Field(default="",
        description="The project; by default cloudjob asks IAM for the region's project.")
    bucket: Text = Field(default="",
        description="Where to store code and outputs if no store is given.")
    workspace_id: Text = Field(default="0", description="The workspace of the job.")
    pool_id: Text = Field(default="",
        description="The dedicated pool to run the job in; empty for the public pool.")
    engine: Text = Field(default="",
        description="A preset engine, as its id or NAME:VERSION; empty for an image of your own.")
    description: Text = Field(default="",
        description="The description in the ModelArts console; by default the job's name.")
    access_method: Annotated[str, OneOf("env", "parameter")] = Field(default="env",
        description="How the script learns the paths of inputs and outputs: from the variable "
                    "NAME, or from --NAME=PATH among its arguments.")
    parameters: Labels = Field(default={},
        description="Hyperparameters, which the platform appends as --NAME=VALUE.")
    log_export: Text = Field(default="",
        description="Where the platform stores complete logs; by default beside the code; none "
                    "disables it.")
    auto_stop_hours: Whole = Field(default=0, ge=0, le=8760,
        description="Hours after which the platform ends the job; by default the timeout plus "
                    "one hour.")
    priority: Whole = Field(default=0, ge=0, le=3,
        description="1 to 3, in a dedicated pool; 0 is the platform's default.")
    preemptible: Annotated[str, OneOf("false", "true")] = Field(default="false",
        description="Whether a job of higher priority may preempt this one.")
    affinity: Annotated[str, OneOf("none", "cabinet", "hyperinstance")] = Field(default="none",
        description="What the nodes must have in common.")
    affinity_group_size: Whole = Field(default=0, ge=0, le=10_000,
        description="How many nodes must have it in common.")
    hang_retry: Annotated[str, OneOf("false", "true")] = Field(default="false",
        description="Whether the platform restarts a job that hangs.")
    ssh_keys: Texts = Field(default=(),
        description="Key pairs of the account that may log in to the nodes.")
    volumes: TreeList = Field(default=[],
        description="Volumes to mount: a list of nfs, pfs and obs, in the format of the API.")
    annotations: Labels = Field(default={},
        description="Annotations of the job, for example for fault tolerance.")
    tags: Labels = Field(default={}, description="Tags of the job.")
    body: Tree = Field(default={},
        description="Merged into the body of the request, for settings without a key here; null "
                    "removes a key.")
    source_limit_mb: Number = _SOURCE_LIMIT


class Kubernetes(Values):
    """Settings of the kubernetes backend."""

    engine: Annotated[str, OneOf("auto", "volcano", "mpi-operator", "ms-operator")] = Field(
        default="auto",
        description="The operator that runs the job; auto asks the cluster which one it has.")
    context: Text = Field(default="",
        description="The context in the kubeconfig; by default the current one.")
    kubeconfig: Text = Field(default="",
        description="The file with the access to the cluster; by default $KUBECONFIG, then "
                    "~/.kube/config, then the service account of the pod that cloudjob runs in.")
    namespace: Text = Field(default="",
        description="The namespace of the job; by default the one of the context.")
    queue: Text = Field(default="",
        description="The queue of the job; by default the scheduler's own.")
    cpus: Number = Field(default=0.0, ge=0, le=4096,
        description="CPUs that each node requests and is limited to; 0 requests none.")
    memory_gib: Number = Field(default=0.0, ge=0, le=65_536,
        description="Memory that each node requests and is limited to; 0 requests none.")
    shm_gib: Number = Field(default=2.0, ge=0, le=65_536,
        description="Size of /dev/shm, where ranks of one node exchange data; it counts as "
                    "memory. 0 leaves the runtime's 64 MiB.")
    gpus: Whole = Field(default=0, ge=0, le=64, description="GPUs of each node.")
    gpu_resource: Text = Field(default="nvidia.com/gpu",
        description="The resource that `gpus` counts, for example huawei.com/Ascend910.")
    node_selector: Labels = Field(default={},
        description="Labels of the machines that may run a node.")
    tolerations: TreeList = Field(default=[],
        description="Taints to tolerate, in the format of Kubernetes.")
    volumes: TreeList = Field(default=[],
        description="Volumes in the format of Kubernetes, each with its mountPath, and "
                    "optionally subPath and readOnly, beside its name.")
    service_account: Text = Field(default="",
        description="The service account of the pods; without one they get no token.")
    image_pull_secrets: Texts = Field(default=(), description="Secrets for pulling the image.")
    image_pull_policy: Annotated[str, OneOf("", "Always", "IfNotPresent", "Never")] = Field(
        default="",
        description="When to pull the image; empty leaves it to the cluster.")
    priority_class: Text = Field(default="",
        description="The priority class of the job and its pods.")
    user: Text = Field(default="1000:100",
        description="The user and group of the pods; empty for the user of the image.")
    home: Annotated[str, OneOf("empty", "image")] = Field(default="empty",
        description="What /home/ma-user contains: empty is a fresh folder, so that any image "
                    "works; image is the image's own folder.")
    launcher_creation: Annotated[str, OneOf("AtStartup", "WaitForWorkersReady")] = Field(
        default="AtStartup",
        description="With mpi-operator: when to create node 0, at once or when the other pods "
                    "are ready.")
    keep_min: Number = Field(default=0.0, ge=0, le=_YEAR_MIN,
        description="Minutes after which the cluster deletes a job that has ended; 0 keeps it "
                    "until `cloudjob rm`.")
    presigned_h: Number = Field(default=0.0, ge=0, le=168,
        description="Hours for which the pods get signed URLs of the package and the record "
                    "instead of the store's keys; for jobs without outputs, and without inputs "
                    "from s3:// or obs://. 0 gives them the keys.")
    labels: Labels = Field(default={}, description="Labels of the job and its pods.")
    annotations: Labels = Field(default={}, description="Annotations of the job and its pods.")
    pod: Tree = Field(default={},
        description="Merged into each pod's template as a strategic merge patch, for settings "
                    "without a key here; null removes a key.")
    job: Tree = Field(default={}, description="Merged into the job's manifest in the same way.")
    source_limit_mb: Number = _SOURCE_LIMIT


class Slurm(Values):
    """Settings of the slurm backend."""

    host: Text = Field(default="",
        description="The login node, by its name in your ssh configuration; empty if Slurm's "
                    "commands are on this machine.")
    folder: Text = Field(default="",
        description="The folder for jobs, which every node sees under the same path; by default "
                    "under $CLOUDJOB_HOME, with a host ~/.cloudjob/slurm there.")
    scratch: Text = Field(default="/tmp",
        description="A folder on each node's own disk, where code and inputs are unpacked.")
    partition: Text = Field(default="", description="#SBATCH --partition.")
    account: Text = Field(default="", description="#SBATCH --account.")
    qos: Text = Field(default="", description="#SBATCH --qos.")
    reservation: Text = Field(default="", description="#SBATCH --reservation.")
    constraint: Text = Field(default="", description="#SBATCH --constraint.")
    nodelist: Text = Field(default="", description="#SBATCH --nodelist.")
    exclude: Text = Field(default="", description="#SBATCH --exclude.")
    time_min: Whole = Field(default=0, ge=0, le=_YEAR_MIN,
        description="#SBATCH --time, in minutes; by default enough for timeout_min, or else the "
                    "partition's own limit.")
    cpus_per_rank: Whole = Field(default=1, ge=1, le=4096,
        description="#SBATCH --cpus-per-task: CPUs of each rank.")
    memory_gib: Number = Field(default=0.0, ge=0, le=65_536,
        description="#SBATCH --mem: memory of each node; 0 is the partition's default.")
    gpus: Whole = Field(default=0, ge=0, le=64, description="#SBATCH --gpus-per-node.")
    gres: Text = Field(default="",
        description="#SBATCH --gres: other devices of each node, for example nvme:1.")
    exclusive: Annotated[str, OneOf("false", "true")] = Field(default="false",
        description="#SBATCH --exclusive: no other job on the nodes.")
    requeue: Annotated[str, OneOf("false", "true")] = Field(default="false",
        description="#SBATCH --requeue: Slurm starts the job again after it was preempted or "
                    "lost a node.")
    warn_s: Whole = Field(default=0, ge=0, le=65_535,
        description="#SBATCH --signal: seconds before the time limit or preemption at which the "
                    "ranks receive SIGTERM; by default grace_s plus half a minute for outputs.")
    mpi: Annotated[str, OneOf("ssh", "pmix")] = Field(default="ssh",
        description="How the launcher mpirun starts ranks: mpirun over an sshd of the job's own, "
                    "or Slurm's srun with its PMIx.")
    python: Text = Field(default="",
        description="The interpreter that runs the script; by default the one of the active "
                    "virtual environment, or else the one that runs cloudjob; with a host the "
                    "one on PATH.")
    setup: Texts = Field(default=(),
        description="Shell lines that each node runs first, in a login shell, for example module "
                    "load openmpi.")
    sbatch: Texts = Field(default=(), description="More options, as they follow #SBATCH.")
    source_limit_mb: Number = _SOURCE_LIMIT


class MindSpore(Values):
    """Settings of scripts for MindSpore."""

    device_target: Annotated[str, OneOf(*mindspore.DEVICE_TARGETS)] = Field(default="none",
        description="The device that the script runs on, passed in CLOUDJOB_DEVICE_TARGET; with "
                    "none the variable is not set.")
    parallel_mode: Annotated[str, OneOf(*mindspore.PARALLEL_MODES)] = Field(default="none",
        description="How to distribute the training over the ranks; the script reads it from "
                    "CLOUDJOB_PARALLEL_MODE and applies it.")
    search_mode: Annotated[str, OneOf(*mindspore.SEARCH_MODES)] = Field(default="none",
        description="How auto_parallel searches for a strategy; the script reads it from "
                    "CLOUDJOB_SEARCH_MODE.")
    devices: Texts = Field(default=(),
        description="The devices of each node for a rank table, if the platform provides none: a "
                    "line such as 10.0.0.1 0=192.168.1.1 1=192.168.2.1 for each node.")


class Network(Values):
    """Settings of the network between the nodes."""

    stall_min: Number = Field(default=env.DEFAULT_STALL_S / 60, ge=0.25, le=_DAY_MIN,
        description="Minutes for which the network between the nodes may stall, or a node may "
                    "freeze, before the job is ended.")


class ObjectStorage(Values):
    """Settings of stores of one scheme."""

    endpoint: Text = Field(default="",
        description="The service's URL, without the bucket: "
                    "https://obs.cn-north-4.myhuaweicloud.com.")
    region: Text = Field(default="", description="The bucket's region: cn-north-4, us-east-1.")
    addressing: Annotated[str, OneOf(*ADDRESSINGS)] = Field(default="auto",
        description="Whether the bucket is part of the path or of the host name; auto is virtual "
                    "on AWS and OBS, and path elsewhere.")
    profile: Text = Field(default="",
        description="The profile in AWS's files that has the credentials.")
# fmt: on
