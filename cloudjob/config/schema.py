"""The JSON Schema of a job file, for editors."""

from __future__ import annotations

from typing import Any

from cloudjob.model.job import SECTIONS, JobSpec
from cloudjob.model.keys import Key, Section, Values


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a job file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$defs": {model.__name__: _model(model) for model in SECTIONS.values()},
        **_model(JobSpec),
        "title": "cloudjob job file",
        "description": "The description of a job; `cloudjob config show` prints what it means.",
        "type": ["object", "null"],
    }


def _model(model: type[Values]) -> dict[str, Any]:
    return {
        "type": "object",
        "description": model.__doc__,
        "properties": {name: _key(key) for name, key in model.KEYS.items()},
        "additionalProperties": False,
    }


def _key(key: Key) -> dict[str, Any]:
    """Return the schema of a key, which may also be null: that counts as not given."""
    schema = {**key.kind.schema(), "description": key.description}
    if isinstance(key.kind, Section):
        text = {"description": key.description} if key.description else {}
        return {"anyOf": [key.kind.schema(), {"type": "null"}], **text}
    default = key.kind.shown(key.default)
    schema["default"] = dict(default) if key.kind.is_map else default
    if isinstance(default, tuple):
        schema["default"] = list(default)
    if "enum" in schema:
        schema["enum"] = [*schema["enum"], None]
    elif isinstance(schema.get("type"), list):
        schema["type"] = [*schema["type"], "null"]
    elif "type" in schema:
        schema["type"] = [schema["type"], "null"]
    return schema
