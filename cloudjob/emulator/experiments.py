"""Training experiments: named groups of jobs."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping
from typing import Any

from cloudjob.emulator.answers import ApiError
from cloudjob.emulator.database import Database
from cloudjob.emulator.wanted import check_description, inner

REFERENCE = "training_experiment_reference"
_KIND = "experiment"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")


def create(database: Database, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Keep a new experiment and return it.

    Raises:
        ApiError: Its name or description is not allowed, or the name is taken.
    """
    now_ms = int(time.time() * 1000)
    made = {
        "description": "",
        "workspace_id": "0",
        **asked,
        "id": str(uuid.uuid4()),
        "create_time": now_ms,
        "update_time": now_ms,
    }
    return _keep(database, {"metadata": made, "statistic": {"job_count": 0}})


def change(database: Database, found: dict[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Change name and description of an experiment.

    Raises:
        ApiError: They are not allowed, or the name is taken.
    """
    changed = {key: asked[key] for key in ("name", "description") if asked.get(key) is not None}
    found["metadata"].update(changed, update_time=int(time.time() * 1000))
    return _keep(database, found)


def counted(database: Database, found: dict[str, Any]) -> dict[str, Any]:
    """Return an experiment with the number of its jobs."""
    count = database.count_in_experiment(found["metadata"]["id"])
    return {**found, "statistic": {"job_count": count}}


def refer(database: Database, metadata: dict[str, Any]) -> None:
    """Put a job into the experiment that its metadata names; a new name makes a new experiment.

    Raises:
        ApiError: There is no experiment of this id, or the name is not allowed.
    """
    asked = inner(metadata, REFERENCE)
    if not (asked.get("id") or asked.get("name")):
        metadata.pop(REFERENCE, None)
        return
    if asked.get("id"):
        found = database.thing(_KIND, str(asked["id"]))
        if found is None:
            raise ApiError("ModelArts.2788", f"{REFERENCE}: {asked['id']} not found")
    else:
        found = _named(database, asked["name"]) or create(
            database, {key: asked[key] for key in ("name", "description") if asked.get(key)}
        )
    number = found["metadata"]["id"]
    metadata[REFERENCE] = {
        "id": number,
        "name": found["metadata"]["name"],
        "serial_number": database.count_in_experiment(number) + 1,
    }


def has_name(database: Database, name: str) -> bool:
    """Whether an experiment has this name."""
    return _named(database, name) is not None


def _named(database: Database, name: Any) -> dict[str, Any] | None:
    found = database.things(_KIND)
    return next((item for item in found if item["metadata"]["name"] == name), None)


def _keep(database: Database, made: dict[str, Any]) -> dict[str, Any]:
    metadata = made["metadata"]
    name = metadata.get("name")
    if not isinstance(name, str) or not _NAME.match(name):
        raise ApiError("ModelArts.2788", f"name: {name}")
    check_description(metadata["description"] or "")
    with database.transaction():
        other = _named(database, name)
        if other and other["metadata"]["id"] != metadata["id"]:
            raise ApiError("ModelArts.2788", f"name: {name} is taken")
        database.put_thing(_KIND, metadata["id"], name, made)
    return made
