"""One layer of a job: each value with its type and with where it was written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudjob.spec import FIELDS, MASK, SECTIONS, Field, given, number_range, one_line

MAPS = ("map", "secrets")
# Narrower than int() and float(), which also take '1_0', ' 1 ', other scripts' digits and 'nan'.
_NUMBERS = {
    "int": (re.compile(r"[+-]?[0-9]{1,18}"), int, "a whole number"),
    "float": (re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"), float, "a number"),
}


@dataclass(frozen=True, slots=True)
class Value:
    """One value of one layer; ``place`` is what a message about it begins with."""

    value: Any
    origin: str
    folder: Path
    place: str = ""


Layer = dict[str, Value]


def layer_of_flags(flags: Mapping[str, object], cwd: Path, problems: list[str]) -> Layer:
    """Return what the command line says as a layer."""
    layer: Layer = {}
    for key, value in flags.items():
        field = field_of(key)
        origin = field.flag or "command line"
        for dotted, item in _flattened(key, field, value):
            put(layer, dotted, field, Value(item, origin, cwd), problems)
    return layer


def layer_of_job(
    origin: str, described: Mapping[str, Any], cwd: Path, problems: list[str]
) -> Layer:
    """Return a job as a layer; what an older cloudjob knew and we do not is left out."""
    layer: Layer = {}
    flat = {field.name: described.get(field.name) for field in FIELDS}
    flat["secrets"] = dict.fromkeys(flat["secrets"] or (), "")
    for name, fields in SECTIONS.items():
        values = described.get(name) or {}
        flat.update({f"{name}.{f.name}": values[f.name] for f in fields if f.name in values})
    for key, value in flat.items():
        field = field_of(key)
        for dotted, item in _flattened(key, field, value):
            put(layer, dotted, field, Value(item, origin, cwd, f"{origin}: "), problems)
    return layer


def field_of(key: str) -> Field:
    """Return the field of a dotted key."""
    name, _, inner = key.partition(".")
    fields = SECTIONS[name] if inner else FIELDS
    return next(field for field in fields if field.name == (inner or name))


def _flattened(key: str, field: Field, value: Any) -> Iterator[tuple[str, object]]:
    if value is None:
        return
    if field.kind in MAPS:
        yield from ((f"{key}.{name}", item) for name, item in value.items())
    elif field.kind == "list":
        yield key, tuple(value)
    else:
        yield key, value if field.kind == "tree" else str(value)


def put(layer: Layer, key: str, field: Field, value: Value, problems: list[str]) -> None:
    """Put a value into its layer in the field's own type, or say why that cannot be."""
    try:
        typed = _typed(field, value)
    except ValueError as error:
        problems.append(f"{value.place}{one_line(key)}: {error}")
    else:
        layer[key] = Value(typed, value.origin, value.folder, value.place)


def _typed(field: Field, value: Value) -> object:
    if field.kind in _NUMBERS:
        rule, convert, wanted = _NUMBERS[field.kind]
        if not rule.fullmatch(value.value):
            allowed = number_range(field)
            raise ValueError(f"is not {wanted} (given {given(value.value)}; allowed {allowed})")
        return convert(value.value)
    if field.kind == "secrets" and value.value and not value.value.startswith("@"):
        raise ValueError(
            "a secret's value must not be written down where others can read it "
            f"(given {MASK}; allowed the name alone, taken from your environment, or @FILE)"
        )
    if field.name == "source":
        return str(value.folder / value.value)
    return value.value
