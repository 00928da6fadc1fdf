"""Everything that can be wrong with a job. No I/O."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from cloudjob import mindspore
from cloudjob.errors import SpecError
from cloudjob.spec.fields import (
    BACKENDS,
    ELASTIC_BACKENDS,
    FIELDS,
    MASK,
    MAX_RANKS,
    MAX_WORD_BYTES,
    NAME_RULE,
    RESERVED_PREFIXES,
    SECTIONS,
    VARIABLE_FIELDS,
    VARIABLE_RULE,
    Field,
)
from cloudjob.spec.job import JobSpec, section
from cloudjob.spec.words import given, nearest, number_range, one_line
from jobentry.contract import env
from jobentry.contract.launchers import AUTO, LAUNCHERS


def check(spec: JobSpec) -> None:
    """Do nothing for a job that makes sense.

    Raises:
        SpecError: with every fault of one that does not.
    """
    found = problems(spec)
    if found:
        raise SpecError(found)


def problems(spec: JobSpec) -> list[str]:
    """Return every fault, each ``field: what is wrong (given …; allowed …)``."""
    return [f"{one_line(key)}: {what}" for key, what in faults(spec)]


def faults(spec: JobSpec) -> list[tuple[str, str]]:
    """Return each fault as its dotted key (``nodes``, ``env.A``, ``args[0]``) and what is wrong."""
    return [
        *_script_faults(spec),
        *_name_faults(spec.name),
        *_number_faults(spec),
        *_word_faults("", FIELDS, {f.name: getattr(spec, f.name) for f in FIELDS}),
        *_args_faults(spec.args),
        *_variable_faults(spec),
        *_collisions(spec),
        *_input_nodes_faults(spec),
        *_elastic_faults(spec),
        *_section_faults(spec.sections),
        *mindspore.faults(_for_mindspore(spec)),
    ]


def _for_mindspore(spec: JobSpec) -> mindspore.Job:
    settings = section(spec, "mindspore")
    text = {name: str(settings[name]) for name in ("device_target", "parallel_mode", "search_mode")}
    listed = settings["devices"]
    return mindspore.Job(
        launcher=spec.launcher,
        nodes=spec.nodes,
        procs_per_node=spec.procs_per_node,
        is_checked=spec.hardware_check != "off",
        devices=[str(line) for line in listed] if isinstance(listed, (list, tuple)) else (),
        servers=spec.env.get("MS_SERVER_NUM", ""),
        **text,
    )


def _script_faults(spec: JobSpec) -> Iterator[tuple[str, str]]:
    script = spec.script
    if not script:
        yield "script", "is missing (allowed: a file in the source folder)"
        return
    if spec.takes_command:
        return
    if script.startswith("/"):
        yield "script", f"must be relative to the source folder (given {given(script)})"
    elif _climbs(script):
        yield "script", f"lies outside the source folder (given {given(script)})"
    elif not _steps(script):
        yield "script", f"must name a file, not the folder (given {given(script)})"


def _steps(path: str) -> list[str]:
    return [step for step in path.split("/") if step not in ("", ".")]


def _climbs(path: str) -> bool:
    depth = 0
    for step in _steps(path):
        depth += -1 if step == ".." else 1
        if depth < 0:
            return True
    return False


def _name_faults(name: str) -> Iterator[tuple[str, str]]:
    if not re.fullmatch(NAME_RULE, name):
        allowed = "letters, digits, '_' and '-', 1 to 64 of them"
        yield (
            "name",
            f"is not a name every platform accepts (given {given(name)}; allowed {allowed})",
        )


def _number_faults(spec: JobSpec) -> Iterator[tuple[str, str]]:
    numbers = [f for f in FIELDS if f.kind in ("int", "float")]
    wrong = [f for f in numbers if not _in_range(f, getattr(spec, f.name))]
    for f in wrong:
        value = getattr(spec, f.name)
        yield f.name, f"is out of range (given {given(value)}; allowed {number_range(f)})"
    launcher = LAUNCHERS.get(spec.launcher)
    if launcher and launcher.is_one_a_node and spec.procs_per_node > 1:
        yield (
            "procs_per_node",
            f"must be 1 with the launcher {spec.launcher}, which starts one process a node"
            f" (given {spec.procs_per_node})",
        )
    ranks = spec.nodes * spec.procs_per_node
    if ranks > MAX_RANKS and not {"nodes", "procs_per_node"} & {f.name for f in wrong}:
        product = f"{spec.nodes} x {spec.procs_per_node} = {ranks}"
        yield (
            "nodes",
            f"times procs_per_node is too many ranks (given {product}; allowed {MAX_RANKS})",
        )


def _in_range(field: Field, value: float) -> bool:
    least = -math.inf if field.least is None else field.least
    most = math.inf if field.most is None else field.most
    return math.isfinite(value) and least <= value <= most


def _word_faults(
    prefix: str, fields: Iterable[Field], values: Mapping[str, object]
) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the fields that hold one text."""
    for f in fields:
        value = values.get(f.name, f.default)
        if f.kind != "str" or not isinstance(value, str):
            continue
        what = _unknown_word(f, value) or _unsendable(value, given(value))
        if what:
            yield prefix + f.name, what


def _unknown_word(field: Field, value: str) -> str:
    if not field.allowed or value in field.allowed:
        return ""
    guess = nearest(value, field.allowed)
    return f"is not known{guess} (given {given(value)}; allowed {', '.join(field.allowed)})"


def _unsendable(value: str, shown: str, *, taken_bytes: int = 0) -> str:
    """Return why Linux cannot hand this text to a program, or nothing when it can."""
    if "\0" in value:
        return f"holds a NUL character (given {shown}; allowed any text without it)"
    try:
        size_bytes = taken_bytes + len(value.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        return f"holds half a character, which no encoding can write (given {shown})"
    if size_bytes > MAX_WORD_BYTES:
        return f"is too long (given {size_bytes} bytes; allowed {MAX_WORD_BYTES}, Linux's limit)"
    return ""


def _args_faults(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    for index, arg in enumerate(args):
        what = _unsendable(arg, given(arg))
        if what:
            yield f"args[{index}]", what


def _variable_faults(spec: JobSpec) -> Iterator[tuple[str, str]]:
    for field_name in VARIABLE_FIELDS:
        for name, value in getattr(spec, field_name).items():
            shown = MASK if field_name == "secrets" else given(value)
            what = _bad_variable_name(name) or _unsendable(
                value, shown, taken_bytes=len(name.encode("utf-8", "replace")) + 1
            )
            if not what and field_name == "inputs" and not value:
                what = "is empty (allowed a URI)"
            if what:
                yield f"{field_name}.{name}", what


def _bad_variable_name(name: str) -> str:
    if not re.fullmatch(VARIABLE_RULE, name):
        allowed = "letters, digits and '_', not a digit first"
        return f"is not a variable's name (given {given(name)}; allowed {allowed})"
    for prefix in RESERVED_PREFIXES:
        if name.startswith(prefix):
            return (
                f"uses a reserved name (given {given(name)}; allowed: not beginning with {prefix})"
            )
    return ""


def _collisions(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield the names that two fields would both set in the ranks' environment."""
    first: dict[str, str] = {}
    for field_name in VARIABLE_FIELDS:
        for name in getattr(spec, field_name):
            if name in first:
                yield f"{field_name}.{name}", f"is also in {first[name]} (allowed: each name once)"
            first.setdefault(name, field_name)


def _input_nodes_faults(spec: JobSpec) -> Iterator[tuple[str, str]]:
    for name, text in spec.input_nodes.items():
        key = f"input_nodes.{name}"
        if name not in spec.inputs:
            guess = nearest(name, spec.inputs)
            allowed = ", ".join(spec.inputs) or "none, there are no inputs"
            yield key, f"is no input{guess} (allowed {allowed})"
        elif not env.is_list(text):
            yield key, f"does not list nodes (given {given(text)}; allowed like 0 or 0,2-3)"
        elif not any(env.is_listed(node, text) for node in range(spec.nodes)):
            yield key, f"is none of the nodes (given {given(text)}; allowed 0 to {spec.nodes - 1})"


def _elastic_faults(spec: JobSpec) -> Iterator[tuple[str, str]]:
    launcher = LAUNCHERS.get(spec.launcher)
    is_elastic = launcher is not None and launcher.is_elastic
    if is_elastic and spec.backend in BACKENDS and spec.backend not in ELASTIC_BACKENDS:
        yield (
            "launcher",
            f"is not for this backend, which ends a job that has lost a node (given"
            f" {spec.launcher} with {spec.backend}; allowed with {', '.join(ELASTIC_BACKENDS)})",
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


def _section_faults(sections: Mapping[str, Mapping[str, object]]) -> Iterator[tuple[str, str]]:
    for name, values in sections.items():
        fields = SECTIONS.get(name)
        if fields is None:
            yield (
                name,
                f"is no section{nearest(name, SECTIONS)} (allowed {', '.join(SECTIONS)})",
            )
            continue
        known = [f.name for f in fields]
        for key in values:
            if key not in known:
                yield (
                    f"{name}.{key}",
                    f"is no key{nearest(key, known)} (allowed {', '.join(known)})",
                )
        yield from _word_faults(f"{name}.", fields, values)
        for f in fields:
            value = values.get(f.name, f.default)
            wanted = (list, tuple) if f.default == () else Mapping
            if f.kind == "tree" and not isinstance(value, wanted):
                what = "a list" if f.default == () else "a mapping"
                yield f"{name}.{f.name}", f"is not {what} (given {given(value)})"
            if isinstance(value, (int, float)) and not _in_range(f, value):
                allowed = number_range(f)
                yield f"{name}.{f.name}", f"is out of range (given {value!r}; allowed {allowed})"
