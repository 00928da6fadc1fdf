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
          help="The job's name: letters, digits, _ and -, at most 64; by default the script's."),
    Field(name="nodes", kind="int", default=1, flag="--nodes", short="-n", metavar="N",
          least=1, most=10_000, help="How many nodes the job runs on."),
    Field(name="procs_per_node", kind="int", default=1, flag="--procs-per-node", metavar="M",
          least=1, most=1024, help="How many ranks run on each node."),
    Field(name="backend", kind="str", default="process", flag="--backend", metavar="NAME",
          allowed=BACKENDS, help="Where the job runs."),
    Field(name="launcher", kind="str", default=AUTO, flag="--launcher", metavar="NAME",
          allowed=LAUNCHER_NAMES,
          help="What starts the ranks; auto is what the script's imports ask for."),
    Field(name="source", kind="str", default=".", flag="--source", metavar="DIR",
          help="The folder that travels; in a file, relative to that file."),
    Field(name="env", kind="map", default={}, flag="--env", short="-e", metavar="NAME=VALUE",
          help="Variables every rank sees; a nearer layer wins name by name."),
    Field(name="secrets", kind="secrets", default={}, flag="--secret", metavar="NAME[=@FILE]",
          help="Variables whose values are never shown; each comes from your environment, or is a "
               "file's exact bytes."),
    Field(name="inputs", kind="map", default={}, flag="--input", metavar="NAME=URI",
          help="Objects brought to every node before the script starts; the variable NAME holds "
               "the path."),
    Field(name="input_nodes", kind="map", default={}, flag="--input-nodes", metavar="NAME=NODES",
          help="The nodes that need an input, like 0 or 0,2-3; by default all do."),
    Field(name="outputs", kind="map", default={}, flag="--output", metavar="NAME=URI",
          help="Folders kept while the job runs and when it ends; an empty URI is the job's own "
               "place in the store."),
    Field(name="output_sync_s", kind="float", default=30.0, flag="--output-sync-s", metavar="S",
          least=0, most=_DAY_S,
          help="How often outputs are kept while the job runs; 0 is only at the end."),
    Field(name="restore_outputs", kind="str", default="none", flag="--restore-outputs",
          metavar="WHICH", allowed=RESTORES,
          help="Which of the files that an earlier run left at an output's URI each node gets back "
               "before the script starts: its own, or those of all nodes."),
    Field(name="image", kind="str", flag="--image", metavar="REF",
          help="The container image, for backends that run containers."),
    Field(name="flavor", kind="str", flag="--flavor", metavar="ID",
          help="The platform's name for the kind of node."),
    Field(name="timeout_min", kind="float", default=0.0, flag="--timeout-min", metavar="T",
          least=0, most=_YEAR_MIN, help="Minutes after which the job is ended; 0 is never."),
    Field(name="start_timeout_min", kind="float", default=10.0, flag="--start-timeout-min",
          metavar="T", least=0.01, most=_YEAR_MIN,
          help="Minutes that the nodes may take to find each other, and the ranks to start."),
    Field(name="retries", kind="int", default=0, flag="--retries", metavar="R",
          least=0, most=10, help="How often a failed job is started again."),
    Field(name="min_nodes", kind="int", default=0, flag="--min-nodes", metavar="N",
          least=0, most=10_000,
          help="With how few of its nodes an elastic job (the launcher horovod-elastic) goes on; 0 "
               "is 1 with that launcher, and all of them with any other."),
    Field(name="grace_s", kind="float", default=10.0, flag="--grace-s", metavar="S",
          least=0, most=_DAY_S, help="Seconds between SIGTERM and SIGKILL."),
    Field(name="store", kind="str", flag="--store", metavar="URI",
          help="Where code and outputs are kept; by default a folder below $CLOUDJOB_HOME."),
    Field(name=SOURCE_LIMIT_MB, kind="float", default=100.0, flag="--source-limit-mb",
          metavar="MB", least=0, help="The largest source folder that is packed, in megabytes."),
    Field(name="links", kind="str", default="keep", flag="--follow-links", const="follow",
          allowed=("keep", "follow"),
          help="follow: links that lead out of the source are packed as what they lead to; without "
               "it they are refused."),
    Field(name="hardware_check", kind="str", default="on", flag="--no-hardware-check", const="off",
          allowed=("on", "off"),
          help="off: a launcher or a parallel mode that MindSpore's documents rule out on a device "
               "is started all the same."),
)

_STORE_FIELDS = (
    Field(name="endpoint", kind="str", metavar="URL",
          help="Where the service is, without the bucket: https://obs.cn-north-4.myhuaweicloud.com."),
    Field(name="region", kind="str", metavar="NAME",
          help="The bucket's region: cn-north-4, us-east-1."),
    Field(name="addressing", kind="str", default="auto", metavar="HOW", allowed=ADDRESSINGS,
          help="Whether the bucket stands in the path or in the host name of a request; by itself, "
               "that is virtual on AWS and OBS, and path elsewhere."),
    Field(name="profile", kind="str", metavar="NAME",
          help="The profile of AWS's files that has the keys."),
)

# Nodes that fetch over a slow line bear less than a folder on this machine.
_SOURCE_LIMIT = Field(
    name=SOURCE_LIMIT_MB, kind="float", default=0.0, metavar="MB", least=0,
    help="The largest source folder that is packed for this backend, in megabytes; 0 is what "
         "source_limit_mb says.")

NETWORK = "network"

SECTIONS: Mapping[str, tuple[Field, ...]] = MappingProxyType({
    "process": (
        Field(name="python", kind="str", metavar="PATH",
              help="The interpreter that runs the script; by default that of the active virtual "
                   "environment, else the one that runs cloudjob."),
        Field(name="isolation", kind="str", default="auto", metavar="HOW", allowed=ISOLATIONS,
              help="Whether the emulated nodes are kept apart from each other."),
        Field(name="gpus", kind="int", default=0, metavar="G", least=0, most=64,
              help="NVIDIA's GPUs of a node, which no other node has; with 0 all nodes share those "
                   "that this shell sees."),
        _SOURCE_LIMIT,
    ),
    "docker": (
        Field(name="cpus", kind="float", default=0.0, metavar="C", least=0, most=4096,
              help="Processors that a node may use; 0 is all of the machine."),
        Field(name="memory_gib", kind="float", default=0.0, metavar="GIB", least=0, most=65536,
              help="Memory that a node may use; 0 is all of the machine."),
        Field(name="shm_gib", kind="float", default=2.0, metavar="GIB", least=0, most=65536,
              help="Room in /dev/shm, where ranks of one node exchange their data."),
        Field(name="gpus", kind="int", default=0, metavar="G", least=0, most=64,
              help="GPUs of a node, which no other node has."),
        _SOURCE_LIMIT,
    ),
    "modelarts": (
        Field(name="region", kind="str", metavar="REGION",
              help="Where jobs run, cn-north-4 for example; by default $HW_REGION_NAME."),
        Field(name="endpoint", kind="str", metavar="URL",
              help="The service's address, where it is not the public one of the region."),
        Field(name="iam_endpoint", kind="str", metavar="URL",
              help="The address of IAM, where it is not the public one of the region."),
        Field(name="auth", kind="str", default="sign", metavar="HOW", allowed=("sign", "token"),
              help="How keys prove who we are: they sign each request, or IAM gives a token for "
                   "them, which some private clouds want."),
        Field(name="project_id", kind="str", metavar="ID",
              help="The project; by default IAM is asked for that of the region."),
        Field(name="bucket", kind="str", metavar="BUCKET[/FOLDER]",
              help="Where code and outputs are kept when no store is named."),
        Field(name="workspace_id", kind="str", default="0", metavar="ID",
              help="The workspace of the job."),
        Field(name="pool_id", kind="str", metavar="ID",
              help="The dedicated pool that the job runs in; empty for the public one."),
        Field(name="engine", kind="str", metavar="ID",
              help="A preset engine, as its id or NAME:VERSION; empty for an image of yours."),
        Field(name="description", kind="str", metavar="TEXT",
              help="What the console shows; by default the job's name."),
        Field(name="access_method", kind="str", default="env", metavar="HOW",
              allowed=("env", "parameter"),
              help="How the script learns where inputs and outputs lie: from the variable NAME, or "
                   "from --NAME=PATH among its arguments."),
        Field(name="parameters", kind="map", default={}, metavar="NAME: VALUE",
              help="Hyperparameters, which the platform appends as --NAME=VALUE."),
        Field(name="log_export", kind="str", metavar="URI",
              help="Where the platform keeps whole logs; by default beside the code; none for "
                   "nowhere."),
        Field(name="auto_stop_hours", kind="int", default=0, metavar="H", least=0, most=8760,
              help="Hours after which the platform ends the job; by default the time-out and an "
                   "hour."),
        Field(name="priority", kind="int", default=0, metavar="P", least=0, most=3,
              help="1 to 3, in a dedicated pool; 0 is the platform's default."),
        Field(name="preemptible", kind="str", default="false", metavar="YES",
              allowed=("false", "true"), help="Whether a job of higher priority may end this one."),
        Field(name="affinity", kind="str", default="none", metavar="KIND",
              allowed=("none", "cabinet", "hyperinstance"),
              help="What the nodes must share."),
        Field(name="affinity_group_size", kind="int", default=0, metavar="N", least=0, most=10_000,
              help="How many nodes must share it."),
        Field(name="hang_retry", kind="str", default="false", metavar="YES",
              allowed=("false", "true"),
              help="Whether the platform starts a job again that hangs."),
        Field(name="ssh_keys", kind="list", default=(), metavar="NAME",
              help="Key pairs of the account that may log in to the nodes."),
        Field(name="volumes", kind="tree", default=(), metavar="LIST",
              help="What is mounted: a list of nfs, pfs and obs, as the API has it."),
        Field(name="annotations", kind="map", default={}, metavar="NAME: VALUE",
              help="Annotations of the job, fault tolerance for example."),
        Field(name="tags", kind="map", default={}, metavar="KEY: VALUE",
              help="Tags of the job."),
        Field(name="body", kind="tree", default={}, metavar="TREE",
              help="Merged into the body of the request: what cloudjob has no key for; null takes "
                   "a key away."),
        _SOURCE_LIMIT,
    ),
    "kubernetes": (
        Field(name="engine", kind="str", default="auto", metavar="NAME",
              allowed=KUBERNETES_ENGINES,
              help="The operator that runs the job; auto asks the cluster which one it has."),
        Field(name="context", kind="str", metavar="NAME",
              help="The context of the kubeconfig; by default its current one."),
        Field(name="kubeconfig", kind="str", metavar="PATH",
              help="The file that says how to reach the cluster; by default $KUBECONFIG, then "
                   "~/.kube/config, then the service account of the pod that cloudjob runs in."),
        Field(name="namespace", kind="str", metavar="NAME",
              help="Where the job is made; by default the namespace of the context."),
        Field(name="queue", kind="str", metavar="NAME",
              help="The queue that the job waits in; by default the scheduler's own."),
        Field(name="cpus", kind="float", default=0.0, metavar="C", least=0, most=4096,
              help="Processors that a node asks for and may use; 0 asks for none."),
        Field(name="memory_gib", kind="float", default=0.0, metavar="GIB", least=0, most=65536,
              help="Memory that a node asks for and may use; 0 asks for none."),
        Field(name="shm_gib", kind="float", default=2.0, metavar="GIB", least=0, most=65536,
              help="Room in /dev/shm, where ranks of one node exchange their data; it counts as "
                   "memory. 0 leaves the runtime's 64 MiB."),
        Field(name="gpus", kind="int", default=0, metavar="N", least=0, most=64,
              help="GPUs of a node."),
        Field(name="gpu_resource", kind="str", default="nvidia.com/gpu", metavar="NAME",
              help="The resource that `gpus` counts; huawei.com/Ascend910 for example."),
        Field(name="node_selector", kind="map", default={}, metavar="LABEL: VALUE",
              help="Labels of the machines that may run a node."),
        Field(name="tolerations", kind="tree", default=(), metavar="LIST",
              help="Taints of machines that do not matter, as Kubernetes has them."),
        Field(name="volumes", kind="tree", default=(), metavar="LIST",
              help="Volumes as Kubernetes has them, each with its mountPath, and with subPath and "
                   "readOnly where wanted, beside its name."),
        Field(name="service_account", kind="str", metavar="NAME",
              help="The service account of the pods; without one they get no token."),
        Field(name="image_pull_secrets", kind="list", default=(), metavar="NAME",
              help="Secrets with which the image is pulled."),
        Field(name="image_pull_policy", kind="str", metavar="WHEN", allowed=PULL_POLICIES,
              help="When the image is pulled; empty leaves it to the cluster."),
        Field(name="priority_class", kind="str", metavar="NAME",
              help="The priority class of job and pods."),
        Field(name="user", kind="str", default="1000:100", metavar="UID:GID",
              help="Whom the pods run as; empty for the user of the image."),
        Field(name="home", kind="str", default="empty", metavar="WHAT", allowed=HOMES,
              help="What /home/ma-user is: empty is a fresh folder, so that any image works; image "
                   "is what the image has there."),
        Field(name="launcher_creation", kind="str", default="AtStartup", metavar="WHEN",
              allowed=LAUNCHER_CREATIONS,
              help="With mpi-operator: when node 0 is made, at once or when the other pods are "
                   "ready."),
        Field(name="keep_min", kind="float", default=0.0, metavar="T", least=0, most=_YEAR_MIN,
              help="Minutes after which the cluster deletes a job that has ended; 0 keeps it until "
                   "`cloudjob rm`."),
        Field(name="presigned_h", kind="float", default=0.0, metavar="H", least=0, most=168,
              help="For how many hours the pods get signed addresses of package and record, and no "
                   "keys of the store; for jobs without outputs, and without inputs of s3:// or "
                   "obs://. 0 gives them the keys."),
        Field(name="labels", kind="map", default={}, metavar="NAME: VALUE",
              help="Labels of the job and its pods."),
        Field(name="annotations", kind="map", default={}, metavar="NAME: VALUE",
              help="Annotations of the job and its pods."),
        Field(name="pod", kind="tree", default={}, metavar="TREE",
              help="Merged into each pod's template as a strategic merge patch: what cloudjob has "
                   "no key for; null takes a key away."),
        Field(name="job", kind="tree", default={}, metavar="TREE",
              help="Merged into the job's manifest in the same way."),
        _SOURCE_LIMIT,
    ),
    "slurm": (
        Field(name="host", kind="str", metavar="HOST",
              help="The login node, by its name in your ssh configuration; empty where Slurm's "
                   "own commands are."),
        Field(name="folder", kind="str", metavar="DIR",
              help="Where the folders of jobs lie, seen by every node under the same path; by "
                   "default below $CLOUDJOB_HOME, with a host ~/.cloudjob/slurm there."),
        Field(name="scratch", kind="str", default="/tmp", metavar="DIR",
              help="A folder of each node's own disk, where code and inputs are unpacked."),
        Field(name="partition", kind="str", metavar="NAME", help="#SBATCH --partition."),
        Field(name="account", kind="str", metavar="NAME", help="#SBATCH --account."),
        Field(name="qos", kind="str", metavar="NAME", help="#SBATCH --qos."),
        Field(name="reservation", kind="str", metavar="NAME", help="#SBATCH --reservation."),
        Field(name="constraint", kind="str", metavar="FEATURES", help="#SBATCH --constraint."),
        Field(name="nodelist", kind="str", metavar="NODES", help="#SBATCH --nodelist."),
        Field(name="exclude", kind="str", metavar="NODES", help="#SBATCH --exclude."),
        Field(name="time_min", kind="int", default=0, metavar="T", least=0, most=_YEAR_MIN,
              help="#SBATCH --time, in minutes; by default room for timeout_min, else the "
                   "partition's own limit."),
        Field(name="cpus_per_rank", kind="int", default=1, metavar="C", least=1, most=4096,
              help="#SBATCH --cpus-per-task: processors of each rank."),
        Field(name="memory_gib", kind="float", default=0.0, metavar="GIB", least=0, most=65536,
              help="#SBATCH --mem: memory of each node; 0 is the partition's own default."),
        Field(name="gpus", kind="int", default=0, metavar="G", least=0, most=64,
              help="#SBATCH --gpus-per-node."),
        Field(name="gres", kind="str", metavar="LIST",
              help="#SBATCH --gres: other devices of each node, nvme:1 for example."),
        Field(name="exclusive", kind="str", default="false", metavar="YES",
              allowed=("false", "true"), help="#SBATCH --exclusive: no other job on the nodes."),
        Field(name="requeue", kind="str", default="false", metavar="YES",
              allowed=("false", "true"),
              help="#SBATCH --requeue: Slurm starts the job again after it was preempted or has "
                   "lost a node."),
        Field(name="warn_s", kind="int", default=0, metavar="S", least=0, most=65535,
              help="#SBATCH --signal: how long before its time limit or preemption the ranks are "
                   "sent SIGTERM; by default grace_s and half a minute for outputs."),
        Field(name="mpi", kind="str", default="ssh", metavar="HOW", allowed=("ssh", "pmix"),
              help="How the launcher mpirun starts ranks: mpirun over an sshd of the job's own, or "
                   "Slurm's srun with its PMIx."),
        Field(name="python", kind="str", metavar="PATH",
              help="The interpreter that runs the script; by default that of the active virtual "
                   "environment, else the one that runs cloudjob; with a host the one on PATH."),
        Field(name="setup", kind="list", default=(), metavar="LINE",
              help="Lines of shell that each node runs first, in a login shell: module load "
                   "openmpi."),
        Field(name="sbatch", kind="list", default=(), metavar="OPTION",
              help="More options, as they stand behind #SBATCH."),
        _SOURCE_LIMIT,
    ),
    "mindspore": (
        Field(name="device_target", kind="str", default=mindspore.NONE, metavar="DEVICE",
              allowed=mindspore.DEVICE_TARGETS,
              help="What the script runs on; it finds this in CLOUDJOB_DEVICE_TARGET, or nothing "
                   "there with none."),
        Field(name="parallel_mode", kind="str", default=mindspore.NONE, metavar="MODE",
              allowed=mindspore.PARALLEL_MODES,
              help="How the training is spread over the ranks; the script finds this in "
                   "CLOUDJOB_PARALLEL_MODE and applies it."),
        Field(name="search_mode", kind="str", default=mindspore.NONE, metavar="MODE",
              allowed=mindspore.SEARCH_MODES,
              help="How auto_parallel looks for a strategy; the script finds this in "
                   "CLOUDJOB_SEARCH_MODE."),
        Field(name="devices", kind="list", default=(), metavar="LINE",
              help="The devices of each node for a rank table, where the platform gives none: a "
                   "line like 10.0.0.1 0=192.168.1.1 1=192.168.2.1 for each node."),
    ),
    NETWORK: (
        Field(name="stall_min", kind="float", default=env.DEFAULT_STALL_S / 60, metavar="T",
              least=0.25, most=_DAY_S / 60,
              help="Minutes for which the network between the nodes may stall, or a node be "
                   "frozen, before the job is ended."),
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
