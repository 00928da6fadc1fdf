"""What a job is, as one value. No I/O."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, TypedDict

from pydantic import Field, ValidationInfo, field_validator

from cloudjob.model import grid
from cloudjob.model.rules import AUTO_RANKS, BACKENDS, NAME_RULE
from cloudjob.model.sections import (
    Docker,
    Hang,
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
from cloudjob.model.text import MASK, given, hide, secret_texts, secret_values, secrets_masked
from cloudjob.model.types import (
    Flag,
    Inputs,
    Labels,
    Number,
    OneOf,
    Option,
    Outputs,
    Patterns,
    Ranks,
    Secrets,
    SweepValues,
    Text,
    Texts,
    Values,
    Variables,
    Whole,
    key,
    shown,
)
from jobentry.contract.env import RESTORE_CHOICES
from jobentry.contract.launchers import AUTO, LAUNCHERS

# Longer waits overflow the timers of platforms and of Python; no platform runs a job for a year.
_YEAR_MIN = 525_600
_DAY_S = 86_400


class JobSpec(Values):
    """Everything that a user specifies about one job, each value valid by itself.

    ``check`` says whether the values also fit together. An empty ``name`` becomes the script's.
    Text may hold surrogate escapes, as ``sys.argv`` does for bytes that are not UTF-8.
    """

    # fmt: off
    script: Text = key("The program to run, relative to the source folder.")
    args: Texts = key("The script's own arguments, byte for byte.", ())
    name: Annotated[Text, Option("--name", "NAME")] = key(
        "The job's name: letters, digits, _ and -, at most 64; by default the script's name.",
        validate_default=True, json_schema_extra={"pattern": f"^{NAME_RULE}$"})
    nodes: Annotated[Whole, Option("--nodes", "N", short="-n")] = key(
        "Number of nodes.", 1, ge=1, le=10_000)
    procs_per_node: Annotated[Ranks, Option("--procs-per-node", "M")] = key(
        "Number of ranks on each node; auto is one for each GPU or NPU of a node, else 1.",
        AUTO_RANKS, ge=1, le=1024, json_schema_extra={"default": "auto"})
    backend: Annotated[str, OneOf(*BACKENDS), Option("--backend", "NAME")] = key(
        "Where the job runs.", "process")
    launcher: Annotated[str, OneOf(AUTO, *LAUNCHERS), Option("--launcher", "NAME")] = key(
        "How to start the ranks; auto chooses from the script's imports.", "auto")
    source: Annotated[Text, Option("--source", "DIR")] = key(
        "The folder to send; in a file, relative to that file.", ".")
    env: Annotated[Variables, Option("--env", "NAME=VALUE", short="-e")] = key(
        "Variables for every rank; an option takes precedence over a file, name by name.", {})
    secrets: Annotated[Secrets, Option("--secret", "NAME[=@FILE]")] = key(
        "Variables whose values are never shown; each value comes from your environment, or is the "
        "exact bytes of a file.", {}, repr=False)
    inputs: Annotated[Inputs, Option("--input", "NAME=URI")] = key(
        "Objects to copy to every node before the script starts; the variable NAME holds the path.",
        {})
    input_nodes: Annotated[Labels, Option("--input-nodes", "NAME=NODES")] = key(
        "The nodes that need an input, such as 0 or 0,2-3; by default all nodes.", {})
    outputs: Annotated[Outputs, Option("--output", "NAME=URI")] = key(
        "Folders whose files are saved while the job runs and when it ends; an empty URI is the "
        "job's own folder in the store.", {})
    output_sync_s: Annotated[Number, Option("--output-sync-s", "S")] = key(
        "Seconds between saves of the outputs while the job runs; 0 saves only at the end.",
        30.0, ge=0, le=_DAY_S)
    restore_outputs: Annotated[
        str, OneOf(*RESTORE_CHOICES), Option("--restore-outputs", "WHICH")
    ] = key(
        "Which files that an earlier run saved at an output's URI to restore on each node before "
        "the script starts: the node's own, or those of all nodes.", "none")
    metrics: Annotated[Patterns, Option("--metric", "NAME=REGEX")] = key(
        "Metrics in what ranks print: a regular expression for each, with a group for the value "
        "and, if named step, one for the step; `cloudjob metrics` shows them.", {})
    detect_metrics: Annotated[
        str, OneOf("on", "off"), Option("--no-detect-metrics", const="off")
    ] = key(
        "off: find only the metrics that JSON lines, event files and patterns give; on: also find "
        "numbers behind words such as loss and accuracy.", "on")
    image: Annotated[Text, Option("--image", "REF")] = key(
        "The container image, for backends that run containers.")
    flavor: Annotated[Text, Option("--flavor", "ID")] = key(
        "The platform's name for the kind of node.")
    timeout_min: Annotated[Number, Option("--timeout-min", "T")] = key(
        "Minutes after which the job is ended; 0 sets no limit.", 0.0, ge=0, le=_YEAR_MIN)
    start_timeout_min: Annotated[Number, Option("--start-timeout-min", "T")] = key(
        "Minutes allowed for the nodes to connect, and then for the ranks to start.",
        10.0, ge=0.01, le=_YEAR_MIN)
    retries: Annotated[Whole, Option("--retries", "R")] = key(
        "How many times to start a failed job again; or a mapping with this number as max, and the "
        "keys of retry.", 0, ge=0, le=10, json_schema_extra={"type": ["integer", "object"]})
    min_nodes: Annotated[Whole, Option("--min-nodes", "N")] = key(
        "The fewest nodes with which an elastic job (the launcher horovod-elastic) continues; 0 "
        "means 1 with that launcher, and all nodes with any other.", 0, ge=0, le=10_000)
    grace_s: Annotated[Number, Option("--grace-s", "S")] = key(
        "Seconds between SIGTERM and SIGKILL.", 10.0, ge=0, le=_DAY_S)
    store: Annotated[Text, Option("--store", "URI")] = key(
        "Where to store code and outputs; by default a folder under $CLOUDJOB_HOME.")
    source_limit_mb: Annotated[Number, Option("--source-limit-mb", "MB")] = key(
        "The largest source folder to pack, in megabytes.", 100.0, ge=0)
    links: Annotated[
        str, OneOf("keep", "follow"), Option("--follow-links", const="follow")
    ] = key(
        "follow: follow symbolic links that point outside the source folder; keep: refuse them.",
        "keep")
    hardware_check: Annotated[
        str, OneOf("on", "off"), Option("--no-hardware-check", const="off")
    ] = key(
        "off: start a launcher or parallel mode even if MindSpore's documentation rules it out on "
        "the device.", "on")
    strict: Annotated[Flag, Option("--strict", const="true")] = key(
        "true: fail with the exit code of a launcher or Python program that the script starts, "
        "even if the script ignores it; false: only the script's own exit code counts.", False)
    sweep: Annotated[SweepValues, Option("--sweep", "NAME=VALUES")] = key(
        "One job for each combination of values, such as lr=0.1,0.01 or seed=1..3; {NAME} in "
        "arguments and in values of env, inputs and outputs is the job's value.", {})
    max_parallel: Annotated[Whole, Option("--max-parallel", "K")] = key(
        "How many jobs of a sweep run at the same time; 0 is 1 on this machine (process, docker) "
        "and all elsewhere.", 0, ge=0, le=grid.MAX_JOBS)
    max_jobs: Annotated[Whole, Option("--max-jobs", "N")] = key(
        "The most jobs that a sweep may have.", 100, ge=1, le=grid.MAX_JOBS)
    fail_fast: Annotated[Flag, Option("--fail-fast", const="true")] = key(
        "true: cancel the other jobs of a sweep when one fails; false: the others continue.",
        False)
    process: Process = Field(default_factory=Process)
    docker: Docker = Field(default_factory=Docker)
    modelarts: ModelArts = Field(default_factory=ModelArts)
    kubernetes: Kubernetes = Field(default_factory=Kubernetes)
    slurm: Slurm = Field(default_factory=Slurm)
    mindspore: MindSpore = Field(default_factory=MindSpore)
    network: Network = Field(default_factory=Network)
    hang: Hang = Field(default_factory=Hang)
    retry: Retry = Field(default_factory=Retry)
    notify: Notify = Field(default_factory=Notify)
    s3: ObjectStorage = Field(default_factory=ObjectStorage,
        description="Settings of s3:// stores.")
    obs: ObjectStorage = Field(default_factory=ObjectStorage,
        description="Settings of obs:// stores.")
    # fmt: on

    @field_validator("name")
    @classmethod
    def _valid_name(cls, name: str, info: ValidationInfo) -> str:
        name = name or default_name(info.data.get("script", ""))
        if not re.fullmatch(NAME_RULE, name):
            allowed = "letters, digits, '_' and '-', 1 to 64 of them"
            raise ValueError(
                f"is not a name every platform accepts (given {given(name)}; allowed {allowed})"
            )
        return name

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
        return MappingProxyType(dict(getattr(self, name)))

    @property
    def sections(self) -> Mapping[str, Mapping[str, Any]]:
        """The sections that were given, each with the keys that were given."""
        values = {name: getattr(self, name) for name in SECTIONS}
        return MappingProxyType(
            {name: value.given() for name, value in values.items() if value.model_fields_set}
        )


class Options(TypedDict, total=False):
    """The keys of a job file as keyword arguments; ``docs/reference/job-file.md`` describes them.

    ``secrets`` are names of environment variables, or map a name to ``""`` or to ``@FILE``.
    """

    name: str
    nodes: int
    procs_per_node: int | str
    backend: str
    launcher: str
    source: str | os.PathLike[str]
    env: Mapping[str, str | float]
    secrets: Sequence[str] | Mapping[str, str]
    inputs: Mapping[str, str]
    input_nodes: Mapping[str, str]
    outputs: Mapping[str, str]
    output_sync_s: float
    restore_outputs: str
    metrics: Mapping[str, str]
    detect_metrics: str
    image: str
    flavor: str
    timeout_min: float
    start_timeout_min: float
    retries: int | Mapping[str, Any]
    min_nodes: int
    grace_s: float
    store: str
    source_limit_mb: float
    links: str
    hardware_check: str
    strict: bool
    sweep: Mapping[str, Any]
    max_parallel: int
    max_jobs: int
    fail_fast: bool
    process: Mapping[str, Any]
    docker: Mapping[str, Any]
    modelarts: Mapping[str, Any]
    kubernetes: Mapping[str, Any]
    slurm: Mapping[str, Any]
    mindspore: Mapping[str, Any]
    network: Mapping[str, Any]
    hang: Mapping[str, Any]
    retry: Mapping[str, Any]
    notify: Mapping[str, Any]
    s3: Mapping[str, Any]
    obs: Mapping[str, Any]


SECTIONS: Mapping[str, type[Values]] = MappingProxyType({
    name: field.annotation for name, field in JobSpec.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Values)
})  # fmt: skip
OPTIONS: Mapping[str, Option] = MappingProxyType({
    name: item for name, field in JobSpec.model_fields.items()
    for item in field.metadata if isinstance(item, Option)
})  # fmt: skip


def default_name(script: str) -> str:
    """Return a job name made from a script's stem, with ``-`` for characters platforms refuse."""
    last = script.rpartition("/")[2]
    stem = last.rpartition(".")[0] or last
    return re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-")[:64] or "job"


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
    fields = JobSpec.model_fields
    keys = {name: shown(fields[name], value) for name, value in spec if name not in SECTIONS}
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
