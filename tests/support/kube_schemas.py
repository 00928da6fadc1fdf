"""Upstream's schemas of the objects that are built into Kubernetes, for each of its versions."""

from __future__ import annotations

from typing import Any

import kubernetes_validate

# The versions that have a schema, and in which the engine ``job`` works.
VERSIONS = tuple(f"1.{minor}" for minor in range(29, 38))


def problems(item: dict[str, Any], version: str) -> list[str]:
    """Return what a version of Kubernetes does not know or accept in an object: the first such."""
    try:
        kubernetes_validate.validate(item, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}"]
    return []
