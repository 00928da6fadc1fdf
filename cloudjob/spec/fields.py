"""Every key of a job: what it is called, what it may hold and what it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from cloudjob import mindspore
from jobentry.contract import env
from jobentry.contract.launchers import AUTO, LAUNCHERS

BACKENDS = ("process", "docker", "modelarts", "kubernetes", "slurm")
LAUNCHER_NAMES = (AUTO, *LAUNCHERS)
ISOLATIONS = ("auto", "none")
ADDRESSINGS = ("auto", "path", "virtual")
KUBERNETES_ENGINES = ("auto", "volcano", "mpi-operator", "ms-operator")
LAUNCHER_CREATIONS = ("AtStartup", "WaitForWorkersReady")
PULL_POLICIES = ("", "Always", "IfNotPresent", "Never")
HOMES = ("empty", "image")
RESTORES = env.RESTORES

MASK = "***"

# Linux refuses a word of argv or of the environment above MAX_ARG_STRLEN = 131072 bytes, which
# includes the terminating NUL (execve(2)); the job would only find out on its node.
MAX_WORD_BYTES = 131_071
MAX_RANKS = 100_000
# A longer wait overflows the clocks of platforms and of Python; no platform lets a job live a year.
_YEAR_MIN = 525_600
_DAY_S = 86_400

SOURCE_LIMIT_MB = "source_limit_mb"
NAME_RULE = r"[A-Za-z0-9_-]{1,64}"
VARIABLE_RULE = r"[A-Za-z_][A-Za-z0-9_]*"
# ModelArts refuses user variables that begin with MA_; CLOUDJOB_ is how our two halves speak.
RESERVED_PREFIXES = ("MA_", "CLOUDJOB_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One key of a job as the job file, the command line and the documentation know it.

    Args:
        kind: One of ``str int float list map secrets``, and ``tree`` for YAML that is passed on as
            it stands.
        flag: The option that sets it; empty for what only files set and for positional words.
        allowed: The words it may hold; empty for any.
        const: The word that the flag stands for, when it takes none itself.
        least: The smallest number allowed.
        most: The largest number allowed.
    """

    name: str
    kind: str
    help: str
    default: object = ""
    metavar: str = ""
    flag: str = ""
    short: str = ""
    allowed: tuple[str, ...] = ()
    const: str = ""
    least: float | None = None
    most: float | None = None


# fmt: off
FIELDS: tuple[Field, ...] = (
    Field(name="script", kind="str", metavar="SCRIPT",
          help="The program to run, relative to the source folder."),
    Field(name="args", kind="list", default=(), metavar="ARGS",
          help="The script's own arguments, byte for byte."),
    Field(name="name", kind="str", flag="--name", metavar="NAME",
          help="The job's name: letters, digits, _ and -, at most 64; by default the script's "
               "name."),
    Field(name="nodes", kind="int", default=1, flag="--nodes", short="-n", metavar="N",
          least=1, most=10_000, help="Number of nodes."),
    Field(name="procs_per_node", kind="int", default=1, flag="--procs-per-node", metavar="M",
          least=1, most=1024, help="Number of ranks on each node."),
    Field(name="backend", kind="str", default="process", flag="--backend", metavar="NAME",
          allowed=BACKENDS, help="Where the job runs."),
    Field(name="launcher", kind="str", default=AUTO, flag="--launcher", metavar="NAME",
          allowed=LAUNCHER_NAMES,
          help="How to start the ranks; auto chooses from the script's imports."),
    Field(name="source", kind="str", default=".", flag="--source", metavar="DIR",
          help="The folder to send; in a file, relative to that file."),
    Field(name="env", kind="map", default={}, flag="--env", short="-e", metavar="NAME=VALUE",
          help="Variables for every rank; an earlier layer takes precedence, name by name."),
    Field(name="secrets", kind="secrets", default={}, flag="--secret", metavar="NAME[=@FILE]",
          help="Variables whose values are never shown; each value comes from your environment, "
               "or is the exact bytes of a file."),
    Field(name="inputs", kind="map", default={}, flag="--input", metavar="NAME=URI",
          help="Objects to copy to every node before the script starts; the variable NAME holds "
               "the path."),
    Field(name="input_nodes", kind="map", default={}, flag="--input-nodes", metavar="NAME=NODES",
          help="The nodes that need an input, such as 0 or 0,2-3; by default all nodes."),
    Field(name="outputs", kind="map", default={}, flag="--output", metavar="NAME=URI",
          help="Folders whose files are saved while the job runs and when it ends; an empty URI "
               "is the job's own folder in the store."),
    Field(name="output_sync_s", kind="float", default=30.0, flag="--output-sync-s", metavar="S",
          least=0, most=_DAY_S,
          help="Seconds between saves of the outputs while the job runs; 0 saves only at the "
               "end."),
    Field(name="restore_outputs", kind="str", default="none", flag="--restore-outputs",
          metavar="WHICH", allowed=RESTORES,
          help="Which files that an earlier run saved at an output's URI to restore on each node"
               " before the script starts: the node's own, or those of all nodes."),
    Field(name="image", kind="str", flag="--image", metavar="REF",
          help="The container image, for backends that run containers."),
    Field(name="flavor", kind="str", flag="--flavor", metavar="ID",
          help="The platform's name for the kind of node."),
    Field(name="timeout_min", kind="float", default=0.0, flag="--timeout-min", metavar="T",
          least=0, most=_YEAR_MIN, help="Minutes after which the job is ended; 0 sets no limit."),
    Field(name="start_timeout_min", kind="float", default=10.0, flag="--start-timeout-min",
          metavar="T", least=0.01, most=_YEAR_MIN,
          help="Minutes allowed for the nodes to connect, and then for the ranks to start."),
    Field(name="retries", kind="int", default=0, flag="--retries", metavar="R",
          least=0, most=10, help="How many times to start a failed job again."),
    Field(name="min_nodes", kind="int", default=0, flag="--min-nodes", metavar="N",
          least=0, most=10_000,
          help="The fewest nodes with which an elastic job (the launcher horovod-elastic) "
               "continues; 0 means 1 with that launcher, and all nodes with any other."),
    Field(name="grace_s", kind="float", default=10.0, flag="--grace-s", metavar="S",
          least=0, most=_DAY_S, help="Seconds between SIGTERM and SIGKILL."),
    Field(name="store", kind="str", flag="--store", metavar="URI",
          help="Where to store code and outputs; by default a folder under $CLOUDJOB_HOME."),
    Field(name=SOURCE_LIMIT_MB, kind="float", default=100.0, flag="--source-limit-mb",
          metavar="MB", least=0, help="The largest source folder to pack, in megabytes."),
    Field(name="links", kind="str", default="keep", flag="--follow-links", const="follow",
          allowed=("keep", "follow"),
          help="follow: follow symbolic links that point outside the source folder; keep: refuse"
               " them."),
    Field(name="hardware_check", kind="str", default="on", flag="--no-hardware-check", const="off",
          allowed=("on", "off"),
          help="off: start a launcher or parallel mode even if MindSpore's documentation rules "
               "it out on the device."),
)

_STORE_FIELDS = (
    Field(name="endpoint", kind="str", metavar="URL",
          help="The service's URL, without the bucket: https://obs.cn-north-4.myhuaweicloud.com."),
    Field(name="region", kind="str", metavar="NAME",
          help="The bucket's region: cn-north-4, us-east-1."),
    Field(name="addressing", kind="str", default="auto", metavar="HOW", allowed=ADDRESSINGS,
          help="Whether the bucket is part of the path or of the host name; auto is virtual on "
               "AWS and OBS, and path elsewhere."),
    Field(name="profile", kind="str", metavar="NAME",
          help="The profile in AWS's files that has the credentials."),
)

# Nodes that fetch over a slow line bear less than a folder on this machine.
_SOURCE_LIMIT = Field(
    name=SOURCE_LIMIT_MB, kind="float", default=0.0, metavar="MB", least=0,
    help="The largest source folder to pack for this backend, in megabytes; 0 uses "
         "source_limit_mb.")

NETWORK = "network"

SECTIONS: Mapping[str, tuple[Field, ...]] = MappingProxyType({
    "process": (
        Field(name="python", kind="str", metavar="PATH",
              help="The interpreter that runs the script; by default the one of the active "
                   "virtual environment, or else the one that runs cloudjob."),
        Field(name="isolation", kind="str", default="auto", metavar="HOW", allowed=ISOLATIONS,
              help="Whether to isolate the emulated nodes from each other."),
        Field(name="gpus", kind="int", default=0, metavar="G", least=0, most=64,
              help="NVIDIA GPUs reserved for each node; with 0 all nodes share the GPUs that "
                   "this shell sees."),
        _SOURCE_LIMIT,
    ),
    "docker": (
        Field(name="cpus", kind="float", default=0.0, metavar="C", least=0, most=4096,
              help="CPUs that each node may use; 0 is all of the machine."),
        Field(name="memory_gib", kind="float", default=0.0, metavar="GIB", least=0, most=65536,
              help="Memory that each node may use; 0 is all of the machine."),
        Field(name="shm_gib", kind="float", default=2.0, metavar="GIB", least=0, most=65536,
              help="Size of /dev/shm, where ranks of one node exchange data."),
        Field(name="gpus", kind="int", default=0, metavar="G", least=0, most=64,
              help="GPUs reserved for each node."),
        _SOURCE_LIMIT,
    ),
    "modelarts": (
        Field(name="region", kind="str", metavar="REGION",
              help="The region, cn-north-4 for example; by default $HW_REGION_NAME."),
        Field(name="endpoint", kind="str", metavar="URL",
              help="The URL of the service, if it is not the public one of the region."),
        Field(name="iam_endpoint", kind="str", metavar="URL",
              help="The URL of IAM, if it is not the public one of the region."),
        Field(name="auth", kind="str", default="sign", metavar="HOW", allowed=("sign", "token"),
              help="How to authenticate: sign signs each request with the keys; token exchanges "
                   "them for a token of IAM, which some private clouds require."),
        Field(name="project_id", kind="str", metavar="ID",
              help="The project; by default cloudjob asks IAM for the region's project."),
        Field(name="bucket", kind="str", metavar="BUCKET[/FOLDER]",
              help="Where to store code and outputs if no store is given."),
        Field(name="workspace_id", kind="str", default="0", metavar="ID",
              help="The workspace of the job."),
        Field(name="pool_id", kind="str", metavar="ID",
              help="The dedicated pool to run the job in; empty for the public pool."),
        Field(name="engine", kind="str", metavar="ID",
              help="A preset engine, as its id or NAME:VERSION; empty for an image of your own."),
        Field(name="description", kind="str", metavar="TEXT",
              help="The description in the ModelArts console; by default the job's name."),
        Field(name="access_method", kind="str", default="env", metavar="HOW",
              allowed=("env", "parameter"),
              help="How the script learns the paths of inputs and outputs: from the variable "
                   "NAME, or from --NAME=PATH among its arguments."),
        Field(name="parameters", kind="map", default={}, metavar="NAME: VALUE",
              help="Hyperparameters, which the platform appends as --NAME=VALUE."),
        Field(name="log_export", kind="str", metavar="URI",
              help="Where the platform stores complete logs; by default beside the code; none "
                   "disables it."),
        Field(name="auto_stop_hours", kind="int", default=0, metavar="H", least=0, most=8760,
              help="Hours after which the platform ends the job; by default the timeout plus one"
                   " hour."),
        Field(name="priority", kind="int", default=0, metavar="P", least=0, most=3,
              help="1 to 3, in a dedicated pool; 0 is the platform's default."),
        Field(name="preemptible", kind="str", default="false", metavar="YES",
              allowed=("false", "true"), help="Whether a job of higher priority may preempt this"
                                              " one."),
        Field(name="affinity", kind="str", default="none", metavar="KIND",
              allowed=("none", "cabinet", "hyperinstance"),
              help="What the nodes must have in common."),
        Field(name="affinity_group_size", kind="int", default=0, metavar="N", least=0, most=10_000,
              help="How many nodes must have it in common."),
        Field(name="hang_retry", kind="str", default="false", metavar="YES",
              allowed=("false", "true"),
              help="Whether the platform restarts a job that hangs."),
        Field(name="ssh_keys", kind="list", default=(), metavar="NAME",
              help="Key pairs of the account that may log in to the nodes."),
        Field(name="volumes", kind="tree", default=(), metavar="LIST",
              help="Volumes to mount: a list of nfs, pfs and obs, in the format of the API."),
        Field(name="annotations", kind="map", default={}, metavar="NAME: VALUE",
              help="Annotations of the job, for example for fault tolerance."),
        Field(name="tags", kind="map", default={}, metavar="KEY: VALUE",
              help="Tags of the job."),
        Field(name="body", kind="tree", default={}, metavar="TREE",
              help="Merged into the body of the request, for settings without a key here; null "
                   "removes a key."),
        _SOURCE_LIMIT,
    ),
    "kubernetes": (
        Field(name="engine", kind="str", default="auto", metavar="NAME",
              allowed=KUBERNETES_ENGINES,
              help="The operator that runs the job; auto asks the cluster which one it has."),
        Field(name="context", kind="str", metavar="NAME",
              help="The context in the kubeconfig; by default the current one."),
        Field(name="kubeconfig", kind="str", metavar="PATH",
              help="The file with the access to the cluster; by default $KUBECONFIG, then "
                   "~/.kube/config, then the service account of the pod that cloudjob runs in."),
        Field(name="namespace", kind="str", metavar="NAME",
              help="The namespace of the job; by default the one of the context."),
        Field(name="queue", kind="str", metavar="NAME",
              help="The queue of the job; by default the scheduler's own."),
        Field(name="cpus", kind="float", default=0.0, metavar="C", least=0, most=4096,
              help="CPUs that each node requests and is limited to; 0 requests none."),
        Field(name="memory_gib", kind="float", default=0.0, metavar="GIB", least=0, most=65536,
              help="Memory that each node requests and is limited to; 0 requests none."),
        Field(name="shm_gib", kind="float", default=2.0, metavar="GIB", least=0, most=65536,
              help="Size of /dev/shm, where ranks of one node exchange data; it counts as "
                   "memory. 0 leaves the runtime's 64 MiB."),
        Field(name="gpus", kind="int", default=0, metavar="N", least=0, most=64,
              help="GPUs of each node."),
        Field(name="gpu_resource", kind="str", default="nvidia.com/gpu", metavar="NAME",
              help="The resource that `gpus` counts, for example huawei.com/Ascend910."),
        Field(name="node_selector", kind="map", default={}, metavar="LABEL: VALUE",
              help="Labels of the machines that may run a node."),
        Field(name="tolerations", kind="tree", default=(), metavar="LIST",
              help="Taints to tolerate, in the format of Kubernetes."),
        Field(name="volumes", kind="tree", default=(), metavar="LIST",
              help="Volumes in the format of Kubernetes, each with its mountPath, and optionally"
                   " subPath and readOnly, beside its name."),
        Field(name="service_account", kind="str", metavar="NAME",
              help="The service account of the pods; without one they get no token."),
        Field(name="image_pull_secrets", kind="list", default=(), metavar="NAME",
              help="Secrets for pulling the image."),
        Field(name="image_pull_policy", kind="str", metavar="WHEN", allowed=PULL_POLICIES,
              help="When to pull the image; empty leaves it to the cluster."),
        Field(name="priority_class", kind="str", metavar="NAME",
              help="The priority class of the job and its pods."),
        Field(name="user", kind="str", default="1000:100", metavar="UID:GID",
              help="The user and group of the pods; empty for the user of the image."),
        Field(name="home", kind="str", default="empty", metavar="WHAT", allowed=HOMES,
              help="What /home/ma-user contains: empty is a fresh folder, so that any image "
                   "works; image is the image's own folder."),
        Field(name="launcher_creation", kind="str", default="AtStartup", metavar="WHEN",
              allowed=LAUNCHER_CREATIONS,
              help="With mpi-operator: when to create node 0, at once or when the other pods are"
                   " ready."),
        Field(name="keep_min", kind="float", default=0.0, metavar="T", least=0, most=_YEAR_MIN,
              help="Minutes after which the cluster deletes a job that has ended; 0 keeps it "
                   "until `cloudjob rm`."),
        Field(name="presigned_h", kind="float", default=0.0, metavar="H", least=0, most=168,
              help="Hours for which the pods get signed URLs of the package and the record "
                   "instead of the store's keys; for jobs without outputs, and without inputs "
                   "from s3:// or obs://. 0 gives them the keys."),
        Field(name="labels", kind="map", default={}, metavar="NAME: VALUE",
              help="Labels of the job and its pods."),
        Field(name="annotations", kind="map", default={}, metavar="NAME: VALUE",
              help="Annotations of the job and its pods."),
        Field(name="pod", kind="tree", default={}, metavar="TREE",
              help="Merged into each pod's template as a strategic merge patch, for settings "
                   "without a key here; null removes a key."),
        Field(name="job", kind="tree", default={}, metavar="TREE",
              help="Merged into the job's manifest in the same way."),
        _SOURCE_LIMIT,
    ),
    "slurm": (
        Field(name="host", kind="str", metavar="HOST",
              help="The login node, by its name in your ssh configuration; empty if Slurm's "
                   "commands are on this machine."),
        Field(name="folder", kind="str", metavar="DIR",
              help="The folder for jobs, which every node sees under the same path; by default "
                   "under $CLOUDJOB_HOME, with a host ~/.cloudjob/slurm there."),
        Field(name="scratch", kind="str", default="/tmp", metavar="DIR",
              help="A folder on each node's own disk, where code and inputs are unpacked."),
        Field(name="partition", kind="str", metavar="NAME", help="#SBATCH --partition."),
        Field(name="account", kind="str", metavar="NAME", help="#SBATCH --account."),
        Field(name="qos", kind="str", metavar="NAME", help="#SBATCH --qos."),
        Field(name="reservation", kind="str", metavar="NAME", help="#SBATCH --reservation."),
        Field(name="constraint", kind="str", metavar="FEATURES", help="#SBATCH --constraint."),
        Field(name="nodelist", kind="str", metavar="NODES", help="#SBATCH --nodelist."),
        Field(name="exclude", kind="str", metavar="NODES", help="#SBATCH --exclude."),
        Field(name="time_min", kind="int", default=0, metavar="T", least=0, most=_YEAR_MIN,
              help="#SBATCH --time, in minutes; by default enough for timeout_min, or else the "
                   "partition's own limit."),
        Field(name="cpus_per_rank", kind="int", default=1, metavar="C", least=1, most=4096,
              help="#SBATCH --cpus-per-task: CPUs of each rank."),
        Field(name="memory_gib", kind="float", default=0.0, metavar="GIB", least=0, most=65536,
              help="#SBATCH --mem: memory of each node; 0 is the partition's default."),
        Field(name="gpus", kind="int", default=0, metavar="G", least=0, most=64,
              help="#SBATCH --gpus-per-node."),
        Field(name="gres", kind="str", metavar="LIST",
              help="#SBATCH --gres: other devices of each node, for example nvme:1."),
        Field(name="exclusive", kind="str", default="false", metavar="YES",
              allowed=("false", "true"), help="#SBATCH --exclusive: no other job on the nodes."),
        Field(name="requeue", kind="str", default="false", metavar="YES",
              allowed=("false", "true"),
              help="#SBATCH --requeue: Slurm starts the job again after it was preempted or lost"
                   " a node."),
        Field(name="warn_s", kind="int", default=0, metavar="S", least=0, most=65535,
              help="#SBATCH --signal: seconds before the time limit or preemption at which the "
                   "ranks receive SIGTERM; by default grace_s plus half a minute for outputs."),
        Field(name="mpi", kind="str", default="ssh", metavar="HOW", allowed=("ssh", "pmix"),
              help="How the launcher mpirun starts ranks: mpirun over an sshd of the job's own, "
                   "or Slurm's srun with its PMIx."),
        Field(name="python", kind="str", metavar="PATH",
              help="The interpreter that runs the script; by default the one of the active "
                   "virtual environment, or else the one that runs cloudjob; with a host the one"
                   " on PATH."),
        Field(name="setup", kind="list", default=(), metavar="LINE",
              help="Shell lines that each node runs first, in a login shell, for example module "
                   "load openmpi."),
        Field(name="sbatch", kind="list", default=(), metavar="OPTION",
              help="More options, as they follow #SBATCH."),
        _SOURCE_LIMIT,
    ),
    "mindspore": (
        Field(name="device_target", kind="str", default=mindspore.NONE, metavar="DEVICE",
              allowed=mindspore.DEVICE_TARGETS,
              help="The device that the script runs on, passed in CLOUDJOB_DEVICE_TARGET; with "
                   "none the variable is not set."),
        Field(name="parallel_mode", kind="str", default=mindspore.NONE, metavar="MODE",
              allowed=mindspore.PARALLEL_MODES,
              help="How to distribute the training over the ranks; the script reads it from "
                   "CLOUDJOB_PARALLEL_MODE and applies it."),
        Field(name="search_mode", kind="str", default=mindspore.NONE, metavar="MODE",
              allowed=mindspore.SEARCH_MODES,
              help="How auto_parallel searches for a strategy; the script reads it from "
                   "CLOUDJOB_SEARCH_MODE."),
        Field(name="devices", kind="list", default=(), metavar="LINE",
              help="The devices of each node for a rank table, if the platform provides none: a "
                   "line such as 10.0.0.1 0=192.168.1.1 1=192.168.2.1 for each node."),
    ),
    NETWORK: (
        Field(name="stall_min", kind="float", default=env.DEFAULT_STALL_S / 60, metavar="T",
              least=0.25, most=_DAY_S / 60,
              help="Minutes for which the network between the nodes may stall, or a node may "
                   "freeze, before the job is ended."),
    ),
    "s3": _STORE_FIELDS,
    "obs": _STORE_FIELDS,
})
# fmt: on

# Sections that are not a backend's, beside the network's: those of the stores of these schemes, and
# of a framework.
STORE_SECTIONS = ("s3", "obs")
FRAMEWORK_SECTIONS = ("mindspore",)

# Those that leave a job alone when it has lost a node.
ELASTIC_BACKENDS = ("process", "docker")

VARIABLE_FIELDS = ("env", "secrets", "inputs", "outputs")
