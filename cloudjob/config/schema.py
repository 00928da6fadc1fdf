"""The JSON Schema of a job file, for editors."""

from __future__ import annotations

from typing import Any

from cloudjob.config.layer import MAPS
from cloudjob.spec import (
    FIELDS,
    FRAMEWORK_SECTIONS,
    NAME_RULE,
    NETWORK,
    RESERVED_PREFIXES,
    SECTIONS,
    STORE_SECTIONS,
    VARIABLE_FIELDS,
    VARIABLE_RULE,
    Field,
)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a job file."""
    keys = {field.name: _schema(field) for field in FIELDS}
    for name, fields in SECTIONS.items():
        keys[name] = {
            "description": f"Settings of {_owner(name)}.",
            "type": ["object", "null"],
            "additionalProperties": False,
            "properties": {field.name: _schema(field) for field in fields},
        }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "cloudjob job file",
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": keys,
    }


def _owner(section_name: str) -> str:
    if section_name == NETWORK:
        return "the network between the nodes"
    if section_name in FRAMEWORK_SECTIONS:
        return "scripts for MindSpore"
    is_store = section_name in STORE_SECTIONS
    return f"stores {section_name}://" if is_store else f"the {section_name} backend"


def _schema(field: Field) -> dict[str, Any]:
    schema: dict[str, Any] = {"description": field.help}
    if field.kind == "tree":
        return {**schema, "type": ["array" if field.default == () else "object", "null"]}
    if field.kind in MAPS or field.kind == "list":
        shape = _SHAPES[field.kind]
        # Only names of variables have a rule.
        is_free = field.kind == "map" and field.name not in VARIABLE_FIELDS
        left_out = "propertyNames" if is_free else ""
        return {**schema, **{key: value for key, value in shape.items() if key != left_out}}
    if field.kind == "str":
        schema["type"] = list(_TEXT_TYPES)
    else:
        schema["type"] = ["integer" if field.kind == "int" else "number", "null"]
    limits = {"minimum": field.least, "maximum": field.most, "default": field.default}
    schema.update((k, v) for k, v in limits.items() if v is not None and v != "")
    if field.allowed:
        schema["enum"] = [*(_as_written(word) for word in field.allowed), None]
    if field.name == "name":
        schema["pattern"] = f"^{NAME_RULE}$"
    return schema


def _as_written(word: str) -> object:
    """An editor reads ``true`` as a truth, as YAML does; we take the word."""
    return {"true": True, "false": False}.get(word, word)


# YAML types words by their look; every one of these is taken as the text that was written.
_TEXT_TYPES = ("string", "number", "boolean", "null")
_TEXT = {"type": list(_TEXT_TYPES)}
_VARIABLE = {"pattern": f"^(?!{'|'.join(RESERVED_PREFIXES)}){VARIABLE_RULE}$"}
_SHAPES: dict[str, dict[str, Any]] = {
    "list": {"type": ["array", "null"], "items": {"type": ["string", "number", "boolean"]}},
    "map": {
        "type": ["object", "null"],
        "propertyNames": _VARIABLE,
        "additionalProperties": _TEXT,
    },
    "secrets": {
        "anyOf": [
            {"type": "null"},
            {"type": "array", "items": {"type": "string", **_VARIABLE}},
            {
                "type": "object",
                "propertyNames": _VARIABLE,
                "additionalProperties": {"type": ["string", "null"], "pattern": "^(@|$)"},
            },
        ]
    },
}
