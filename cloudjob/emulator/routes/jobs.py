"""Training jobs: create, show, list, change, stop, delete."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from cloudjob.emulator import models, views
from cloudjob.emulator.app import Endpoint
from cloudjob.emulator.database import UNFINISHED, Condition, JobRow, Phase, StopRequest
from cloudjob.emulator.errors import ServiceRefusal
from cloudjob.emulator.models import (
    UNSORTABLE,
    Algorithm,
    Description,
    Items,
    JobRequest,
    Model,
    Offset,
    Query,
    Run,
    SchedulePolicy,
    now_ms,
)
from cloudjob.emulator.obs.client import ObsError
from cloudjob.emulator.request import Request
from cloudjob.emulator.routes import algorithms, authorizations, experiments
from cloudjob.emulator.service import JOB, JOBS, PROJECT, EmulatedService
from cloudjob.emulator.staging import check_code_limits

STOPPABLE: tuple[Phase, ...] = ("Creating", "Pending", "Running")
# Keys to sort and filter by -> columns.
_SORTS = {
    "create_time": "create_ms",
    "name": "name",
    "job_name": "name",
    "phase": "phase",
    "status": "phase",
    "start_time": "start_ms",
    "duration": "(end_ms - start_ms)",
    "user_name": "user_name",
}
_FILTERS = {
    "name": "name",
    "create_time": "create_ms",
    "phase": "phase",
    "algorithm_name": "algorithm_name",
    "kind": "kind",
    "user_name": "user_name",
    "node_count": "nodes",
    "pool_id": "pool",
}
_NUMBERS = ("create_ms", "nodes")
_TAGS, _HOSTS = 10, 10
_WINDOW_MS = 31 * 86_400_000
Text = Annotated[str, BeforeValidator(str), Field(max_length=256)]


# -- create ---------------------------------------------------------------------------------------


def create(service: EmulatedService, request: Request) -> Any:
    """Create a job and put it into the queue."""
    body, user = request.json(), service.user(request)
    authorizations.check(service, user.id)
    job = models.job(_with_algorithm(service, body), service.settings)
    tags = models.by_key(job.tags)
    _check_obs(service, job)
    with service.database.transaction():
        # In one transaction, so that only one of several simultaneous requests gets the name.
        _check_room(service, job)
        job.metadata.training_experiment_reference = experiments.joined(
            service.database, job.metadata.training_experiment_reference
        )
        row = _row(job, user.name)
        service.database.add_job(row, job.output_urls(), tags)
        service.database.add_event(row.id, "Training job created.")
    service.scheduler.wake()
    return views.job(row, service.settings)


def _with_algorithm(service: EmulatedService, body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a request with the values of the algorithm that it names, if any."""
    requested = body.get("algorithm")
    if not isinstance(requested, dict) or not (
        requested.get("subscription_id") or requested.get("id")
    ):
        return body
    algorithm = service.database.resource(algorithms.StoredAlgorithm, str(requested.get("id")))
    if algorithm is None or requested.get("subscription_id"):
        raise ServiceRefusal("ModelArts.2755")
    merged = models.with_algorithm(requested, algorithm.metadata.name, algorithm.job_config)
    return {**body, "algorithm": merged}


def _check_room(service: EmulatedService, job: JobRequest) -> None:
    if service.database.has_name(job.metadata.name, job.metadata.workspace_id):
        raise ServiceRefusal("ModelArts.2751", job.metadata.name)
    used = service.database.output_in_use(job.output_urls())
    if used:
        raise ServiceRefusal("ModelArts.2753", f"Other running job contain {used}")
    if service.database.count_jobs(UNFINISHED) >= service.settings.max_jobs:
        raise ServiceRefusal("ModelArts.0118", "number of training jobs")


def _check_obs(service: EmulatedService, job: JobRequest) -> None:
    algorithm, log = job.algorithm, job.spec.log_export_path.obs_url
    try:
        if algorithm.code_dir:
            _check_code(service, algorithm)
        urls = [item.url for item in algorithm.channels]
        for url in [*urls, log] if log else urls:
            if not service.obs.has_bucket(models.place(url).bucket):
                raise ServiceRefusal("ModelArts.2791", f"{url}, reason: the bucket does not exist")
    except ObsError as error:
        raise ServiceRefusal("ModelArts.0010") from error


def _check_code(service: EmulatedService, algorithm: Algorithm) -> None:
    settings, code = service.settings, models.place(algorithm.code_dir)
    if not service.obs.has_bucket(code.bucket):
        raise ServiceRefusal("ModelArts.2757", f"{algorithm.code_dir}: no such bucket")
    objects = service.obs.list(code.bucket, code.prefix, limit=settings.code_limit_files * 2 + 2)
    check_code_limits(objects, settings)
    if not objects:
        raise ServiceRefusal("ModelArts.2757", f"{algorithm.code_dir} is empty")
    boot = algorithm.boot_file
    if boot and models.place(boot).key not in {item.key for item in objects}:
        raise ServiceRefusal("ModelArts.2758", f"{boot} does not exist")


def _row(job: JobRequest, user_name: str) -> JobRow:
    resource, policy = job.spec.resource, job.spec.schedule_policy or SchedulePolicy()
    return JobRow(
        id=str(uuid.uuid4()),
        name=job.metadata.name,
        workspace=job.metadata.workspace_id,
        kind=job.kind,
        phase="Creating",
        secondary="Creating",
        priority=policy.priority or 1,
        algorithm_name=str(job.algorithm.name or ""),
        user_name=user_name,
        create_ms=now_ms(),
        start_ms=0,
        end_ms=0,
        nodes=resource.node_count,
        pool=resource.pool_id or "",
        stop_request=StopRequest.NONE,
        body=job,
        run=Run(),
    )


# -- show and change ------------------------------------------------------------------------------


def show(service: EmulatedService, request: Request) -> Any:
    return views.job(service.job(request), service.settings)


class _SpecChange(Model):
    schedule_policy: SchedulePolicy = SchedulePolicy()


class _Change(Model):
    description: Description | None = None
    spec: _SpecChange = _SpecChange()


def change(service: EmulatedService, request: Request) -> Any:
    """Change the description of a job, and the priority of one that has not ended."""
    row = service.job(request)
    requested = request.body(_Change)
    body = row.body
    if requested.description is not None:
        body.metadata.description = requested.description
    values: dict[str, Any] = {}
    policy = requested.spec.schedule_policy
    if policy.priority is not None:
        if row.is_final:
            raise ServiceRefusal("ModelArts.2788", f"schedule_policy: the job is {row.phase}")
        policy_now = body.spec.schedule_policy or SchedulePolicy()
        body.spec.schedule_policy = policy_now.model_copy(update=policy.model_dump())
        values["priority"] = policy.priority
    service.database.update_job(row.id, body=body, **values)
    return show(service, request)


def check_name(service: EmulatedService, request: Request) -> Any:
    """Return whether a job with this name exists."""
    query = request.query
    name, workspace = query.get("job_name", ""), query.get("workspace_id") or "0"
    return {"is_duplicate": service.database.has_name(name, workspace)}


# -- stop and delete ------------------------------------------------------------------------------


class _Action(Model):
    action_type: Literal["terminate"]


def act(service: EmulatedService, request: Request) -> Any:
    """Terminate a job."""
    row = service.job(request)
    request.body(_Action)
    if not service.database.change_phase(
        row.id, STOPPABLE, "Terminating", stop_request=StopRequest.STOP
    ):
        raise ServiceRefusal("ModelArts.2796", f"It is {row.phase}.")
    service.database.add_event(row.id, "Training job is being terminated.")
    service.scheduler.wake()
    return views.job(service.job(request), service.settings)


def delete(service: EmulatedService, request: Request) -> Any:
    """Delete a job; a running job is ended first."""
    _delete(service, service.job(request))
    return ""


class _Id(Model):
    id: str


class _Deleted(Model):
    metadata: _Id


class _Batch(Model):
    jobs: Annotated[Items[_Deleted], Field(min_length=1)]


def delete_many(service: EmulatedService, request: Request) -> Any:
    """Delete several jobs, or none if one of them is unknown."""
    ids = [item.metadata.id for item in request.body(_Batch).jobs]
    for row in [service.job_of(job) for job in ids]:
        _delete(service, row)
    return ""


def _delete(service: EmulatedService, row: JobRow) -> None:
    service.database.update_job(row.id, stop_request=StopRequest.STOP)
    service.scheduler.remove(row.id)


# -- list -----------------------------------------------------------------------------------------


class Filter(Model):
    """A condition of a search."""

    key: str
    operator: Literal["in", "not", "like", "between"] = "in"
    value: Annotated[list[Text], Field(min_length=1, max_length=100)]


class TagFilter(Model):
    """Matches jobs with a tag, and with one of the values if any are given."""

    key: Annotated[str, BeforeValidator(str)]
    values: Annotated[list[Text], Field(max_length=_TAGS)] = []


TagFilters = Annotated[list[TagFilter], Field(max_length=_TAGS)]


class _Search(Model):
    codes: ClassVar[Mapping[str, str]] = {
        "limit": Query.code,
        "offset": Query.code,
        "sort_by": UNSORTABLE,
        "order": UNSORTABLE,
        "filters": "ModelArts.2789",
    }
    limit: Annotated[int, Field(ge=1, le=50, strict=False)] = 50
    offset: Annotated[Offset, Field(strict=False)] = 0
    sort_by: str = ""
    order: Literal["", "asc", "desc"] = ""
    group_by: str = ""
    workspace_id: str = ""
    train_type: Literal["", "job", "ftjob"] = ""
    filters: Annotated[list[Filter], Field(max_length=50)] = []
    tags: TagFilters = []
    host_ips: Annotated[list[str], Field(max_length=_HOSTS)] = []


def search(service: EmulatedService, request: Request) -> Any:
    """Return a page of jobs; ``offset`` is the page's number."""
    query = request.body(_Search)
    sort, order = query.sort_by or "create_time", query.order or "desc"
    if sort not in _SORTS:
        raise ServiceRefusal(UNSORTABLE, f"{sort} {order}")
    total, rows = service.database.find_jobs(
        _conditions(service, query),
        order=f"{_SORTS[sort]} {order}, rowid {order}",
        limit=query.limit,
        skip=query.offset * query.limit,
    )
    items = [views.job(row, service.settings) for row in rows]
    return {
        "total": total,
        "count": len(items),
        "limit": query.limit,
        "offset": query.offset,
        "sort_by": sort,
        "order": order,
        "group_by": query.group_by,
        "workspace_id": query.workspace_id or "0",
        "ai_project": "default-ai-project",
        "train_type": query.train_type,
        "items": items,
    }


def _conditions(service: EmulatedService, query: _Search) -> list[Condition]:
    conditions: list[Condition] = [("workspace = ?", [query.workspace_id or "0"])]
    conditions += [_condition(service, item) for item in query.filters]
    conditions += tag_conditions(query.tags)
    if query.host_ips:
        conditions.append(_host_condition(query.host_ips))
    if query.train_type == "ftjob":
        conditions.append(("0", []))  # There are no fine-tuning jobs.
    if query.tags or query.host_ips:
        conditions.append(_window(query.filters))
    return conditions


def _condition(service: EmulatedService, item: Filter) -> Condition:
    values: list[Any] = list(item.value)
    if item.key == "user_id":
        names = [user.name for user in service.account.users if user.id in values]
        item = Filter(key="user_name", operator=item.operator, value=names or [""])
        values = list(item.value)
    column = _FILTERS.get(item.key)
    if column is None or (item.operator == "between" and len(values) != 2):
        raise ServiceRefusal("ModelArts.2789", f"{item.key[:256]} {item.operator}")
    if item.operator == "between":
        mark = "CAST(? AS INTEGER)" if column in _NUMBERS else "?"
        return f"{column} BETWEEN {mark} AND {mark}", values
    if item.operator == "like":
        alternatives = " OR ".join(f"{column} LIKE ? ESCAPE '\\'" for _ in values)
        return f"({alternatives})", [f"%{_escaped(text)}%" for text in values]
    marks = ", ".join("?" * len(values))
    return f"{column} {'NOT ' if item.operator == 'not' else ''}IN ({marks})", values


def tag_conditions(tags: list[TagFilter]) -> list[Condition]:
    """Return the conditions for jobs with all of these tags.

    Raises:
        ServiceRefusal: A key or a value occurs twice.
    """
    conditions: list[Condition] = []
    keys = [tag.key for tag in tags]
    for tag in tags:
        if keys.count(tag.key) > 1 or len(set(tag.values)) < len(tag.values):
            raise ServiceRefusal("ModelArts.2788", "tags: each once")
        values = [value for value in tag.values if value]
        which = f" AND value IN ({', '.join('?' * len(values))})" if values else ""
        conditions.append(
            (f"id IN (SELECT job FROM tags WHERE key = ?{which})", [tag.key, *values])
        )
    return conditions


def _host_condition(hosts: list[str]) -> Condition:
    """Return the condition for jobs on one of these hosts; loopback means this machine."""
    try:
        addresses = [ip_address(host) for host in hosts]
    except ValueError as error:
        raise ServiceRefusal("ModelArts.2788", f"host_ips: {error}") from error
    if any(host.is_loopback for host in addresses):
        return "start_ms > 0", []
    hosts_of_job = "SELECT json_extract(value, '$.host_ip') FROM json_each(run, '$.task_ips')"
    marks = ", ".join(["(?)"] * len(addresses))
    return f"EXISTS ({hosts_of_job} INTERSECT VALUES {marks})", [str(host) for host in addresses]


def _window(filters: list[Filter]) -> Condition:
    """Return the condition that limits a search by tags or hosts to 31 days."""
    for item in filters:
        if item.key == "create_time" and item.operator == "between":
            if not all(text.isdecimal() for text in item.value):
                raise ServiceRefusal("ModelArts.2764", "create_time")
            if int(item.value[1]) - int(item.value[0]) > _WINDOW_MS:
                raise ServiceRefusal("ModelArts.2789", "create_time: at most 31 days")
            return "1", []
    return "create_ms >= ?", [now_ms() - _WINDOW_MS]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")


ENDPOINTS = (
    Endpoint("POST", JOBS, create, 201),
    Endpoint("POST", JOBS + "/batch-delete", delete_many, 202),
    Endpoint("GET", JOB, show),
    Endpoint("PUT", JOB, change),
    Endpoint("DELETE", JOB, delete, 202),
    Endpoint("POST", JOB + "/actions", act, 202),
    Endpoint("POST", PROJECT + "/training-job-searches", search),
    Endpoint("GET", PROJECT + "/training-job-names", check_name),
)
