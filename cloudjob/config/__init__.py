"""Read options, the environment and YAML files into a ``JobSpec``; start with ``load``.

Options take precedence over the job file, then come the project's file, the user's file and the
defaults. Each layer is validated by itself, so every error names its file and line, even if another
layer overrides the value.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from cloudjob.config.files import PROJECT_FILE, ConfigFile, files_of, reason
from cloudjob.config.layer import Layer, check, layer_of_job, layer_of_options, merged
from cloudjob.config.yaml_file import layer_of_file
from cloudjob.errors import SpecError
from cloudjob.model.job import SECTIONS, JobSpec, masked
from cloudjob.model.rules import MAX_ARG_BYTES, name_on_nodes
from cloudjob.model.text import MASK, one_line
from cloudjob.model.validation import validate
from jobentry.contract.launchers import LAUNCHERS
from jobentry.contract.secret_values import is_secret_name

_LIMIT = "source_limit_mb"
# The origin of a value that no file, variable or option has set.
DEFAULT = "default"


class Loaded(NamedTuple):
    """A job and where each of its values was written.

    Args:
        origins: Dotted key -> ``--nodes`` or ``job.yaml:3``; defaults have none.
        chosen_source: Which folder was chosen as the source, and why, if the script lies outside
            the current folder and nothing names a source.
    """

    spec: JobSpec
    origins: Mapping[str, str]
    chosen_source: str = ""


class Copied(NamedTuple):
    """A job to copy.

    Args:
        origin: What it is, for messages.
        described: Its values, as ``masked`` returns them.
        is_whole: Whether they are all values of the job, so that the project's and the user's file
            do not count; else these provide the others.
    """

    origin: str
    described: Mapping[str, Any]
    is_whole: bool = True


def load(
    flags: Mapping[str, object],
    *,
    job_file: str | None,
    cwd: Path,
    environ: Mapping[str, str],
    needs_script: bool = True,
    copied: Copied | None = None,
) -> Loaded:
    """Return the job that options and files describe together.

    Args:
        flags: The options that were given, by key; text is read as in YAML, secrets are names with
            ``""`` or ``@FILE``.
        job_file: The file of ``--config``.
        cwd: The folder to which paths in options are relative.
        environ: The source of secrets and of ``$CLOUDJOB_CONFIG``.
        copied: A job to copy. Its secrets are read from ``environ`` by name.
        needs_script: False for ``config show``, which works without a script.

    Raises:
        UsageError: a file cannot be read.
        SpecError: with every error of all files, options and the job they describe.
    """
    options = check(layer_of_options(flags, cwd))
    source = Path(options.values.get("source", cwd))
    files = files_of(job_file, cwd, source, environ)
    layers = [*_layers(files, copied, cwd), options]
    values = {"source": str(cwd), **merged(layers)}
    if (
        "script" in flags
        and "script" in values
        and not any("source" in layer.values for layer in layers)
    ):
        chosen = _project(values, cwd)
        if chosen:
            more = {"source": str(chosen.folder), "script": str(cwd / values["script"])}
            loaded = load({**flags, **more}, job_file=job_file, cwd=cwd, environ=environ,
                          needs_script=needs_script, copied=copied)  # fmt: skip
            origins = {**loaded.origins, "source": "the script's path"}
            return loaded._replace(origins=origins, chosen_source=chosen.why)
    origins = {key: origin for layer in layers for key, origin in layer.origins.items()}
    if copied is not None and copied.is_whole:
        layers[0].problems += _masked_values(values, layers[0])
    _apply_source_limit(layers, values, origins)
    problems = [problem for layer in layers for problem in layer.problems]
    invalid = {key for layer in layers for key in layer.invalid}
    spec, invalid_later = _spec(values, environ, cwd, invalid)
    for key, what in invalid_later:
        if needs_script or key != "script" or spec.script:
            nearest = next((layer for layer in layers[::-1] if key in layer.origins), options)
            problems.append(nearest.problem(key, what))
    if problems:
        raise SpecError(problems)
    return Loaded(spec, MappingProxyType(origins))


def _layers(files: Sequence[ConfigFile], copied: Copied | None, cwd: Path) -> list[Layer]:
    """Return the layers of files and of a copied job, the farthest first."""
    if copied is None:
        return [check(layer_of_file(file)) for file in files]
    job_files = [file for file in files if file.must_exist and file.what == "job file"]
    others = [] if copied.is_whole else [file for file in files if file not in job_files]
    return [
        *(check(layer_of_file(file)) for file in others),
        check(layer_of_job(copied.origin, copied.described, cwd)),
        *(check(layer_of_file(file)) for file in job_files),
    ]


def _masked_values(values: Mapping[str, Any], layer: Layer) -> Iterator[str]:
    """Yield an error for each value that a copy cannot have: records mask the values of secrets."""
    env = layer.values.get("env", {})
    if not (layer.values.get("secrets") or any(map(is_secret_name, env))):
        return
    what = f"was recorded with {MASK} for the value of a secret (allowed: give it again)"
    args = layer.values.get("args", ())
    if values.get("args", ()) == args and any(MASK in arg for arg in args):
        yield layer.problem("args", what)
    for name, value in env.items():
        if values["env"][name] == value and MASK in value:
            yield layer.problem(f"env.{name}", what)


def show(loaded: Loaded) -> list[tuple[str, str, str]]:
    """Return each key with its value, secrets as ``***``, and its origin, for ``config show``."""
    rows: list[tuple[str, str]] = []
    described = masked(loaded.spec)
    for name, value in loaded.spec.items():
        if name in SECTIONS:
            for key, item in value.items():
                rows += _rows(f"{name}.{key}", item)
        else:
            item = described[name]
            rows += _rows(name, tuple(item) if isinstance(item, list) else item)
    return [(key, value, loaded.origins.get(key, DEFAULT)) for key, value in rows]


def _rows(key: str, value: object) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [row for name, item in value.items() for row in _rows(f"{key}.{name}", item)]
    if isinstance(value, bool):
        return [(key, str(value).lower())]
    return [(key, shlex.join(value) if isinstance(value, tuple) else str(value))]


def _spec(
    values: dict[str, Any], environ: Mapping[str, str], cwd: Path, invalid: set[str]
) -> tuple[JobSpec, list[tuple[str, str]]]:
    """Return the job that the merged values describe, and its errors."""
    unusable: list[tuple[str, str]] = []
    for name, place in values.get("secrets", {}).items():
        try:
            values["secrets"][name] = _secret(name, place, environ)
        except ValueError as error:
            unusable.append((f"secrets.{name}", str(error)))
    if "script" in values and not _takes_command(values):
        script = _relative(values["script"], cwd / values["source"], cwd)
        values["script"] = name_on_nodes(script)
    spec, wrong = validate(values, invalid)
    return spec, unusable + wrong


def _secret(name: str, place: str, environ: Mapping[str, str]) -> str:
    """Return a secret from the environment, or from ``@FILE``."""
    if not place:
        if name not in environ:
            raise ValueError("is not set in your environment (allowed: set it, or name a @FILE)")
        return environ[name]
    path = Path(place[1:])
    try:
        # One byte more than allowed, so that the size check reports a larger file.
        with path.open("rb") as file:
            data: bytes = file.read(MAX_ARG_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {one_line(str(path))}: {reason(error)}") from error
    return data.decode("utf-8", "surrogateescape")


def _takes_command(values: Mapping[str, Any]) -> bool:
    launcher = LAUNCHERS.get(values.get("launcher", ""))
    return launcher is not None and launcher.takes_command


class _Project(NamedTuple):
    """The folder to send for a script, and the reason as a message."""

    folder: Path
    why: str


# The files and folders that mark the top of a project.
_PROJECT_MARKS = (PROJECT_FILE, ".git", "pyproject.toml", "setup.py")
# Folders of the system.
_SYSTEM = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/proc", "/run", "/sbin", "/sys", "/usr"),
    *("/Applications", "/Library", "/System", "/private/etc"),
)


def _project(values: Mapping[str, Any], cwd: Path) -> _Project | None:
    """Return the folder to send for a script that lies outside the current folder."""
    script = values["script"]
    path = Path(os.path.realpath(cwd / script)) if "\0" not in script else cwd
    if _takes_command(values) or path.is_relative_to(cwd.resolve()) or not _is_file(path):
        return None
    for folder in filter(_may_be_sent, path.parents):
        for mark in _PROJECT_MARKS:
            if (folder / mark).exists():
                why = f"source {folder}: the project of {one_line(script)}, as it contains {mark}"
                return _Project(folder, why)
    if not _may_be_sent(path.parent):
        return None
    return _Project(path.parent, f"source {path.parent}: the folder of {one_line(script)}")


def _may_be_sent(folder: Path) -> bool:
    """Whether a folder may be sent by default: not a home folder, /tmp or a system folder."""
    is_shared = bool(folder.stat().st_mode & stat.S_IWOTH)
    is_system = any(folder.is_relative_to(system) for system in _SYSTEM)
    home = Path.home().resolve()
    return folder not in (home, *home.parents) and not is_shared and not is_system


def _relative(script: str, source: Path, cwd: Path) -> str:
    """Return the script's path relative to the source, never starting with a dash."""
    if script.startswith("-"):
        return f"./{script}"
    if "\0" in f"{script}{source}":
        return script
    if not script.startswith("/"):
        is_below = os.path.normpath(script).partition("/")[0] != ".."
        if (is_below and _is_there(source / script)) or not _is_file(cwd / script):
            return script
        # A path completed by a shell is relative to the current folder.
        return _inside(str(cwd / script), source) or script
    return _inside(script, source) or script


def _is_there(path: Path) -> bool:
    """Whether a path exists; one with a name that is too long does not."""
    try:
        return path.exists()
    except OSError:
        return False


def _is_file(path: Path) -> bool:
    return _is_there(path) and path.is_file()


def _inside(script: str, source: Path) -> str:
    """Return a script's path relative to the source; empty if it lies outside."""
    for folder, path in ((source, script), (source.resolve(), os.path.realpath(script))):
        inside = os.path.relpath(path, folder)
        if inside.partition("/")[0] not in ("..", "."):
            return inside
    return ""


def _apply_source_limit(
    layers: Sequence[Layer], values: dict[str, Any], origins: dict[str, str]
) -> None:
    """Set both limits of the source to the one that applies, if the backend has its own.

    The nearest layer that has either key wins; within one layer, the backend's key wins. Both keys
    get the value, so that a copy of the job has the same limit.
    """
    backend = values.get("backend", JobSpec.KEYS["backend"].default)
    limit = values.get(backend, {}).get(_LIMIT)
    if limit is None or float(limit) <= 0:
        return
    for layer in layers[::-1]:
        for key, layer_values in ((f"{backend}.{_LIMIT}", layer.values.get(backend, {})),
                           (_LIMIT, layer.values)):  # fmt: skip
            if _LIMIT in layer_values:
                values[_LIMIT] = values[backend][_LIMIT] = layer_values[_LIMIT]
                origins[_LIMIT] = origins[f"{backend}.{_LIMIT}"] = layer.origins[key]
                return
