"""The sections of a job file: the settings of each backend, store and framework.

Each key is declared here and nowhere else; the JSON Schema, ``docs/reference/job-file.md`` and
``config show`` follow from it.
"""

from __future__ import annotations

from typing import Annotated

from cloudjob.model import mindspore
from cloudjob.model.rules import ADDRESSINGS
from cloudjob.model.types import (
    Events,
    Flag,
    Labels,
    Number,
    OneOf,
    RetryKinds,
    Text,
    Texts,
    Tree,
    TreeList,
    Values,
    Webhook,
    Whole,
    key,
)
from jobentry.contract import env, hang_actions, retry_kinds

_DAY_MIN = 1440
# No platform runs a job for a year.
_YEAR_MIN = 525_600

# The limit is lower for nodes that download over a slow connection than for a local folder.
_SOURCE_LIMIT = key(
    "The largest source folder to pack for this backend, in megabytes; 0 uses source_limit_mb.",
    0.0,
    ge=0,
)


# fmt: off
class Process(Values):
    """Settings of the process backend."""

    python: Text = key(
        "The interpreter that runs the script; by default the one of the active virtual "
        "environment, or else the one that runs cloudjob.")
    isolation: Annotated[str, OneOf("auto", "names", "none")] = key(
        "What each emulated node has for itself: auto is its host name and its folders /tmp, "
        "/cache, /home/ma-user, /home/work and /dev/shm; names is only the host name; "
        "none is nothing.",
        "auto")
    gpus: Whole = key(
        "NVIDIA GPUs reserved for each node; with 0 all nodes share the GPUs that this shell sees.",
        0, ge=0, le=64)
    source_limit_mb: Number = _SOURCE_LIMIT


class Docker(Values):
    """Settings of the docker backend."""

    cpus: Number = key("CPUs that each node may use; 0 is all of the machine.", 0.0, ge=0, le=4096)
    memory_gib: Number = key(
        "Memory that each node may use; 0 is all of the machine.", 0.0, ge=0, le=65_536)
    shm_gib: Number = key(
        "Size of /dev/shm, where ranks of one node exchange data.", 2.0, ge=0, le=65_536)
    gpus: Whole = key("GPUs reserved for each node.", 0, ge=0, le=64)
    source_limit_mb: Number = _SOURCE_LIMIT


class ModelArts(Values):
    """Settings of the modelarts backend."""

    region: Text = key("The region, cn-north-4 for example; by default $HW_REGION_NAME.")
    endpoint: Text = key("The URL of the service, if it is not the public one of the region.")
    iam_endpoint: Text = key("The URL of IAM, if it is not the public one of the region.")
    auth: Annotated[str, OneOf("sign", "token")] = key(
        "How to authenticate: sign signs each request with the keys; token exchanges them for a "
        "token of IAM, which some private clouds require.", "sign")
    project_id: Text = key("The project; by default cloudjob asks IAM for the region's project.")
    bucket: Text = key("Where to store code and outputs if no store is given.")
    workspace_id: Text = key("The workspace of the job.", "0")
    pool_id: Text = key("The dedicated pool to run the job in; empty for the public pool.")
    engine: Text = key(
        "A preset engine, as its id or NAME:VERSION; empty for an image of your own.")
    description: Text = key("The description in the ModelArts console; by default the job's name.")
    access_method: Annotated[str, OneOf("env", "parameter")] = key(
        "How the script learns the paths of inputs and outputs: from the variable NAME, or from "
        "--NAME=PATH among its arguments.", "env")
    parameters: Labels = key("Hyperparameters, which the platform appends as --NAME=VALUE.", {})
    log_export: Text = key(
        "Where the platform stores complete logs; by default beside the code; none disables it.")
    auto_stop_hours: Whole = key(
        "Hours after which the platform ends the job; by default the timeout plus one hour.",
        0, ge=0, le=8760)
    priority: Whole = key(
        "1 to 3, in a dedicated pool; 0 is the platform's default.", 0, ge=0, le=3)
    preemptible: Flag = key(
        "Whether a job of higher priority may preempt this one.", False)
    affinity: Annotated[str, OneOf("none", "cabinet", "hyperinstance")] = key(
        "What the nodes must have in common.", "none")
    affinity_group_size: Whole = key("How many nodes must have it in common.", 0, ge=0, le=10_000)
    hang_retry: Flag = key(
        "Whether the platform restarts a job that hangs.", False)
    first_version: Flag = key(
        "Whether ranks get the variables of the platform's first version as well (DLS_TASK_INDEX, "
        "BATCH_CUSTOM0_HOSTS and the like), on every backend.", False)
    ssh_keys: Texts = key("Key pairs of the account that may log in to the nodes.", ())
    volumes: TreeList = key(
        "Volumes to mount: a list of nfs, pfs and obs, in the format of the API.", [])
    annotations: Labels = key("Annotations of the job, for example for fault tolerance.", {})
    tags: Labels = key("Tags of the job.", {})
    body: Tree = key(
        "Merged into the body of the request, for settings without a key here; null removes a key.",
        {})
    source_limit_mb: Number = _SOURCE_LIMIT


class Kubernetes(Values):
    """Settings of the kubernetes backend."""

    engine: Annotated[
        str, OneOf("auto", "volcano", "mpi-operator", "ms-operator", "job", "jobset")
    ] = key(
        "What runs the job: an operator, or Kubernetes itself (job); auto takes the first of these "
        "that the cluster offers you, and with retries the first that can restart a job.", "auto")
    context: Text = key("The context in the kubeconfig; by default the current one.")
    kubeconfig: Text = key(
        "The file with the access to the cluster; by default $KUBECONFIG, then ~/.kube/config, "
        "then the service account of the pod that cloudjob runs in.")
    namespace: Text = key("The namespace of the job; by default the one of the context.")
    queue: Text = key(
        "The queue of the job, with job and jobset a LocalQueue of Kueue; by default the "
        "scheduler's own.")
    cpus: Number = key(
        "CPUs that each node requests and is limited to; 0 requests none.", 0.0, ge=0, le=4096)
    memory_gib: Number = key(
        "Memory that each node requests and is limited to; 0 requests none.", 0.0, ge=0, le=65_536)
    shm_gib: Number = key(
        "Size of /dev/shm, where ranks of one node exchange data; it counts as memory. 0 leaves "
        "the runtime's 64 MiB.", 2.0, ge=0, le=65_536)
    gpus: Whole = key("GPUs of each node.", 0, ge=0, le=64)
    gpu_resource: Text = key(
        "The resource that `gpus` counts, for example huawei.com/Ascend910.", "nvidia.com/gpu")
    node_selector: Labels = key("Labels of the machines that may run a node.", {})
    tolerations: TreeList = key("Taints to tolerate, in the format of Kubernetes.", [])
    volumes: TreeList = key(
        "Volumes in the format of Kubernetes, each with its mountPath, and optionally subPath and "
        "readOnly, beside its name.", [])
    service_account: Text = key("The service account of the pods; without one they get no token.")
    image_pull_secrets: Texts = key("Secrets for pulling the image.", ())
    image_pull_policy: Annotated[str, OneOf("", "Always", "IfNotPresent", "Never")] = key(
        "When to pull the image; empty leaves it to the cluster.")
    priority_class: Text = key("The priority class of the job and its pods.")
    user: Text = key("The user and group of the pods; empty for the user of the image.", "1000:100")
    home: Annotated[str, OneOf("empty", "image")] = key(
        "What /home/ma-user contains: empty is a fresh folder, so that any image works; image is "
        "the image's own folder.", "empty")
    launcher_creation: Annotated[str, OneOf("AtStartup", "WaitForWorkersReady")] = key(
        "With mpi-operator: when to create node 0, at once or when the other pods are ready.",
        "AtStartup")
    keep_min: Number = key(
        "Minutes after which the cluster deletes a job that has ended; 0 keeps it until `cloudjob "
        "rm`.", 0.0, ge=0, le=_YEAR_MIN)
    presigned_h: Number = key(
        "Hours for which the pods get signed URLs of the package and the record instead of the "
        "store's keys; for jobs without outputs, and without inputs from s3:// or obs://. 0 gives "
        "them the keys.", 0.0, ge=0, le=168)
    labels: Labels = key("Labels of the job and its pods.", {})
    annotations: Labels = key("Annotations of the job and its pods.", {})
    pod: Tree = key(
        "Merged into each pod's template as a strategic merge patch, for settings without a key "
        "here; null removes a key.", {})
    job: Tree = key("Merged into the job's manifest in the same way.", {})
    source_limit_mb: Number = _SOURCE_LIMIT


class Slurm(Values):
    """Settings of the slurm backend."""

    host: Text = key(
        "The login node, by its name in your ssh configuration; empty if Slurm's commands are on "
        "this machine.")
    folder: Text = key(
        "The folder for jobs, which every node sees under the same path; by default under "
        "$CLOUDJOB_HOME, with a host ~/.cloudjob/slurm there.")
    scratch: Text = key(
        "A folder on each node's own disk, where code and inputs are unpacked.", "/tmp")
    partition: Text = key("#SBATCH --partition.")
    account: Text = key("#SBATCH --account.")
    qos: Text = key("#SBATCH --qos.")
    reservation: Text = key("#SBATCH --reservation.")
    constraint: Text = key("#SBATCH --constraint.")
    nodelist: Text = key("#SBATCH --nodelist.")
    exclude: Text = key("#SBATCH --exclude.")
    time_min: Whole = key(
        "#SBATCH --time, in minutes; by default enough for timeout_min, or else the partition's "
        "own limit.", 0, ge=0, le=_YEAR_MIN)
    cpus_per_rank: Whole = key("#SBATCH --cpus-per-task: CPUs of each rank.", 1, ge=1, le=4096)
    memory_gib: Number = key(
        "#SBATCH --mem: memory of each node; 0 is the partition's default.", 0.0, ge=0, le=65_536)
    gpus: Whole = key("#SBATCH --gpus-per-node.", 0, ge=0, le=64)
    gres: Text = key("#SBATCH --gres: other devices of each node, for example nvme:1.")
    exclusive: Flag = key(
        "#SBATCH --exclusive: no other job on the nodes.", False)
    requeue: Flag = key(
        "#SBATCH --requeue: Slurm starts the job again after it was preempted or lost a node.",
        False)
    warn_s: Whole = key(
        "#SBATCH --signal: seconds before the time limit or preemption at which the ranks receive "
        "SIGTERM; by default grace_s plus half a minute for outputs.", 0, ge=0, le=65_535)
    mpi: Annotated[str, OneOf("ssh", "pmix")] = key(
        "How the launcher mpirun starts ranks: ssh is Open MPI's own mpirun, pmix is Slurm's srun "
        "with its PMIx.", "ssh")
    python: Text = key(
        "The interpreter that runs the script; by default the one of the active virtual "
        "environment, or else the one that runs cloudjob, unless setup puts another python first "
        "on PATH; with a host the one on PATH.")
    setup: Texts = key(
        "Shell lines that each node runs first, in a login shell, for example module load openmpi.",
        ())
    sbatch: Texts = key("More options, as they follow #SBATCH.", ())
    source_limit_mb: Number = _SOURCE_LIMIT


class MindSpore(Values):
    """Settings of scripts for MindSpore."""

    device_target: Annotated[str, OneOf(*mindspore.DEVICE_TARGETS)] = key(
        "The device that the script runs on, passed in CLOUDJOB_DEVICE_TARGET; with none the "
        "variable is not set.", "none")
    parallel_mode: Annotated[str, OneOf(*mindspore.PARALLEL_MODES)] = key(
        "How to distribute the training over the ranks; the script reads it from "
        "CLOUDJOB_PARALLEL_MODE and applies it.", "none")
    search_mode: Annotated[str, OneOf(*mindspore.SEARCH_MODES)] = key(
        "How auto_parallel searches for a strategy; the script reads it from CLOUDJOB_SEARCH_MODE.",
        "none")
    devices: Texts = key(
        "The devices of each node for a rank table, if the platform provides none: a line such as "
        "10.0.0.1 0=192.168.1.1 1=192.168.2.1 for each node.", ())


class Network(Values):
    """Settings of the network between the nodes."""

    stall_min: Number = key(
        "Minutes for which the network between the nodes may stall, or a node may freeze, before "
        "the job is ended.", env.DEFAULT_STALL_S / 60, ge=0.25, le=_DAY_MIN)


class Hang(Values):
    """What to do if the job hangs: its ranks wait for each other, or for one that does not move."""

    action: Annotated[str, OneOf(*hang_actions.ACTIONS)] = key(
        "warn reports it; stop also ends the job, if it certainly hangs; off does not look for "
        "hangs.", hang_actions.WARN)
    after_min: Number = key(
        "Minutes after the report at which stop ends the job.", env.DEFAULT_HANG_AFTER_S / 60,
        ge=0, le=_YEAR_MIN)
    scale: Number = key(
        "A factor for the times after which a job counts as hung; 0.5 halves them.", 1.0, ge=0.01,
        le=100)


class Retry(Values):
    """After which failures a job is started again, and when."""

    on: RetryKinds = key(
        "The kinds of failures after which a job is started again: user is an exception of the "
        "script (exit code 1 or 2), exit another exit code of it, crash a signal, platform a lost "
        "node, network a store or node that cannot be reached, hang a hang, preempted a stop from "
        "outside, entry a failure of cloudjob itself.", retry_kinds.DEFAULT)
    backoff_s: Number = key(
        "Seconds before the second attempt; the pause doubles each time, up to 10 minutes.", 0.0,
        ge=0, le=3600)


class Notify(Values):
    """Notifications about a job: where they go, and which events they report."""

    events: Events = key(
        "What to report: end is every end, failure is an end in failure, hang is that the job "
        "hangs.", ("end", "hang"))
    webhook: Webhook = key(
        "Where to send a JSON object with a Slack-compatible text: the name of a variable of your "
        "environment that holds the URL, or @FILE.")
    command: Texts = key(
        "A command to run on your machine, as a list of words, without a shell; it gets the text "
        "as its input.", ())
    silent_min: Number = key(
        "Minutes for which all ranks print nothing before that is reported as a hang, too; 0 does "
        "not report it.", 0.0, ge=0, le=_YEAR_MIN)


class ObjectStorage(Values):
    """Settings of stores of one scheme."""

    endpoint: Text = key(
        "The service's URL, without the bucket: https://obs.cn-north-4.myhuaweicloud.com.")
    region: Text = key("The bucket's region: cn-north-4, us-east-1.")
    addressing: Annotated[str, OneOf(*ADDRESSINGS)] = key(
        "Whether the bucket is part of the path or of the host name; auto is virtual on AWS and "
        "OBS, and path elsewhere.", "auto")
    profile: Text = key("The profile in AWS's files that has the credentials.")
# fmt: on
