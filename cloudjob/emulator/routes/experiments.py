"""Training experiments: named groups of jobs."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Any

from cloudjob.emulator import models
from cloudjob.emulator.app import Endpoint
from cloudjob.emulator.database import Database
from cloudjob.emulator.errors import ServiceRefusal
from cloudjob.emulator.models import (
    Description,
    ExperimentReference,
    Model,
    Name,
    StoredResource,
    now_ms,
)
from cloudjob.emulator.request import Request
from cloudjob.emulator.service import PROJECT, EmulatedService, page_of

_EXPERIMENTS = PROJECT + "/training-experiments"
_EXPERIMENT = _EXPERIMENTS + "/{experiment_id}"
_REFERENCE = "training_experiment_reference"


class _Fields(Model):
    name: Name
    description: Description = ""


class _Metadata(_Fields):
    workspace_id: Any = "0"
    id: Any = ""
    create_time: Any = 0
    update_time: Any = 0


class _Request(Model):
    metadata: _Fields


class Experiment(StoredResource):
    """A stored experiment."""

    kind = "experiment"
    metadata: _Metadata


def create(service: EmulatedService, request: Request) -> Any:
    return _shown(_create(service.database, request.body(_Request).metadata), job_count=0)


def _create(database: Database, fields: _Fields) -> Experiment:
    metadata = _Metadata(**fields.model_dump())
    metadata.id = str(uuid.uuid4())
    metadata.create_time = metadata.update_time = now_ms()
    return _store(database, Experiment(metadata=metadata))


def change(service: EmulatedService, request: Request) -> Any:
    stored = _found(service, request)
    body = request.json()
    # The reference has both keys at the top; some clients nest them as in a create request.
    inner = body.get("metadata")
    body = {**(inner if isinstance(inner, dict) else {}), **body}
    old_fields = stored.metadata.model_dump(include={"name", "description"})
    fields = {key: body[key] for key in old_fields if body.get(key) is not None}
    changed = models.parse(_Fields, {**old_fields, **fields})
    stored.metadata.name, stored.metadata.description = changed.name, changed.description
    stored.metadata.update_time = now_ms()
    _store(service.database, stored)
    return changed.model_dump()


def experiments(service: EmulatedService, request: Request) -> Any:
    """Return a sorted page of experiments; ``offset`` is the page's number."""
    stored = service.database.resources(Experiment)
    return page_of(request, stored, partial(_counted, service.database))


def experiment(service: EmulatedService, request: Request) -> Any:
    return _counted(service.database, _found(service, request))


def remove(service: EmulatedService, request: Request) -> Any:
    service.database.remove_resource(Experiment, _found(service, request).metadata.id)
    return ""


def check_name(service: EmulatedService, request: Request) -> Any:
    """Return whether an experiment of this name exists."""
    name = request.query.get("experiment_name", "")
    return {"is_duplicate": _named(service.database, name) is not None}


def joined(database: Database, reference: ExperimentReference | None) -> ExperimentReference | None:
    """Return the reference of a job that is added to an experiment; a new name creates one.

    Raises:
        ServiceRefusal: There is no experiment with this id, or the name is not allowed.
    """
    if reference is None or not (reference.id or reference.name):
        return None
    if reference.id:
        stored = database.resource(Experiment, reference.id)
        if stored is None:
            raise ServiceRefusal("ModelArts.2788", f"{_REFERENCE}: {reference.id} not found")
    else:
        fields = reference.model_dump(include={"name", "description"})
        stored = _named(database, reference.name) or _create(
            database, models.parse(_Fields, fields)
        )
    metadata, number = stored.metadata, _count(database, stored) + 1
    return ExperimentReference(id=metadata.id, name=metadata.name, serial_number=number)


def _found(service: EmulatedService, request: Request) -> Experiment:
    number = request.path_params["experiment_id"]
    stored = service.database.resource(Experiment, number)
    if stored is None:
        raise ServiceRefusal("ModelArts.2788", f"experiment: {number} not found")
    return stored


def _shown(stored: Experiment, job_count: int) -> dict[str, Any]:
    return {**stored.model_dump(), "statistic": {"job_count": job_count}}


def _counted(database: Database, stored: Experiment) -> dict[str, Any]:
    return _shown(stored, _count(database, stored))


def _count(database: Database, stored: Experiment) -> int:
    of_experiment = f"json_extract(body, '$.metadata.{_REFERENCE}.id') = ?"
    return database.count_jobs((of_experiment, [stored.metadata.id]))


def _named(database: Database, name: str) -> Experiment | None:
    stored = database.resources(Experiment)
    return next((item for item in stored if item.metadata.name == name), None)


def _store(database: Database, stored: Experiment) -> Experiment:
    metadata = stored.metadata
    with database.transaction():
        other = _named(database, metadata.name)
        if other and other.metadata.id != metadata.id:
            raise ServiceRefusal("ModelArts.2788", f"name: {metadata.name} is taken")
        database.put_resource(metadata.id, metadata.name, stored)
    return stored


ENDPOINTS = (
    Endpoint("POST", _EXPERIMENTS, create, 201),
    Endpoint("GET", _EXPERIMENTS, experiments),
    Endpoint("GET", _EXPERIMENT, experiment),
    Endpoint("PUT", _EXPERIMENT, change),
    Endpoint("DELETE", _EXPERIMENT, remove, 202),
    Endpoint("GET", PROJECT + "/training-experiment-names", check_name),
)
