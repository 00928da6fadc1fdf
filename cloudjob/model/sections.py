"""The sections of a job file: the settings of each backend, store and framework.

Each key is declared here and nowhere else; the JSON Schema, ``docs/reference/job-file.md`` and
``config show`` follow from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloudjob.model import mindspore
from cloudjob.model.keys import Values, key
from cloudjob.model.kinds import (
    EVENTS,
    FLAG,
    LABELS,
    RETRY_KINDS,
    TEXT,
    TEXTS,
    TREE,
    TREE_LIST,
    WEBHOOK,
    Number,
    OneOf,
    Whole,
)
from cloudjob.model.rules import ADDRESSINGS
from jobentry.contract import env, hang_actions, retry_kinds

_DAY_MIN = 1440
# No platform runs a job for a year.
_YEAR_MIN = 525_600

# The limit is lower for nodes that download over a slow connection than for a local folder.
_SOURCE_LIMIT = key(
    Number(0),
    "The largest source folder to pack for this backend, in megabytes; 0 uses source_limit_mb.",
    0.0,
)


# fmt: off
class Process(Values):
    """Settings of the process backend."""

    python: str = key(
        TEXT,
        "The interpreter that runs the script; by default the one of the active virtual "
        "environment, or else the one that runs cloudjob.")
    isolation: str = key(
        OneOf("auto", "names", "none"),
        "What each emulated node has for itself: auto is its host name and its folders /tmp, "
        "/var/tmp, /dev/shm, /run/lock, /cache, /home/ma-user and /home/work; names is only the "
        "host name; none is nothing.", "auto")
    gpus: int = key(
        Whole(0, 64),
        "NVIDIA GPUs reserved for each node; with 0 all nodes share the GPUs that this shell "
        "sees.", 0, is_harmless=True)
    source_limit_mb: float = _SOURCE_LIMIT


class Docker(Values):
    """Settings of the docker backend."""

    cpus: float = key(
        Number(0, 4096), "CPUs that each node may use; 0 is all of the machine.", 0.0,
        is_harmless=True)
    memory_gib: float = key(
        Number(0, 65_536), "Memory that each node may use; 0 is all of the machine.", 0.0,
        is_harmless=True)
    shm_gib: float = key(
        Number(0, 65_536), "Size of /dev/shm, where ranks of one node exchange data.", 2.0,
        is_harmless=True)
    gpus: int = key(
        Whole(0, 64), "GPUs reserved for each node.", 0, is_harmless=True)
    source_limit_mb: float = _SOURCE_LIMIT


class ModelArts(Values):
    """Settings of the modelarts backend."""

    region: str = key(
        TEXT, "The region, cn-north-4 for example; by default $HW_REGION_NAME.")
    endpoint: str = key(
        TEXT, "The URL of the service, if it is not the public one of the region.")
    iam_endpoint: str = key(
        TEXT, "The URL of IAM, if it is not the public one of the region.")
    auth: str = key(
        OneOf("sign", "token"),
        "How to authenticate: sign signs each request with the keys; token exchanges them for a "
        "token of IAM, which some private clouds require.", "sign")
    project_id: str = key(
        TEXT, "The project; by default cloudjob asks IAM for the region's project.")
    bucket: str = key(
        TEXT, "Where to store code and outputs if no store is given.")
    workspace_id: str = key(
        TEXT, "The workspace of the job.", "0")
    pool_id: str = key(
        TEXT, "The dedicated pool to run the job in; empty for the public pool.")
    engine: str = key(
        TEXT, "A preset engine, as its id or NAME:VERSION; empty for an image of your own.")
    description: str = key(
        TEXT, "The description in the ModelArts console; by default the job's name.")
    access_method: str = key(
        OneOf("env", "parameter"),
        "How the script learns the paths of inputs and outputs: from the variable NAME, or from "
        "--NAME=PATH among its arguments.", "env")
    parameters: Mapping[str, str] = key(
        LABELS, "Hyperparameters, which the platform appends as --NAME=VALUE.", {})
    log_export: str = key(
        TEXT,
        "Where the platform stores complete logs; by default beside the code; none disables it.")
    auto_stop_hours: int = key(
        Whole(0, 8760),
        "Hours after which the platform ends the job; by default the timeout plus one hour.", 0)
    priority: int = key(
        Whole(0, 3), "1 to 3, in a dedicated pool; 0 is the platform's default.", 0)
    preemptible: bool = key(
        FLAG, "Whether a job of higher priority may preempt this one.", False)
    affinity: str = key(
        OneOf("none", "cabinet", "hyperinstance"), "What the nodes must have in common.", "none")
    affinity_group_size: int = key(
        Whole(0, 10_000), "How many nodes must have it in common.", 0)
    hang_retry: bool = key(
        FLAG, "Whether the platform restarts a job that hangs.", False)
    first_version: bool = key(
        FLAG,
        "Whether ranks get the variables of the platform's first version as well (DLS_TASK_INDEX, "
        "BATCH_CUSTOM0_HOSTS and the like), on every backend.", False)
    ssh_keys: tuple[str, ...] = key(
        TEXTS, "Key pairs of the account that may log in to the nodes.", ())
    volumes: list[Any] = key(
        TREE_LIST, "Volumes to mount: a list of nfs, pfs and obs, in the format of the API.", [])
    annotations: Mapping[str, str] = key(
        LABELS, "Annotations of the job, for example for fault tolerance.", {})
    tags: Mapping[str, str] = key(
        LABELS, "Tags of the job.", {})
    body: Mapping[str, Any] = key(
        TREE,
        "Merged into the body of the request, for settings without a key here; null removes a "
        "key.", {})
    source_limit_mb: float = _SOURCE_LIMIT


class Kubernetes(Values):
    """Settings of the kubernetes backend."""

    engine: str = key(
        OneOf("auto", "volcano", "mpi-operator", "ms-operator", "job", "jobset"),
        "What runs the job: an operator, or Kubernetes itself (job); auto takes the first of "
        "these that the cluster offers you; with retries, the first operator that can restart a "
        "job, else job.",
        "auto")
    context: str = key(
        TEXT, "The context in the kubeconfig; by default the current one.")
    kubeconfig: str = key(
        TEXT,
        "The file with the access to the cluster; by default $KUBECONFIG, then ~/.kube/config, "
        "then the service account of the pod that cloudjob runs in.")
    namespace: str = key(
        TEXT, "The namespace of the job; by default the one of the context.")
    queue: str = key(
        TEXT,
        "The queue of the job, with job and jobset a LocalQueue of Kueue; by default the "
        "scheduler's own.")
    cpus: float = key(
        Number(0, 4096), "CPUs that each node requests and is limited to; 0 requests none.", 0.0,
        is_harmless=True)
    memory_gib: float = key(
        Number(0, 65_536), "Memory that each node requests and is limited to; 0 requests none.",
        0.0, is_harmless=True)
    shm_gib: float = key(
        Number(0, 65_536),
        "Size of /dev/shm, where ranks of one node exchange data; it counts as memory. 0 leaves "
        "the runtime's 64 MiB.", 2.0, is_harmless=True)
    gpus: int = key(
        Whole(0, 64), "GPUs of each node.", 0, is_harmless=True)
    gpu_resource: str = key(
        TEXT, "The resource that `gpus` counts, for example huawei.com/Ascend910.",
        "nvidia.com/gpu")
    node_selector: Mapping[str, str] = key(
        LABELS, "Labels of the machines that may run a node.", {})
    tolerations: list[Any] = key(
        TREE_LIST, "Taints to tolerate, in the format of Kubernetes.", [])
    volumes: list[Any] = key(
        TREE_LIST,
        "Volumes in the format of Kubernetes, each with its mountPath, and optionally subPath and "
        "readOnly, beside its name; the same volume may have several paths.", [])
    service_account: str = key(
        TEXT, "The service account of the pods; without one they get no token.")
    image_pull_secrets: tuple[str, ...] = key(
        TEXTS, "Secrets for pulling the image.", ())
    image_pull_policy: str = key(
        OneOf("", "Always", "IfNotPresent", "Never"),
        "When to pull the image; empty leaves it to the cluster.")
    priority_class: str = key(
        TEXT, "The priority class of the job and its pods.")
    user: str = key(
        TEXT, "The user and group of the pods; empty for the user of the image.", "1000:100")
    home: str = key(
        OneOf("empty", "image"),
        "What /home/ma-user contains: empty is a fresh folder, so that any image works; image is "
        "the image's own folder.", "empty")
    launcher_creation: str = key(
        OneOf("AtStartup", "WaitForWorkersReady"),
        "With mpi-operator: when to create node 0, at once or when the other pods are ready.",
        "AtStartup")
    keep_min: float = key(
        Number(0, _YEAR_MIN),
        "Minutes after which the cluster deletes a job that has ended; 0 keeps it until `cloudjob "
        "rm`.", 0.0)
    pending_min: float = key(
        Number(0, _YEAR_MIN),
        "Minutes that a job may wait for its first node to start, for whatever reason; 0 lets it "
        "wait for room and in queues for as long as it takes.", 0.0)
    presigned_h: float = key(
        Number(0, 168),
        "Hours for which the pods get signed URLs of the package and the record instead of the "
        "store's keys; for jobs without outputs, and without inputs from s3:// or obs://. 0 gives "
        "them the keys.", 0.0)
    labels: Mapping[str, str] = key(
        LABELS, "Labels of the job and its pods.", {})
    annotations: Mapping[str, str] = key(
        LABELS, "Annotations of the job and its pods.", {})
    pod: Mapping[str, Any] = key(
        TREE,
        "Merged into each pod's template as a strategic merge patch, for settings without a key "
        "here; null removes a key.", {})
    job: Mapping[str, Any] = key(
        TREE, "Merged into the job's manifest in the same way.", {})
    source_limit_mb: float = _SOURCE_LIMIT


class Slurm(Values):
    """Settings of the slurm backend."""

    host: str = key(
        TEXT,
        "The login node, by its name in your ssh configuration; empty if Slurm's commands are on "
        "this machine.")
    folder: str = key(
        TEXT,
        "The folder for jobs, which every node sees under the same path; by default under "
        "$CLOUDJOB_HOME, with a host ~/.cloudjob/slurm there.")
    scratch: str = key(
        TEXT, "A folder on each node's own disk, where code and inputs are unpacked.", "/tmp")
    partition: str = key(
        TEXT, "#SBATCH --partition.")
    account: str = key(
        TEXT, "#SBATCH --account.")
    qos: str = key(
        TEXT, "#SBATCH --qos.")
    reservation: str = key(
        TEXT, "#SBATCH --reservation.")
    constraint: str = key(
        TEXT, "#SBATCH --constraint.")
    nodelist: str = key(
        TEXT, "#SBATCH --nodelist.")
    exclude: str = key(
        TEXT, "#SBATCH --exclude.")
    time_min: int = key(
        Whole(0, _YEAR_MIN),
        "#SBATCH --time, in minutes; by default enough for timeout_min, or else the partition's "
        "own limit.", 0, is_harmless=True)
    cpus_per_rank: int = key(
        Whole(1, 4096), "#SBATCH --cpus-per-task: CPUs of each rank.", 1, is_harmless=True)
    memory_gib: float = key(
        Number(0, 65_536), "#SBATCH --mem: memory of each node; 0 is the partition's default.",
        0.0, is_harmless=True)
    gpus: int = key(
        Whole(0, 64), "#SBATCH --gpus-per-node.", 0, is_harmless=True)
    gres: str = key(
        TEXT, "#SBATCH --gres: other devices of each node, for example nvme:1.")
    exclusive: bool = key(
        FLAG, "#SBATCH --exclusive: no other job on the nodes.", False, is_harmless=True)
    requeue: bool = key(
        FLAG,
        "#SBATCH --requeue: Slurm starts the job again after it was preempted or lost a node.",
        False)
    warn_s: int = key(
        Whole(0, 65_535),
        "#SBATCH --signal: seconds before the time limit or preemption at which the ranks receive "
        "SIGTERM; by default grace_s plus half a minute for outputs.", 0, is_harmless=True)
    mpi: str = key(
        OneOf("ssh", "pmix"),
        "How the launcher mpirun starts ranks: ssh is Open MPI's own mpirun, pmix is Slurm's srun "
        "with its PMIx.", "ssh")
    python: str = key(
        TEXT,
        "The interpreter that runs the script; by default the one of the active virtual "
        "environment, or else the one that runs cloudjob, unless setup puts another python first "
        "on PATH; with a host the one on PATH.")
    setup: tuple[str, ...] = key(
        TEXTS,
        "Shell lines that each node runs first, in a login shell, for example module load "
        "openmpi.", ())
    sbatch: tuple[str, ...] = key(
        TEXTS, "More options, as they follow #SBATCH.", ())
    source_limit_mb: float = _SOURCE_LIMIT


class MindSpore(Values):
    """Settings of scripts for MindSpore."""

    device_target: str = key(
        OneOf(*mindspore.DEVICE_TARGETS),
        "The device that the script runs on, passed in CLOUDJOB_DEVICE_TARGET; with none the "
        "variable is not set.", "none", is_harmless=True)
    parallel_mode: str = key(
        OneOf(*mindspore.PARALLEL_MODES),
        "How to distribute the training over the ranks; the script reads it from "
        "CLOUDJOB_PARALLEL_MODE and applies it.", "none", is_harmless=True)
    search_mode: str = key(
        OneOf(*mindspore.SEARCH_MODES),
        "How auto_parallel searches for a strategy; the script reads it from "
        "CLOUDJOB_SEARCH_MODE.", "none", is_harmless=True)
    devices: tuple[str, ...] = key(
        TEXTS,
        "The devices of each node for a rank table, if the platform provides none: a line such as "
        "10.0.0.1 0=192.168.1.1 1=192.168.2.1 for each node.", ())


class Network(Values):
    """Settings of the network between the nodes."""

    stall_min: float = key(
        Number(0.25, _DAY_MIN),
        "Minutes for which the network between the nodes may stall, or a node may freeze, before "
        "the job is ended.", env.DEFAULT_STALL_S / 60, is_harmless=True)


class HangSettings(Values):
    """What to do if the job hangs: its ranks wait for each other, or for one that does not move."""

    action: str = key(
        OneOf(*hang_actions.ACTIONS),
        "warn reports it; stop also ends the job, if it certainly hangs; off does not look for "
        "hangs.", hang_actions.WARN, is_harmless=True)
    after_min: float = key(
        Number(0, _YEAR_MIN), "Minutes after the report at which stop ends the job.",
        env.DEFAULT_HANG_AFTER_S / 60, is_harmless=True)
    scale: float = key(
        Number(0.01, 100),
        "A factor for the times after which a job counts as hung; 0.5 halves them.", 1.0,
        is_harmless=True)


class Retry(Values):
    """After which failures a job is started again, and when."""

    on: tuple[str, ...] = key(
        RETRY_KINDS,
        "The kinds of failures after which a job is started again: user is an exception of the "
        "script (exit code 1 or 2), exit another exit code of it, crash a signal, platform a lost "
        "node, network a store or node that cannot be reached, hang a hang, preempted a stop from "
        "outside, entry a failure of cloudjob itself.", retry_kinds.DEFAULT, is_harmless=True)
    backoff_s: float = key(
        Number(0, 3600),
        "Seconds before the second attempt; the pause doubles each time, up to 10 minutes.", 0.0,
        is_harmless=True)


class Notify(Values):
    """Notifications about a job: where they go, and which events they report."""

    events: tuple[str, ...] = key(
        EVENTS,
        "What to report: end is every end, failure is an end in failure, hang is that the job "
        "hangs.", ("end", "hang"))
    webhook: str = key(
        WEBHOOK,
        "Where to send a JSON object with a Slack-compatible text: the name of a variable of your "
        "environment that holds the URL, or @FILE.")
    command: tuple[str, ...] = key(
        TEXTS,
        "A command to run on your machine, as a list of words, without a shell; it gets the text "
        "as its input.", ())
    silent_min: float = key(
        Number(0, _YEAR_MIN),
        "Minutes for which all ranks print nothing before that is reported as a hang, too; 0 does "
        "not report it.", 0.0)


class ObjectStorage(Values):
    """Settings of stores of one scheme."""

    endpoint: str = key(
        TEXT, "The service's URL, without the bucket: https://obs.cn-north-4.myhuaweicloud.com.")
    region: str = key(
        TEXT, "The bucket's region: cn-north-4, us-east-1.")
    addressing: str = key(
        OneOf(*ADDRESSINGS),
        "Whether the bucket is part of the path or of the host name; auto is virtual on AWS and "
        "OBS, and path elsewhere.", "auto")
    profile: str = key(
        TEXT, "The profile in AWS's files that has the credentials.")
# fmt: on
