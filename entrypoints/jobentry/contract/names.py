"""The names of the variables that the two halves share.

Apart from ``env``, because a rank's door reads these without the imports that ``env`` needs.
"""

from __future__ import annotations

# What the platform sets (reference: "viewing environment variables of a training container").
MA_HOME = "MA_HOME"
MA_MOUNT_PATH = "MA_MOUNT_PATH"
MA_JOB_DIR = "MA_JOB_DIR"
MA_LOG_DIR = "MA_LOG_DIR"
MA_SCRIPT_INTERPRETER = "MA_SCRIPT_INTERPRETER"
MA_CURRENT_IP = "MA_CURRENT_IP"
MA_CURRENT_HOST_IP = "MA_CURRENT_HOST_IP"
MA_CURRENT_INSTANCE_NAME = "MA_CURRENT_INSTANCE_NAME"
MA_NUM_GPUS = "MA_NUM_GPUS"
MA_NUM_HOSTS = "MA_NUM_HOSTS"
MA_TASK_NAME = "MA_TASK_NAME"
MA_TASK_INDEX = "MA_TASK_INDEX"
MA_VJ_NAME = "MA_VJ_NAME"
VC_TASK_INDEX = "VC_TASK_INDEX"
VK_TASK_INDEX = "VK_TASK_INDEX"
VC_WORKER_NUM = "VC_WORKER_NUM"
VC_WORKER_HOSTS = "VC_WORKER_HOSTS"
SSHD_PORT = "SSHD_PORT"

# What a user may override in the mpirun command.
OPENMPI_NP = "OPENMPI_NP"
OPENMPI_HOST_FILE_PATH = "OPENMPI_HOST_FILE_PATH"
TUNE_ENV_FILE = "TUNE_ENV_FILE"
OPENMPI_BIND_ARGS = "OPENMPI_BIND_ARGS"
OPENMPI_X_ARGS = "OPENMPI_X_ARGS"
OPENMPI_MCA_ARGS = "OPENMPI_MCA_ARGS"
OPENMPI_EXTRA_ARGS = "OPENMPI_EXTRA_ARGS"

# Which interfaces and devices the libraries below a script use.
NCCL_SOCKET_IFNAME = "NCCL_SOCKET_IFNAME"
NCCL_IB_HCA = "NCCL_IB_HCA"
GLOO_SOCKET_IFNAME = "GLOO_SOCKET_IFNAME"
OMPI_TCP_INCLUDE = "OMPI_MCA_btl_tcp_if_include"
OMPI_TCP_EXCLUDE = "OMPI_MCA_btl_tcp_if_exclude"

# What cloudjob adds.
CLOUDJOB_JOB = "CLOUDJOB_JOB"
CLOUDJOB_LAUNCHER = "CLOUDJOB_LAUNCHER"
CLOUDJOB_PROCS_PER_NODE = "CLOUDJOB_PROCS_PER_NODE"
CLOUDJOB_CODE_URI = "CLOUDJOB_CODE_URI"
CLOUDJOB_CODE_DIGEST = "CLOUDJOB_CODE_DIGEST"
CLOUDJOB_RECORD_URI = "CLOUDJOB_RECORD_URI"
CLOUDJOB_NODE_DIR = "CLOUDJOB_NODE_DIR"
CLOUDJOB_SSH_KEY = "CLOUDJOB_SSH_KEY"
# Where nodes that share a machine leave the addresses on which they listen for the head.
CLOUDJOB_CONTROL_DIR = "CLOUDJOB_CONTROL_DIR"
# How long the connection between head and workers may be silent.
CLOUDJOB_STALL_S = "CLOUDJOB_STALL_S"
# The folder of what was put into this container alone; the entry empties it when the job has ended.
CLOUDJOB_DELIVERED = "CLOUDJOB_DELIVERED"
# A file with more variables, secrets among them.
CLOUDJOB_ENV_FILE = "CLOUDJOB_ENV_FILE"
# The folder of what the platform has brought: code, key and variables, found by their names.
CLOUDJOB_DELIVERY = "CLOUDJOB_DELIVERY"
# A folder that the platform keeps, where the head's record goes.
CLOUDJOB_RECORD_DIR = "CLOUDJOB_RECORD_DIR"
CLOUDJOB_ENV_NAMES = "CLOUDJOB_ENV_NAMES"
CLOUDJOB_SECRET_NAMES = "CLOUDJOB_SECRET_NAMES"
CLOUDJOB_INPUTS = "CLOUDJOB_INPUTS"
CLOUDJOB_OUTPUTS = "CLOUDJOB_OUTPUTS"
# Which nodes bring an input, where not all do: JSON, name to numbers like 0,2-3.
CLOUDJOB_INPUT_NODES = "CLOUDJOB_INPUT_NODES"
CLOUDJOB_RESTORE_OUTPUTS = "CLOUDJOB_RESTORE_OUTPUTS"
CLOUDJOB_OUTPUT_SYNC_S = "CLOUDJOB_OUTPUT_SYNC_S"
CLOUDJOB_OUTPUT_LIMIT_S = "CLOUDJOB_OUTPUT_LIMIT_S"
# What jobs of one machine share of their inputs, and how large that may become.
CLOUDJOB_CACHE_DIR = "CLOUDJOB_CACHE_DIR"
CLOUDJOB_CACHE_LIMIT_GB = "CLOUDJOB_CACHE_LIMIT_GB"
# How s3:// and obs:// are reached.
CLOUDJOB_S3_ENDPOINT = "CLOUDJOB_S3_ENDPOINT"
CLOUDJOB_S3_REGION = "CLOUDJOB_S3_REGION"
CLOUDJOB_S3_ADDRESSING = "CLOUDJOB_S3_ADDRESSING"
CLOUDJOB_S3_ACCESS_KEY = "CLOUDJOB_S3_ACCESS_KEY"
CLOUDJOB_S3_SECRET_KEY = "CLOUDJOB_S3_SECRET_KEY"
CLOUDJOB_S3_SESSION_TOKEN = "CLOUDJOB_S3_SESSION_TOKEN"
CLOUDJOB_SIGNED_URIS = "CLOUDJOB_SIGNED_URIS"
CLOUDJOB_STORE_PATIENCE_S = "CLOUDJOB_STORE_PATIENCE_S"
# What a script for MindSpore is told of the job, and a list of the devices of all nodes, as lines.
CLOUDJOB_DEVICE_TARGET = "CLOUDJOB_DEVICE_TARGET"
CLOUDJOB_PARALLEL_MODE = "CLOUDJOB_PARALLEL_MODE"
CLOUDJOB_SEARCH_MODE = "CLOUDJOB_SEARCH_MODE"
CLOUDJOB_DEVICES = "CLOUDJOB_DEVICES"
CLOUDJOB_GRACE_S = "CLOUDJOB_GRACE_S"
CLOUDJOB_TIMEOUT_S = "CLOUDJOB_TIMEOUT_S"
CLOUDJOB_START_TIMEOUT_S = "CLOUDJOB_START_TIMEOUT_S"
# With how few nodes an elastic job goes on.
CLOUDJOB_MIN_NODES = "CLOUDJOB_MIN_NODES"
# The number of a rank whose launcher has no word for it.
CLOUDJOB_RANK = "CLOUDJOB_RANK"
# Where a rank writes its log, and how its script says that it ended badly.
CLOUDJOB_LOG_DIR = "CLOUDJOB_LOG_DIR"
CLOUDJOB_END_FD = "CLOUDJOB_END_FD"
# The exact value of a variable that Open MPI itself changes on its way to a rank.
CLOUDJOB_EXACT_ = "CLOUDJOB_EXACT_"

# With these the entry reaches the job's store. They belong to the submitter and are kept from the
# ranks: pass keys that a script needs under other names.
STORE_ACCESS = (
    CLOUDJOB_S3_ENDPOINT,
    CLOUDJOB_S3_REGION,
    CLOUDJOB_S3_ADDRESSING,
    CLOUDJOB_S3_ACCESS_KEY,
    CLOUDJOB_S3_SECRET_KEY,
    CLOUDJOB_S3_SESSION_TOKEN,
    CLOUDJOB_SIGNED_URIS,
)

# The documented tune file carries these
# (env | grep -E '^MA_|^SHARED_|^S3_|^PATH|^VC_WORKER_|^SCC|^CRED').
CARRIED_PREFIXES = ("MA_", "SHARED_", "S3_", "VC_WORKER_", "SCC", "CRED")

# True on one node only, so the head's value must not reach the ranks of another.
PER_NODE = frozenset(
    (
        MA_TASK_INDEX,
        VC_TASK_INDEX,
        VK_TASK_INDEX,
        MA_CURRENT_IP,
        MA_CURRENT_HOST_IP,
        MA_CURRENT_INSTANCE_NAME,
        CLOUDJOB_NODE_DIR,
        CLOUDJOB_SSH_KEY,
        # Each entry sets these, also when they are one user's word for all nodes.
        NCCL_SOCKET_IFNAME,
        NCCL_IB_HCA,
        GLOO_SOCKET_IFNAME,
        OMPI_TCP_EXCLUDE,
        "MA_HOME",
        "MA_MOUNT_PATH",
        "MA_JOB_DIR",
        "MA_LOG_DIR",
        "HOME",
        "HOSTNAME",
        "POD_NAME",
    )
)

# Open MPI puts its own folder in front of the first two and sets the others whatever it is given.
CHANGED_BY_OPEN_MPI = ("PATH", "LD_LIBRARY_PATH", "TMPDIR", "PWD")
