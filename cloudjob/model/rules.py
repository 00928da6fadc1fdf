"""The rules for names and texts of a job."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple


class Telling(Enum):
    """What tells a backend the kind of a failure, for ``retry.on``."""

    RECORD = "the record of the head"
    EXIT_CODE = "the exit code"
    PLATFORM = "the platform, which knows its own faults and hangs only"
    NOTHING = "nothing"


class BackendKind(NamedTuple):
    """The properties of a backend that are needed without importing it.

    Args:
        location: Its class, as ``module:name``.
        is_remote: Whether its jobs run on other machines.
        refreshes_keys: Whether it can give new store keys to the nodes of a running job.
        telling: What decides whether a failed job is tried again.
        python_key: The key of the job file that names the interpreter of scripts; empty if only
            the image has one.
        shares_files: Whether its nodes see the files of this machine, interpreters included.
    """

    location: str
    is_remote: bool = False
    refreshes_keys: bool = False
    telling: Telling = Telling.NOTHING
    python_key: str = ""
    shares_files: bool = False


BACKENDS: Mapping[str, BackendKind] = MappingProxyType(
    {
        "process": BackendKind(
            "cloudjob.backends.process.backend:ProcessBackend",
            telling=Telling.RECORD,
            python_key="process.python",
            shares_files=True,
        ),
        "docker": BackendKind(
            "cloudjob.backends.docker.backend:DockerBackend", refreshes_keys=True
        ),
        "modelarts": BackendKind(
            "cloudjob.backends.modelarts.backend:ModelArtsBackend",
            is_remote=True,
            telling=Telling.PLATFORM,
        ),
        "kubernetes": BackendKind(
            "cloudjob.backends.kubernetes.backend:KubernetesBackend",
            is_remote=True,
            refreshes_keys=True,
        ),
        "slurm": BackendKind(
            "cloudjob.backends.slurm.backend:SlurmBackend",
            is_remote=True,
            refreshes_keys=True,
            telling=Telling.EXIT_CODE,
            python_key="slurm.python",
        ),
    }
)
# The number of ranks per node until the node's devices are counted.
AUTO_RANKS = 0
# How the buckets of a store are addressed.
ADDRESSINGS = ("auto", "path", "virtual")
# What notifications report of a job: every end, only an end in failure, that it hangs.
EVENT_WORDS = END, FAILURE, HANG = "end", "failure", "hang"
# The fields whose entries become variables of every rank.
VARIABLE_FIELDS = ("env", "secrets", "inputs", "outputs")
# The schemes of inputs that are volumes of Kubernetes; an output can be the first.
VOLUME_SCHEMES = ("pvc", "secret", "configmap")

# Linux refuses an argument or a variable above MAX_ARG_STRLEN = 131072 bytes, which includes the
# terminating NUL (execve(2)); without this check, the job would fail on its node.
MAX_ARG_BYTES = 131_071
NAME_RULE = r"[A-Za-z0-9_-]{1,64}"
VARIABLE_RULE = r"[A-Za-z_][A-Za-z0-9_]*"
# ModelArts refuses user variables that begin with MA_; cloudjob uses CLOUDJOB_ to configure nodes.
RESERVED_PREFIXES = ("MA_", "CLOUDJOB_")


def name_on_nodes(name: str) -> str:
    """Return a file's name as scripts write it: macOS may store ``é`` as two characters.

    File systems of macOS find a file by either form, those of nodes only by the exact one.
    """
    return unicodedata.normalize("NFC", name) if sys.platform == "darwin" else name


def is_remote(backend: str) -> bool:
    """Whether jobs of this backend run on other machines; False for a name that is unknown."""
    return backend in BACKENDS and BACKENDS[backend].is_remote
