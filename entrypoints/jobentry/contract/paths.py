"""The keys of a job's objects in the store and the paths of a node's files in its container."""

from __future__ import annotations

import posixpath
from typing import Mapping, NamedTuple

from jobentry.contract import names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from jobentry.contract import env

# The file name of the node half's zipapp.
ENTRY = "jobentry.pyz"
# The head's exit record. Its folder is not that of an output, as platforms upload whole outputs.
RECORD = "exit.json"
# The report of a full check of the nodes, beside the record.
PREFLIGHT = "preflight.json"
# Files in the folder that a platform copies to each node. (The layers of a package are in
# ``layers/``, beside ``code/``, where its descriptor expects them.)
DELIVERED_CODE = "code/code.json"
DELIVERED_ENV = "env"
DELIVERED_SSH_KEY = "ssh-key"
# Fresh keys of the store, which `cloudjob refresh` puts there while the job runs.
DELIVERED_KEYS = "store-keys"
DELIVERED_ARGV = "words"
# Seconds for which a head looks for requests in the store: no URL of S3 is valid for longer.
SIGNED_S = 7 * 86400


class JobPaths(NamedTuple):
    """The keys of one job's objects in the store."""

    job: str

    @property
    def code(self) -> str:
        """The descriptor of the code package; its layers are shared with other jobs."""
        return self.job + "/code.json"

    @property
    def node(self) -> str:
        """The folder that the platform copies to each node, on platforms that do so."""
        return self.job + "/node"

    @property
    def delivered_code(self) -> str:
        """The descriptor of the code package, on platforms that copy it to the nodes."""
        return f"{self.node}/{DELIVERED_CODE}"

    @property
    def submission(self) -> str:
        """The description of the submitted job, for people and for repeating the job."""
        return self.job + "/submission.json"

    @property
    def record(self) -> str:
        """The exit record."""
        return self.records + RECORD

    @property
    def records(self) -> str:
        """The folder of the exit record, and of the journals and logs of nodes."""
        return self.job + "/record/"

    def journal(self, node: int) -> str:
        """The journal of a node, as it was when the node ended."""
        return f"{self.records}{journal_name(node)}"

    @property
    def request(self) -> str:
        """A request for stacks, on platforms where no command reaches a node."""
        return self.job + "/request.json"

    @property
    def answer(self) -> str:
        """The answer to the request."""
        return self.job + "/answer.json"

    @property
    def outputs(self) -> str:
        """The folder of the ranks' outputs."""
        return self.job + "/outputs"


def with_emulated_packages(path: str, entry: str) -> str:
    """Return ``path``, a PYTHONPATH, followed by the platform's packages that we emulate.

    Args:
        entry: The entry's archive, or the folder of the unpacked one.
    """
    return f"{path}:{entry}/emulated" if path else f"{entry}/emulated"


class NodePaths(NamedTuple):
    """The files of one node.

    Args:
        home: The home folder, ``/home/ma-user`` on the platform.
        job_dir: The folder in which the platform puts code folders.
        mount: The folder of inputs and outputs.
        log_dir: The folder of logs.
        node_dir: The folder of files shared by the entry and the ranks of this node.
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
        """Open MPI's host file."""
        return posixpath.join(self.node_dir, "hostfile")

    @property
    def tune_file(self) -> str:
        """Open MPI's tune file, with the variables to carry."""
        return posixpath.join(self.node_dir, "tune")

    @property
    def node_env(self) -> str:
        """The exact environment of this node for its ranks, separated by NUL."""
        return posixpath.join(self.node_dir, "env")

    @property
    def ssh_config(self) -> str:
        """The ssh configuration for the other nodes."""
        return posixpath.join(self.node_dir, "ssh-config")

    @property
    def events(self) -> str:
        """The FIFO on which ranks report their start and end to the entry."""
        return posixpath.join(self.node_dir, "events")

    @property
    def agent(self) -> str:
        """The script that mpirun starts instead of ssh."""
        return posixpath.join(self.node_dir, "agent")

    @property
    def agent_requests(self) -> str:
        """The FIFO on which mpirun's agents request commands on other nodes."""
        return posixpath.join(self.node_dir, "asks")

    @property
    def waiting(self) -> str:
        """A file that exists while ranks must wait because workers are missing."""
        return posixpath.join(self.node_dir, "waiting")

    def rank_log(self, rank: int) -> str:
        """The log of one rank."""
        return posixpath.join(self.log_dir, "rank-%d.log" % rank)

    def input(self, name: str) -> str:
        """The folder of an input."""
        return posixpath.join(self.mount, "inputs", name + "_0")

    def output(self, name: str) -> str:
        """The folder of an output."""
        return posixpath.join(self.mount, "outputs", name + "_0")


def journal_name(node: int) -> str:
    """Return the name of a node's journal, which is stored beside the record."""
    return "journal-%d.jsonl.gz" % node


def attempt_name(attempt: int) -> str:
    """Return the name of the folder for the record and the journals of one attempt, from 1 on."""
    return "attempt-%d" % attempt


def node_paths(environ: Mapping[str, str], node: env.NodeEnv) -> NodePaths:
    """Return the paths of this node, from the platform's variables or its documented layout."""
    home = home_of(environ)
    mount = environ.get(names.MA_MOUNT_PATH) or posixpath.join(home, "modelarts")
    return NodePaths(
        home=home,
        job_dir=environ.get(names.MA_JOB_DIR) or posixpath.join(mount, "user-job-dir"),
        mount=mount,
        log_dir=environ.get(names.MA_LOG_DIR) or posixpath.join(mount, "log"),
        # The same path on every node; if nodes share a home, the backend sets one for each node.
        node_dir=node.node_dir or node_dir(home, node.job),
    )


def home_of(environ: Mapping[str, str]) -> str:
    """Return the home folder of a node."""
    return environ.get(names.MA_HOME) or environ.get("HOME") or "/home/ma-user"


def node_dir(home: str, job: str) -> str:
    """Return the folder of files that the entry and the ranks of a node share."""
    return posixpath.join(home, ".cloudjob", job)
