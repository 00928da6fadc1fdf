"""Finds and describes every error in a job. No I/O."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from cloudjob.errors import SpecError
from cloudjob.model import grid, key_rules
from cloudjob.model.job import JobSpec
from cloudjob.model.kinds import Fault, Location, ValueFaults, check_size, dotted
from cloudjob.model.rules import VARIABLE_FIELDS, VOLUME_SCHEMES
from cloudjob.model.text import given, nearest, one_line
from jobentry.contract import env
from jobentry.contract.launchers import LAUNCHERS

MAX_RANKS = 100_000


def validate(
    values: Mapping[str, Any], invalid: Set[str] = frozenset()
) -> tuple[JobSpec, list[tuple[str, str]]]:
    """Return the job that the valid values describe, and each wrong key with the reason.

    Args:
        invalid: Keys whose values were already found invalid and are not in ``values``.
    """
    faults: Sequence[Fault] = ()
    try:
        spec = JobSpec.read(values)
    except ValueFaults as error:
        faults = error.faults
        spec = JobSpec.read(_without(values, [location for location, _ in faults]))
        invalid = {*invalid, *(str(location[0]) for location, _ in faults)}
    problems = [(dotted(location), what) for location, what in faults]
    return spec, problems + conflicts(spec, invalid)


def valid_part(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
    """Return the values that are valid by themselves, and the faults of the others."""
    faults = JobSpec.read_given(values)[1]
    if not faults:
        return dict(values), []
    return _without(values, [location for location, _ in faults]), faults


def _without(values: Mapping[Any, Any], locations: Iterable[Location]) -> dict[Any, Any]:
    """Return values without those at some locations; a list is removed as a whole."""
    inner: dict[str | int, list[Location]] = {}
    for first, *rest in locations:
        inner.setdefault(first, []).append(tuple(rest))
    kept = {name: value for name, value in values.items() if name not in inner}
    for name, parts in inner.items():
        value = values[name]
        if isinstance(value, Mapping) and all(parts):
            kept[name] = _without(value, parts)
    return kept


# -- keys that contradict each other ----------------------------------------------------------


def conflicts(spec: JobSpec, invalid: Set[str] = frozenset()) -> list[tuple[str, str]]:
    """Return the keys whose values contradict those of other keys, and why.

    Args:
        invalid: Keys that have their defaults because their values were invalid; checks that read
            one of them are skipped.
    """
    return [
        problem for check, keys in _CHECKS if not invalid & set(keys) for problem in check(spec)
    ]  # fmt: skip


def check(spec: JobSpec) -> None:
    """Check that no keys contradict each other.

    Raises:
        SpecError: with every contradiction.
    """
    problems = conflicts(spec)
    if problems:
        raise SpecError([f"{one_line(key)}: {what}" for key, what in problems])


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


def _volumes(spec: JobSpec) -> Iterator[tuple[str, str]]:
    for key in ("inputs", "outputs"):
        for name, uri in getattr(spec, key).items():
            scheme = uri.partition("://")[0]
            if scheme in VOLUME_SCHEMES and spec.backend != "kubernetes":
                what = f"is a volume of Kubernetes (given {scheme}:// with {spec.backend})"
                yield f"{key}.{name}", what


# Each check with the keys that it reads.
_CHECKS = (
    (_script, ("script", "launcher")),
    (_ranks, ("nodes", "procs_per_node", "launcher")),
    (_variables, ()),
    (_input_nodes, ("inputs", "nodes")),
    (_volumes, ("backend", "inputs", "outputs")),
    (key_rules.of_sweep, ("sweep", "max_jobs", *grid.FILLED)),
    (
        key_rules.of_mindspore,
        ("launcher", "nodes", "procs_per_node", "hardware_check", "mindspore", "env"),
    ),
)
