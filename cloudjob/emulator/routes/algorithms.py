"""Algorithms: named settings of what a job runs."""

from __future__ import annotations

import uuid
from typing import Any

from pydantic import Field

from cloudjob.emulator import models
from cloudjob.emulator.app import Endpoint
from cloudjob.emulator.errors import ServiceRefusal
from cloudjob.emulator.models import (
    AlgorithmConfig,
    Description,
    Model,
    Name,
    PageQuery,
    StoredResource,
    now_ms,
)
from cloudjob.emulator.request import Request
from cloudjob.emulator.service import PROJECT, EmulatedService, page_of

_ALGORITHMS = PROJECT + "/algorithms"
_ALGORITHM = _ALGORITHMS + "/{algorithm_id}"


class _Metadata(Model):
    name: Name
    description: Description = ""
    id: Any = ""
    workspace_id: Any = "0"
    ai_project: Any = "default-ai-project"
    user_name: Any = ""
    domain_id: Any = None
    source: Any = "custom"
    api_version: Any = ""
    is_valid: Any = True
    state: Any = ""
    tags: Any = None
    attr_list: Any = None
    version_num: Any = 0
    size: Any = 0
    create_time: Any = Field(default_factory=now_ms)
    update_time: Any = 0


class StoredAlgorithm(StoredResource):
    """A stored algorithm."""

    kind = "algorithm"
    metadata: _Metadata
    job_config: AlgorithmConfig = AlgorithmConfig()
    resource_requirements: Any = []
    advanced_config: Any = {}


def create(service: EmulatedService, request: Request) -> Any:
    stored = _completed(service, request.body(StoredAlgorithm))
    stored.metadata.id, stored.metadata.user_name = str(uuid.uuid4()), service.user(request).name
    with service.database.transaction():
        others = service.database.resources(StoredAlgorithm)
        if any(other.metadata.name == stored.metadata.name for other in others):
            raise ServiceRefusal("ModelArts.2752")
        return _stored(service, stored)


def change(service: EmulatedService, request: Request) -> Any:
    """Replace an algorithm; missing metadata keeps its old values."""
    old = _named(service, request).metadata
    body = request.json()
    metadata = body.get("metadata") or {}
    if isinstance(metadata, dict):
        body["metadata"] = {**old.model_dump(), **metadata}
    stored = _completed(service, models.parse(StoredAlgorithm, body))
    stored.metadata.id, stored.metadata.create_time = old.id, old.create_time
    stored.metadata.update_time = now_ms()
    return _stored(service, stored)


def _completed(service: EmulatedService, stored: StoredAlgorithm) -> StoredAlgorithm:
    stored.job_config.engine.complete(service.settings)
    if stored.job_config.code_dir:
        models.place(stored.job_config.code_dir)
    if stored.metadata.domain_id is None:
        stored.metadata.domain_id = service.account.domain_id
    return stored


def _stored(service: EmulatedService, stored: StoredAlgorithm) -> Any:
    service.database.put_resource(stored.metadata.id, stored.metadata.name, stored)
    return stored.model_dump()


class _Search(PageQuery):
    searches: str = ""


def algorithms(service: EmulatedService, request: Request) -> Any:
    """Return a page of algorithms; ``offset`` is the page's number."""
    text = request.parsed_query(_Search).searches.partition("name:")[2]
    stored = service.database.resources(StoredAlgorithm)
    stored = [item for item in stored if text in item.metadata.name]
    return page_of(request, stored, StoredAlgorithm.model_dump)


def _named(service: EmulatedService, request: Request) -> StoredAlgorithm:
    stored = service.database.resource(StoredAlgorithm, request.path_params["algorithm_id"])
    if stored is None:
        raise ServiceRefusal("ModelArts.2755")
    return stored


def algorithm(service: EmulatedService, request: Request) -> Any:
    return _named(service, request).model_dump()


def remove(service: EmulatedService, request: Request) -> Any:
    service.database.remove_resource(StoredAlgorithm, _named(service, request).metadata.id)
    return ""


def searches(service: EmulatedService, request: Request) -> Any:
    """Return the algorithms of the automatic search, which the emulator does not have."""
    return {"search_algo_count": 0, "search_algo_list": []}


ENDPOINTS = (
    Endpoint("POST", _ALGORITHMS, create),
    Endpoint("GET", _ALGORITHMS, algorithms),
    Endpoint("GET", _ALGORITHM, algorithm),
    Endpoint("PUT", _ALGORITHM, change),
    Endpoint("DELETE", _ALGORITHM, remove, 202),
    Endpoint("GET", PROJECT + "/search-algorithms", searches),
)
