"""Tags of training jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from cloudjob.emulator.app import Endpoint
from cloudjob.emulator.database import Condition
from cloudjob.emulator.errors import ServiceRefusal
from cloudjob.emulator.models import TAGS, Items, Model, PageQuery, Tag, by_key
from cloudjob.emulator.request import Request
from cloudjob.emulator.routes.jobs import TagFilters, tag_conditions
from cloudjob.emulator.service import PROJECT, EmulatedService

_TAGGED = PROJECT + "/modelarts-training-job"


def tags(service: EmulatedService, request: Request) -> Any:
    return {"tags": _tags(service, service.job(request).id)}


def _tags(service: EmulatedService, job: str) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in service.database.tags(job)]


def all_tags(service: EmulatedService, request: Request) -> Any:
    """Return every key with its values."""
    values_of: dict[str, list[str]] = {}
    for key, value in service.database.tags():
        values_of.setdefault(key, []).append(value)
    return {"tags": [{"key": key, "values": values} for key, values in values_of.items()]}


class _Tags(Model):
    tags: Annotated[Items[Tag], Field(min_length=1)]


def add(service: EmulatedService, request: Request) -> Any:
    row, requested = service.job(request), by_key(request.body(_Tags).tags)
    with service.database.transaction():
        if len({**dict(service.database.tags(row.id)), **requested}) > TAGS:
            raise ServiceRefusal("ModelArts.2788", f"tags: at most {TAGS}")
        service.database.add_tags(row.id, requested)


class _Key(Model):
    key: str


class _Keys(Model):
    tags: Annotated[Items[_Key], Field(min_length=1)]


def remove(service: EmulatedService, request: Request) -> Any:
    row, requested = service.job(request), request.body(_Keys)
    service.database.remove_tags(row.id, [tag.key for tag in requested.tags])


class _Match(Model):
    key: Literal["resource_name"]
    value: Annotated[str, BeforeValidator(str)] = ""


class _Filter(Model):
    codes: ClassVar[Mapping[str, str]] = {"matches": "ModelArts.2789"}
    workspace_id: str = ""
    without_any_tag: bool = False
    tags: TagFilters = []
    matches: Annotated[list[_Match], Field(max_length=1)] = []


class _Page(PageQuery):
    limit: Annotated[int, Field(ge=1, le=1000)] = 10


def tagged(service: EmulatedService, request: Request) -> Any:
    """Return the jobs with these tags; here ``offset`` is the number of an item."""
    page = request.parsed_query(_Page)
    total, rows = service.database.find_jobs(
        _conditions(request), order="create_ms DESC", limit=page.limit, skip=page.offset
    )
    listed = [
        {
            "resource_id": row.id,
            "resource_name": row.name,
            "workspace_id": row.workspace,
            "resource_detail": {},
            "tags": _tags(service, row.id),
        }
        for row in rows
    ]
    return {"resources": listed, "total_count": total}


def count(service: EmulatedService, request: Request) -> Any:
    return {"total_count": service.database.count_jobs(*_conditions(request))}


def _conditions(request: Request) -> list[Condition]:
    query = request.body(_Filter)
    conditions: list[Condition] = [
        ("workspace = ?", [query.workspace_id or "0"]),
        *tag_conditions(query.tags),
    ]
    if query.without_any_tag:
        conditions.append(("id NOT IN (SELECT job FROM tags)", []))
    conditions += [("instr(name, ?) > 0", [match.value]) for match in query.matches]
    return conditions


ENDPOINTS = (
    Endpoint("GET", _TAGGED + "/tags", all_tags),
    Endpoint("GET", _TAGGED + "/{job_id}/tags", tags),
    Endpoint("POST", _TAGGED + "/{job_id}/tags/create", add, 204),
    Endpoint("DELETE", _TAGGED + "/{job_id}/tags/delete", remove, 204),
    Endpoint("POST", _TAGGED + "/resource-instances/filter", tagged),
    Endpoint("POST", _TAGGED + "/resource-instances/count", count),
)
