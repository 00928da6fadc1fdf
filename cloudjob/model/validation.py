"""Finds and describes every error in a job. No I/O."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from cloudjob.errors import SpecError
from cloudjob.model import grid, key_rules
from cloudjob.model.job import SECTIONS, JobSpec
from cloudjob.model.rules import BACKENDS, VARIABLE_FIELDS
from cloudjob.model.text import given, nearest, one_line
from cloudjob.model.types import check_size, choices_of, number_range
from jobentry.contract import env
from jobentry.contract.launchers import AUTO, LAUNCHERS

# The path of a value in a job: ("nodes",), ("env", "A"), ("args", 0), ("slurm", "mpi").
Location = tuple[str | int, ...]

MAX_RANKS = 100_000
_ELASTIC_BACKENDS = tuple(name for name, kind in BACKENDS.items() if kind.is_elastic)


def validate(
    values: Mapping[str, Any], invalid: Set[str] = frozenset()
) -> tuple[JobSpec, list[tuple[str, str]]]:
    """Return the job that the valid values describe, and each wrong key with the reason.

    Args:
        invalid: Keys whose values were already found invalid and are not in ``values``.
    """
    values, wrong = valid_part(values)
    spec = JobSpec.model_validate(values)
    invalid = {*invalid, *(str(location[0]) for location, _ in wrong)}
    found = [(dotted(location), what) for location, what in wrong]
    return spec, found + conflicts(spec, invalid)


def valid_part(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[Location, str]]]:
    """Return the values that are valid by themselves, and the location and error of the others."""
    valid, found = dict(values), []
    while wrong := _errors(valid):
        found += wrong
        valid = _without(valid, [location for location, _ in wrong])
    return valid, found


def _errors(values: Mapping[str, Any]) -> list[tuple[Location, str]]:
    try:
        JobSpec.model_validate(values)
    except ValidationError as error:
        found: dict[Location, str] = {}
        for item in error.errors(include_url=False):
            location = tuple(step for step in item["loc"] if step != "[key]")
            found.setdefault(location, _message(location, item["type"], item))
        return list(found.items())
    return []


def _without(values: Mapping[str, Any], locations: Iterable[Location]) -> dict[str, Any]:
    """Return values without those at some locations; a list is removed as a whole.

    A mapping with a name that is not UTF-8 is also removed as a whole, because pydantic does not
    report its exact location.
    """
    inner: dict[str, list[Location]] = {}
    for first, *rest in locations:
        inner.setdefault(str(first), []).append(tuple(rest))
    kept = {name: value for name, value in values.items() if name not in inner}
    for name, parts in inner.items():
        value = values.get(name)
        if isinstance(value, dict) and all(part and part[0] in value for part in parts):
            kept[name] = _without(value, parts)
    return kept


def dotted(location: Location) -> str:
    """Return a location as messages show it: ``env.A``, ``args[0]``."""
    return "".join(
        f"[{step}]" if isinstance(step, int) else f".{step}" for step in location
    ).removeprefix(".")


def _field_at(location: Location) -> FieldInfo | None:
    model: type[Any] = JobSpec
    if location[0] in SECTIONS and len(location) > 1:
        model, location = SECTIONS[str(location[0])], location[1:]
    found: FieldInfo | None = model.model_fields.get(location[0])
    return found


_SHAPES = {
    "tuple_type": "must be a list of texts",
    "list_type": "must be a list",
    "dict_type": "must be a mapping, NAME: value",
    "model_type": "must be a mapping of keys to values",
}
_NUMBERS = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
}
_LIMITS = ("greater_than_equal", "less_than_equal", "finite_number")


def _message(location: Location, kind: str, error: Mapping[str, Any]) -> str:
    """Describe an error of pydantic: what is wrong, what was given, what is allowed."""
    value, field = error["input"], _field_at(location)
    if kind == "value_error":
        return str(error["ctx"]["error"])
    if kind == "extra_forbidden":
        return _unknown_key(location)
    if location == ("secrets",):
        return "must be a mapping, or a list of names"
    is_scalar = isinstance(value, (str, int, float))
    if field and kind in _NUMBERS and is_scalar:
        allowed = number_range(field)
        return f"is not {_NUMBERS[kind]} (given {given(value)}; allowed {allowed})"
    if field and kind in _LIMITS:
        return f"is out of range (given {given(value)}; allowed {number_range(field)})"
    if field and choices_of(field) and is_scalar:
        choices = choices_of(field)
        shown = (
            f"(given {given(value)}; allowed {', '.join(each or repr(each) for each in choices)})"
        )
        return f"is not known{nearest(str(value), choices)} {shown}"
    return _SHAPES.get(kind, "must be one text or number")


def _unknown_key(location: Location) -> str:
    *parent, key = location
    if parent:
        known = SECTIONS[str(parent[0])].model_fields
        return f"no such key{nearest(str(key), known)} (allowed {', '.join(known)})"
    return f"no such key{nearest(str(key), JobSpec.model_fields)}"


# -- keys that contradict each other ----------------------------------------------------------


def conflicts(spec: JobSpec, invalid: Set[str] = frozenset()) -> list[tuple[str, str]]:
    """Return the keys whose values contradict those of other keys, and why.

    Args:
        invalid: Keys that have their defaults because their values were invalid; checks that read
            one of them are skipped.
    """
    return [
        found for check, keys in _CHECKS if not invalid & set(keys) for found in check(spec)
    ]  # fmt: skip


def check(spec: JobSpec) -> None:
    """Check that no keys contradict each other.

    Raises:
        SpecError: with every contradiction.
    """
    found = conflicts(spec)
    if found:
        raise SpecError([f"{one_line(key)}: {what}" for key, what in found])


def _script(spec: JobSpec) -> Iterator[tuple[str, str]]:
    script = spec.script
    if not script:
        yield "script", "is missing (allowed: a file in the source folder)"
        return
    if spec.takes_command:
        return
    path = posixpath.normpath(script)
    if script.startswith("/"):
        yield "script", f"must be relative to the source folder (given {given(script)})"
    elif path.partition("/")[0] == "..":
        yield "script", f"lies outside the source folder (given {given(script)})"
    elif path == ".":
        yield "script", f"must name a file, not the folder (given {given(script)})"


def _ranks(spec: JobSpec) -> Iterator[tuple[str, str]]:
    launcher = LAUNCHERS.get(spec.launcher)
    if launcher and launcher.is_one_a_node and spec.procs_per_node > 1:
        yield (
            "procs_per_node",
            f"must be 1 with the launcher {spec.launcher}, which starts one process per node"
            f" (given {spec.procs_per_node})",
        )
    ranks = spec.nodes * spec.ranks_per_node
    if ranks > MAX_RANKS:
        product = f"{spec.nodes} x {spec.ranks_per_node} = {ranks}"
        yield (
            "nodes",
            f"times procs_per_node is too many ranks (given {product}; allowed {MAX_RANKS})",
        )


def _variables(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield variables too long for Linux, and names that two keys would both set."""
    first: dict[str, str] = {}
    for key in VARIABLE_FIELDS:
        for name, value in getattr(spec, key).items():
            try:
                check_size(len(f"{name}={value}".encode("utf-8", "surrogateescape")))
            except ValueError as error:
                yield f"{key}.{name}", str(error)
            if name in first:
                yield f"{key}.{name}", f"is also in {first[name]} (allowed: each name once)"
            first.setdefault(name, key)


def _input_nodes(spec: JobSpec) -> Iterator[tuple[str, str]]:
    for name, text in spec.input_nodes.items():
        key = f"input_nodes.{name}"
        if name not in spec.inputs:
            guess = nearest(name, spec.inputs)
            allowed = ", ".join(spec.inputs) or "none, there are no inputs"
            yield key, f"is not an input{guess} (allowed {allowed})"
        elif not env.is_list(text):
            yield key, f"does not list nodes (given {given(text)}; for example 0 or 0,2-3)"
        elif not any(env.is_listed(node, text) for node in range(spec.nodes)):
            yield key, f"is none of the nodes (given {given(text)}; allowed 0 to {spec.nodes - 1})"


def _elastic(spec: JobSpec) -> Iterator[tuple[str, str]]:
    launcher = LAUNCHERS.get(spec.launcher)
    is_elastic = launcher is not None and launcher.is_elastic
    if is_elastic and spec.backend in BACKENDS and spec.backend not in _ELASTIC_BACKENDS:
        yield (
            "launcher",
            f"is not for this backend, which ends a job that has lost a node (given"
            f" {spec.launcher} with {spec.backend}; allowed with {', '.join(_ELASTIC_BACKENDS)})",
        )
    if spec.min_nodes and not is_elastic and spec.launcher != AUTO:
        yield (
            "min_nodes",
            f"is for the launcher horovod-elastic; with {spec.launcher} all nodes are needed"
            f" (given {spec.min_nodes})",
        )
    elif spec.min_nodes > spec.nodes:
        yield (
            "min_nodes",
            f"is more than the job has (given {spec.min_nodes}; allowed 0 to {spec.nodes})",
        )


# Each check with the keys that it reads.
_CHECKS = (
    (_script, ("script", "launcher")),
    (_ranks, ("nodes", "procs_per_node", "launcher")),
    (_variables, ()),
    (_input_nodes, ("inputs", "nodes")),
    (_elastic, ("launcher", "backend", "nodes", "min_nodes")),
    (key_rules.of_sweep, ("sweep", "max_jobs", *grid.FILLED)),
    (
        key_rules.of_mindspore,
        ("launcher", "nodes", "procs_per_node", "hardware_check", "mindspore", "env"),
    ),
)
