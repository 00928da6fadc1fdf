"""What a job is, as one value. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from cloudjob.spec.fields import FIELDS, MASK, SECTIONS, VARIABLE_FIELDS
from jobentry.contract.launchers import AUTO, LAUNCHERS


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """Everything a user says about one job; ``check`` says whether it makes sense.

    Mappings are copied and read-only. An empty ``name`` becomes the script's.
    Text may hold surrogate escapes, as ``sys.argv`` does for bytes that are not UTF-8.
    """

    script: str
    args: tuple[str, ...] = ()
    name: str = ""
    nodes: int = 1
    procs_per_node: int = 1
    backend: str = "process"
    launcher: str = AUTO
    source: str = "."
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    inputs: Mapping[str, str] = field(default_factory=dict)
    input_nodes: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    output_sync_s: float = 30.0
    restore_outputs: str = "none"
    image: str = ""
    flavor: str = ""
    timeout_min: float = 0.0
    start_timeout_min: float = 10.0
    retries: int = 0
    min_nodes: int = 0
    grace_s: float = 10.0
    store: str = ""
    source_limit_mb: float = 100.0
    links: str = "keep"
    hardware_check: str = "on"
    sections: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        frozen: dict[str, object] = {
            "args": tuple(self.args),
            "name": self.name or default_name(self.script),
            "sections": _read_only({k: _read_only(v) for k, v in self.sections.items()}),
        }
        frozen.update(
            (name, _read_only(getattr(self, name))) for name in (*VARIABLE_FIELDS, "input_nodes")
        )
        for name, value in frozen.items():
            object.__setattr__(self, name, value)

    @property
    def takes_command(self) -> bool:
        """Whether the script is any command of the nodes, and not a file of the source."""
        return self.launcher in LAUNCHERS and LAUNCHERS[self.launcher].takes_command


def default_name(script: str) -> str:
    """Return the job name a script gives: its stem, with what no platform accepts made ``-``."""
    last = script.rpartition("/")[2]
    stem = last.rpartition(".")[0] or last
    return re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-")[:64] or "job"


def section(spec: JobSpec, name: str) -> Mapping[str, object]:
    """Return the settings of one backend with its defaults filled in."""
    defaults = {f.name: f.default for f in SECTIONS.get(name, ())}
    return MappingProxyType({**defaults, **spec.sections.get(name, {})})


def masked(spec: JobSpec) -> dict[str, object]:
    """Return the job as plain JSON values with every secret as ``***``."""
    shown: dict[str, object] = {f.name: _plain(getattr(spec, f.name)) for f in FIELDS}
    shown["secrets"] = dict.fromkeys(spec.secrets, MASK)
    sections = {
        name: {key: _plain(value) for key, value in values.items()}
        for name, values in spec.sections.items()
    }
    return {**shown, **sections}


def _read_only(mapping: Mapping[str, object]) -> Mapping[str, object]:
    return MappingProxyType(dict(mapping))


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value
