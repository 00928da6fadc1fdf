"""The names of the environment variables that both halves use.

Separate from ``env``, as the rank wrapper needs the names without the imports of ``env``.
"""

from __future__ import annotations

# Set by the platform (reference: "viewing environment variables of a training container").
MA_HOME = "MA_HOME"
MA_MOUNT_PATH = "MA_MOUNT_PATH"
MA_JOB_DIR = "MA_JOB_DIR"
MA_LOG_DIR = "MA_LOG_DIR"
MA_SCRIPT_INTERPRETER = "MA_SCRIPT_INTERPRETER"
MA_CURRENT_IP = "MA_CURRENT_IP"
MA_CURRENT_HOST_IP = "MA_CURRENT_HOST_IP"
MA_CURRENT_INSTANCE_NAME = "MA_CURRENT_INSTANCE_NAME"
MA_NUM_GPUS = "MA_NUM_GPUS"
MA_NUM_NPUS = "MA_NUM_NPUS"
MA_NUM_HOSTS = "MA_NUM_HOSTS"
MA_TASK_NAME = "MA_TASK_NAME"
MA_TASK_INDEX = "MA_TASK_INDEX"
MA_VJ_NAME = "MA_VJ_NAME"
VC_TASK_INDEX = "VC_TASK_INDEX"
VK_TASK_INDEX = "VK_TASK_INDEX"
VC_WORKER_NUM = "VC_WORKER_NUM"
VC_WORKER_HOSTS = "VC_WORKER_HOSTS"
SSHD_PORT = "SSHD_PORT"
# Of the platform's first version.
DLS_TASK_INDEX = "DLS_TASK_INDEX"
BATCH_CURRENT_HOST = "BATCH_CURRENT_HOST"

# Parts of the mpirun command that a user may set.
OPENMPI_NP = "OPENMPI_NP"
OPENMPI_HOST_FILE_PATH = "OPENMPI_HOST_FILE_PATH"
TUNE_ENV_FILE = "TUNE_ENV_FILE"
OPENMPI_BIND_ARGS = "OPENMPI_BIND_ARGS"
OPENMPI_X_ARGS = "OPENMPI_X_ARGS"
OPENMPI_MCA_ARGS = "OPENMPI_MCA_ARGS"
OPENMPI_EXTRA_ARGS = "OPENMPI_EXTRA_ARGS"

# Network interfaces and devices for the communication libraries.
NCCL_SOCKET_IFNAME = "NCCL_SOCKET_IFNAME"
NCCL_IB_HCA = "NCCL_IB_HCA"
NCCL_SOCKET_FAMILY = "NCCL_SOCKET_FAMILY"
GLOO_SOCKET_IFNAME = "GLOO_SOCKET_IFNAME"
TP_SOCKET_IFNAME = "TP_SOCKET_IFNAME"
HCCL_SOCKET_IFNAME = "HCCL_SOCKET_IFNAME"
HCCL_IF_IP = "HCCL_IF_IP"
OMPI_TCP_INCLUDE = "OMPI_MCA_btl_tcp_if_include"
OMPI_TCP_EXCLUDE = "OMPI_MCA_btl_tcp_if_exclude"
# The same for mpirun's daemons, of Open MPI 4.1 and 5.0.
OMPI_DAEMONS_INCLUDE = "OMPI_MCA_oob_tcp_if_include"
PRTE_INCLUDE = "PRTE_MCA_prte_if_include"
OF_DAEMONS = (OMPI_DAEMONS_INCLUDE, PRTE_INCLUDE)
# With these, hwloc in mpirun and its daemons finds processors and memory, and no devices (ADR 75).
WITHOUT_DEVICES = {
    "HWLOC_COMPONENTS": "-linux:pci,-linux:io,linux,stop",
    "HWLOC_PLUGINS_PATH": "/nonexistent",
}

# On Ascend: the platform's rank table, or the folder that contains it.
RANK_TABLE_FILE = "RANK_TABLE_FILE"

# Set by cloudjob.
CLOUDJOB_JOB = "CLOUDJOB_JOB"
CLOUDJOB_LAUNCHER = "CLOUDJOB_LAUNCHER"
CLOUDJOB_PROCS_PER_NODE = "CLOUDJOB_PROCS_PER_NODE"
CLOUDJOB_CODE_URI = "CLOUDJOB_CODE_URI"
CLOUDJOB_CODE_DIGEST = "CLOUDJOB_CODE_DIGEST"
CLOUDJOB_RECORD_URI = "CLOUDJOB_RECORD_URI"
CLOUDJOB_NODE_DIR = "CLOUDJOB_NODE_DIR"
CLOUDJOB_SSH_KEY = "CLOUDJOB_SSH_KEY"
# The folder in which nodes on one machine announce the addresses on which they listen.
CLOUDJOB_CONTROL_DIR = "CLOUDJOB_CONTROL_DIR"
# Seconds for which the connection between head and workers may be silent.
CLOUDJOB_STALL_S = "CLOUDJOB_STALL_S"
# The folder of files that only this container has; the entry empties it at the end of the job.
CLOUDJOB_DELIVERED = "CLOUDJOB_DELIVERED"
# A file with more variables, including secrets.
CLOUDJOB_ENV_FILE = "CLOUDJOB_ENV_FILE"
# Folders that have another path on this node: JSON, path of the submitting machine to path here.
CLOUDJOB_MOVED = "CLOUDJOB_MOVED"
# The folder that the platform copied to this node: code, key and variables.
CLOUDJOB_DELIVERY = "CLOUDJOB_DELIVERY"
# A folder that the platform uploads, for the head's record.
CLOUDJOB_RECORD_DIR = "CLOUDJOB_RECORD_DIR"
# Set on emulated nodes of ModelArts: Python also finds packages that only the platform has.
CLOUDJOB_EMULATED = "CLOUDJOB_EMULATED"
# Whether ranks get the variables of the platform's first version as well.
CLOUDJOB_FIRST_VERSION = "CLOUDJOB_FIRST_VERSION"
CLOUDJOB_ENV_NAMES = "CLOUDJOB_ENV_NAMES"
CLOUDJOB_SECRET_NAMES = "CLOUDJOB_SECRET_NAMES"
CLOUDJOB_INPUTS = "CLOUDJOB_INPUTS"
CLOUDJOB_OUTPUTS = "CLOUDJOB_OUTPUTS"
# The nodes that fetch an input, if not all do: JSON, name to node numbers such as 0,2-3.
CLOUDJOB_INPUT_NODES = "CLOUDJOB_INPUT_NODES"
CLOUDJOB_RESTORE_OUTPUTS = "CLOUDJOB_RESTORE_OUTPUTS"
CLOUDJOB_OUTPUT_SYNC_S = "CLOUDJOB_OUTPUT_SYNC_S"
CLOUDJOB_OUTPUT_LIMIT_S = "CLOUDJOB_OUTPUT_LIMIT_S"
# The cache of inputs that the jobs of one machine share, and its size limit.
CLOUDJOB_CACHE_DIR = "CLOUDJOB_CACHE_DIR"
CLOUDJOB_CACHE_LIMIT_GB = "CLOUDJOB_CACHE_LIMIT_GB"
# Access to s3:// and obs:// stores.
CLOUDJOB_S3_ENDPOINT = "CLOUDJOB_S3_ENDPOINT"
CLOUDJOB_S3_REGION = "CLOUDJOB_S3_REGION"
CLOUDJOB_S3_ADDRESSING = "CLOUDJOB_S3_ADDRESSING"
CLOUDJOB_S3_ACCESS_KEY = "CLOUDJOB_S3_ACCESS_KEY"
CLOUDJOB_S3_SECRET_KEY = "CLOUDJOB_S3_SECRET_KEY"
CLOUDJOB_S3_SESSION_TOKEN = "CLOUDJOB_S3_SESSION_TOKEN"
CLOUDJOB_SIGNED_URIS = "CLOUDJOB_SIGNED_URIS"
# The certificates of authorities that are trusted beside those of the image, in PEM format.
CLOUDJOB_CA_CERTIFICATES = "CLOUDJOB_CA_CERTIFICATES"
CLOUDJOB_STORE_PATIENCE_S = "CLOUDJOB_STORE_PATIENCE_S"
# Settings for MindSpore scripts, and the devices of all nodes, one line per node.
CLOUDJOB_DEVICE_TARGET = "CLOUDJOB_DEVICE_TARGET"
CLOUDJOB_PARALLEL_MODE = "CLOUDJOB_PARALLEL_MODE"
CLOUDJOB_SEARCH_MODE = "CLOUDJOB_SEARCH_MODE"
CLOUDJOB_DEVICES = "CLOUDJOB_DEVICES"
CLOUDJOB_GRACE_S = "CLOUDJOB_GRACE_S"
CLOUDJOB_TIMEOUT_S = "CLOUDJOB_TIMEOUT_S"
CLOUDJOB_START_TIMEOUT_S = "CLOUDJOB_START_TIMEOUT_S"
# How much to check before the ranks start.
CLOUDJOB_PREFLIGHT = "CLOUDJOB_PREFLIGHT"
# What to do with a job that hangs, after how many seconds, and a factor for the times after which a
# job counts as hung.
CLOUDJOB_HANG_ACTION = "CLOUDJOB_HANG_ACTION"
CLOUDJOB_HANG_AFTER_S = "CLOUDJOB_HANG_AFTER_S"
CLOUDJOB_HANG_SCALE = "CLOUDJOB_HANG_SCALE"
CLOUDJOB_STRICT = "CLOUDJOB_STRICT"
# For a job with retries: the number of this attempt, what ended the one before, and the folder with
# the record of that one.
CLOUDJOB_ATTEMPT = "CLOUDJOB_ATTEMPT"
CLOUDJOB_PREVIOUS_CAUSE = "CLOUDJOB_PREVIOUS_CAUSE"
CLOUDJOB_PREVIOUS_DIR = "CLOUDJOB_PREVIOUS_DIR"
# Whether the platform starts single nodes again, so that all must fail for another attempt.
CLOUDJOB_ENDS_TOGETHER = "CLOUDJOB_ENDS_TOGETHER"
# The folder that was packed, where nodes see it and Python may import from it.
CLOUDJOB_SOURCE = "CLOUDJOB_SOURCE"
# The variables that the shell that started the entry has dropped because of their names.
CLOUDJOB_LEFT_OUT = "CLOUDJOB_LEFT_OUT"
# The number of a rank, for launchers that have no variable for it.
CLOUDJOB_RANK = "CLOUDJOB_RANK"
# The folder of a rank's log, and the descriptor on which its script reports a failure.
CLOUDJOB_END_FD = "CLOUDJOB_END_FD"
# Prefix of a copy of a variable that Open MPI changes on the way to a rank.
CLOUDJOB_EXACT_ = "CLOUDJOB_EXACT_"

# Used by the entry to access the job's store. They belong to the submitter and are not passed to
# the ranks; a script that needs credentials gets them under other names.
STORE_ACCESS = (
    CLOUDJOB_S3_ENDPOINT,
    CLOUDJOB_S3_REGION,
    CLOUDJOB_S3_ADDRESSING,
    CLOUDJOB_S3_ACCESS_KEY,
    CLOUDJOB_S3_SECRET_KEY,
    CLOUDJOB_S3_SESSION_TOKEN,
    CLOUDJOB_SIGNED_URIS,
    CLOUDJOB_CA_CERTIFICATES,
)

# The keys among them; temporary keys may be replaced while the job runs.
STORE_KEYS = (CLOUDJOB_S3_ACCESS_KEY, CLOUDJOB_S3_SECRET_KEY, CLOUDJOB_S3_SESSION_TOKEN)

# Prefixes of the variables in the documented tune file
# (env | grep -E '^MA_|^SHARED_|^S3_|^PATH|^VC_WORKER_|^SCC|^CRED').
CARRIED_PREFIXES = ("MA_", "SHARED_", "S3_", "VC_WORKER_", "SCC", "CRED")

# Valid on one node only, so the head's value must not reach ranks of other nodes.
PER_NODE = frozenset(
    (
        MA_TASK_INDEX,
        VC_TASK_INDEX,
        VK_TASK_INDEX,
        DLS_TASK_INDEX,
        BATCH_CURRENT_HOST,
        MA_CURRENT_IP,
        MA_CURRENT_HOST_IP,
        MA_CURRENT_INSTANCE_NAME,
        CLOUDJOB_NODE_DIR,
        CLOUDJOB_SSH_KEY,
        # Each entry sets these, even if the user gives one value for all nodes.
        NCCL_SOCKET_IFNAME,
        NCCL_IB_HCA,
        GLOO_SOCKET_IFNAME,
        TP_SOCKET_IFNAME,
        HCCL_SOCKET_IFNAME,
        HCCL_IF_IP,
        OMPI_TCP_INCLUDE,
        OMPI_TCP_EXCLUDE,
        OMPI_DAEMONS_INCLUDE,
        PRTE_INCLUDE,
        # Slurm may give the nodes different numbers of devices.
        MA_NUM_GPUS,
        MA_NUM_NPUS,
        "MA_HOME",
        "MA_MOUNT_PATH",
        "MA_JOB_DIR",
        "MA_LOG_DIR",
        "HOME",
        "HOSTNAME",
        "POD_NAME",
    )
)

# Open MPI prepends its own folder to the first two and overwrites the others.
CHANGED_BY_OPEN_MPI = ("PATH", "LD_LIBRARY_PATH", "TMPDIR", "PWD")
