"""Where things lie: the objects of a job in the store, and the files of a node in its container."""

from __future__ import annotations

import posixpath
from typing import Mapping, NamedTuple

from jobentry.contract import env, names

# The archive of the node half.
ENTRY = "jobentry.pyz"
# The head's record, in a folder of its own: a platform that keeps outputs keeps folders.
RECORD = "exit.json"
# What lies in the folder that a platform brings to each node by itself.
# (The layers of a package lie where its descriptor looks for them: ``layers/`` beside ``code/``.)
DELIVERED_CODE = "code/code.json"
DELIVERED_ENV = "env"
DELIVERED_SSH_KEY = "ssh-key"
DELIVERED_WORDS = "words"


class JobPaths(NamedTuple):
    """The keys of one job's objects in the store."""

    job: str

    @property
    def code(self) -> str:
        """The descriptor of the code package; its layers are shared with other jobs."""
        return self.job + "/code.json"

    @property
    def node(self) -> str:
        """What the platform itself brings to each node, where it does."""
        return self.job + "/node"

    @property
    def brought_code(self) -> str:
        """The descriptor of the code package, where the platform brings it."""
        return f"{self.node}/{DELIVERED_CODE}"

    @property
    def submission(self) -> str:
        """What was submitted, for people and for a later run of the same."""
        return self.job + "/submission.json"

    @property
    def record(self) -> str:
        """How the job ended."""
        return self.job + "/record/" + RECORD

    @property
    def outputs(self) -> str:
        """What the ranks left in their output folders."""
        return self.job + "/outputs"


class NodePaths(NamedTuple):
    """The files of one node.

    Args:
        home: The home folder, ``/home/ma-user`` on the platform.
        job_dir: Where the platform puts code folders.
        mount: Where inputs and outputs lie.
        log_dir: Where logs lie.
        node_dir: What the entry and the ranks of this node leave for each other.
    """

    home: str
    job_dir: str
    mount: str
    log_dir: str
    node_dir: str

    @property
    def code(self) -> str:
        """The folder of the code, the working directory of the ranks."""
        return posixpath.join(self.job_dir, "code")

    @property
    def host_file(self) -> str:
        """Open MPI's list of hosts and slots."""
        return posixpath.join(self.node_dir, "hostfile")

    @property
    def tune_file(self) -> str:
        """Open MPI's list of variables to carry."""
        return posixpath.join(self.node_dir, "tune")

    @property
    def node_env(self) -> str:
        """The exact environment of this node, NUL-separated, for its ranks."""
        return posixpath.join(self.node_dir, "env")

    @property
    def members(self) -> str:
        """The file in which the head says which nodes take part in an elastic job now."""
        return posixpath.join(self.node_dir, "members")

    @property
    def ssh_config(self) -> str:
        """How ssh reaches the other nodes."""
        return posixpath.join(self.node_dir, "ssh-config")

    @property
    def events(self) -> str:
        """The FIFO on which ranks tell the entry that they start and end."""
        return posixpath.join(self.node_dir, "events")

    @property
    def agent(self) -> str:
        """What mpirun takes for ssh, where it needs none."""
        return posixpath.join(self.node_dir, "agent")

    @property
    def asks(self) -> str:
        """The FIFO on which mpirun's agents ask for commands on other nodes."""
        return posixpath.join(self.node_dir, "asks")

    @property
    def waiting(self) -> str:
        """A file that is there while no rank may begin: not all workers are there."""
        return posixpath.join(self.node_dir, "waiting")

    def rank_log(self, rank: int) -> str:
        """What one rank wrote, byte for byte."""
        return posixpath.join(self.log_dir, "rank-%d.log" % rank)

    def input(self, name: str) -> str:
        """The folder of an input."""
        return posixpath.join(self.mount, "inputs", name + "_0")

    def output(self, name: str) -> str:
        """The folder of an output."""
        return posixpath.join(self.mount, "outputs", name + "_0")


def node_paths(environ: Mapping[str, str], node: env.NodeEnv) -> NodePaths:
    """Return the paths of this node: the platform's words first, its documented layout else."""
    home = environ.get(names.MA_HOME) or environ.get("HOME") or "/home/ma-user"
    mount = environ.get(names.MA_MOUNT_PATH) or posixpath.join(home, "modelarts")
    return NodePaths(
        home=home,
        job_dir=environ.get(names.MA_JOB_DIR) or posixpath.join(mount, "user-job-dir"),
        mount=mount,
        log_dir=environ.get(names.MA_LOG_DIR) or posixpath.join(mount, "log"),
        # The same path on every node; where nodes share a home, the backend names one for each.
        node_dir=node.node_dir or posixpath.join(home, ".cloudjob", node.job),
    )
