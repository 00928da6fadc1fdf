"""Details of one training job: logs, metrics, events, tasks, stages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from cloudjob.emulator.app import Endpoint
from cloudjob.emulator.database import Condition, JobRow
from cloudjob.emulator.errors import ServiceRefusal
from cloudjob.emulator.job_context import JobContext
from cloudjob.emulator.models import (
    Model,
    Offset,
    Order,
    PageQuery,
    Query,
    RunRecord,
    Time,
    task_of,
)
from cloudjob.emulator.obs.client import ObsError
from cloudjob.emulator.request import Request
from cloudjob.emulator.service import JOB, PROJECT, EmulatedService
from cloudjob.model.times import rfc3339

_TASK = JOB + "/tasks/{task_id}"
_URL_S = 300
_TYPES = ("text/plain", "application/octet-stream")


# -- logs -----------------------------------------------------------------------------------------


def _tail(service: EmulatedService, request: Request) -> tuple[bytes, int]:
    row = service.job(request)
    log = JobContext(row.id, service).log(service.node(request, row))
    data, size = log.tail(service.settings.log_preview_bytes)
    if not size:
        raise ServiceRefusal("ModelArts.2776")
    return data, size


def preview(service: EmulatedService, request: Request) -> Any:
    """Return the last bytes of a log; 204 if there is none yet."""
    data, size = _tail(service, request)
    text = data.decode("utf-8", "replace")
    return {"content": text, "current_size": len(data), "full_size": size}


def log_url(service: EmulatedService, request: Request) -> Any:
    """Return a URL of the complete log in OBS; it is valid for five minutes."""
    row = service.job(request)
    index = service.node(request, row)
    kind = request.query.get("Content-Type") or request.headers.get("content-type", "")
    try:
        place = JobContext(row.id, service).export_log(row, index)
        if place is None:
            raise ServiceRefusal("ModelArts.2776")
        kind = kind if kind in _TYPES else _TYPES[0]
        return {"obs_url": service.obs.url(place, kind, _URL_S)}
    except ObsError as error:
        raise ServiceRefusal("ModelArts.0010") from error


class _Lines(Query):
    lines: Annotated[int, Field(ge=1, le=500)] = 50
    base_line: Offset | None = None
    order: Order = "desc"


def log_lines(service: EmulatedService, request: Request) -> Any:
    """Return lines of a log by their numbers."""
    query = request.parsed_query(_Lines)
    data, _ = _tail(service, request)
    lines = data.decode("utf-8", "replace").splitlines(keepends=True)
    if query.order == "asc":
        first = query.base_line or 0
    else:
        last = len(lines) if query.base_line is None else query.base_line
        first = max(0, last - query.lines)
    page = lines[first : first + query.lines]
    return {
        "start_line": str(first),
        "end_line": str(first + len(page)),
        "lines": len(page),
        "content": "".join(page),
    }


# -- metrics and events ---------------------------------------------------------------------------


def metrics(service: EmulatedService, request: Request) -> Any:
    """Return percentages, one per minute; -1 for unknown, 204 if there are none yet."""
    row = service.job(request)
    samples = service.database.metrics(row.id, task_of(service.node(request, row)))
    if not samples:
        raise ServiceRefusal("ModelArts.2777")
    values = {
        "cpuUsage": [cpu for cpu, _ in samples],
        "memUsage": [memory for _, memory in samples],
        **dict.fromkeys(
            ("gpuUtil", "gpuMemUsage", "npuUtil", "npuMemUsage"), [-1.0] * len(samples)
        ),
    }
    return {"metrics": [{"metric": name, "value": value} for name, value in values.items()]}


class _Events(PageQuery):
    limit: Annotated[int, Field(ge=1, le=100)] = 50
    order: Order = "desc"
    level: Literal["Info", "Warning", "Error"] | None = None
    source: str = ""
    pattern: Annotated[str, Field(max_length=256)] = ""
    start_time: Time | None = None
    end_time: Time | None = None


def events(service: EmulatedService, request: Request) -> Any:
    """Return a page of events; ``offset`` is the page's number."""
    row = service.job(request)
    query = request.parsed_query(_Events)
    total, rows = service.database.events(
        _event_conditions(row.id, query),
        order=query.order,
        limit=query.limit,
        skip=query.offset * query.limit,
    )
    end_ms = row.end_ms or rows[0][0] if rows else row.end_ms
    listed = [
        {"message": message, "level": level, "time": rfc3339(time_ms / 1000), "source": source}
        for time_ms, level, source, message in rows
    ]
    return {
        "total": total,
        "limit": query.limit,
        "offset": query.offset,
        "order": query.order,
        "start_time": request.query.get("start_time") or rfc3339(row.create_ms / 1000),
        "end_time": request.query.get("end_time") or rfc3339((end_ms or row.create_ms) / 1000),
        "events": listed,
    }


def _event_conditions(job: str, query: _Events) -> list[Condition]:
    conditions: list[Condition] = [("job = ?", [job])]
    if query.level:
        conditions.append(("level = ?", [query.level]))
    if query.source:
        conditions.append(("source = ?", [query.source]))
    if query.pattern:
        conditions.append(("instr(message, ?) > 0", [query.pattern]))
    if (query.start_time is None) != (query.end_time is None):
        raise ServiceRefusal("ModelArts.2764", "start_time and end_time belong together")
    if query.start_time is not None:
        conditions.append(("time_ms BETWEEN ? AND ?", [query.start_time, query.end_time]))
    return conditions


class _Tasks(Query):
    schedule_count: Offset | None = None


def tasks(service: EmulatedService, request: Request) -> Any:
    """Return the host of each task for each time that it was scheduled."""
    row = service.job(request)
    schedule_count = request.parsed_query(_Tasks).schedule_count
    count = row.run.attempt + 1 if row.start_ms else 0
    return [
        {**task.model_dump(), "schedule_count": time}
        for time in range(1, count + 1)
        for task in row.run.task_ips
        if schedule_count in (None, time)
    ]


def stages(service: EmulatedService, request: Request) -> Any:
    """Return the stages of each attempt."""
    row = service.job(request)
    listed = [
        {"record_order": order, "stages": _stages(row, record)}
        for order, record in enumerate(row.run.running_records)
    ]
    return {"total_count": len(listed), "running_records": listed}


def _stages(row: JobRow, record: RunRecord) -> list[dict[str, Any]]:
    start, end = record.start_at * 1000, (record.end_at or 0) * 1000
    times = (("Queuing", row.create_ms, start), ("Running", start, end))
    return [
        {
            "job_id": row.id,
            "name": name,
            "en_message": name,
            "zh_message": name,
            "start_time": rfc3339(first / 1000),
            "end_time": rfc3339(last / 1000),
            "stage_order": order,
            "sub_stages": [],
        }
        for order, (name, first, last) in enumerate(times)
    ]


def route_plan(service: EmulatedService, request: Request) -> Any:
    """Return an empty plan, because the emulator never renumbers ranks."""
    row = service.job(request)
    return {"job_id": row.id, "status": "disabled", "rank_mapping": ""}


class _Report(Model):
    type: Any = ""


def report(service: EmulatedService, request: Request) -> Any:
    """Record a task's report as an event."""
    row = service.job(request)
    index, kind = service.node(request, row), request.path_params["report_type"]
    JobContext(row.id, service).task_event(index, f"{kind}: {request.body(_Report).type}")
    return {}


def categories(service: EmulatedService, request: Request) -> Any:
    """Return the categories of notifications."""
    names = ("Started", "Completed", "Failed", "Terminated", "Restarted", "Hanged", "Preempted")
    listed = [
        {"id": f"Job{name}", "name": f"Job{name}", "description": "", "notification": True}
        for name in names
    ]
    return {"event-categories": listed}


ENDPOINTS = (
    Endpoint("GET", _TASK + "/logs/preview", preview),
    Endpoint("GET", _TASK + "/logs/url", log_url),
    Endpoint("GET", JOB + "/logs/{task_id}", log_lines),
    Endpoint("GET", JOB + "/metrics/{task_id}", metrics),
    Endpoint("GET", JOB + "/events", events),
    Endpoint("GET", JOB + "/tasks", tasks),
    Endpoint("GET", JOB + "/stages", stages),
    Endpoint("GET", JOB + "/route_plan", route_plan),
    Endpoint("POST", _TASK + "/reports/{report_type}", report),
    Endpoint("GET", PROJECT + "/training-event-categories", categories),
)
