"""Flavors, engines and quotas of the account."""

from __future__ import annotations

from typing import Any, Literal

from cloudjob.emulator import views
from cloudjob.emulator.app import Endpoint
from cloudjob.emulator.errors import ServiceRefusal
from cloudjob.emulator.models import Query
from cloudjob.emulator.request import Request
from cloudjob.emulator.service import PROJECT, EmulatedService


class _Flavors(Query):
    flavor_type: Literal["CPU", "GPU", "Ascend"] | None = None


def flavors(service: EmulatedService, request: Request) -> Any:
    kind = request.parsed_query(_Flavors).flavor_type
    flavor_list = [
        views.flavor(item)
        for item in service.settings.flavors
        if not item.pool and kind in (None, item.kind)
    ]
    return {"total_count": len(flavor_list), "flavors": flavor_list}


def pool_flavor(service: EmulatedService, request: Request) -> Any:
    """Return the node size of a flavor."""
    flavor_id = request.query.get("flavor_id", "")
    for item in service.settings.flavors:
        if item.id == flavor_id:
            return {"cpu_core_num": item.cpu_cores, "mem_size": item.memory_gb}
    raise ServiceRefusal("ModelArts.2781", flavor_id)


def engines(service: EmulatedService, request: Request) -> Any:
    engine_list = [views.engine(item) for item in service.settings.engines]
    return {"total": len(engine_list), "items": engine_list}


def quotas(service: EmulatedService, request: Request) -> Any:
    """Return the limits on jobs and nodes, and their usage."""
    settings = service.settings
    used = service.database.unfinished()
    nodes = sum(item[3] for item in used if item[1] == "Running")
    quota_list = [
        {"resource": "training-job", "quota": settings.max_jobs, "used": len(used)},
        {"resource": "node", "quota": settings.public_nodes, "used": nodes},
    ]
    return {"quotas": quota_list}


ENDPOINTS = (
    Endpoint("GET", PROJECT + "/training-job-flavors", flavors),
    Endpoint("GET", PROJECT + "/training-pool-flavors", pool_flavor),
    Endpoint("GET", PROJECT + "/training-job-engines", engines),
    Endpoint("GET", PROJECT + "/training-quotas", quotas),
)
