"""The JSON Schema of a job file, for editors."""

from __future__ import annotations

from typing import Any

from cloudjob.model.job import JobSpec


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a job file."""
    schema = JobSpec.model_json_schema()
    for model in (schema, *schema["$defs"].values()):
        for key in model["properties"].values():
            _allow_null(key)
        del model["title"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "cloudjob job file",
        "description": "The description of a job; `cloudjob config show` prints what it means.",
        "type": ["object", "null"],
    }


def _allow_null(key: dict[str, Any]) -> None:
    """Allow null for a key, which then counts as not given."""
    key.pop("title", None)
    if "enum" in key:
        key["enum"] = [*key["enum"], None]
    elif isinstance(key.get("type"), list):
        key["type"] = [*key["type"], "null"]
    elif "type" in key:
        key["type"] = [key["type"], "null"]
    elif "$ref" in key:
        key["anyOf"] = [{"$ref": key.pop("$ref")}, {"type": "null"}]
