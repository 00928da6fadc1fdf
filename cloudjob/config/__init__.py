"""Layered YAML and flags -> JobSpec.

Flags win over the job file, that over the project's, that over the user's, that over defaults.
Every layer is a flat table of dotted keys (``nodes``, ``env.A``, ``process.python``), so that
nearer layers win key by key and each value still knows where it was written.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cloudjob.config.env_file import read_env_file
from cloudjob.config.files import files_of, reason
from cloudjob.config.layer import MAPS, Layer, Value, field_of, layer_of_flags, layer_of_job
from cloudjob.config.reader import layer_of_file
from cloudjob.config.schema import json_schema
from cloudjob.errors import SpecError
from cloudjob.spec import (
    FIELDS,
    MASK,
    MAX_WORD_BYTES,
    SECTIONS,
    SOURCE_LIMIT_MB,
    JobSpec,
    faults,
    one_line,
    section,
)

__all__ = ["Loaded", "json_schema", "load", "read_env_file", "show"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A job and where each of its values was written.

    Args:
        origins: Dotted key -> ``--nodes``, ``job.yaml:3`` or ``default``.
    """

    spec: JobSpec
    origins: Mapping[str, str]


def load(
    flags: Mapping[str, object],
    *,
    job_file: str | None,
    cwd: Path,
    environ: Mapping[str, str],
    needs_script: bool = True,
    copied: tuple[str, Mapping[str, Any]] | None = None,
) -> Loaded:
    """Return the job that flags and files describe together.

    Args:
        flags: What the user gave and nothing else, by field name (or ``process.python``);
            text is read as in YAML, secrets are names with ``""`` or ``@FILE``.
        job_file: What ``--config`` names.
        cwd: The folder that relative flags mean.
        environ: Where secrets and ``$CLOUDJOB_CONFIG`` come from.
        copied: What stands in the place of the files: where it comes from, and another job as
            ``spec.masked`` shows it. Its secrets are taken from ``environ`` by their names.
        needs_script: False for ``config show``, which makes sense before there is a script.

    Raises:
        UsageError: a file cannot be read.
        SpecError: with everything that is wrong in all files, flags and the job they make.
    """
    problems: list[str] = []
    flag_layer = layer_of_flags(flags, cwd, problems)
    source = flag_layer.get("source")
    files = files_of(job_file, cwd, Path(source.value) if source else cwd, environ)
    if copied is not None:
        files = [file for file in files if file.must_exist and file.what == "job file"]
    layers = [layer_of_file(file, problems) for file in files]
    if copied is not None:
        layers.insert(0, layer_of_job(*copied, cwd, problems))
    layers.append(flag_layer)
    values = {key: value for layer in layers for key, value in layer.items()}
    values.update(_source_limit(layers, values))
    spec = _spec(_with_secrets(values, environ, problems), cwd)
    for key, what in faults(spec):
        if needs_script or key != "script" or spec.script:
            problems.append(_placed(key, what, values))
    if problems:
        raise SpecError(problems)
    return Loaded(spec, MappingProxyType(_origins(values)))


def show(loaded: Loaded) -> list[tuple[str, str, str]]:
    """Return each key with its value, secrets as ``***``, and its origin, for ``config show``."""
    rows: list[tuple[str, str]] = []
    for field in FIELDS:
        value = getattr(loaded.spec, field.name)
        if field.kind in MAPS:
            secret = field.kind == "secrets"
            rows += [(f"{field.name}.{k}", MASK if secret else v) for k, v in value.items()]
        else:
            rows.append((field.name, shlex.join(value) if field.kind == "list" else str(value)))
    for name in SECTIONS:
        for key, value in section(loaded.spec, name).items():
            rows += _section_rows(f"{name}.{key}", value)
    return [(key, value, loaded.origins.get(key, "default")) for key, value in rows]


def _section_rows(key: str, value: object) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [(f"{key}.{name}", str(item)) for name, item in value.items()]
    return [(key, shlex.join(value) if isinstance(value, tuple) else str(value))]


def _with_secrets(values: Layer, environ: Mapping[str, str], problems: list[str]) -> Layer:
    """Return the values with each secret's own in the place of where to find it."""
    found: Layer = {}
    for key, value in values.items():
        field, _, name = key.partition(".")
        if field != "secrets":
            found[key] = value
            continue
        try:
            text = _secret(name, value, environ)
        except ValueError as error:
            problems.append(f"{value.place}{one_line(key)}: {error}")
        else:
            found[key] = Value(text, value.origin, value.folder, value.place)
    return found


def _secret(name: str, value: Value, environ: Mapping[str, str]) -> str:
    if not value.value:
        if name not in environ:
            raise ValueError("is not set in your environment (allowed: set it, or name a @FILE)")
        return environ[name]
    path = value.folder / value.value[1:]
    try:
        # One byte more than fits, so that the check of its size has something to say.
        with path.open("rb") as file:
            data: bytes = file.read(MAX_WORD_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {one_line(str(path))}: {reason(error)}") from error
    return data.decode("utf-8", "surrogateescape")


def _spec(values: Layer, cwd: Path) -> JobSpec:
    words: dict[str, Any] = {"script": "", "source": str(cwd)}
    maps: dict[str, Any] = {}
    for key, value in values.items():
        field, dot, name = key.partition(".")
        if dot:
            maps.setdefault(field, {})[name] = value.value
        else:
            words[field] = value.value
    sections = {name: _section(name, maps.pop(name)) for name in SECTIONS if name in maps}
    spec = JobSpec(**words, **maps, sections=sections)
    return spec if spec.takes_command else replace(spec, script=_relative(spec, cwd))


def _relative(spec: JobSpec, cwd: Path) -> str:
    """Return the script's path as the nodes find it: relative to the source, and no option."""
    script = spec.script
    if script.startswith("-"):
        return f"./{script}"
    if not script.startswith("/") or "\0" in script + spec.source:
        return script
    source = cwd / spec.source
    for folder, path in ((source, script), (source.resolve(), os.path.realpath(script))):
        inside = os.path.relpath(path, folder)
        if inside.partition("/")[0] not in ("..", "."):
            return inside
    return script


def _source_limit(layers: Sequence[Layer], values: Layer) -> Layer:
    """Return the limit of the source, when the backend has one of its own.

    The nearest layer that speaks of either wins, and in one layer the backend's own.
    """
    backend = values["backend"].value if "backend" in values else field_of("backend").default
    own = f"{backend}.{SOURCE_LIMIT_MB}"
    if own not in values or values[own].value <= 0:
        return {}
    nearest_of = [layer[key] for layer in layers for key in (SOURCE_LIMIT_MB, own) if key in layer]
    # Both say the same from here on: a copy of the job has this limit, whatever comes of layers.
    return dict.fromkeys((SOURCE_LIMIT_MB, own), nearest_of[-1])


def _section(name: str, values: Mapping[str, object]) -> dict[str, object]:
    """Return a section's values by field; what stands in one of its maps has a dot in its key."""
    maps = {field.name for field in SECTIONS[name] if field.kind in MAPS}
    made: dict[str, Any] = {}
    for key, value in values.items():
        field, _, inner = key.partition(".")
        if field in maps:
            made.setdefault(field, {})[inner] = value
        else:
            made[key] = value
    return made


def _placed(key: str, what: str, values: Layer) -> str:
    """Return a problem with the file and line that its value came from, if it came from one."""
    value = values.get(key) or values.get(key.partition("[")[0])
    return f"{value.place if value else ''}{one_line(key)}: {what}"


def _origins(values: Layer) -> dict[str, str]:
    plain = [field.name for field in FIELDS if field.kind not in MAPS]
    inner = [f"{name}.{field.name}" for name, fields in SECTIONS.items() for field in fields]
    defaults = dict.fromkeys([*plain, *inner], "default")
    return {**defaults, **{key: value.origin for key, value in values.items()}}
