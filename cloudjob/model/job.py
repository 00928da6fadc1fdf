"""What a job is, as one value. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from cloudjob.model import grid
from cloudjob.model.keys import Heading, Option, Section, Values, key, section
from cloudjob.model.kinds import (
    FLAG,
    INPUTS,
    JOB_NAME,
    LABELS,
    OUTPUTS,
    PATTERNS,
    RETRIES,
    SECRETS,
    SWEEP,
    TEXT,
    TEXTS,
    VARIABLES,
    Number,
    OneOf,
    RankCount,
    Whole,
)
from cloudjob.model.rules import AUTO_RANKS, BACKENDS
from cloudjob.model.sections import (
    Docker,
    HangSettings,
    Kubernetes,
    MindSpore,
    ModelArts,
    Network,
    Notify,
    ObjectStorage,
    Process,
    Retry,
    Slurm,
)
from cloudjob.model.text import MASK, hide, secret_texts, secret_values, secrets_masked
from jobentry.contract import preflight_levels
from jobentry.contract.env import RESTORE_CHOICES
from jobentry.contract.launchers import AUTO, LAUNCHERS

# Longer waits overflow the timers of platforms and of Python; no platform runs a job for a year.
_YEAR_MIN = 525_600
_DAY_S = 86_400


def default_name(script: str) -> str:
    """Return a job name made from a script's stem, with ``-`` for characters platforms refuse."""
    last = script.rpartition("/")[2]
    stem = last.rpartition(".")[0] or last
    return re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-")[:64] or "job"


class JobSpec(Values):
    """Everything that a user specifies about one job, each value valid by itself.

    ``check`` says whether the values also fit together. An empty ``name`` becomes the script's.
    Text may hold surrogate escapes, as ``sys.argv`` does for bytes that are not UTF-8.
    """

    # fmt: off
    script: str = key(
        TEXT, "The program to run, relative to the source folder.", is_harmless=True)
    args: tuple[str, ...] = key(
        TEXTS, "The script's own arguments, byte for byte.", (), is_harmless=True)
    name: str = key(
        JOB_NAME,
        "The job's name: letters, digits, _ and -, at most 64; by default the script's name.", "",
        Option(Heading.FILES, "--name", "NAME"), is_harmless=True,
        implied=lambda values: default_name(values["script"]))
    nodes: int = key(
        Whole(1, 10_000), "Number of nodes.", 1, Option(Heading.PLACE, "--nodes", "N", short="-n"),
        is_harmless=True)
    procs_per_node: int = key(
        RankCount(1, 1024),
        "Number of ranks on each node; auto is one for each GPU or NPU of a node, else 1.",
        AUTO_RANKS, Option(Heading.PLACE, "--procs-per-node", "M"), is_harmless=True)
    backend: str = key(
        OneOf(*BACKENDS), "Where the job runs.", "process",
        Option(Heading.PLACE, "--backend", "NAME"), is_harmless=True)
    launcher: str = key(
        OneOf(AUTO, *LAUNCHERS), "How to start the ranks; auto chooses from the script's imports.",
        "auto", Option(Heading.PLACE, "--launcher", "NAME"), is_harmless=True)
    source: str = key(
        TEXT, "The folder to send; in a file, relative to that file.", ".",
        Option(Heading.FILES, "--source", "DIR"))
    env: Mapping[str, str] = key(
        VARIABLES,
        "Variables for every rank; an option takes precedence over a file, name by name.", {},
        Option(Heading.VARIABLES, "--env", "NAME=VALUE", short="-e"))
    secrets: Mapping[str, str] = key(
        SECRETS,
        "Variables whose values are never shown; each value comes from your environment, or is "
        "the exact bytes of a file.", {}, Option(Heading.VARIABLES, "--secret", "NAME[=@FILE]"))
    inputs: Mapping[str, str] = key(
        INPUTS,
        "Objects, or files of this machine (./data), to copy to every node before the script "
        "starts; the variable NAME holds the path. On Kubernetes also volumes, which are mounted: "
        "pvc://CLAIM/PATH, secret://NAME/KEY, configmap://NAME/KEY.", {},
        Option(Heading.VARIABLES, "--input", "NAME=URI"))
    input_nodes: Mapping[str, str] = key(
        LABELS, "The nodes that need an input, such as 0 or 0,2-3; by default all nodes.", {},
        Option(Heading.VARIABLES, "--input-nodes", "NAME=NODES"))
    outputs: Mapping[str, str] = key(
        OUTPUTS,
        "Folders whose files are saved while the job runs and when it ends; an empty URI is the "
        "job's own folder in the store, and pvc://CLAIM/PATH one in a claim of Kubernetes.", {},
        Option(Heading.OUTPUTS, "--output", "NAME=URI"),
        is_harmless=True)
    output_sync_s: float = key(
        Number(0, _DAY_S),
        "Seconds between saves of the outputs while the job runs; 0 saves only at the end.", 30.0,
        Option(Heading.OUTPUTS, "--output-sync-s", "S"), is_harmless=True)
    restore_outputs: str = key(
        OneOf(*RESTORE_CHOICES),
        "Which files that an earlier run saved at an output's URI to restore on each node before "
        "the script starts: the node's own, or those of all nodes.", "none",
        Option(Heading.OUTPUTS, "--restore-outputs", "WHICH"))
    metrics: Mapping[str, str] = key(
        PATTERNS,
        "Metrics in what ranks print: a regular expression for each, with a group for the value "
        "and, if named step, one for the step; `cloudjob metrics` shows them.", {},
        Option(Heading.OUTPUTS, "--metric", "NAME=REGEX"), is_harmless=True)
    detect_metrics: str = key(
        OneOf("on", "off"),
        "off: find only the metrics that JSON lines, event files and patterns give; on: also find "
        "numbers behind words such as loss and accuracy.", "on",
        Option(Heading.OUTPUTS, "--no-detect-metrics", const="off"), is_harmless=True)
    image: str = key(
        TEXT, "The container image, for backends that run containers.", "",
        Option(Heading.PLACE, "--image", "REF"))
    flavor: str = key(
        TEXT, "The platform's name for the kind of node.", "",
        Option(Heading.PLACE, "--flavor", "ID"), is_harmless=True)
    timeout_min: float = key(
        Number(0, _YEAR_MIN), "Minutes after which the job is ended; 0 sets no limit.", 0.0,
        Option(Heading.LIMITS, "--timeout-min", "T"), is_harmless=True)
    start_timeout_min: float = key(
        Number(0.01, _YEAR_MIN),
        "Minutes allowed for the nodes to connect, and then for the ranks to start.", 10.0,
        Option(Heading.LIMITS, "--start-timeout-min", "T"), is_harmless=True)
    retries: int = key(
        RETRIES,
        "How many times to start a failed job again; or a mapping with this number as max, and "
        "the keys of retry.", 0,
        Option(Heading.LIMITS, "--retries", "R"), is_harmless=True)
    grace_s: float = key(
        Number(0, _DAY_S), "Seconds between SIGTERM and SIGKILL.", 10.0,
        Option(Heading.LIMITS, "--grace-s", "S"), is_harmless=True)
    store: str = key(
        TEXT, "Where to store code and outputs; by default a folder under $CLOUDJOB_HOME.", "",
        Option(Heading.FILES, "--store", "URI"))
    source_limit_mb: float = key(
        Number(0), "The largest source folder to pack, in megabytes.", 100.0,
        Option(Heading.FILES, "--source-limit-mb", "MB"))
    links: str = key(
        OneOf("keep", "follow"),
        "follow: follow symbolic links that point outside the source folder; keep: refuse them.",
        "keep", Option(Heading.FILES, "--follow-links", const="follow"))
    hardware_check: str = key(
        OneOf("on", "off"),
        "off: start a launcher or parallel mode even if MindSpore's documentation rules it out on "
        "the device.", "on", Option(Heading.LIMITS, "--no-hardware-check", const="off"),
        is_harmless=True)
    preflight: str = key(
        OneOf(*preflight_levels.LEVELS),
        "What to check on all nodes before the ranks start: quick takes at most 2 seconds, or 4 if "
        "a connection fails; full also measures the network, disks, memory and GPUs, in at most 30 "
        "seconds; off checks nothing.",
        preflight_levels.QUICK, Option(Heading.LIMITS, "--preflight", "LEVEL"),
        is_harmless=True)
    strict: bool = key(
        FLAG,
        "true: fail with the exit code of a launcher or Python program that the script starts, "
        "even if the script ignores it; false: only the script's own exit code counts.", False,
        Option(Heading.LIMITS, "--strict", const="true"), is_harmless=True)
    sweep: Mapping[str, tuple[str, ...]] = key(
        SWEEP,
        "One job for each combination of values, such as lr=0.1,0.01 or seed=1..3; {NAME} in "
        "arguments and in values of env, inputs and outputs is the job's value.", {},
        Option(Heading.SWEEPS, "--sweep", "NAME=VALUES"))
    max_parallel: int = key(
        Whole(0, grid.MAX_JOBS),
        "How many jobs of a sweep run at the same time; 0 is 1 on this machine (process, docker) "
        "and all elsewhere.", 0, Option(Heading.SWEEPS, "--max-parallel", "K"))
    max_jobs: int = key(
        Whole(1, grid.MAX_JOBS), "The most jobs that a sweep may have.", 100,
        Option(Heading.SWEEPS, "--max-jobs", "N"))
    fail_fast: bool = key(
        FLAG, "true: cancel the other jobs of a sweep when one fails; false: the others continue.",
        False, Option(Heading.SWEEPS, "--fail-fast", const="true"))
    process: Process = section(Process)
    docker: Docker = section(Docker)
    modelarts: ModelArts = section(ModelArts)
    kubernetes: Kubernetes = section(Kubernetes)
    slurm: Slurm = section(Slurm)
    mindspore: MindSpore = section(MindSpore)
    network: Network = section(Network)
    hang: HangSettings = section(HangSettings)
    retry: Retry = section(Retry)
    notify: Notify = section(Notify)
    s3: ObjectStorage = section(ObjectStorage, "Settings of s3:// stores.")
    obs: ObjectStorage = section(ObjectStorage, "Settings of obs:// stores.")
    # fmt: on

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks of each node; 1 if it is not chosen yet."""
        return self.procs_per_node or 1

    @property
    def takes_command(self) -> bool:
        """Whether the script may be any command on the nodes, not only a file of the source."""
        return self.launcher in LAUNCHERS and LAUNCHERS[self.launcher].takes_command

    def section(self, name: str) -> Mapping[str, Any]:
        """Return the values of a section, with its defaults."""
        values: Values = getattr(self, name)
        return MappingProxyType(dict(values.items()))

    @property
    def sections(self) -> Mapping[str, Mapping[str, Any]]:
        """The sections that were given, each with the keys that were given."""
        chosen = self.chosen()
        values_of = {name: chosen[name].chosen() for name in SECTIONS if name in chosen}
        return MappingProxyType({name: values for name, values in values_of.items() if values})


SECTIONS: Mapping[str, type[Values]] = MappingProxyType(
    {name: item.kind.model for name, item in JobSpec.KEYS.items() if isinstance(item.kind, Section)}
)
OPTIONS: Mapping[str, Option] = MappingProxyType(
    {name: item.option for name, item in JobSpec.KEYS.items() if item.option}
)


# The keys that are masked for the records, because they may contain values of secrets.
_TEXTS = ("args", "env", "sweep")


def masked(spec: JobSpec, masked_texts: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the job as plain JSON values with every secret as ``***``, and the given sections.

    Args:
        masked_texts: The texts to mask in arguments and variables; by default the values of its
            secrets and of variables with a name such as ``WANDB_API_KEY``.
    """
    if masked_texts is None:
        masked_texts = secret_texts(secret_values(spec.secrets, spec.env))
    keys = {
        name: JobSpec.KEYS[name].kind.shown(value)
        for name, value in spec.items() if name not in SECTIONS
    }  # fmt: skip
    keys["secrets"] = dict.fromkeys(spec.secrets, MASK)
    keys.update({name: hide(keys[name], masked_texts) for name in _TEXTS})
    keys["env"] = secrets_masked(hide(spec.env, masked_texts))
    given_sections = {name: _plain(values) for name, values in spec.sections.items()}
    return {**_plain(keys), **given_sections}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: dict(value) if isinstance(value, Mapping)
        else list(value) if isinstance(value, tuple) else value
        for key, value in values.items()
    }  # fmt: skip
