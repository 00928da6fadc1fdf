import os
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

# `python scripts/reference.py` writes this file.

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
    grace_s: float
    store: str
    source_limit_mb: float
    links: str
    hardware_check: str
    preflight: str
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
