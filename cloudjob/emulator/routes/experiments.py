"""Training experiments: named groups of jobs."""

from __future__ import annotations

import uuid
from typing import Any

from cloudjob.emulator import models
from cloudjob.emulator.app import Endpoint
from cloudjob.emulator.clock import now_ms
from cloudjob.emulator.database import Database
from cloudjob.emulator.errors import ApiError
from cloudjob.emulator.models import Description, Model, Name
from cloudjob.emulator.request import Request
from cloudjob.emulator.service import PROJECT, Service, page_of

_EXPERIMENTS = PROJECT + "/training-experiments"
_EXPERIMENT = _EXPERIMENTS + "/{experiment_id}"
_REFERENCE = "training_experiment_reference"
_KIND = "experiment"


class _Metadata(Model):
    name: Name
    description: Description = ""


class _Experiment(Model):
    metadata: _Metadata


def create(service: Service, request: Request) -> Any:
    return _create(service.database, request.body(_Experiment).metadata)


def _create(database: Database, metadata: _Metadata) -> dict[str, Any]:
    created_ms = now_ms()
    made = {
        "workspace_id": "0",
        **metadata.model_dump(),
        "id": str(uuid.uuid4()),
        "create_time": created_ms,
        "update_time": created_ms,
    }
    return _store(database, {"metadata": made, "statistic": {"job_count": 0}})


def change(service: Service, request: Request) -> Any:
    found = _found(service, request)
    body = request.json()
    # The reference has both keys at the top; some clients nest them as in a create request.
    inner = body.get("metadata")
    body = {**(inner if isinstance(inner, dict) else {}), **body}
    known = {key: found["metadata"][key] for key in ("name", "description")}
    given = {key: body[key] for key in known if body.get(key) is not None}
    changed = models.parse(_Metadata, {**known, **given}).model_dump()
    found["metadata"].update(changed, update_time=now_ms())
    _store(service.database, found)
    return changed


def experiments(service: Service, request: Request) -> Any:
    """Return a sorted page of experiments; ``offset`` is the page's number."""
    page = page_of(request, service.database.resources(_KIND))
    page["items"] = [_counted(service.database, item) for item in page["items"]]
    return page


def experiment(service: Service, request: Request) -> Any:
    return _counted(service.database, _found(service, request))


def remove(service: Service, request: Request) -> Any:
    service.database.remove_resource(_KIND, _found(service, request)["metadata"]["id"])
    return ""


def check_name(service: Service, request: Request) -> Any:
    """Return whether an experiment of this name exists."""
    name = request.query.get("experiment_name", "")
    return {"is_duplicate": _named(service.database, name) is not None}


def refer(database: Database, metadata: dict[str, Any]) -> None:
    """Add a job to the experiment that its metadata names; a new name creates an experiment.

    Raises:
        ApiError: There is no experiment with this id, or the name is not allowed.
    """
    reference = metadata.pop(_REFERENCE, {})
    if reference.get("id"):
        found = database.resource(_KIND, reference["id"])
        if found is None:
            raise ApiError("ModelArts.2788", f"{_REFERENCE}: {reference['id']} not found")
    elif reference.get("name"):
        fields = {key: reference[key] for key in ("name", "description")}
        found = _named(database, reference["name"]) or _create(
            database, models.parse(_Metadata, fields)
        )
    else:
        return
    metadata[_REFERENCE] = {
        "id": found["metadata"]["id"],
        "name": found["metadata"]["name"],
        "serial_number": _count(database, found) + 1,
    }


def _found(service: Service, request: Request) -> dict[str, Any]:
    number = request.path_params["experiment_id"]
    found = service.database.resource(_KIND, number)
    if found is None:
        raise ApiError("ModelArts.2788", f"experiment: {number} not found")
    return found


def _counted(database: Database, found: dict[str, Any]) -> dict[str, Any]:
    return {**found, "statistic": {"job_count": _count(database, found)}}


def _count(database: Database, found: dict[str, Any]) -> int:
    of_experiment = f"json_extract(body, '$.metadata.{_REFERENCE}.id') = ?"
    return database.count_jobs((of_experiment, [found["metadata"]["id"]]))


def _named(database: Database, name: str) -> dict[str, Any] | None:
    found = database.resources(_KIND)
    return next((item for item in found if item["metadata"]["name"] == name), None)


def _store(database: Database, made: dict[str, Any]) -> dict[str, Any]:
    metadata = made["metadata"]
    with database.transaction():
        other = _named(database, metadata["name"])
        if other and other["metadata"]["id"] != metadata["id"]:
            raise ApiError("ModelArts.2788", f"name: {metadata['name']} is taken")
        database.put_resource(_KIND, metadata["id"], metadata["name"], made)
    return made


ENDPOINTS = (
    Endpoint("POST", _EXPERIMENTS, create, 201),
    Endpoint("GET", _EXPERIMENTS, experiments),
    Endpoint("GET", _EXPERIMENT, experiment),
    Endpoint("PUT", _EXPERIMENT, change),
    Endpoint("DELETE", _EXPERIMENT, remove, 202),
    Endpoint("GET", PROJECT + "/training-experiment-names", check_name),
)
