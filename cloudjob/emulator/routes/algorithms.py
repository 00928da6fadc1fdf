"""Algorithms: named settings of what a job runs."""

from __future__ import annotations

import uuid
from typing import Any

from cloudjob.emulator import models
from cloudjob.emulator.app import Endpoint
from cloudjob.emulator.clock import now_ms
from cloudjob.emulator.errors import ApiError
from cloudjob.emulator.models import Description, Items, Model, Name, Page, Parameter
from cloudjob.emulator.request import Request
from cloudjob.emulator.service import PROJECT, Service, page_of

_ALGORITHMS = PROJECT + "/algorithms"
_ALGORITHM = _ALGORITHMS + "/{algorithm_id}"
_KIND = "algorithm"


class _Metadata(Model):
    name: Name
    description: Description = ""


class _Config(Model):
    engine: dict[str, Any] = {}
    code_dir: str = ""
    parameters: Items[Parameter] = []
    inputs: Items[dict[str, Any]] = []
    outputs: Items[dict[str, Any]] = []


class _Algorithm(Model):
    metadata: _Metadata
    job_config: _Config = _Config()
    resource_requirements: Any = []
    advanced_config: Any = {}


def create(service: Service, request: Request) -> Any:
    made = _made(service, request.body(_Algorithm), str(uuid.uuid4()))
    made["metadata"]["user_name"] = service.user(request).name
    with service.database.transaction():
        names = [item["metadata"]["name"] for item in service.database.resources(_KIND)]
        if made["metadata"]["name"] in names:
            raise ApiError("ModelArts.2752")
        return _stored(service, made)


def change(service: Service, request: Request) -> Any:
    """Replace an algorithm; missing metadata keeps its old values."""
    old = algorithm(service, request)["metadata"]
    body = request.json()
    given = body.get("metadata") or {}
    if isinstance(given, dict):
        body["metadata"] = {**old, **given}
    made = _made(service, models.parse(_Algorithm, body), old["id"])
    made["metadata"].update(create_time=old["create_time"], update_time=now_ms())
    return _stored(service, made)


def _stored(service: Service, made: dict[str, Any]) -> dict[str, Any]:
    metadata = made["metadata"]
    service.database.put_resource(_KIND, metadata["id"], metadata["name"], made)
    return made


def _made(service: Service, requested: _Algorithm, algorithm_id: str) -> dict[str, Any]:
    made = requested.model_dump()
    config = made["job_config"]
    found = models.engine_of(config["engine"], service.settings)
    if found:
        config["engine"].update(models.engine_keys(found))
    if config["code_dir"]:
        models.place(config["code_dir"])
    made["metadata"] = {
        "workspace_id": "0",
        "ai_project": "default-ai-project",
        "user_name": service.settings.user,
        "domain_id": service.account.domain_id,
        "source": "custom",
        "api_version": "",
        "is_valid": True,
        "state": "",
        "tags": None,
        "attr_list": None,
        "version_num": 0,
        "size": 0,
        "create_time": now_ms(),
        "update_time": 0,
        **made["metadata"],
        "id": algorithm_id,
    }
    return made


class _Search(Page):
    searches: str = ""


def algorithms(service: Service, request: Request) -> Any:
    """Return a page of algorithms; ``offset`` is the page's number."""
    text = request.parsed_query(_Search).searches.partition("name:")[2]
    found = service.database.resources(_KIND)
    return page_of(request, [item for item in found if text in item["metadata"]["name"]])


def algorithm(service: Service, request: Request) -> Any:
    found = service.database.resource(_KIND, request.path_params["algorithm_id"])
    if found is None:
        raise ApiError("ModelArts.2755")
    return found


def remove(service: Service, request: Request) -> Any:
    algorithm(service, request)
    service.database.remove_resource(_KIND, request.path_params["algorithm_id"])
    return ""


def searches(service: Service, request: Request) -> Any:
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
